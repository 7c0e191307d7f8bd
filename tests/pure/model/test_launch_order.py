"""The order of programs: emitted kernels compute every tile once, heavy ones first."""

from __future__ import annotations

import re
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest

from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.launch_order import TOGETHER_BYTES, heads_together, heavy_end, rows_together
from tilegen.kernels.registry import KERNELS
from tilegen.masks import causal, full, sliding_window
from tilegen.model.dram import levels
from tilegen.model.formulas import computed
from tilegen.model.launches import launches
from tilegen.model.terms import TAIL
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

PARSE = AttentionProblem.parse
TILE = TileConfig.parse("m64n64w4s2")
NAMES = {"fwd": ("tile_m", "head"), "bwd_dq": ("tile_m", "head"), "bwd_dkdv": ("tile_n", "head_kv")}


def started(problem: AttentionProblem, kernel: Kernel) -> list[tuple[int, int, int]]:
    """Return (tile, head, batch) of each program of a launch, by the text of the kernel."""
    source = render(problem, TILE, kernel).source
    tile, head = NAMES[kernel]
    (text,) = re.findall(
        r"^    num_tiles = .*?(?:^    batch = [^\n]*|= _schedule\([^\n]*)\n", source, re.S | re.M
    )
    assert f"{tile} = " in text or f"{tile}, {head}, batch = " in text
    schedule = re.findall(r"^def _schedule\(.*?^    return [^\n]*\n", source, re.S | re.M)
    constants = re.findall(r"^(\w+) = tl\.constexpr\((\d+)\)", source, re.M)
    rows = problem.seqlen_kv if kernel == "bwd_dkdv" else problem.seqlen_q
    heads = problem.num_heads_kv if kernel == "bwd_dkdv" else problem.num_heads_q
    count = -(-rows // 64) * heads * problem.batch
    results: list[tuple[int, int, int]] = []
    for program in range(count):
        tl = SimpleNamespace(
            program_id=lambda axis, program=program: program,
            num_programs=lambda axis: count,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            maximum=max,
        )
        names: dict[str, Any] = {name: int(value) for name, value in constants} | {
            "tl": tl,
            "seqlen_q": problem.seqlen_q,
            "seqlen_kv": problem.seqlen_kv,
            "num_heads_q": problem.num_heads_q,
            "num_heads_kv": problem.num_heads_kv,
        }
        for lines in (*schedule, textwrap.dedent(text)):
            # Python's integers have any number of bits, and no method for it.
            exec(re.sub(r"[.]to[(]tl[.]int64[)]", "", lines), names)
        results.append((names[tile], names[head], names["batch"]))
    return results


SHAPES = (
    "b1 hq4 hkv1 q200 d64",
    "b3 hq6 hkv2 q300 kv500 d128",
    "b2 hq3 hkv3 q130 kv30000 d128",  # two heads start together, of six
    "b1 hq4 hkv2 q130 kv200000 d128",  # one
)


@pytest.mark.parametrize("mask", ["causal", "full", "window(99,0)", "causal(bottom_right)"])
@pytest.mark.parametrize("kernel", NAMES)
@pytest.mark.parametrize("shape", SHAPES[:2])
def test_every_tile_is_computed_once(shape: str, kernel: Kernel, mask: str) -> None:
    problem = PARSE(f"{shape} bf16 {mask}")
    actual = started(problem, kernel)
    assert len(actual) == len(set(actual))
    rows = problem.seqlen_kv if kernel == "bwd_dkdv" else problem.seqlen_q
    heads = problem.num_heads_kv if kernel == "bwd_dkdv" else problem.num_heads_q
    assert {one[0] for one in actual} == set(range(-(-rows // 64)))
    assert {one[1] for one in actual} == set(range(heads))
    assert {one[2] for one in actual} == set(range(problem.batch))


@pytest.mark.parametrize("shape, together", [*zip(SHAPES, (1, 6, 2, 1), strict=True)])
def test_heavy_tiles_of_the_heads_that_l2_holds_start_first(shape: str, together: int) -> None:
    problem = PARSE(f"{shape} bf16 causal(bottom_right)")
    assert heads_together(problem, KERNELS["fwd"]) == together
    actual = started(problem, "fwd")
    tiles, group = -(-problem.seqlen_q // 64), problem.group_size
    section = together * group * tiles
    for first in range(0, len(actual), section):
        part = actual[first : first + section]
        order = [tile for tile, _, _ in part]
        assert order == sorted(order, reverse=True)
        heads = {(batch, head // group) for _, head, batch in part}
        assert len(heads) <= together
        neighbours = [(tile, batch, head // group) for tile, head, batch in part]
        assert len(set(neighbours[:group])) == 1, "heads of a group start side by side"


def test_keys_with_most_queries_start_first() -> None:
    problem = PARSE("b2 hq8 hkv2 q512 d64 bf16 causal")
    order = [tile for tile, _, _ in started(problem, "bwd_dkdv")]
    assert order == sorted(order), "the first keys have all queries"


def test_equal_tiles_run_head_after_head() -> None:
    heads = [head for _, head, _ in started(PARSE("b1 hq3 hkv1 q300 d64 bf16 full"), "fwd")]
    assert heads == sorted(heads)
    assert heavy_end(full(), KERNELS["fwd"]) == ""
    assert heavy_end(causal(), KERNELS["fwd"]) == "last"
    assert heavy_end(causal(), KERNELS["bwd_dkdv"]) == "first"
    assert heavy_end(sliding_window(99, 0), KERNELS["bwd_preprocess"]) == ""


def test_rows_of_the_heads_that_start_together_fit_into_l2() -> None:
    problem = PARSE("b1 hq32 hkv8 q8192 d128 bf16 causal")
    assert rows_together(problem) * 512 == TOGETHER_BYTES < gpu("h200").l2_bytes
    assert heads_together(problem, KERNELS["fwd"]) == 8
    assert heads_together(problem, KERNELS["bwd_dkdv"]) == 2, "a program reads a whole group"


def makespan(jobs: list[float], workers: int) -> float:
    free = [0.0] * workers
    for job in jobs:
        first = min(range(workers), key=free.__getitem__)
        free[first] += job
    return max(free)


@pytest.mark.parametrize("shape", ["b1 hq8 hkv2 q2048 d64", "b1 hq16 hkv16 q1024 d64"])
def test_the_tail_is_that_of_the_lightest_programs(shape: str) -> None:
    """Programs in the order of the kernel on 40 SMs take what the model says, within 3 %."""
    problem, spec = PARSE(f"{shape} bf16 causal"), gpu("h200")
    run = launches(Tiled.of("fwd", problem, spec, TILE))
    overhead, workers = 0.6, 40
    jobs = [tile + 1 + overhead for tile, _, _ in started(problem, "fwd")]
    ideal = sum(jobs) / workers
    facts = {"steps": run.steps, "programs": run.programs, "longest": run.longest, "waves": 2}
    facts |= {"slots": workers, "full_step": 1.0, "full_ends": overhead, "heavy_first": True}
    sections = -(-problem.num_heads_kv // heads_together(problem, KERNELS["fwd"]))
    tail = computed(TAIL, facts | {"sections": sections})["tail"]
    assert makespan(jobs, workers) == pytest.approx(ideal + tail, rel=0.03)
    by_head = [
        one for _ in range(problem.num_heads_q) for one in sorted(jobs[:: problem.num_heads_q])
    ]
    assert makespan(by_head, workers) > 1.04 * makespan(jobs, workers)


def test_heads_that_start_together_are_read_from_dram_once() -> None:
    problem = PARSE("b1 hq32 hkv8 q8192 d128 bf16 causal")
    dram = levels(Tiled.of("fwd", problem, gpu("h200"), TileConfig.parse("m128n128w8s2t")))
    assert dram.sweeps == 1
    small = levels(Tiled.of("fwd", problem, gpu("rtx3090"), TILE))
    assert small.sweeps > 1.5, "32 MB do not fit into 6"
