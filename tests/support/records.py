"""Records, measurements and locations for the tests of the store and the tuner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import EstimateSummary, Location, TuningRecord, Versions, save
from tilegen.store.files import LOCK
from tilegen.store.places import Owner
from tilegen.task import KernelTask
from tilegen.tuning.measure import Measurement

H200 = gpu("h200")
A100 = gpu("a100")
PROBLEM = AttentionProblem.parse("b4 hq32 hkv8 q64 kv64 d128 bf16 causal")
TASK = KernelTask.of("fwd", PROBLEM, H200)
VERSIONS = Versions(
    tilegen="0.1.0", torch="2.13.0+cu130", triton="3.7.1", cuda="13.0", driver="580.65.06"
)
UNMEASURED = Measurement(status="unmeasured", message="chosen by the model")

RECORD = TuningRecord(
    gpu=H200.name,
    arch=H200.arch,
    kernel="fwd",
    problem=PROBLEM,
    config=TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3),
    measurement=Measurement(status="ok", median_us=398.25, p20_us=395.0, p80_us=402.5, repeats=210),
    estimate=EstimateSummary(
        seconds=3.71e-4, limit="tensor", read_bytes=2_214_592_512, write_bytes=136_314_880
    ),
    versions=VERSIONS,
    template_digest="87ebae389eec",
    trials=64,
    seconds_spent=57.5,
    date="2026-11-21T09:30:00Z",
    command="tilegen tune 'b4 hq32 hkv8 q64 kv64 d128 bf16 causal' --kernel fwd --trials 64",
)


def timed(median_us: float, spread: float = 0.0) -> Measurement:
    """Return a measurement whose p20 and p80 are `spread` of the median away."""
    return Measurement(
        status="ok",
        median_us=median_us,
        p20_us=median_us * (1 - spread),
        p80_us=median_us * (1 + spread),
        repeats=20,
    )


def record(**changes: Any) -> TuningRecord:
    """Return RECORD with some fields changed; `us` stands for a whole measurement."""
    if "us" in changes:
        changes["measurement"] = timed(changes.pop("us"))
    return replace(RECORD, **changes)


def own(root: Path) -> Location:
    return Location(str(root), "own")


def folder_of(location: Location) -> Path:
    assert location.folder is not None
    return location.folder


def written(root: Path) -> list[Path]:
    """Return all files below `root` but those that writers lock."""
    return sorted(
        one for one in root.rglob("*") if one.is_file() and one.suffix != Path(LOCK).suffix
    )


def place(root: Path, put: TuningRecord, origin: Owner = "own") -> Location:
    """Write a record at its place under `root` without asking `save`; return that location."""
    file = root / put.path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(put.to_json(), encoding="utf-8")
    return Location(str(root), origin)


def save_many(root: Path, writer: int) -> None:
    """Save ever faster records; here, because processes that are spawned import it."""
    for step in range(20):
        finding = record(us=1000.0 - 10 * step + writer, trials=step, source=f"{writer:012x}")
        save(finding, location=own(root))
