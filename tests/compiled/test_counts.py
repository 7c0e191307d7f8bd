"""The traffic model is a contract: bytes that emitted kernels load and store equal the formula."""

import pytest
import torch

from tests.support.counted import moved_by
from tests.support.problems import PROBLEMS, tiled
from tilegen.check.reference import make_inputs
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

MASKS = [
    "full",
    "causal",
    "causal(bottom_right)",
    "window(40,0)",
    "window(9,30,bottom_right)",
    "causal&window(33,3)",
    "causal(bottom_right)&window(20,2)",
    "prefix_lm(20)",
    "global(5)|window(9,9)",
    "causal&(kv_prefix(4)|window(8,-1))",
    "~window(5,5)",
]
SHAPES = ["q128 kv128", "q64 kv192", "q192 kv64", "q100 kv77", "q77 kv130", "q1 kv100"]
CONFIGS = [TileConfig(block_m=32, block_n=16), TileConfig(block_m=16, block_n=64)]


def counted(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> tuple[int, int]:
    x = make_inputs(problem)
    rows = torch.zeros(x.q.shape[:3])
    arguments = {
        "fwd": (x.q, x.k, x.v, 0.1),
        "bwd_preprocess": (x.dout, x.dout),
        "bwd_dkdv": (x.q, x.k, x.v, x.dout, rows, rows, 0.1),
        "bwd_dq": (x.q, x.k, x.v, x.dout, rows, rows, 0.1),
    }[kernel]
    return moved_by(render(problem, config, kernel, aligned=config.descriptors), *arguments)


@pytest.mark.parametrize("kernel", LARGE_CACHE)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_on_aligned_and_ragged_shapes(mask: str, kernel: Kernel) -> None:
    """In tiles of both kinds in turn, so that each shape and kernel meets both."""
    config = CONFIGS[(MASKS.index(mask) + LARGE_CACHE.index(kernel)) % 2]
    for shape in SHAPES:
        problem = AttentionProblem.parse(f"b1 hq2 hkv1 {shape} d16 fp16 {mask}")
        expected = traffic_of(tiled(kernel, problem, config))
        assert (expected.read_bytes, expected.write_bytes) == counted(problem, config, kernel)


@pytest.mark.parametrize(
    "problem, kernel",
    [
        (problem, LARGE_CACHE[(i + more) % len(LARGE_CACHE)])
        for i, problem in enumerate(PROBLEMS)
        for more in (0, 2)
    ],
    ids=str,
)
def test_every_problem_of_the_table(problem: AttentionProblem, kernel: Kernel) -> None:
    """In two kernels each."""
    config = TileConfig(block_m=64, block_n=32)
    expected = traffic_of(tiled(kernel, problem, config))
    assert (expected.read_bytes, expected.write_bytes) == counted(problem, config, kernel)


def test_the_counter_counts() -> None:
    """A dense forward by hand: 2 row tiles read all keys and values, queries are read once."""
    problem = AttentionProblem.parse("b1 hq1 hkv1 q64 kv48 d16/32 fp16 full")
    read, written = counted(problem, TileConfig(block_m=32, block_n=16), "fwd")
    assert read == 2 * (64 * 16 + 2 * 48 * (16 + 32))
    assert written == 2 * 64 * 32 + 4 * 64
