"""First choices of today beside those of an earlier commit, and why they changed.

    python -m benchmarks.first_choices [--gpu h200] [--out FILE]

Each kernel of each problem of the catalogue that either commit chooses has a line. Both configs are
compiled with today's kernels, so that the two times differ by the config alone. The earlier choices
are in results/first_choices_before.csv; they were launched without being compiled first. Needs no
GPU; keeps what it has written, and continues where it stopped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, Environment, environment
from benchmarks.rows import append, read, same_values, with_environment
from benchmarks.workloads import CATALOGUE
from tilegen import gpu as gpu_named
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import time_as_compiled
from tilegen.compiling.acceptable import why_not_used
from tilegen.compiling.verdicts import verdict
from tilegen.errors import BuildFailed, Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, direction_of
from tilegen.kernels.spec import Direction
from tilegen.pipeline import choose_by_model
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

BEFORE = RESULTS / "first_choices_before.csv"
OUT = RESULTS / "first_choices.csv"
SAME = 0.005
"""Part of a time by which two configs differ that count as equally fast."""


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One kernel of one problem on one GPU; times are those that machine code predicts."""

    compiled_for: str
    problem: str
    kernel: str
    before: str = ""
    """The config that an earlier commit launched first; empty if it took another kernel."""
    after: str = ""
    """Today's config; empty if the pass is computed by other kernels."""
    before_us: float | None = None
    """None if the config does not compile to a kernel that fits, or is no longer legal."""
    after_us: float | None = None
    why: str


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A config as the compiler sees it."""

    seconds: float | None
    why_not_used: str
    """Why the config may not be used; empty if it may."""


def compiled(
    problem: AttentionProblem, spec: GpuSpec, kernel: Kernel, config: TileConfig
) -> Compiled:
    """Compile a config of a kernel; return its resources and verdict."""
    tiled = Tiled.of(kernel, problem, spec, config)
    try:
        built = verdict(tiled, aligned=True)
    except Unsupported as error:
        return Compiled(seconds=None, why_not_used=str(error))
    why_not = why_not_used(built, spec)
    if isinstance(built, BuildFailed) or built.shared_bytes > spec.smem_per_block:
        return Compiled(seconds=None, why_not_used=why_not)
    seconds = time_as_compiled(tiled, built).seconds
    return Compiled(seconds=seconds, why_not_used=why_not)


def why(before: Compiled, after: Compiled) -> str:
    """Return why one config took the place of another."""
    if before.why_not_used:
        return f"not usable: {before.why_not_used}"
    if before.seconds is None or after.seconds is None:
        return "not compiled"
    ratio = before.seconds / after.seconds
    if abs(ratio - 1) <= SAME:
        return "as fast by machine code, less by prediction"
    if ratio < 1:
        return f"faster by machine code, {ratio:.2f} times the time, and predicted slower"
    return f"slower by machine code, {ratio:.2f} times the time"


def passes(kernels: tuple[Kernel, ...]) -> dict[Direction, tuple[Kernel, ...]]:
    """Return kernels by the pass that they belong to."""
    by_direction: dict[Direction, tuple[Kernel, ...]] = {}
    for kernel in kernels:
        way = direction_of(kernel)
        by_direction[way] = (*by_direction.get(way, ()), kernel)
    return by_direction


def lines(
    problem: AttentionProblem, spec: GpuSpec, before: dict[Kernel, TileConfig]
) -> list[dict[str, object]]:
    """Return the lines of a problem, as values of a Row."""
    now = passes(kernels_of(problem, spec))
    then = passes(tuple(before))
    lines_of_problem: list[dict[str, object]] = []
    for way, kernels in now.items():
        others = then.get(way, ())
        for kernel in dict.fromkeys((*others, *kernels)):
            line: dict[str, object] = {"kernel": kernel}
            if kernel in before:
                line["before"] = before[kernel].key
            if kernel in kernels:
                config = choose_by_model(KernelTask.of(kernel, problem, spec)).config
                today = compiled(problem, spec, kernel, config)
                line |= {"after": config.key, "after_us": _us(today.seconds)}
                if before.get(kernel) == config:
                    line |= {"before_us": line["after_us"], "why": "the same"}
                elif kernel in before:
                    past = compiled(problem, spec, kernel, before[kernel])
                    line |= {"before_us": _us(past.seconds), "why": why(past, today)}
                else:
                    line["why"] = f"in the place of {' '.join(others) or 'nothing'}"
            else:
                line["why"] = f"the pass is computed by {' '.join(kernels)}"
            lines_of_problem.append(line)
    return lines_of_problem


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e6 * seconds, 2)


def main(
    gpu: Annotated[
        list[str] | None, typer.Option(help="Default: all of the earlier choices; repeatable.")
    ] = None,
    before: Annotated[Path, typer.Option(help="The earlier choices.")] = BEFORE,
    out: Annotated[Path, typer.Option(help="Result file.")] = OUT,
    most: Annotated[int, typer.Option(help="End after so many new problems.")] = 2**31,
) -> None:
    """Write the lines of each problem that has none yet.

    Example: python -m benchmarks.first_choices --gpu h200
    """
    chosen: dict[tuple[str, str], dict[Kernel, TileConfig]] = {}
    for line in read(before):
        if line["kernel"] not in KERNELS:
            raise Unsupported(f"expected a kernel of tilegen in {before}, got {line['kernel']!r}")
        of = chosen.setdefault((line["compiled_for"], line["problem"]), {})
        of[line["kernel"]] = TileConfig.parse(line["config"])
    if not chosen:
        raise Unsupported(f"expected earlier choices in {before}, found none")
    done = same_values(read(out), ("compiled_for", "problem"))
    for name in gpu or dict.fromkeys(name for name, _ in chosen):
        spec = gpu_named(name)
        for workload in CATALOGUE:
            problem = workload.problem.normal()
            key = spec.name, problem.key
            if key not in chosen or key in done or most <= 0:
                continue
            done.add(key)
            most -= 1
            for values in lines(problem, spec, chosen[key]):
                row = with_environment(
                    Row, environment(), compiled_for=spec.name, problem=problem.key, **values
                )
                append(out, row)
                print(f"{spec.name} {problem.key} {row.kernel} {row.before} {row.after}: {row.why}")


if __name__ == "__main__":
    typer.run(main)
