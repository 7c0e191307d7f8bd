"""First choices by their machine code, and whether anything better was hidden beside them.

    python -m benchmarks.machine_code [--gpu h200] [--neighbours] [--problem TEXT] [--out FILE]

Each kernel of each problem of the catalogue, or of those that are named, is compiled as a call
would settle on it, and its main loop read: one row with resources, clocks of each unit for
128 x 128 scores, and the predicted time before and after. With --neighbours the configs that differ
by one step of one knob are compiled as well, and those that are faster by their machine code are
named. Needs no GPU; keeps what it has written, and continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, Environment, environment
from benchmarks.rows import append, read, same_values, with_environment
from benchmarks.workloads import CATALOGUE
from tilegen import gpu as gpu_named
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import estimate, search_space, time_as_compiled
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.verdicts import verdict
from tilegen.errors import BuildFailed
from tilegen.explaining.machine_code import SHOWN
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.resources import Resources
from tilegen.pipeline import choose_by_model
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

OUT = RESULTS / "machine_code.csv"
NEAR = 1.15
"""Predicted time over that of the choice up to which a neighbour is compiled."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A config of a kernel, as compiled."""

    config: TileConfig
    built: Resources
    seconds: float
    usable: bool
    hidden: bool
    """True if a tuner would not try it."""


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One line of the results; clocks are for 128 x 128 scores."""

    compiled_for: str
    problem: str
    kernel: str
    config: str
    registers: int
    spill_bytes: int
    tensor: int | None = None
    exp: int | None = None
    issue: int | None = None
    smem: int | None = None
    local: int | None = None
    masking: int | None = None
    exposed: float | None = None
    bound: int | None = None
    predicted_us: float
    static_us: float
    better: str = ""
    """Neighbours that are faster by their machine code, with their part of the time."""
    hidden: str = ""
    """Configs among `better` that a tuner would not try."""
    refused: str = ""
    """Neighbours that would be faster but may not be used: their machine code waits for each matrix
    product, or for what it has spilled."""


def neighbours(config: TileConfig, kernel: Kernel) -> list[TileConfig]:
    """Return the configs that differ by one step of one of a kernel's knobs."""
    knobs, configs = KERNELS[kernel].knobs, []
    for field in fields(knobs):
        values: tuple[int, ...] = getattr(knobs, field.name)
        if field.name == "block_m":  # of each of the heads of a tile
            values = tuple(one // config.heads for one in values if one >= config.heads)
        at = values.index(getattr(config, field.name))
        configs += [replace(config, **{field.name: one}) for one in values[max(0, at - 1) : at + 2]]
    return [one for one in configs if one != config]


def neighbourhood(
    problem: AttentionProblem, spec: GpuSpec, kernel: Kernel, *, near: bool = True
) -> list[Compiled]:
    """Return the config of a call without a record, and if `near` its neighbours that compile."""
    task = KernelTask.of(kernel, problem, spec)
    chosen = choose_by_model(task).config
    tried = set(search_space(task))
    longest = NEAR * estimate(task.tiled(chosen)).seconds
    others = [
        one
        for one in neighbours(chosen, kernel)
        if near and estimate(task.tiled(one)).seconds <= longest
    ]
    compiled: list[Compiled] = []
    for config in (chosen, *others):
        built = verdict(task.tiled(config), aligned=True)
        if isinstance(built, BuildFailed) or built.shared_bytes > spec.smem_per_block:
            continue
        compiled.append(
            Compiled(
                config=config,
                built=built,
                seconds=time_as_compiled(task.tiled(config), built).seconds,
                usable=acceptable(built, spec),
                hidden=config not in tried,
            )
        )
    return compiled


def row(problem: AttentionProblem, spec: GpuSpec, kernel: Kernel, *, near: bool) -> Row:
    """Return the line of one kernel."""
    chosen, *others = neighbourhood(problem, spec, kernel, near=near)
    config, built, seconds = chosen.config, chosen.built, chosen.seconds
    faster = [one for one in others if one.seconds < seconds]
    better = [one for one in faster if one.usable]
    line = with_environment(
        Row,
        environment(),
        compiled_for=spec.name,
        problem=problem.key,
        kernel=kernel,
        config=config.key,
        registers=built.registers,
        spill_bytes=built.spill_bytes,
        predicted_us=round(1e6 * estimate(Tiled.of(kernel, problem, spec, config)).seconds, 2),
        static_us=round(1e6 * seconds, 2),
        better=_listed(better, seconds),
        hidden=_listed([one for one in better if one.hidden], seconds),
        refused=_listed([one for one in faster if not one.usable], seconds),
    )
    if (code := built.step_code) is None:
        return line
    clocks = clocks_as_compiled(code, spec)
    scale = SHOWN / (config.rows * config.block_n)
    units = ("tensor", "exp", "issue", "smem", "local", "masking", "bound")
    shown = {name: round(scale * getattr(clocks, name)) for name in units}
    return replace(line, **shown, exposed=round(clocks.exposed, 3))


def _listed(faster: list[Compiled], seconds: float) -> str:
    return " ".join(f"{one.config.key}:{one.seconds / seconds:.3f}" for one in faster)


def _wanted(
    names: list[str], problems: list[AttentionProblem]
) -> Iterator[tuple[GpuSpec, AttentionProblem, Kernel]]:
    for name in names:
        spec = gpu_named(name)
        for wanted in problems:
            problem = wanted.normal()
            for kernel in kernels_of(problem, spec):
                yield spec, problem, kernel


def main(
    gpu: Annotated[list[str] | None, typer.Option(help="Default: h200; may be repeated.")] = None,
    near: Annotated[
        bool, typer.Option("--neighbours", help="Compile configs beside each choice too.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Result file.")] = OUT,
    most: Annotated[int, typer.Option(help="End after so many new lines.")] = 2**31,
    problem: Annotated[
        list[str] | None, typer.Option(help="In the place of the catalogue; may be repeated.")
    ] = None,
) -> None:
    """Write a line for each kernel that has none yet.

    Example: python -m benchmarks.machine_code --neighbours
    """
    done = same_values(read(out), ("compiled_for", "problem", "kernel"))
    left = most
    asked = [wanted.problem for wanted in CATALOGUE]
    if problem:
        asked = list(map(AttentionProblem.parse, problem))
    for spec, wanted, kernel in _wanted(gpu or ["h200"], asked):
        if (spec.name, wanted.key, kernel) in done or left <= 0:
            continue
        done.add((spec.name, wanted.key, kernel))
        line = row(wanted, spec, kernel, near=near)
        append(out, line)
        left -= 1
        print(f"{spec.name} {wanted.key} {kernel} {line.config} {line.static_us} us {line.better}")


if __name__ == "__main__":
    typer.run(main)
