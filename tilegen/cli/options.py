"""Options shared by several commands, and functions that print results."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import typer
from rich.console import Console

from tilegen.api import ALL, FORWARD, kernel_named
from tilegen.device import Device
from tilegen.devices import HERE, device_named
from tilegen.gpus.spec import catalogue
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

EXAMPLE = "b4 hq32 hkv8 q4096 d128 bf16 causal"


def joined(words: list[str]) -> list[str]:
    """Return one notation for words that a shell has split. Raises InvalidProblem and
    Unsupported."""
    AttentionProblem.parse(text := " ".join(words))
    return [text]


def _gpu(name: str | None) -> str | None:
    """Return the name of a known GPU or processor. Raises Unsupported."""
    if name is not None and name != HERE:
        device_named(name)
    return name


def _kernel(name: str) -> str:
    """Return the name of a kernel, or the word for several. Raises Unsupported."""
    return name if name in (ALL, FORWARD) else kernel_named(name)


def _of_kernels(word: str, meaning: str) -> Any:
    """Return an option that takes the name of a kernel, or a word for others."""
    return typer.Option(
        help=f"{', '.join(KERNELS)}; {word}: {meaning}",
        callback=_kernel,
        autocompletion=lambda: [word, *KERNELS],
    )


def _gpus() -> list[str]:
    return [spec.name for spec in catalogue()]


# Callbacks check names before a command imports anything slow.
Problem = Annotated[
    list[str], typer.Argument(help=f'notation, such as "{EXAMPLE}"', callback=joined)
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="catalogue name, file, or cpu: the one here; default: the GPU here, else cpu",
        callback=_gpu,
        autocompletion=_gpus,
    ),
]
ByModel = Annotated[
    bool, typer.Option("--model", help="the model's ranking alone: compile nothing")
]
FastMemory = Annotated[
    str | None, typer.Option(help="shared memory per program instead of the GPU's, such as 48KiB")
]
OneKernel = Annotated[str, _of_kernels(FORWARD, "its first")]
KernelsOption = Annotated[str, _of_kernels(ALL, "what the problem needs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would happen, change nothing")]

WIDTH = 100
"""Width of tables, and of lines that are wrapped [characters]."""
console = Console(highlight=False, soft_wrap=True, markup=False)


def titled(device: Device) -> str:
    """Return the name of a device with its title, for the first line of a command."""
    return f"{device.name} ({device.title})"


def columns() -> int:
    """Return the columns of the terminal; 0 if the output is none."""
    return console.width if console.is_terminal else 0


def print_wrapped(lines: Iterable[str], indented: int | None = None) -> None:
    """Print lines, at most WIDTH columns wide; what is left over is indented by two columns more,
    or by so many."""
    width = min(WIDTH, columns() or WIDTH)
    for line in lines:
        more = len(line) - len(line.lstrip()) + 2 if indented is None else indented
        console.print(_filled(line, width, more))


def print_for_terminal(text: str, indented: int) -> None:
    """Print a text, whose lines are wrapped only where a terminal is too narrow for them."""
    width = columns()
    for line in text.splitlines():
        console.print(_filled(line, width, indented) if len(line) > width > 0 else line)


def _filled(line: str, width: int, indented: int) -> str:
    width = max(width, 2 * indented)
    return textwrap.fill(line, width, break_on_hyphens=False, subsequent_indent=" " * indented)


def working(doing: str) -> AbstractContextManager[object]:
    """Return a context in which a terminal shows what is being done, until it is done."""
    return console.status(doing) if console.is_terminal else nullcontext()


def in_stores(context: typer.Context) -> None:
    """Look into stores of tuned winners, and move records between them."""
    context.with_resource(working("reading and writing stores"))


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
