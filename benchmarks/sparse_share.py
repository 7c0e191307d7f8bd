"""Time of block-sparse attention against the share of blocks that its mask keeps.

    python -m benchmarks.sparse_share --minutes 6

Each row of blocks keeps the same number of random blocks; tilegen and SDPA, which reads a dense
mask, are timed in turns, forward and backward. A straight line through the times says what the
blocks cost, and what a call costs without any.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

import tilegen
from benchmarks.environment import RESULTS, Environment, environment, gpu_folder, has_gpu
from benchmarks.rows import append, read, same_values, with_environment
from benchmarks.whole import figures
from benchmarks.whole.lines import fitted_lines
from benchmarks.whole.progress import progress
from tilegen.check.reference import dense_mask
from tilegen.cpu.timing import timed_in_turns

BLOCK, HEAD_DIM = 128, 64
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
LENGTHS = {8192: 2, 16384: 1}
"""Heads by length, on a CPU; ON_GPU times as many on a GPU."""
ON_GPU = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Direction = Literal["forward", "backward"]
Function = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class SparseRow(Environment):
    """One pass of one layout with one attention."""

    seqlen: int
    heads: int
    dtype: str
    direction: str
    share: float
    """Share of blocks that the mask keeps."""
    attention: str
    threads: int
    ms: float
    """The median over rounds."""
    rounds: int
    over_tilegen: float
    """Time of this attention over tilegen's, the median over rounds."""


def passes(
    seqlen: int, heads: int, dtype: str, share: float, device: str
) -> dict[Direction, dict[str, Function]]:
    """Return functions that compute forward and backward with a random layout of blocks."""
    per_row = max(1, round(share * (seqlen // BLOCK)))
    mask = tilegen.masks.random_blocks(seqlen, seqlen, block=BLOCK, per_row=per_row)
    dense = dense_mask(mask, seqlen, seqlen, device)
    computed_by = {
        "tilegen": partial(tilegen.attention, mask=mask),
        "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=dense),
    }
    generator = torch.Generator().manual_seed(0)
    shape = 4, 1, heads, seqlen, HEAD_DIM
    *inputs, dout = torch.randn(shape, generator=generator).to(device, DTYPES[dtype])
    leaves = [x.clone().requires_grad_() for x in inputs]
    functions: dict[Direction, dict[str, Function]] = {"forward": {}, "backward": {}}
    for name, attention in computed_by.items():
        functions["forward"][name] = _waiting(partial(_forward, attention, inputs), device)
        backward = partial(_backward, attention, leaves, dout, [])
        functions["backward"][name] = _waiting(backward, device)
    return functions


def _forward(attention: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> object:
    with torch.no_grad():
        return attention(*inputs)


def _backward(
    attention: Callable[..., torch.Tensor],
    leaves: list[torch.Tensor],
    dout: torch.Tensor,
    results: list[torch.Tensor],
) -> object:
    if not results:  # the first call warms up and is not timed
        results.append(attention(*leaves))
    return torch.autograd.grad(results[0], leaves, dout, retain_graph=True)


def _waiting(function: Function, device: str) -> Function:
    def run() -> object:
        result = function()
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    return run


def measure(
    seqlen: int, heads: int, dtype: str, share: float, machine: Environment, seconds: float
) -> Iterator[SparseRow]:
    """Yield the rows of one layout."""
    device = "cuda" if has_gpu() else "cpu"
    for direction, functions in passes(seqlen, heads, dtype, share, device).items():
        for attention, timing in timed_in_turns(functions, seconds=seconds).items():
            yield with_environment(
                SparseRow,
                machine,
                seqlen=seqlen,
                heads=heads,
                dtype=dtype,
                direction=direction,
                share=share,
                attention=attention,
                threads=torch.get_num_threads(),
                ms=1e3 * timing.median,
                rounds=timing.rounds,
                over_tilegen=timing.ratio,
            )


def described(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield each line in words."""
    for (seqlen, dtype, direction), line in fitted_lines(rows).items():
        yield (
            f"{seqlen} tokens, {dtype}, {direction}: {line.overhead:.2f} ms and {line.slope:.1f} "
            f"ms for all blocks; no time is off by more than {100 * line.apart:.1f} % of that"
        )


def main(
    out: Annotated[Path | None, typer.Option(help="result file")] = None,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 6.0,
    seconds: Annotated[float, typer.Option(help="time for each attention of a pass")] = 1.0,
    length: Annotated[
        list[int] | None, typer.Option(help="tokens, may be repeated; default: 8192 and 16384")
    ] = None,
    figure: Annotated[bool, typer.Option("--figure", help="draw the figure and end")] = False,
) -> None:
    """Time each layout that the result file does not have yet.

    Example: python -m benchmarks.sparse_share --length 8192 --minutes 2
    """
    path = out or RESULTS / gpu_folder() / "sparse_share.csv"
    if figure:
        figures.save_sparse(read(path), path)
        return
    end = time.monotonic() + 60 * minutes
    machine = environment()
    done = same_values(read(path), ("seqlen", "dtype", "share", "direction", "attention"))
    cases = [(n, dtype, share) for n in length or LENGTHS for dtype in DTYPES for share in SHARES]
    left = 0
    for seqlen, dtype, share in progress(cases, describe=str):
        if (str(seqlen), dtype, str(share), "backward", "sdpa") in done:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        heads = ON_GPU if has_gpu() else LENGTHS.get(seqlen, 1)
        for row in measure(seqlen, heads, dtype, share, machine, seconds):
            append(path, row)
            where = f"{row.seqlen} {row.dtype} {row.direction:8} {row.share:6.4f}"
            print(
                f"{where} {row.attention:8} {row.ms:9.2f} ms {row.over_tilegen:6.2f} x", flush=True
            )
    for text in described(read(path)):
        print(text)
    if left:
        print(f"time is up: {left} layouts left; type the same command again")


if __name__ == "__main__":
    typer.run(main)
