"""Results of the compiler are stored, so that later choices compile nothing."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilegen
from tests.support.problems import tiled, used
from tilegen import pipeline
from tilegen.choose.ranker import time_as_compiled
from tilegen.cli.main import app
from tilegen.compiling import compiler, verdicts
from tilegen.compiling.verdicts import MAX_BYTES, verdict
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate, Compiled
from tilegen.model.resources import Resources
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

H200 = gpu("h200")
PROBLEM = AttentionProblem.parse("hq8 hkv2 q512 d64 bf16 causal")
CONFIG = TileConfig(block_m=64, block_n=64)
GOOD = used(spill_bytes=16)


class Compiler:
    """`compile_for` without a compiler: counts calls, and fails on request."""

    def __init__(self) -> None:
        self.asked: list[tuple[TileConfig, str, bool]] = []
        self.failure: str | None = None
        self.cause: Exception | None = None
        self.spilled: dict[TileConfig, int] = {}
        """Bytes that configs spill; others spill what GOOD does."""

    def __call__(self, rendered: RenderedKernel, arch: str) -> compiler.CompiledKernel:
        self.asked.append((rendered.config, arch, rendered.aligned))
        if self.failure is not None:
            raise BuildFailed(self.failure) from self.cause
        return compiler.CompiledKernel(
            rendered=rendered,
            arch=arch,
            binary=b"",
            reported=used(spill_bytes=self.spilled.get(rendered.config, GOOD.spill_bytes)),
            scratch_pointers=0,
            seconds=0.0,
        )


@pytest.fixture
def compile_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler_a = Compiler()
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "compile_for", compiler_a)
    return compiler_a


def asked(arch: str = "sm_90", aligned: bool = True) -> Resources | BuildFailed:
    return verdict(tiled("fwd", PROBLEM, CONFIG, arch), aligned=aligned)


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.json"))


def test_a_second_choice_compiles_nothing(compile_: Compiler) -> None:
    first = pipeline.choose(PROBLEM, H200, "forward", may_compile=True)
    assert [one[0] for one in compile_.asked] == [one.config for one in first.values()]
    compile_.asked.clear()
    again = pipeline.choose(PROBLEM, H200, "forward", may_compile=True)
    assert again == first
    assert not compile_.asked
    assert all(used == GOOD for one in again.values() for used in one.tried.values())


def test_one_verdict_is_about_one_kernel(compile_: Compiler, tmp_path: Path) -> None:
    for _ in range(2):
        assert [asked(), asked("sm_80"), asked(aligned=False)] == [GOOD] * 3
    assert compile_.asked == [
        (CONFIG, "sm_90", True),
        (CONFIG, "sm_80", True),
        (CONFIG, "sm_90", False),
    ]
    longer = AttentionProblem.parse("hq16 hkv4 q1000 d64 bf16 causal")
    assert verdict(tiled("fwd", longer, CONFIG, "sm_90"), aligned=True) == GOOD
    assert len(compile_.asked) == 3, "any batch, heads and lengths have the same kernel"
    names = sorted(file.name for file in files(tmp_path))
    assert names == ["fwd.sm_80.json", "fwd.sm_90.json", "fwd.sm_90.json"]


def test_failures_are_remembered_if_the_compiler_would_fail_again(compile_: Compiler) -> None:
    compile_.failure, compile_.cause = "no " * 400, OSError("no space left on device")
    assert isinstance(asked(), BuildFailed)
    compile_.cause = RuntimeError("PassManager::run failed")
    first, again = asked(), asked()
    assert len(compile_.asked) == 2, "what the machine lacked is asked again, and no more"
    assert isinstance(first, BuildFailed)
    assert isinstance(again, BuildFailed)
    assert str(first).startswith(str(again))


def test_another_triton_compiles_again(
    compile_: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked()
    monkeypatch.setattr(verdicts, "installed", lambda package: "99.0")
    asked()
    asked()
    assert len(compile_.asked) == 2
    (file,) = files(tmp_path)
    assert json.loads(file.read_text())["triton"] == "99.0"


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[1]",
        b'{"triton": 3}',
        b"\xff\xfe",
        b" " * (MAX_BYTES + 1),
        b'{"spill_bytes": -1}',
        b'{"spill_bytes": true}',
        b'{"step_code": "no"}',
        b'{"step_code": {"instructions": 1}}',
        b'{"registers": 1e99}',
        b'{"failed": 1}',
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(
    damage: bytes, compile_: Compiler, tmp_path: Path
) -> None:
    asked()
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    if damage.startswith(b'{"') and damage.endswith(b"}") and b"triton" not in damage:
        damage = json.dumps({**json.loads(whole), **json.loads(damage)}).encode()
    file.write_bytes(damage)
    assert asked() == GOOD
    assert len(compile_.asked) == 2
    assert file.read_bytes() == whole


def test_a_pipe_instead_of_a_file_does_not_block(compile_: Compiler, tmp_path: Path) -> None:
    asked()
    (file,) = files(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert asked() == GOOD


def test_a_cache_for_reading_only_works(
    compile_: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_bytes(b"no folder can be made here, whoever asks")
    assert asked() == asked() == GOOD
    assert len(compile_.asked) == 2
    chosen = pipeline.choose(PROBLEM, H200, "forward", may_compile=True)
    assert set(chosen) == {"fwd"}


def test_verdicts_are_in_private_folders(compile_: Compiler, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        asked()
    finally:
        os.umask(before)
    (file,) = files(tmp_path)
    kernels = file.parent.parent
    assert kernels == tmp_path / "cache" / "kernels"
    assert kernels.stat().st_mode & 0o077 == 0


def by_config(results: list[Candidate]) -> dict[TileConfig, Candidate]:
    return {one.config: one for one in results}


def test_a_proposal_marks_compiled_and_predicted_numbers(compile_: Compiler) -> None:
    before = tilegen.propose(PROBLEM, H200, top=3)
    assert [one.compiled for one in before] == [None] * 3
    config = before[1].config
    verdict(tiled("fwd", PROBLEM, config, "sm_90"), aligned=True)
    verdict(tiled("fwd", PROBLEM, before[0].config, "sm_80"), aligned=True)
    compile_.failure = "PassManager::run failed"
    verdict(tiled("fwd", PROBLEM, before[2].config, "sm_90"), aligned=True)
    compile_.asked.clear()
    after = tilegen.propose(PROBLEM, H200, top=3)
    assert not compile_.asked, "a proposal compiles nothing"
    assert [replace(one, compiled=None) for one in after] == before, "nor changes its order"
    assert after[0].compiled is None, "compiled for another architecture"
    assert after[1].compiled == Compiled(
        triton=version("triton"),
        resources=GOOD,
        seconds=time_as_compiled(Tiled.of("fwd", PROBLEM, H200, config), GOOD).seconds,
        why_not_used="",
    )
    assert after[2].compiled == Compiled(triton=version("triton"), why_not_used=compile_.failure)


def test_a_proposal_that_compiles_comes_in_the_order_of_a_call(compile_: Compiler) -> None:
    best = tilegen.propose(PROBLEM, H200, top=1)[0].config
    compile_.spilled = {best: 128}
    call = pipeline.choose_kernel(KernelTask.of("fwd", PROBLEM, H200), may_compile=True)
    assert len(call.seconds) > 1
    candidates = tilegen.propose(PROBLEM, H200, top=50, compile=True)
    first = candidates[: len(call.tried)]
    assert first[0].config == call.config
    assert by_config(first).keys() == call.tried.keys()
    seconds = [one.compiled.seconds for one in first if one.compiled]
    assert seconds == sorted(call.seconds.values())
    rest = [one for one in tilegen.propose(PROBLEM, H200, top=50) if one.config not in call.tried]
    assert candidates[len(first) :] == rest, "what was not compiled stays in the model's order"


def test_unusable_configs_come_last(compile_: Compiler) -> None:
    best = [item.config for item in tilegen.propose(PROBLEM, H200, top=2)]
    compile_.spilled = dict.fromkeys(best, 400)
    candidates = tilegen.propose(PROBLEM, H200, top=50, compile=True)
    for item in candidates[-2:]:
        assert item.config in best
        assert item.compiled
        assert item.compiled.why_not_used.startswith("400 bytes of registers spilled per thread")
    assert not any(item.compiled and item.compiled.why_not_used for item in candidates[:-2])
    call = pipeline.choose_kernel(KernelTask.of("fwd", PROBLEM, H200), may_compile=True)
    assert candidates[0].config == call.config


def test_the_command_prints_compiled_results(compile_: Compiler) -> None:
    def lines(*more: str) -> list[str]:
        asked = ["propose", PROBLEM.key, "--gpu", "h200", "--top", "3", *more]
        result = CliRunner().invoke(app, asked, catch_exceptions=False)
        return [one.rstrip() for one in result.stdout.splitlines()]

    assert not any("Triton" in one or "*" in one for one in lines())
    _, _, first, *others = lines("--compile")
    assert re.search(r" us +[\d.]+ us .* 255\* +16 B\*$", first)
    assert f"* as compiled by Triton {version('triton')}" in others
    (told,) = [one for one in lines() if one.endswith("*")]
    assert told.startswith(first.split()[0])
    compile_.failure = "PassManager::run failed"
    (other,) = {one.config for one in tilegen.propose(PROBLEM, H200, top=2)} - {
        TileConfig.parse(first.split()[0])
    }
    verdict(tiled("fwd", PROBLEM, other, "sm_90"), aligned=True)
    row, note = [one for one in lines() if one.startswith(other.key)]
    assert re.search(r" us +refused ", row)
    assert note == f"{other.key} is refused: {compile_.failure}"
