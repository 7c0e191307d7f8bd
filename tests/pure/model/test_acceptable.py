"""The rule for usable binaries, and its callers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.problems import STEP, used
from tilegen import pipeline
from tilegen.choose.choice import Shortlist
from tilegen.choose.ranker import by_lower_bound, propose, time_as_compiled
from tilegen.compiling import compiler
from tilegen.compiling.acceptable import MOST_LOCAL, acceptable, first_that_fits, why_not_used
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.estimate import Candidate
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import MOST_SPILLED, SPILL_DOUBT, Footprint
from tilegen.model.resources import Resources
from tilegen.model.time import time
from tilegen.pipeline import ENOUGH, MAX_COMPILES, MIN_GAIN
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled
from tilegen.tuning import bench

H200 = gpu("h200")
PROBLEM = AttentionProblem.parse("b1 hq32 hkv8 q8192 d128 bf16 causal")


def test_a_binary_may_spill_a_little() -> None:
    for spilled in (0, 8, 120, MOST_SPILLED):
        assert acceptable(used(spill_bytes=spilled), H200)
        assert bench.refused(used(spill_bytes=spilled), H200) is None
    much = used(spill_bytes=MOST_SPILLED + 8)
    assert not acceptable(much, H200)
    assert why_not_used(much, H200).startswith("136 bytes of registers spilled per thread")
    actual = bench.refused(much, H200)
    assert actual is not None
    assert (actual.status, actual.message) == ("declined", why_not_used(much, H200))


def test_a_trap_is_no_kernel() -> None:
    """ptxas makes a trap of a kernel that needs more tensor memory than the GPU has."""
    trap, spills = used(registers=4), used(spill_bytes=4000)
    assert "into a trap" in why_not_used(trap, gpu("b200"))
    assert not acceptable(trap, gpu("b200"))
    assert first_that_fits([trap, spills], gpu("b200")) == 1
    with pytest.raises(BuildFailed, match="none did"):
        first_that_fits([trap], gpu("b200"))
    assert acceptable(used(registers=22), gpu("b200"))
    assert acceptable(trap, gpu("mi300x")), "AMD's kernels may have few"


def test_a_binary_is_judged_by_its_inner_loop() -> None:
    assert acceptable(used(spill_bytes=400, step_code=STEP), H200), "what spills is elsewhere"
    bound = clocks_as_compiled(STEP, H200).bound
    most = int(MOST_LOCAL * bound)  # a load or store of a warp takes a clock
    assert acceptable(used(step_code=replace(STEP, local=most)), H200)
    much = used(step_code=replace(STEP, local=most + 1))
    assert why_not_used(much, H200).startswith(f"local memory takes {most + 1} clocks of a step")
    actual = bench.refused(much, H200)
    assert actual is not None
    assert actual.status == "declined"


def test_a_binary_that_waits_for_each_product_is_refused_whatever_it_spills() -> None:
    waiting = used(spill_bytes=0, step_code=replace(STEP, serialized=True, local=0))
    assert why_not_used(waiting, H200) == "0 bytes spilled, and each matrix product is waited for"


def test_machine_code_ranks_compiled_configs() -> None:
    config = TileConfig.parse("m64n128w8s2")
    tiled = Tiled.of("bwd_dkdv", PROBLEM, H200, config)

    def seconds(**changes: int) -> float:
        built = used(shared_bytes=131584, step_code=replace(STEP, **changes))
        return time_as_compiled(tiled, built).seconds

    as_it_is = seconds()
    assert seconds(local=0) < as_it_is < seconds(exposed=STEP.instructions)
    assert seconds(partial_instructions=10**5) > as_it_is
    assert seconds(multiply_adds=2**23) > 1.5 * as_it_is


def test_a_binary_has_to_exist_and_fit() -> None:
    assert not acceptable(BuildFailed("no"), H200)
    assert why_not_used(BuildFailed("no"), H200) == "no"
    large = used(shared_bytes=H200.smem_per_block + 1024)
    assert why_not_used(large, H200) == "228 KiB > 227 KiB"
    assert acceptable(used(shared_bytes=H200.smem_per_block), H200)


def test_predicted_spills_are_the_missing_registers() -> None:
    known = {"smem_bytes": 0, "columns": 0, "max_registers": 255}
    assert Footprint(registers=255, **known).spill_bytes == 0
    assert Footprint(registers=256, **known).spill_bytes == 4
    assert Footprint(registers=255 + 20, **known).spill_bytes == 80
    surely = int(255 * SPILL_DOUBT) + 1
    assert not Footprint(registers=surely - 1, **known).surely_spills, "the compiler decides"
    assert Footprint(registers=surely, **known).surely_spills


def test_more_spills_take_longer() -> None:
    config = TileConfig.parse("m64n128w8s2")
    tiled = Tiled.of("bwd_dkdv", PROBLEM, H200, config)
    needs = footprint(tiled)
    seconds = [
        time(tiled, replace(needs, registers=255 + spilled // 4)).seconds for spilled in (0, 8, 120)
    ]
    assert seconds == sorted(set(seconds))
    assert seconds[2] < 1.2 * seconds[0]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[TileConfig, int | None]:
    """Results of compiling: bytes spilled by config, None for a failure; no spill by default."""
    spilled: dict[TileConfig, int | None] = {}

    def compile_(rendered: RenderedKernel, arch: str) -> compiler.CompiledKernel:
        if (size := spilled.setdefault(rendered.config, 0)) is None:
            raise BuildFailed("no")
        return compiler.CompiledKernel(
            rendered=rendered,
            arch=arch,
            binary=b"",
            reported=used(spill_bytes=size),
            scratch_pointers=0,
            seconds=0.0,
        )

    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_for", compile_)
    return spilled


def hopeful() -> list[Candidate]:
    return by_lower_bound(KernelTask.of("bwd_dq", PROBLEM, H200), top=MAX_COMPILES)


def test_a_call_takes_the_fastest_config_as_compiled(
    compiled: dict[TileConfig, int | None],
) -> None:
    """Candidates come in the order of their times without spilling; a spill is then added."""
    ranked = hopeful()
    proposals = [one.config for one in ranked]
    first = propose(KernelTask.of("bwd_dq", PROBLEM, H200), top=1)[0].config
    assert pipeline.choose_kernel(KernelTask.of("bwd_dq", PROBLEM, H200)).config == first
    assert not compiled, "nothing is compiled unless it may be"
    compiled |= {proposals[0]: 400, proposals[1]: None, proposals[2]: 0}
    choice = pipeline.choose_kernel(KernelTask.of("bwd_dq", PROBLEM, H200), may_compile=True)
    assert (choice.config, choice.source) == (proposals[2], "the model")
    assert list(compiled) == proposals[:3]


def test_registers_of_a_tile_tell_of_its_other_stages() -> None:
    """Fewer than predicted let more programs share an SM, if they take less shared memory."""
    problem = AttentionProblem.parse("b1 hq32 hkv8 q8192 d64 bf16 window(127,0)")
    tile = TileConfig.parse("m64n32w4s4")
    task = KernelTask.of("bwd_dq", problem, H200)
    asked = by_lower_bound(task, top=MAX_COMPILES)
    alike = [one for one in asked if replace(one.config, num_stages=4) == tile]
    ranked = Shortlist(task, tuple(one.config for one in alike), "model", "", tuple(alike))

    def compiled(registers: int) -> tuple[TileConfig, int]:
        def compile_(tiled: Tiled) -> Resources:
            needs = footprint(tiled)
            return used(shared_bytes=needs.smem_bytes, registers=registers, step_code=None)

        choice = pipeline.best_acceptable(ranked, compile_)
        return choice.config, len(choice.tried)

    predicted = footprint(task.tiled(tile)).registers
    assert compiled(predicted) == (tile, 1)
    assert compiled(96) == (replace(tile, num_stages=3), 2)


def test_a_tile_that_is_slower_as_compiled_is_not_compiled_with_other_stages() -> None:
    """The code of a step is that of its other stages, but for one stage, which has no pipeline."""
    tile = TileConfig.parse("m64n128w8s3")
    stages = [replace(tile, num_stages=number) for number in (3, 4, 2, 1)]
    (first,) = by_lower_bound(KernelTask.of("bwd_dkdv", PROBLEM, H200), top=1)
    alike = tuple(replace(first, config=one) for one in stages)
    asked: list[TileConfig] = []

    def compile_(tiled: Tiled) -> Resources:
        asked.append(tiled.config)
        needs = footprint(tiled)
        code = replace(STEP, exposed=STEP.instructions)
        return used(shared_bytes=needs.smem_bytes, step_code=code)

    ranked = Shortlist(KernelTask.of("bwd_dkdv", PROBLEM, H200), tuple(stages), "model", "", alike)
    choice = pipeline.best_acceptable(ranked, compile_)
    assert choice.seconds[tile] > 1.2 * first.estimate.cost
    assert asked == [stages[0], stages[3]]


def test_kernels_that_spill_a_little_are_chosen_if_fastest(
    compiled: dict[TileConfig, int | None],
) -> None:
    ranked = hopeful()
    compiled |= {ranked[0].config: 120}
    choice = pipeline.choose_kernel(KernelTask.of("bwd_dq", PROBLEM, H200), may_compile=True)
    seconds = {
        config: time_as_compiled(Tiled.of("bwd_dq", PROBLEM, H200, config), built).seconds
        for config, built in choice.tried.items()
        if not isinstance(built, BuildFailed)
    }
    assert seconds[ranked[0].config] > ranked[0].estimate.seconds
    assert choice.config == min(seconds, key=lambda config: seconds[config])
    # Another was compiled only if it could be faster by more than a trifle.
    order = [item for item in ranked if item.config in seconds]
    for at, item in enumerate(order[1:], 1):
        in_hand = min(seconds[before.config] for before in order[:at])
        assert in_hand > (1 + MIN_GAIN) * item.estimate.seconds
    assert len(choice.tried) <= ENOUGH
    if len(choice.tried) < ENOUGH:
        following = ranked[len(choice.tried)].estimate.seconds
        assert min(seconds.values()) <= (1 + MIN_GAIN) * following


def test_where_nothing_compiles_the_launch_says_why(
    compiled: dict[TileConfig, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    proposals = [one.config for one in hopeful()]
    compiled |= dict.fromkeys(proposals)
    choice = pipeline.choose_kernel(KernelTask.of("bwd_dq", PROBLEM, H200), may_compile=True)
    assert (choice.config, choice.source) == (proposals[0], "the model")
    assert "no kernel could be compiled ahead of the launch" in caplog.text


def test_another_tile_is_compiled_before_the_same_with_other_stages() -> None:
    wide, narrow = TileConfig.parse("m128n64w4s3"), TileConfig.parse("m64n32w4s3")
    ranked = [replace(wide, num_stages=stages) for stages in (3, 4, 2)] + [narrow]
    seconds = dict(zip(ranked, (1.0, 1.0, 1.1, 1.2), strict=True))
    candidates = [
        replace(one, config=config, estimate=replace(one.estimate, seconds=seconds[config]))
        for one, config in zip(hopeful(), ranked, strict=False)
    ]
    asked: list[TileConfig] = []

    def compile(tiled: Tiled) -> Resources:
        asked.append(tiled.config)
        return used(spill_bytes=MOST_SPILLED + 8 if tiled.config == wide else 0)

    task = KernelTask.of("bwd_dq", PROBLEM, H200)
    given = pipeline.Shortlist(task, tuple(ranked), "model", "the model", tuple(candidates))
    chosen = pipeline.best_acceptable(given, compile)
    assert asked[:2] == [wide, narrow]
    assert chosen.config != wide
