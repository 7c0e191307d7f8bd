"""Memory of attention against the length: forward and backward, in a process for each case.

    python -m benchmarks.memory_length --minutes 8

A process makes q, k and v, computes attention and gradients once to compile, gives everything
back, and does it again: the peak of the second time, less what the process had before, counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilegen
from benchmarks.environment import (
    RESULTS,
    Environment,
    environment,
    gpu_folder,
    has_gpu,
)
from benchmarks.rows import append, read, same_values, with_environment
from benchmarks.whole import figures, memory
from benchmarks.whole.lines import growth
from benchmarks.whole.progress import progress
from benchmarks.whole.workers import DoesNotFit, Failed, Worker
from tilegen.check.reference import dense_mask

ATTENTIONS = "tilegen", "sdpa", "eager"
HEADS, HEAD_DIM, WINDOW = 2, 64, 1024
MASKS = "causal", "window"
"""A window keeps each query's last WINDOW keys."""
LENGTHS = tuple(2**n for n in range(10, 21))
MOST_PAIRS_ON_CPU = 2**33
"""Pairs that a case computes on a CPU at most, so that none takes minutes."""


@dataclass(frozen=True, kw_only=True)
class MemoryRow(Environment):
    """Memory of one forward and backward."""

    mask: str
    seqlen: int
    attention: str
    status: str
    """ok, does not fit, failed, or not tried."""
    peak_mib: float | None = None
    """Peak of the process less what it had before q, k and v."""
    bytes_per_token: float | None = None
    """The same over heads and tokens."""
    kept_bytes_per_token: float | None = None
    """Elements kept for the backward beside q, k and v, over heads and tokens."""
    limit_gib: float = 0.0
    detail: str = ""


class Attention:
    """Attention of random numbers, measured in this process."""

    def __init__(self, attention: str, mask: str, device: str) -> None:
        self.attention, self.mask, self.device = attention, mask, device

    def measured(self, seqlen: int) -> dict[str, float]:
        """Return the columns of a length."""
        self._once(seqlen)  # compiles
        memory.start_over(self.device)
        before = memory.in_use(self.device)
        kept = self._once(seqlen)
        peak = memory.peak(self.device) - before
        return {
            "peak_mib": peak / 2**20,
            "bytes_per_token": peak / (HEADS * seqlen),
            "kept_bytes_per_token": kept / (HEADS * seqlen),
        }

    def _once(self, seqlen: int) -> int:
        """Compute attention and gradients; return what is kept for the backward [bytes]."""
        compute = self._function(seqlen)
        q, k, v = (self._random(seqlen).requires_grad_() for _ in range(3))
        given = {x.data_ptr() for x in (q, k, v)}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = compute(q, k, v)
        out.backward(self._random(seqlen))
        if self.device == "cuda":
            torch.cuda.synchronize()
        return sum(kept.values())

    def _random(self, seqlen: int) -> torch.Tensor:
        return torch.randn(1, HEADS, seqlen, HEAD_DIM, device=self.device)

    def _function(self, seqlen: int) -> Callable[..., torch.Tensor]:
        """Return attention with its mask, which counts as memory where it is a tensor."""
        causal = tilegen.causal()
        mask = causal if self.mask == "causal" else tilegen.sliding_window(WINDOW - 1, 0)
        if self.attention == "tilegen":
            return lambda q, k, v: tilegen.attention(q, k, v, mask=mask)
        if self.attention == "sdpa":
            known: dict[str, Any] = {"is_causal": True}
            if self.mask != "causal":
                known = {"attn_mask": dense_mask(mask, seqlen, seqlen, self.device)}
            return lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, **known
            )
        dropped = ~dense_mask(mask, seqlen, seqlen, self.device)

        def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            scores = (q * HEAD_DIM**-0.5) @ k.transpose(-1, -2)
            return scores.masked_fill(dropped, float("-inf")).softmax(-1) @ v

        return eager


def measure(mask: str, seqlen: int, attention: str, machine: Environment, gib: float) -> MemoryRow:
    """Return the row of a case, computed in a process of its own."""
    device = "cuda" if has_gpu() else "cpu"
    known = {"mask": mask, "seqlen": seqlen, "attention": attention, "limit_gib": gib}
    if (reason := _too_long(mask, seqlen, attention, device)) is not None:
        return with_environment(MemoryRow, machine, status="not tried", detail=reason, **known)
    threads = torch.get_num_threads()
    try:
        with Worker(
            Attention, attention, mask, device, gib=gib, device=device, threads=threads
        ) as w:
            return with_environment(
                MemoryRow, machine, status="ok", **known, **w.call("measured", seqlen)
            )
    except (DoesNotFit, Failed) as error:
        status = "does not fit" if isinstance(error, DoesNotFit) else "failed"
        return with_environment(MemoryRow, machine, status=status, detail=str(error), **known)


def _too_long(mask: str, seqlen: int, attention: str, device: str) -> str | None:
    """Return the reason why a case is not tried; None if it is."""
    pairs = seqlen * (WINDOW if mask == "window" and attention == "tilegen" else seqlen)
    if device == "cpu" and pairs > MOST_PAIRS_ON_CPU:
        return f"{pairs / 1e9:.0f} billion pairs take minutes on a CPU"
    return None


def main(
    out: Annotated[Path | None, typer.Option(help="result file")] = None,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 8.0,
    gib: Annotated[
        float, typer.Option(help="memory of each process; 0: three quarters of what is free")
    ] = 0.0,
    attention: Annotated[
        list[str] | None, typer.Option(help="an attention, may be repeated; default: all")
    ] = None,
    most: Annotated[int, typer.Option(help="tokens at most")] = LENGTHS[-1],
    figure: Annotated[bool, typer.Option("--figure", help="draw the figure and end")] = False,
) -> None:
    """Measure each length that the result file does not have yet.

    Example: python -m benchmarks.memory_length --most 16384 --gib 4
    """
    path = out or RESULTS / gpu_folder() / "memory_length.csv"
    if figure:
        figures.save_memory(read(path), path)
        return
    end = time.monotonic() + 60 * minutes
    machine = environment()
    if not gib:
        free = torch.cuda.mem_get_info()[0] if has_gpu() else memory.available()
        gib = 0.75 * free / memory.GIB
    done = same_values(read(path), ("mask", "seqlen", "attention"))
    attentions = attention or ATTENTIONS
    cases = [(m, n, a) for n in LENGTHS if n <= most for m in MASKS for a in attentions]
    left = 0
    for mask, seqlen, attention in progress(cases, describe=str):
        if (mask, str(seqlen), attention) in done:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        row = measure(mask, seqlen, attention, machine, gib)
        append(path, row)
        what = f"{row.peak_mib:9.1f} MiB" if row.status == "ok" else row.detail
        print(f"{mask:7} {seqlen:8} {attention:8} {row.status:12} {what}", flush=True)
    for text in growth(read(path)):
        print(text)
    if left:
        print(f"time is up: {left} cases left; type the same command again")


if __name__ == "__main__":
    typer.run(main)
