"""Bytes that kernels move, counted by builds for the CPU that count, beside the model's, and the
lower bound of a pass as a function of fast memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import sympy as sp

from tests.support.problems import tiled
from tilegen import cpu
from tilegen.check.paging import in_pages
from tilegen.check.reference import make_inputs
from tilegen.cpu.reports import CountedTraffic
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.model.bounds import bound_values, bounds_of
from tilegen.model.symbols import M, P
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import PassTask

Bytes = dict[Kernel, tuple[int, int]]
"""Read and written by each kernel."""


def counting(rendered: RenderedKernel) -> tuple[Callable[..., Any], CountedTraffic]:
    """Return the launch of a counting build, and the bytes that launches move from now on."""
    module = cpu.load(rendered, "count")
    traffic = module.traffic
    traffic.read.clear()
    traffic.written.clear()
    return module.launch, traffic


def moved_by(rendered: RenderedKernel, *given: Any, **named: Any) -> tuple[int, int]:
    """Return the bytes that one launch reads and writes."""
    launch, actual = counting(rendered)
    launch(*given, **named)
    return actual.read_bytes, actual.write_bytes


def counted(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    reads: Mapping[Kernel, Mapping[str, Any]] | None = None,
) -> Bytes:
    """Count the bytes that each kernel of a forward moves; `reads` are the arguments that masks
    add."""
    x = make_inputs(problem)
    given: tuple[Any, ...] = (x.q, x.k, x.v)
    more: dict[str, Any] = {}
    if problem.page:
        *given, more["requests"] = in_pages(x.q, x.k, x.v, problem.page)
    launches, moved = counting_all(problem, configs, reads)
    passes.forward(launches, *given, 0.2, panel_rows=1, **more)
    return {name: (one.read_bytes, one.write_bytes) for name, one in moved.items()}


def counting_all(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    reads: Mapping[Kernel, Mapping[str, Any]] | None = None,
    **options: Any,
) -> tuple[dict[Kernel, Callable[..., Any]], dict[Kernel, CountedTraffic]]:
    """Return the launches of counting builds, and the bytes that all launches of each move."""
    launches: dict[Kernel, Callable[..., Any]] = {}
    moved: dict[Kernel, CountedTraffic] = {}
    for name, config in configs.items():
        launch, moved[name] = counting(render(problem, config, name, **options))
        launches[name] = partial(launch, **(reads or {}).get(name, {}))
    return launches, moved


def predicted(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> Bytes:
    """Return the model's bytes for the same kernels; the first leaves partial results for the
    others."""
    before = next(iter(configs.values()))
    each = {
        name: traffic_of(tiled(name, problem, one, joined=before)) for name, one in configs.items()
    }
    return {name: (one.read_bytes, one.write_bytes) for name, one in each.items()}


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
