"""Machine code of emitted kernels: it is understood, and nothing better than the choice is near."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from importlib.metadata import version

import pytest
from typer.testing import CliRunner

import tilegen
from tests.conftest import CheckGolden
from tests.support.calls import usable
from tilegen.choose.choice import Shortlist
from tilegen.choose.ranker import estimate, search_space, time_as_compiled
from tilegen.cli.main import app
from tilegen.compiling.acceptable import acceptable, why_not_used
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.verdicts import verdict
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import BLOCK_SIZES, Kernel, TileConfig
from tilegen.kernels.registry import KERNELS as KERNEL_SPECS
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.footprint import executed
from tilegen.model.time import step_clocks
from tilegen.pipeline import best_acceptable, choose_by_model
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

PARSE = AttentionProblem.parse
GPUS = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
WIDE = "hq4 hkv1 q4096 d512 bf16 causal"
KERNELS = (
    ("hq4 hkv1 q4096 d128 bf16 causal", "fwd", "m128n64w8s2"),
    ("hq4 hkv1 q4096 d128 bf16 causal", "bwd_dkdv", "m64n64w4s2"),
    ("hq4 hkv1 q4096 d128 bf16 causal", "bwd_dq", "m64n64w4s2"),
    ("hq4 hkv1 q4096 d128 bf16 causal", "bwd_dkdv", "m64n64w8s2"),
    (WIDE, "bwd_scores", "m128n128d64w8s3"),
    (WIDE, "bwd_columns", "m64n128d128w8s3"),
    (WIDE, "bwd_rows", "m64n64d128w4s3"),
    ("hq4 hkv1 q4096 d576/512 bf16 causal", "fwd_streamed", "m64n64d64w8s2"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, text, kernel, config",
    [
        *(("sm_90", *one) for one in KERNELS),  # which has the most forms of instructions
        ("sm_80", *KERNELS[5]),
        ("sm_100", *KERNELS[0]),
        ("sm_120", *KERNELS[5]),
    ],
)
def test_steps_are_found_in_machine_code(arch: str, text: str, kernel: str, config: str) -> None:
    """And have the multiply-adds that the model says, whose unrolling they survived."""
    problem, tile = PARSE(text), TileConfig.parse(config)
    built = compile_for(render(problem, tile, kernel), arch)
    code = built.resources.step_code
    assert code is not None
    work = Tiled.of(kernel, problem, gpu(GPUS[arch]), tile).step
    assert code.multiply_adds == executed(work, 2, tile.num_warps, arch)
    least = work.scores * (kernel != "bwd_columns")  # an exponential for each score
    assert 32 * code.exponentials >= least
    assert code.instructions <= code.partial_instructions
    assert clocks_as_compiled(code, gpu(GPUS[arch])).bound > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, kernel, config",
    [
        ("sm_90", "fwd", "m128n128w8s2"),
        ("sm_90", "bwd_dkdv", "m64n64w4s2t"),
        ("sm_90", "bwd_dq", "m64n128w8s2"),
        ("sm_80", "fwd", "m128n64w4s2"),
        ("sm_80", "bwd_dkdv", "m64n64w8s2"),
        ("sm_100", "fwd", "m128n128w8s2"),
    ],
)
def test_shared_memory_traffic_equals_the_model(arch: str, kernel: str, config: str) -> None:
    """Operands, tiles as they come in, and weights that other warps need; reductions are left out,
    and reads that the compiler repeats."""
    problem, tile, spec = PARSE(KERNELS[0][0]), TileConfig.parse(config), gpu(GPUS[arch])
    code = compile_for(render(problem, tile, kernel), arch).resources.step_code
    assert code is not None
    predicted = step_clocks(Tiled.of(kernel, problem, spec, tile)).smem
    assert 0.8 < predicted / clocks_as_compiled(code, spec).smem <= 1.0


@pytest.mark.slow
def test_amd_is_counted() -> None:
    problem, tile = PARSE("hq4 hkv1 q4096 d64 fp16 causal"), TileConfig.parse("m64n64w4s1")
    built = compile_for(render(problem, tile, "fwd"), "gfx942")
    loops = [one for one in built.code.loops if one.products]
    assert len(loops) == 2
    work = Tiled.of("fwd", problem, gpu("mi300x"), tile).step
    # Instructions have 32 rows, a warp of a tile of 64 rows half of them to itself.
    assert {one.multiply_adds(4) for one in loops} == {1.5 * work.multiply_adds}
    assert all(one.units["shared"] and one.units["exp"] for one in loops)
    assert built.resources.step_code is None


@pytest.mark.slow
def test_kernels_of_another_tile_are_not_taken_for_it() -> None:
    problem, tile = PARSE(KERNELS[0][0]), TileConfig.parse("m128n64w8s2")
    built = compile_for(render(problem, tile, "fwd"), "sm_90")
    of_another = replace(
        built, rendered=replace(built.rendered, config=replace(tile, block_n=BLOCK_SIZES[-1]))
    )
    assert built.resources.step_code is not None
    assert of_another.resources.step_code is None


LONG = "b1 hq32 hkv8 q8192"
CAUSAL, FULL = f"{LONG} d128 bf16 causal", f"{LONG} d128 bf16 full"
SHORT, WINDOW = f"{LONG} d64 bf16 causal", f"{LONG} d64 bf16 window(127,0)"
BESIDE: dict[str, tuple[str, Kernel]] = {
    "fwd-d64-window": (WINDOW, "fwd"),
    "bwd_dkdv-d64-window": (WINDOW, "bwd_dkdv"),
    "bwd_dq-d64-causal": (SHORT, "bwd_dq"),
}
"""Problems whose neighbours are compiled too."""
NEAR = 1.15
"""Predicted time over that of the choice up to which a neighbour is compiled."""
BOUNDED: dict[str, tuple[str, Kernel]] = {
    **BESIDE,
    "fwd-d128-causal": (CAUSAL, "fwd"),
    "bwd_dkdv-d128-causal": (CAUSAL, "bwd_dkdv"),
    "bwd_dq-d128-full": (FULL, "bwd_dq"),
}
known_triton = pytest.mark.skipif(
    version("triton") != "3.7.1", reason="needs Triton 3.7.1, for which the numbers are known"
)


@pytest.mark.slow
@known_triton
@pytest.mark.parametrize("name", BOUNDED)
def test_static_bounds(name: str, golden: CheckGolden) -> None:
    text, kernel = BOUNDED[name]
    problem = PARSE(text)
    golden(told(problem, usable(problem, gpu("h200"), kernel)))


@pytest.mark.slow
@known_triton
@pytest.mark.parametrize("name", BESIDE)
def test_nothing_better_is_hidden_beside_a_choice(name: str) -> None:
    text, kernel = BESIDE[name]
    task = KernelTask.of(kernel, PARSE(text), gpu("h200"))
    chosen = choose_by_model(task).config
    longest = NEAR * estimate(task.tiled(chosen)).seconds
    seconds = {
        config: time_as_compiled(task.tiled(config), built).seconds
        for config in (chosen, *neighbours(chosen, kernel))
        if estimate(task.tiled(config)).seconds <= longest
        and not isinstance(built := verdict(task.tiled(config), aligned=True), BuildFailed)
        and acceptable(built, task.gpu)
    }
    assert len(seconds) > 1
    better = [config for config in seconds if seconds[config] < seconds[chosen]]
    assert set(better) <= set(search_space(task))
    assert all(seconds[config] > 0.93 * seconds[chosen] for config in better)


def neighbours(config: TileConfig, kernel: Kernel) -> list[TileConfig]:
    """Return the configs that differ by one step of one of a kernel's knobs."""
    knobs, configs = KERNEL_SPECS[kernel].knobs, []
    for field in fields(knobs):
        values: tuple[int, ...] = getattr(knobs, field.name)
        if field.name == "block_m":  # of each of the heads of a tile
            values = tuple(one // config.heads for one in values if one >= config.heads)
        at = values.index(getattr(config, field.name))
        configs += [replace(config, **{field.name: one}) for one in values[max(0, at - 1) : at + 2]]
    return [one for one in configs if one != config]


def told(problem: AttentionProblem, built: CompiledKernel) -> str:
    """Return the resources and clocks of a kernel as text."""
    code, config = built.resources.step_code, built.rendered.config
    assert code is not None
    clocks = clocks_as_compiled(code, gpu("h200"))
    scale = 128 * 128 / (config.block_m * config.block_n)
    numbers = (clocks.tensor, clocks.exp, clocks.issue, clocks.smem, clocks.local, clocks.bound)
    used = built.reported
    return (
        f"{problem.key} {config.key} {used.registers} registers {used.spill_bytes} B "
        f"{' '.join(f'{scale * one:.0f}' for one in numbers)} exposed {clocks.exposed:.2f}\n"
    )


@pytest.mark.slow
def test_clocks_of_a_tile_with_the_rows_of_several_heads_are_those_of_its_scores() -> None:
    problem = "b1 hq8 hkv1 q64 kv8192 d128 bf16 full"

    def shown(kernel: str, config: str) -> float:
        (told,) = tilegen.read_code(problem, "h200", kernel=kernel, config=config)
        return told["step"]["scale"] * told["step"]["tensor"]

    assert shown("fwd_split", "m8h8n64k1024w4s3") == pytest.approx(shown("fwd", "m64n64w4s3"))


@pytest.mark.slow
@known_triton
def test_traps_are_not_chosen() -> None:
    """A head dim of 72 is two pieces in tensor memory, which this tile has no room for."""
    problem, b200 = PARSE("b32 hq16 hkv16 q729 d72 bf16 full"), gpu("b200")
    trap, good = TileConfig.parse("m128n256w8s2t"), TileConfig.parse("m64n32w4s2")
    ranked = Shortlist(KernelTask.of("fwd", problem, b200), (trap, good), "model", "a test")
    chosen = best_acceptable(
        ranked,
        lambda tiled: compile_for(render(problem, tiled.config, "fwd"), "sm_100").resources,
    )
    assert "into a trap" in why_not_used(chosen.tried[trap], b200)
    assert chosen.config == good


@pytest.mark.slow
def test_the_command_prints_the_result_of_the_function() -> None:
    text, kernel, config = KERNELS[1]
    asked = "explain", text, "--gpu", "h200", "--kernel", kernel, "--config", config, "--static"
    (told,) = tilegen.read_code(text, "h200", kernel=kernel, config=config)
    answer = CliRunner().invoke(app, [*asked, "--json"], catch_exceptions=False)
    assert json.loads(answer.stdout) == [told]
    (full, partial) = told["loops"]
    assert full["instructions"] < partial["instructions"]
    assert full["products"] == {"64x64x16.SS": 16, "64x128x16.RS": 8}
    assert 0 < told["step"]["exposed"] < 1
    lines = CliRunner().invoke(app, list(asked), catch_exceptions=False).stdout.splitlines()
    assert lines[0].startswith(f"{kernel} {config} on h200, from its machine code: ")
    assert len([line for line in lines if line.startswith("  loop of ")]) == 2
