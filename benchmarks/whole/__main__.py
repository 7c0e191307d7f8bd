"""Models of transformers trained, and generating, with eager attention, SDPA and tilegen in turns.

    python -m benchmarks.whole train --minutes 25
    python -m benchmarks.whole generate --minutes 5
    python -m benchmarks.whole summary

A run that was stopped goes on where it was.
"""

from __future__ import annotations

import typer

from benchmarks.whole import generate, summary, train

app = typer.Typer(no_args_is_help=True)
for name, command in {"train": train, "generate": generate, "summary": summary}.items():
    app.command(name)(command.main)


if __name__ == "__main__":
    app()
