"""Which binaries may be used: the rule, and those who ask it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tilegen import pipeline
from tilegen.build import compiler
from tilegen.build.acceptable import acceptable, objection
from tilegen.choose.ranking import estimate, propose
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import MOST_SPILLED, Footprint
from tilegen.pipeline import TRIED
from tilegen.problem import AttentionProblem
from tilegen.tuning import bench

H200 = gpu("h200")
PROBLEM = AttentionProblem.parse("b1 hq32 hkv8 q8192 d128 bf16 causal")


@dataclass(frozen=True, kw_only=True)
class Used:
    shared_bytes: int = 1000
    registers: int = 255
    spill_bytes: int = 0
    serialized: bool = False


def test_a_binary_may_spill_a_little() -> None:
    for spilled in (0, 8, 120, MOST_SPILLED):
        assert acceptable(Used(spill_bytes=spilled), H200)
        assert bench.refused(Used(spill_bytes=spilled), H200) is None
    much = Used(spill_bytes=MOST_SPILLED + 8)
    assert not acceptable(much, H200)
    assert objection(much, H200).startswith("136 bytes of registers spilled a thread")
    found = bench.refused(much, H200)
    assert found is not None
    assert (found.status, found.message) == ("out_of_resources", objection(much, H200))


def test_a_binary_that_waits_for_each_product_is_refused_whatever_it_spills() -> None:
    waiting = Used(spill_bytes=40, serialized=True)
    assert objection(waiting, H200) == "40 bytes spilled, and each matrix product is waited for"
    product, wait = (
        "HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;\n",
        "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n",
    )
    assert compiler.is_serialized(3 * (product + wait))
    assert not compiler.is_serialized(3 * product + 2 * wait)
    assert not compiler.is_serialized(wait)


def test_a_binary_has_to_exist_and_fit() -> None:
    assert not acceptable(BuildFailed("no"), H200)
    assert objection(BuildFailed("no"), H200) == "no"
    large = Used(shared_bytes=H200.smem_per_block + 1024)
    assert objection(large, H200) == "228 KiB > 227 KiB"
    assert acceptable(Used(shared_bytes=H200.smem_per_block), H200)


def test_predicted_spills_are_those_reported_or_what_registers_lack() -> None:
    known = {"smem_bytes": 0, "columns": 0, "max_registers": 255}
    assert Footprint(registers=255, **known).spill_bytes == 0
    assert Footprint(registers=256, **known).spill_bytes == 4
    assert Footprint(registers=255 + 20, **known).spill_bytes == 80
    reported = Footprint(registers=300, reported_spill=16, **known)
    assert (reported.spill_bytes, reported.spills, reported.spills_much) == (16, True, False)
    assert Footprint(registers=256, **known).spills_much, "nobody has seen that it is no more"
    assert Footprint(registers=256, reported_spill=136, **known).spills_much


def test_a_small_spill_ranks_by_its_time_and_its_traffic() -> None:
    """m64n128w8s2 computes d128 dK/dV with wider products than what fits without spilling."""
    first, *others = propose(PROBLEM, H200, kernel="bwd_dkdv", top=9)
    assert first.config == TileConfig.parse("m64n128w8s2")
    needs = footprint(PROBLEM, first.config, "bwd_dkdv", "sm_90")
    assert 100 <= needs.spill_bytes <= MOST_SPILLED
    assert f"spills {needs.spill_bytes} bytes a thread" in first.reason
    without = min(
        one.estimate.seconds
        for one in others
        if not footprint(PROBLEM, one.config, "bwd_dkdv", "sm_90").spills
    )
    assert 0.8 * without < first.estimate.seconds < without


def test_what_spills_more_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilegen.model import known

    config, seconds = TileConfig.parse("m64n128w8s2"), list[float]()
    for spilled in (0, 8, 120):
        for name in ("spilled_bytes", "reported_spill"):
            monkeypatch.setattr(f"tilegen.model.footprint.{name}", lambda *_, n=spilled: n)
        footprint.cache_clear()
        seconds.append(estimate(PROBLEM, H200, config, "bwd_dkdv").seconds)
    footprint.cache_clear()
    assert seconds == sorted(set(seconds))
    assert known.spilled_bytes(PROBLEM, config, "bwd_dkdv", "sm_90")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[TileConfig, int | None]:
    """What compiling gives: bytes spilled by config, None for a failure; no spill by default."""
    spilled: dict[TileConfig, int | None] = {}

    def compile_(rendered: RenderedKernel, arch: str) -> compiler.CompiledKernel:
        if (size := spilled.setdefault(rendered.config, 0)) is None:
            raise BuildFailed("no")
        return compiler.CompiledKernel(
            rendered=rendered,
            arch=arch,
            binary=b"",
            shared_bytes=1000,
            registers=255,
            spill_bytes=size,
            scratch_pointers=0,
            seconds=0.0,
        )

    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_for", compile_)
    return spilled


def test_a_call_takes_the_first_proposal_that_compiles_to_what_may_be_used(
    compiled: dict[TileConfig, int | None],
) -> None:
    proposals = [one.config for one in propose(PROBLEM, H200, kernel="bwd_dq", top=TRIED)]
    assert pipeline.choose_kernel(PROBLEM, H200, "bwd_dq").config == proposals[0]
    assert not compiled, "nothing is compiled unless it may be"
    compiled |= {proposals[0]: 400, proposals[1]: None, proposals[2]: 120}
    found = pipeline.choose_kernel(PROBLEM, H200, "bwd_dq", may_compile=True)
    assert (found.config, found.source) == (proposals[2], "the model")
    assert list(compiled) == proposals[:3]


def test_where_nothing_compiles_the_launch_says_why(
    compiled: dict[TileConfig, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    proposals = [one.config for one in propose(PROBLEM, H200, kernel="bwd_dq", top=TRIED)]
    compiled |= dict.fromkeys(proposals)
    found = pipeline.choose_kernel(PROBLEM, H200, "bwd_dq", may_compile=True)
    assert (found.config, found.source) == (proposals[0], "the model")
    assert "compiled nothing ahead" in caplog.text
