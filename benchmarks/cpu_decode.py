"""Few queries on many keys on a CPU, beside PyTorch's attention and the machine's reading.

    python -m benchmarks.cpu_decode --minutes 6
    python -m benchmarks.cpu_decode --summary

Calls of `tilegen.attention`, of `attention_paged` on the same keys in shuffled pages of 16 in both
layouts, of SDPA with `enable_gqa`, of SDPA with the heads of a group as rows, and `torch.sum` of as
many bytes as keys and values have, are timed in turns. A run that was stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cpu_calls import Summary, Threads, TimedRow, timed_columns
from benchmarks.environment import RESULTS, Minutes, Seconds
from benchmarks.rows import grouped, in_time, keep, markdown, read, same_values, shown
from tilegen.calls.attention import attention
from tilegen.calls.paged import attention_paged
from tilegen.check.reference import TORCH_DTYPES
from tilegen.problem import AttentionProblem

OUT = RESULTS / "cpu" / "decode.csv"
PAGE = 16
MOST_PAGED = 2**28
"""Keys and values that are copied to pages, at most [bytes]."""
READING = "reading"
SDPA_FORMS = "sdpa gqa", "sdpa rows"
LAYOUTS = "NHD", "HND"
"""Layouts of pages, also the names of their providers."""


@dataclass(frozen=True, kw_only=True)
class DecodeRow(TimedRow):
    """One case by one provider; for reading, `tilegen_speedup` is the part of the reading rate that
    tilegen reaches."""

    gbytes_per_s: float
    """Bytes of keys and values over the median [1e9/s]."""


def cases() -> Iterator[AttentionProblem]:
    """Yield the problems: groups of four heads, and heads alone."""
    for dtype in ("bf16", "fp32"):
        for heads in ("hq32 hkv8", "hq8 hkv8"):
            for queries, keys in ((1, 1024), (1, 8192), (1, 32768), (4, 32768), (16, 32768)):
                yield AttentionProblem.parse(f"{heads} q{queries} kv{keys} d128 {dtype} full")
        yield AttentionProblem.parse(f"hq32 hkv8 q1 kv131072 d128 {dtype} full")


@lru_cache(maxsize=1)
def drawn(dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers that all cases take keys and values from: drawing them takes longer
    than reading."""
    size = max(one.num_heads_kv * one.seqlen_kv * one.head_dim_qk for one in cases())
    some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    return some.repeat(-(-2 * size // len(some)))


def tensors(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v of a problem that is no larger than all `cases`."""
    heads, keys, dim = problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk
    dtype = TORCH_DTYPES[problem.dtype]
    k, v = drawn(dtype)[: 2 * heads * keys * dim].view(2, 1, heads, keys, dim)
    return torch.randn(1, problem.num_heads_q, problem.seqlen_q, dim).to(dtype), k, v


def functions(
    problem: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by provider; tilegen comes first."""
    rows = q.reshape(1, problem.num_heads_kv, -1, problem.head_dim_qk)
    size = k.nbytes + v.nbytes
    memory = torch.zeros(size // 4)
    calls: dict[str, Callable[[], object]] = {
        "tilegen": lambda: attention(q, k, v),
        READING: lambda: memory.sum(),
        "sdpa gqa": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "sdpa rows": lambda: scaled_dot_product_attention(rows, k, v),
    }
    if size <= MOST_PAGED:
        for layout in LAYOUTS:
            calls[layout] = _paged(q, k, v, layout)
    return calls


def _paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str) -> Callable[[], object]:
    pages = k.shape[2] // PAGE
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).int()[None]
    lengths = torch.tensor([k.shape[2]], dtype=torch.int32)
    in_pages: list[torch.Tensor] = []
    for tensor in (k, v):
        pages_of_layout = tensor[0].unflatten(1, (pages, PAGE)).transpose(0, 1)  # page, head, key
        pages_of_layout = pages_of_layout if layout == "HND" else pages_of_layout.transpose(1, 2)
        placed = torch.empty(pages_of_layout.shape, dtype=tensor.dtype)
        placed[table[0].long()] = pages_of_layout
        in_pages.append(placed)
    return lambda: attention_paged(q, *in_pages, table, lengths, layout=layout)


def measure(problem: AttentionProblem, threads: int, seconds: float) -> Iterator[DecodeRow]:
    """Yield the rows of one case."""
    torch.set_num_threads(threads)
    q, k, v = tensors(problem)
    timed = functions(problem, q, k, v)
    with torch.no_grad():
        for name in ("tilegen", *LAYOUTS):
            if name in timed:
                timed[name]()  # compiles
        for columns in list(timed_columns(problem, "forward", timed, threads, seconds)):
            rate = (k.nbytes + v.nbytes) / columns["median_ms"] / 1e6
            yield DecodeRow(**columns, gbytes_per_s=rate)


def line(row: DecodeRow) -> str:
    """Return a row as a terminal shows it."""
    return (
        f"{row.problem:45} {row.threads} {row.provider:14} {row.median_ms:9.3f} ms "
        f"{row.gbytes_per_s:6.1f} GB/s {row.tilegen_speedup:6.2f} x"
    )


def summary(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the table of benchmarks/README.md, then its losses; by least times, since one thread of
    others on the same cores makes a median of two threads that of a queue."""
    table: list[list[str]] = []
    losses: list[str] = []
    for (problem, threads), case in grouped(rows, ("problem", "threads"), "provider").items():
        least = {name: float(row["least_ms"]) for name, row in case.items()}
        ratios = {name: its / least["tilegen"] for name, its in least.items()}
        own = case["tilegen"]
        rate = float(own["gbytes_per_s"]) * float(own["median_ms"]) / least["tilegen"]
        table.append(
            [
                *(problem.removeprefix("b1 ").removesuffix(" full"), threads),
                *(f"{rate:.1f}", f"{ratios[READING]:.2f}"),
                *(f"{ratios[name]:.2f} times" for name in ("sdpa rows", "sdpa gqa")),
                ", ".join(f"{1 / ratios[name]:.2f}" for name in LAYOUTS if name in ratios),
            ]
        )
        losses += [
            f"slower than {name}, {ratios[name]:.2f}: {problem}, {threads}"
            for name in SDPA_FORMS
            if ratios[name] < 1
        ]
    names = (
        *("problem", "threads", "GB/s", "of reading", "SDPA, the group as rows"),
        *("SDPA, `enable_gqa`", "pages NHD, HND, of plain"),
    )
    yield from markdown(names, table).splitlines()
    yield ""
    yield from losses or ["never slower than SDPA in either form"]


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = OUT,
    minutes: Minutes = 6.0,
    seconds: Seconds = 0.4,
    threads: Threads = "1,2",
    only_summary: Summary = False,
) -> None:
    """Measure the cases that the result file does not have yet.

    Example: python -m benchmarks.cpu_decode --minutes 6
    """
    if only_summary:
        print(*summary(shown(out)), sep="\n")
        return
    done = same_values(read(out), ("problem", "threads", "provider"))
    both = product(cases(), map(int, threads.split(",")))
    todo = [case for case in both if (case[0].key, str(case[1]), "tilegen") not in done]
    for problem, number in in_time(todo, minutes):
        keep(out, measure(problem, number, seconds), line)


if __name__ == "__main__":
    typer.run(main)
