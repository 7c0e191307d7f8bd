"""The lower bound of a pass as a function of fast memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import sympy as sp

from tilegen.gpus.spec import gpu
from tilegen.kernels.spec import Direction
from tilegen.model.bounds import bound_values, bounds_of
from tilegen.model.symbols import M, P
from tilegen.problem import AttentionProblem
from tilegen.task import PassTask


@cache
def _least(direction: Direction) -> tuple[list[sp.Symbol], Callable[..., list[float]]]:
    bounds = [*bounds_of(direction).values()]
    arguments = sorted(set().union(*(one.free_symbols for one in bounds)), key=str)
    return arguments, sp.lambdify(arguments, bounds, "math")


def least_bytes(problem: AttentionProblem, direction: Direction, held: int) -> float:
    """Return the bound of a pass for one program after the other, with M = `held` words."""
    values = bound_values(PassTask("forward", problem, gpu("h200"))) | {P: 1, M: held}
    arguments, evaluate = _least(direction)
    return max(evaluate(*(values[one] for one in arguments)))
