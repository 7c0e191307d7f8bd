"""Count the first choices of the model that change if a constant is halved or doubled, over the
catalogue on four GPUs.

python -m benchmarks.constants [--out FILE]

A constant that changes nothing either way does not belong in the model. Needs no GPU.
"""

from __future__ import annotations

import csv
import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from benchmarks.workloads import CATALOGUE
from tilegen import gpu
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import best_of, propose
from tilegen.model import rates
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

GPUS = ("a100", "h100", "h200", "b200")
NAMES = [
    "time.IDLE",
    "time.OVERLAP_NORM",
    "time.CHANGED_INSTRUCTIONS",
    "time.SHARED_READS",
    "on_chip.SPILL_DOUBT",
    "footprint.MAX_UNROLLED",
    *(f"rates.{one.name}" for one in fields(rates.Rates)),
    *(f"instructions.{one.name}" for one in fields(rates.Instructions)),
]
FACTORS = (0.5, 2.0)

Choices = dict[tuple[str, str, str], str]


def choices(problems: list[AttentionProblem]) -> Choices:
    """Return the first choice of each kernel of each problem on each GPU."""
    chosen: Choices = {}
    for name in GPUS:
        spec = gpu(name)
        for problem in problems:
            for kernel in kernels_of(problem, spec):
                best = propose(KernelTask.of(kernel, problem, spec), top=1)[0]
                chosen[name, problem.key, kernel] = best.config.key
    return chosen


def changed(problems: list[AttentionProblem], before: Choices) -> int:
    """Return the number of first choices that differ, those of another family counted once."""
    forget()
    now = choices(problems)
    forget()
    return sum(before.get(one, config) != config for one, config in now.items()) + len(
        {one[:2] for one in now.keys() - before.keys()}
    )


def forget() -> None:
    """Clear the model's caches, which depend on earlier constants."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("tilegen.model", "tilegen.choose")):
            for var in vars(module).values():
                if callable(clear := getattr(var, "cache_clear", None)):
                    clear()


@contextmanager
def scaled(group: str, name: str, factor: float) -> Iterator[None]:
    """Have the model use a constant times a factor, and forget the clocks of steps."""
    if group in ("rates", "instructions"):
        read = "rates_of" if group == "rates" else group
        users = [
            module
            for key, module in sys.modules.items()
            if key.startswith("tilegen.") and hasattr(module, read)
        ]
        real = getattr(rates, read)

        def other(of: Any) -> Any:
            owner, value = real(of), getattr(real(of), name)
            each = isinstance(value, dict)  # by kernel
            grown = {k: v * factor for k, v in value.items()} if each else value * factor
            return replace(owner, **{name: grown})

        changes = [mock.patch.object(module, read, other) for module in users]
    else:
        module = importlib.import_module(f"tilegen.model.{group}")
        changes = [mock.patch.object(module, name, getattr(module, name) * factor)]
    with ExitStack() as stack:
        stack.callback(best_of.cache_clear)
        for change in changes:
            stack.enter_context(change)
        best_of.cache_clear()
        yield


def main(out: Annotated[Path | None, typer.Option(help="File for the table.")] = None) -> None:
    """Print a line for each constant: how many first choices change when it is halved or doubled.

    Example: python -m benchmarks.constants --out constants.csv
    """
    problems = list(dict.fromkeys(one.problem for one in CATALOGUE))
    before = choices(problems)
    rows: list[dict[str, object]] = []
    for full in NAMES:
        counts = []
        for factor in FACTORS:
            with scaled(*full.split("."), factor):
                counts.append(changed(problems, before))
        halved, doubled = counts
        rows.append({"constant": full, "halved": halved, "doubled": doubled, "of": len(before)})
        print(f"{full:40s} {halved:4d} {doubled:4d} of {len(before)}", flush=True)
    if out:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    typer.run(main)
