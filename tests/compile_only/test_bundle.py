"""Ahead of time: what `tilegen generate` writes, and how compiling survives trouble."""

import hashlib
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tilegen import bundle, workers
from tilegen.build import CompiledKernel, compile_many, first_that_fits
from tilegen.config import LARGE_CACHE, TileConfig
from tilegen.device import gpu
from tilegen.errors import BuildFailed, InvalidProblem, Unsupported
from tilegen.problem import AttentionProblem
from tilegen.render import render

PROBLEM = AttentionProblem.parse("hq8 hkv2 q256 d32 fp16 causal")


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_generate_writes_kernels_binaries_and_a_manifest(tmp_path: Path) -> None:
    seen: list[str] = []
    path = bundle.generate(
        [PROBLEM],
        [gpu("h200"), gpu("mi300x")],
        tmp_path,
        on_kernel=lambda e: seen.append(e["arch"]),
    )
    manifest = json.loads(path.read_text())
    entries = manifest["kernels"]
    assert [(e["kernel"], e["arch"]) for e in entries] == [
        (kernel, arch) for arch in ("sm_90", "gfx942") for kernel in LARGE_CACHE
    ]
    assert seen == [e["arch"] for e in entries]
    named = {"manifest.json"}
    for entry in entries:
        source = (tmp_path / entry["source"]).read_text()
        assert f"def {entry['function']}(" in source
        assert (tmp_path / entry["binary"]).read_bytes()[:4] == b"\x7fELF"
        assert entry["spill_bytes"] == 0
        assert [a["type"] for a in entry["arguments"]].count("i32") >= 8
        named |= {entry["source"], entry["binary"]}
    assert set(digests(tmp_path)) == named


def test_the_same_request_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        bundle.generate([PROBLEM], [gpu("a100")], tmp_path / name, kernels=["fwd"])
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_catalogue_files(tmp_path: Path) -> None:
    file = tmp_path / "models.txt"
    file.write_text("# ours\nhq8 q128 d64 bf16 causal  # small\n\n  hq8 q128 d64 fp16\n")
    assert [problem.dtype for problem in bundle.read_catalogue(file)] == ["bf16", "fp16"]
    file.write_text("hq8 q128 d64 bf16\nhq8 q128 d64\n")
    with pytest.raises(InvalidProblem, match=r"models\.txt, line 2: .*not exactly one dtype"):
        bundle.read_catalogue(file)
    file.write_text("# nothing\n")
    with pytest.raises(InvalidProblem, match="at least one problem"):
        bundle.read_catalogue(file)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Unsupported, match="cannot read"):
        bundle.read_catalogue(file)


def test_every_architecture_has_a_typical_gpu() -> None:
    for arch in bundle._TYPICAL:
        assert bundle.gpu_for(arch).arch == arch
    with pytest.raises(Unsupported, match="arch must be one of"):
        bundle.gpu_for("sm_42")


def test_the_first_that_fits_is_taken() -> None:
    rendered = render(PROBLEM, TileConfig(block_m=16, block_n=16))
    good = CompiledKernel(
        rendered=rendered,
        arch="sm_90",
        binary=b"",
        shared_bytes=1000,
        registers=100,
        spill_bytes=0,
        seconds=0.1,
    )
    large, spilling = replace(good, shared_bytes=10**6), replace(good, spill_bytes=8)
    worse = replace(good, spill_bytes=64)
    failed, spec = BuildFailed("no"), gpu("h200")
    assert first_that_fits([failed, large, spilling, good], spec) is good
    assert first_that_fits([worse, spilling, large], spec) is spilling
    with pytest.raises(BuildFailed, match="none did; the first: no"):
        first_that_fits([failed, large], spec)


def test_a_compiler_that_dies_is_a_value_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborts inside LLVM end the process; the kernels after it still compile."""
    rendered = render(PROBLEM, TileConfig(block_m=16, block_n=16))
    worker = workers.Worker()
    try:
        process = worker._start()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        outcome = worker.compile(rendered, "sm_90")
        assert isinstance(outcome, BuildFailed)
        assert "the compiler died" in str(outcome)
        assert isinstance(worker.compile(rendered, "sm_90"), CompiledKernel)
    finally:
        worker.close()


def test_stopping_early_leaves_no_process_behind() -> None:
    rendered = [render(PROBLEM, TileConfig(block_m=16, block_n=n)) for n in (16, 32, 64)]
    results = compile_many(rendered, "sm_90", workers=2)
    next(results)
    results.close()  # type: ignore[attr-defined]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children]
    assert not any(b"tilegen.workers" in command for command in commands)
