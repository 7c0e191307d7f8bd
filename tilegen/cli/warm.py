"""The command `tilegen warm`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tilegen.cli.options import Json, console, print_json
from tilegen.errors import Unsupported
from tilegen.units import seconds_text


def warm(
    problem: Annotated[list[str] | None, typer.Argument(help="notation; repeatable")] = None,
    lengths: Annotated[
        str | None, typer.Option(help="1..8192, or 512,4096; default: the problem's")
    ] = None,
    catalog: Annotated[Path | None, typer.Option(help="file of problems: text or .yaml")] = None,
    backward: Annotated[bool, typer.Option(help="for training too")] = False,
    json_: Json = False,
) -> None:
    """Compile the kernels of calls ahead of time, for this machine and into its cache, so that
    later processes compile nothing. Nothing is tuned.

    Example: tilegen warm "hq32 hkv8 q1 kv8192 d128 bf16 causal(bottom_right)" --lengths 1..8192
    """
    from tilegen.calls.warm import warm as compile_ahead

    started = time.perf_counter()
    buckets = compile_ahead(problem or [], lengths, catalog=catalog, backward=backward)
    if not buckets:
        from tilegen.cpu import why_not

        raise Unsupported(f"nothing to compile: PyTorch computes calls here, since {why_not()}")
    if json_:
        print_json([bucket.key for bucket in buckets])
        return
    for bucket in buckets:
        console.print(bucket.key)
    seconds = seconds_text(time.perf_counter() - started)
    console.print(f"{len(buckets)} buckets of lengths are compiled, {seconds}")
