"""The bound of a mask by its densest sub-grids, beside that by degrees and emitted kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import get_args

import pytest
import sympy as sp

from benchmarks.study.tiles import configs_of, held_words, moved_words
from tests.support.counted import least_bytes
from tests.support.problems import PROBLEMS
from tests.support.splits import backward, splits
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES as FAMILIES_OF
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Direction
from tilegen.model import symbols
from tilegen.model.bounds import bound_values, bounds_of
from tilegen.model.subgrids import (
    MaskFamily,
    closed_form,
    spanned_by_all_heads,
)
from tilegen.model.symbols import P, g, w, w_b
from tilegen.problem import AttentionProblem
from tilegen.task import PassTask

# --------------------------------------------------------------------------------------------------
# Beside the degrees


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_it_is_never_below_the_bound_by_degrees(problem: AttentionProblem) -> None:
    for spec in (gpu("h200"), gpu("h200", fast_memory=4096)):
        by_degree, by_shape = both_bounds(bound_values(PassTask("forward", problem, spec)))
        assert by_shape >= by_degree - 1e-6 * abs(by_degree)


@pytest.mark.parametrize("mask", ["causal", "window(999,0)", "prefix_lm(64)", "documents(@q:512)"])
def test_it_says_more_where_memory_holds_more_than_the_mask(mask: str) -> None:
    mask += "" if mask.startswith("window") else "&causal"
    problem = AttentionProblem.parse(f"b64 hq32 hkv8 q2048 d64 bf16 {mask}")
    by_degree, by_shape = both_bounds(
        bound_values(PassTask("forward", problem, gpu("h200"))) | {P: 1}
    )
    assert by_shape > 1.05 * by_degree


@cache
def _both() -> tuple[list[sp.Symbol], Callable[..., tuple[float, float]]]:
    bounds = [bounds_of("fwd")[name] for name in ("LB1", "LB1G")]
    arguments = sorted(set().union(*(one.free_symbols for one in bounds)), key=str)
    return arguments, sp.lambdify(arguments, bounds, "math")


def both_bounds(values: dict[sp.Symbol, float]) -> tuple[float, float]:
    """Return LB1 and LB1G in bytes."""
    arguments, evaluate = _both()
    return evaluate(*(values[one] for one in arguments))


def test_forms_are_of_the_symbols_that_explanations_name() -> None:
    known = {symbols.N_q, symbols.N_kv, g, w_b, symbols.p}
    assert all(closed_form(one).free_symbols <= known for one in get_args(MaskFamily))
    assert w not in spanned_by_all_heads().free_symbols


# --------------------------------------------------------------------------------------------------
# Emitted kernels

TEXTS = [
    *("full", "causal", "causal(bottom_right)", "window(99,0)", "window(200,50)", "prefix_lm(300)"),
    *("documents(@q:256)&causal", "dilated(4)", "global(20)|window(40,40)", "~window(30,30)"),
    *("neighborhood(32x32,9x9)", "causal&(kv_prefix(9)|window(80,-1))"),
]
SIDES = (16, 32, 128)
PARTS = ("_split", "_sum", "_one_pass")


@pytest.mark.parametrize("direction", FAMILIES_OF)
@pytest.mark.parametrize("text", TEXTS)
def test_no_family_of_kernels_beats_the_bound(text: str, direction: Direction) -> None:
    """With as much fast memory as one program holds; by the formulas that are equal to what is
    counted of emitted kernels."""
    problem = AttentionProblem.parse(f"hq2 hkv1 q1024 kv1024 d16 fp32 {text}").normal()
    for family in FAMILIES_OF[direction].values():
        if family.why_not(problem, "sm_90"):
            continue
        for side in SIDES:
            if family.name == "split_kv":
                configs = splits(problem, rows=side, block_n=side, keys=256)
                moved = moved_words(problem, configs)
                held = held_words("fwd", TileConfig(block_m=side, block_n=side), 16, 4)
                assert least_bytes(problem, direction, held) <= 4 * moved, side
                continue
            configs = {kernel: _config(kernel, side) for kernel in family.names}
            if any(KERNELS[name].parts for name in family.names):
                parts = backward(family.name, stays=side, passes=side, length=1024)
                configs |= {name: one for name, one in parts.items() if name.endswith(PARTS)}
            moved = moved_words(problem, configs)
            held = max(  # a part holds what its kernel does where nothing is split
                held_words(KERNELS[name].fitted_as, config, 16, 4)
                for name, config in configs.items()
                if KERNELS[name].masked
            )
            assert least_bytes(problem, direction, held) <= 4 * moved, (family.name, side)


def _config(kernel: Kernel, side: int) -> TileConfig:
    """Return the config of a kernel whose sides are closest to `side`."""
    return min(
        configs_of(kernel),
        key=lambda one: sum(abs(n - side) for n in (one.block_m, one.block_n, one.block_d or side)),
    )
