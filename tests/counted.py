"""Bytes that the kernels of a forward move, counted in Triton's interpreter, beside the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilegen.check import interpreter
from tilegen.check.paging import in_pages
from tilegen.check.reference import make_inputs
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.traffic import traffic
from tilegen.problem import AttentionProblem

Bytes = dict[Kernel, tuple[int, int]]
"""Read and written by each kernel."""


def counted(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    reads: Mapping[Kernel, Mapping[str, Any]] | None = None,
) -> Bytes:
    """Return what each kernel of a forward moves; `reads` is what masks add to its launch."""
    x = make_inputs(problem)
    given: tuple[Any, ...] = (x.q, x.k, x.v)
    more: dict[str, Any] = {}
    if problem.page:
        *given, more["requests"] = in_pages(x.q, x.k, x.v, problem.page)
    moved: Bytes = {}

    def counting(name: Kernel) -> Any:
        launch = load(render(problem, configs[name], name)).launch

        def run(*given: Any) -> Any:
            with interpreter.count_traffic() as found:
                made = launch(*given, **(reads or {}).get(name, {}))
            moved[name] = found.read_bytes, found.write_bytes
            return made

        return run

    launches = {name: counting(name) for name in configs}
    passes.forward(launches, *given, 0.2, panel_rows=1, **more)
    return moved


def predicted(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> Bytes:
    """Return what the model says of the same; the first kernel leaves what others join."""
    before = next(iter(configs.values()))
    each = {name: traffic(problem, one, name, before=before) for name, one in configs.items()}
    return {name: (one.read_bytes, one.write_bytes) for name, one in each.items()}
