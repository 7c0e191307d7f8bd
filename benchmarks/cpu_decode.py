"""Few queries on many keys on a CPU, beside PyTorch's attention and the machine's reading.

    python -m benchmarks.cpu_decode --minutes 6
    python -m benchmarks.cpu_decode --summary

Calls of `tilegen.attention`, of `attention_paged` on the same keys in shuffled pages of 16 in both
layouts, of SDPA with `enable_gqa`, of SDPA with the heads of a group as rows, and `torch.sum` of as
many bytes as keys and values have, are timed in turns. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.environment import RESULTS, Environment, environment
from benchmarks.rows import append, read, same_values, with_environment
from tilegen import cpu
from tilegen.calls.attention import attention
from tilegen.calls.paged import attention_paged
from tilegen.check.reference import TORCH_DTYPES
from tilegen.cpu.target import host
from tilegen.cpu.timing import timed_in_turns
from tilegen.cpus.host import current_cpu
from tilegen.pipeline import choose
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
class DecodeRow(Environment):
    """One case by one provider."""

    problem: str
    threads: int
    provider: str
    path: str
    """Name of the code that computes tilegen's calls; empty for other providers."""
    config: str
    """Tiles of tilegen's kernels."""
    median_ms: float
    least_ms: float
    rounds: int
    gbytes_per_s: float
    """Bytes of keys and values over the median [1e9/s]."""
    tilegen_speedup: float
    """Time of this provider over tilegen's, the median over rounds: below 1, tilegen is slower. For
    reading it is the part of the reading rate that tilegen reaches."""


def cases() -> Iterator[AttentionProblem]:
    """Yield the problems: groups of four heads, and heads alone."""
    for dtype in ("bf16", "fp32"):
        for heads in ("hq32 hkv8", "hq8 hkv8"):
            for queries, keys in ((1, 1024), (1, 8192), (1, 32768), (4, 32768), (16, 32768)):
                yield AttentionProblem.parse(f"{heads} q{queries} kv{keys} d128 {dtype} full")
        yield AttentionProblem.parse(f"hq32 hkv8 q1 kv131072 d128 {dtype} full")


class Memory:
    """Random numbers that all cases take their tensors from: drawing them takes longer than
    reading."""

    def __init__(self) -> None:
        self._drawn: dict[torch.dtype, torch.Tensor] = {}

    def tensors(self, problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of a problem."""
        heads, keys, dim = problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk
        size, dtype = heads * keys * dim, TORCH_DTYPES[problem.dtype]
        if dtype not in self._drawn or len(self._drawn[dtype]) < 2 * size:
            self._drawn.clear()
            largest = max(one.num_heads_kv * one.seqlen_kv * dim for one in cases())
            drawn = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(dtype)
            self._drawn[dtype] = drawn.repeat(-(-2 * max(size, largest) // len(drawn)))
        k, v = self._drawn[dtype][: 2 * size].view(2, 1, heads, keys, dim)
        q = torch.randn(1, problem.num_heads_q, problem.seqlen_q, dim).to(dtype)
        return q, k, v


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


def measure(
    problem: AttentionProblem, threads: int, seconds: float, memory: Memory, machine: Environment
) -> Iterator[DecodeRow]:
    """Yield the rows of one case."""
    torch.set_num_threads(threads)
    q, k, v = memory.tensors(problem)
    timed = functions(problem, q, k, v)
    with torch.no_grad():
        for name in ("tilegen", *LAYOUTS):
            if name in timed:
                timed[name]()  # compiles
        timings = timed_in_turns(timed, seconds=seconds)
    chosen = choose(problem.normal(), current_cpu(), "forward")
    configs = {kernel: choice.config for kernel, choice in chosen.items()}
    for provider, timing in timings.items():
        own = provider == "tilegen"
        yield with_environment(
            DecodeRow,
            machine,
            problem=problem.key,
            threads=threads,
            provider=provider,
            path=(cpu.why_not() or f"kernels, {host().name}") if own else "",
            config=" ".join(config.key for config in configs.values()) if own else "",
            median_ms=1e3 * timing.median,
            least_ms=1e3 * timing.least,
            rounds=timing.rounds,
            gbytes_per_s=(k.nbytes + v.nbytes) / timing.median / 1e9,
            tilegen_speedup=timing.ratio,
        )


def summary(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield the table of benchmarks/README.md, then its losses; by least times, since one thread of
    others on the same cores makes a median of two threads that of a queue."""
    grouped: dict[tuple[str, str], dict[str, Mapping[str, str]]] = defaultdict(dict)
    for row in rows:
        grouped[row["problem"], row["threads"]][row["provider"]] = row
    yield (
        "| problem | threads | GB/s | of reading | SDPA, the group as rows | SDPA, `enable_gqa` | "
        "pages NHD, HND, of plain |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    losses: list[str] = []
    for (problem, threads), of_case in grouped.items():
        least = {name: float(row["least_ms"]) for name, row in of_case.items()}
        ratios = {name: its / least["tilegen"] for name, its in least.items()}
        tilegen_row = of_case["tilegen"]
        rate = (
            float(tilegen_row["gbytes_per_s"]) * float(tilegen_row["median_ms"]) / least["tilegen"]
        )
        speeds = [f"{ratios[name]:.2f} times" for name in ("sdpa rows", "sdpa gqa")]
        paged = ", ".join(f"{1 / ratios[name]:.2f}" for name in LAYOUTS if name in ratios)
        cells = [problem.removeprefix("b1 ").removesuffix(" full"), threads]
        cells += [f"{rate:.1f}", f"{ratios[READING]:.2f}", *speeds, paged]
        yield f"| {' | '.join(cells)} |"
        for name in SDPA_FORMS:
            if ratios[name] < 1:
                losses.append(f"slower than {name}, {ratios[name]:.2f}: {problem}, {threads}")
    yield ""
    yield from losses or ["never slower than SDPA in either form"]


def main(
    out: Annotated[Path, typer.Option(help="result file")] = OUT,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 6.0,
    seconds: Annotated[float, typer.Option(help="time for each provider of a case")] = 0.4,
    threads: Annotated[str, typer.Option(help="numbers of threads")] = "1,2",
    only_summary: Annotated[
        bool, typer.Option("--summary", help="print the table of a result file")
    ] = False,
) -> None:
    """Measure cases that the result file does not have yet."""
    if only_summary:
        print(*summary(read(out)), sep="\n")
        return
    end = time.monotonic() + 60 * minutes
    machine, memory = environment(), Memory()
    done = same_values(read(out), ("problem", "threads", "provider"))
    left = 0
    for problem in cases():
        for number in [int(text) for text in threads.split(",")]:
            if (problem.key, str(number), "tilegen") in done:
                continue
            if time.monotonic() > end:
                left += 1
                continue
            for row in measure(problem, number, seconds, memory, machine):
                append(out, row)
                print(
                    f"{row.problem:45} {row.threads} {row.provider:14} {row.median_ms:9.3f} ms "
                    f"{row.gbytes_per_s:6.1f} GB/s {row.tilegen_speedup:6.2f} x",
                    flush=True,
                )
    if left:
        print(f"time is up: {left} cases left; type the same command again")


if __name__ == "__main__":
    typer.run(main)
