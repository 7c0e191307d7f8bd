"""Options shared by several commands, and functions that print results."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console

from tilegen.device import Device
from tilegen.kernels.registry import KERNELS

EXAMPLE = "b4 hq32 hkv8 q4096 d128 bf16 causal"

Problem = Annotated[str, typer.Argument(help=f'notation, such as "{EXAMPLE}"')]
Gpu = Annotated[
    str | None,
    typer.Option(help="catalogue name, or cpu: the one here; default: the GPU here, else cpu"),
]
ByModel = Annotated[
    bool, typer.Option("--model", help="the model's ranking alone: compile nothing")
]
FastMemory = Annotated[
    str | None, typer.Option(help="shared memory per program instead of the GPU's, such as 48KiB")
]
OneKernel = Annotated[str, typer.Option(help=f"{', '.join(KERNELS)}; forward: its first")]
Kernels = Annotated[str, typer.Option(help=f"{', '.join(KERNELS)}; all: what the problem needs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would happen, change nothing")]

WIDTH = 100
"""Width of tables, and of lines that are wrapped [characters]."""
console = Console(highlight=False, soft_wrap=True, markup=False)


def titled(device: Device) -> str:
    """Return the name of a device with its title, for the first line of a command."""
    return f"{device.name} ({device.title})"


def print_wrapped(lines: Iterable[str]) -> None:
    """Print lines, at most WIDTH columns wide; what is left over is indented further."""
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        for part in textwrap.wrap(line, WIDTH, break_on_hyphens=False, subsequent_indent=indent):
            console.print(part)


def print_json(value: Any) -> None:
    """Print a result as JSON."""
    print(json.dumps(value, indent=2, default=str))


def positive(value: float | None) -> float | None:
    """Return a number of seconds. Raises BadParameter unless it is above 0 and finite."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"expected a number above 0, got {value}")
    return value


def say_unless(quiet: bool) -> Any:
    """Return a function that prints a line, or does nothing if `quiet`."""
    return (lambda line: None) if quiet else console.print
