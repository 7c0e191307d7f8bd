"""A progress bar over cases, on a terminal alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar("T")


def progress(items: Sequence[T], *, describe: Callable[[T], str]) -> Iterator[T]:
    """Yield items, with a bar that names the one at work."""
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(items))
        for item in items:
            bar.update(task, description=describe(item))
            yield item
            bar.advance(task)
