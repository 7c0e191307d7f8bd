"""Calls of `tilegen.attention` on a CPU beside PyTorch's attention, paired in one run.

    python -m benchmarks.cpu_calls --minutes 40
    python -m benchmarks.cpu_calls --summary

Forward and backward are timed in turns with SDPA's back ends and with standard attention (two
products and a softmax), with one thread and with two. A run that was stopped goes on where it was.
`--summary` prints the tables of README.md and benchmarks/README.md, and draws their figure.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from benchmarks import plots
from benchmarks.arithmetic import flops
from benchmarks.cpu_peak import peak_gflops
from benchmarks.environment import RESULTS, Environment, Minutes, Seconds, path_of_calls
from benchmarks.plots import BLUE, GREEN, GREY, ORANGE
from benchmarks.rows import grouped, in_time, keep, markdown, read, same_values, shown
from tilegen import cpu, pipeline
from tilegen.check.peers import AttentionFunction, sdpa, standard
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.target import host
from tilegen.cpu.timing import timed_in_turns
from tilegen.cpus.host import current_cpu
from tilegen.emit.render import render
from tilegen.errors import TilegenError
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS = {512: 8, 2048: 8, 8192: 2}
"""Heads by length, so that each case takes a while and none takes minutes."""
PASSES: tuple[Direction, ...] = "forward", "backward"
OUT = RESULTS / "cpu" / "calls.csv"
MASKS = ("full", "causal", "window(255,0)", "documents(@q:{document})")
DOCUMENTS = 8
"""Packed documents of a sequence, each an eighth of it."""
MOST_FLOPS = 4e10
"""Limit on the products of a case, so that all cases fit into 40 minutes."""
MOST_SCORES, MOST_EMULATED = 2**25, 2**21
"""Limits on the scores that standard attention writes; the second is for bf16 on a processor
without bf16 instructions, where PyTorch takes minutes for 2048 queries."""
Threads = Annotated[str, typer.Option(help="Numbers of threads.")]
Summary = Annotated[bool, typer.Option("--summary", help="Measure nothing: print the tables.")]


@dataclass(frozen=True, kw_only=True)
class TimedRow(Environment):
    """One case by one provider, timed in turns with tilegen."""

    problem: str
    threads: int
    provider: str
    path: str
    """Name of the code that computes tilegen's calls: kernels with their target, or the reason why
    PyTorch computes. Empty for other providers."""
    config: str
    """Tiles of tilegen's kernels."""
    median_ms: float
    least_ms: float
    rounds: int
    tilegen_speedup: float
    """Time of this provider over tilegen's, the median over rounds: below 1, tilegen is slower."""


@dataclass(frozen=True, kw_only=True)
class CallRow(TimedRow):
    """One pass of one case by one provider."""

    direction: str
    gflops: float
    """Products of the kept pairs over the median: 2 for a forward, 5 for a backward [1e9/s]."""
    peak_fraction: float
    """The same over the measured peak of the threads' cores."""
    compile_ms: float
    """Time that compiling tilegen's kernels took; 0 for others."""


def timed_columns(
    problem: AttentionProblem,
    direction: Direction,
    functions: Mapping[str, Callable[[], object]],
    threads: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Time functions in turns, tilegen's first; yield the columns of a TimedRow of each."""
    timings = timed_in_turns(functions, seconds=seconds)
    chosen = pipeline.choose(problem.normal(), current_cpu(), direction)
    configs = " ".join(choice.config.key for choice in chosen.values())
    for provider, timing in timings.items():
        own = provider == "tilegen"
        yield {
            "problem": problem.key,
            "threads": threads,
            "provider": provider,
            "path": path_of_calls() if own else "",
            "config": configs if own else "",
            "median_ms": 1e3 * timing.median,
            "least_ms": 1e3 * timing.least,
            "rounds": timing.rounds,
            "tilegen_speedup": timing.ratio,
        }


def cases() -> Iterator[AttentionProblem]:
    """Yield the problems of the table, shortest first."""
    for length, dtype, width, mask in product(HEADS, ("fp32", "bf16"), (64, 128, 256, 512), MASKS):
        heads = HEADS[length]
        text = f"hq{heads} q{length} d{width} {dtype} {mask.format(document=length // DOCUMENTS)}"
        problem = AttentionProblem.parse(text)
        if flops(problem, "forward") <= MOST_FLOPS:
            yield problem


def peers(problem: AttentionProblem) -> dict[str, AttentionFunction]:
    """Return the attention functions that a case is compared with."""
    problem = replace(problem, mask=problem.mask.realized(problem.shape, "cpu"))
    functions: dict[str, AttentionFunction] = {}
    for name, backend in (("sdpa", None), ("sdpa math", "MATH")):
        try:
            functions[name] = sdpa(problem, "cpu", backend=backend)
        except TilegenError:  # too many scores for the back end
            continue
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    emulated = problem.dtype == "bf16" and not host().pairs
    if scores <= (MOST_EMULATED if emulated else MOST_SCORES):
        functions["standard"] = standard(problem, "cpu")
    return functions


def measure(
    problem: AttentionProblem, threads: int, seconds: float, peak: float
) -> Iterator[CallRow]:
    """Yield the rows of one case."""
    torch.set_num_threads(threads)
    functions_of = passes_to_time(problem, peers(problem))
    for direction in PASSES:
        for columns in timed_columns(problem, direction, functions_of[direction], threads, seconds):
            own = columns["provider"] == "tilegen"
            gflops = flops(problem, direction) / columns["median_ms"] / 1e6
            yield CallRow(
                **columns,
                direction=direction,
                gflops=gflops,
                peak_fraction=gflops / peak,
                compile_ms=1e3 * compile_seconds(problem, direction) if own else 0.0,
            )


def compile_seconds(problem: AttentionProblem, direction: Direction) -> float:
    """Return the time that compiling the kernels of a call took, when they were not yet on disk."""
    bucket = problem.normal().bucket
    return sum(
        cpu.load(render(bucket, choice.config, kernel)).made.seconds
        for kernel, choice in pipeline.choose(problem, current_cpu(), direction).items()
    )


def line(row: CallRow) -> str:
    """Return a row as a terminal shows it."""
    return (
        f"{row.problem:50} {row.direction:9} {row.threads} {row.provider:10} "
        f"{row.median_ms:9.3f} ms {row.gflops:7.1f} GFLOP/s {100 * row.peak_fraction:4.0f} % "
        f"{row.tilegen_speedup:6.2f} x"
    )


# --------------------------------------------------------------------------------------------------
# The summary

Row = Mapping[str, str]
Case = Mapping[str, Row]
"""The rows of one pass of a problem, by provider."""
STYLES = {
    "tilegen": (BLUE, "tilegen"),
    "sdpa": (ORANGE, "SDPA"),
    "sdpa math": (GREEN, "SDPA, math back end"),
    "standard": (GREY, "standard attention"),
}
"""Colour and label of each provider."""
SHOWN = {
    "b1 hq8 hkv8 q512 kv512 d64 fp32 causal": "512 tokens, head dim 64, fp32, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 fp32 full": "2048 tokens, head dim 64, fp32, full",
    "b1 hq8 hkv8 q2048 kv2048 d128 fp32 causal": "2048 tokens, head dim 128, fp32, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 bf16 causal": "2048 tokens, head dim 64, bf16, causal",
    "b1 hq8 hkv8 q2048 kv2048 d64 fp32 window(255,0)": "2048 tokens, fp32, window of 256",
}
"""Cases of the table of the project's README, and their titles."""
NAMES = (
    *("threads", "pass", "dtype", "cases", "faster", "speed: least, median, most"),
    *("part of the fp32 peak", "faster than the best of SDPA"),
)


def speed(case: Case) -> float:
    """Return the time of SDPA's default back end over tilegen's."""
    return float(case["sdpa"]["tilegen_speedup"])


def best_speed(case: Case) -> float:
    """Return the time of SDPA's fastest back end over tilegen's."""
    of_sdpa = (row for provider, row in case.items() if provider.startswith("sdpa"))
    return min(float(row["tilegen_speedup"]) for row in of_sdpa)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table, its sums and the cases where tilegen is slower."""
    groups: dict[tuple[str, str, str], list[Case]] = defaultdict(list)
    passes: dict[str, list[Case]] = defaultdict(list)
    for (threads, way, problem), case in grouped(
        rows, ("threads", "direction", "problem"), "provider"
    ).items():
        if "sdpa" in case:
            dtype = "fp32" if " fp32 " in problem else "bf16"
            groups[threads, way, dtype].append(case)
            passes[way].append(case)
    table: list[list[str]] = []
    for threads, way, dtype in product(
        sorted({key[0] for key in groups}), PASSES, ("fp32", "bf16")
    ):
        if not (cases := groups[threads, way, dtype]):
            continue
        speeds = sorted(map(speed, cases))
        peaks = [float(case["tilegen"]["peak_fraction"]) for case in cases]
        table.append(
            [
                *(threads, way, dtype, str(len(cases)), str(sum(s > 1 for s in speeds))),
                f"{speeds[0]:.2f}, {statistics.median(speeds):.2f}, {speeds[-1]:.3g}",
                f"{min(peaks):.2f} to {max(peaks):.2f}",
                str(sum(best_speed(case) > 1 for case in cases)),
            ]
        )
    yield from markdown(NAMES, table).splitlines()
    yield ""
    for way, cases in passes.items():
        faster, best = (sum(of(case) > 1 for case in cases) for of in (speed, best_speed))
        yield f"{way}: faster in {faster} of {len(cases)}, than the best of SDPA in {best}"
    for case in sorted((case for cases in passes.values() for case in cases), key=speed):
        row = case["tilegen"]
        if speed(case) < 1:
            where = f"{row['problem']}, {row['direction']}, {row['threads']}"
            yield f"slower: {speed(case):.2f} x, {where}"


def readme_table(rows: Sequence[Row]) -> str:
    """Return the table of the project's README: a few cases with two threads."""
    two = [row for row in rows if row["threads"] == "2"]
    by_case = grouped(two, ("problem", "direction"), "provider")
    lines: list[list[str]] = []
    for problem, title in SHOWN.items():
        pair = [by_case[problem, direction] for direction in PASSES]
        cells = [
            (f"{float(case['tilegen']['median_ms']):.3g} ms", f"{speed(case):.3g} times")
            for case in pair
        ]
        lines.append([title, *cells[0], *cells[1]])
    of = "of SDPA's speed"
    return markdown(("8 heads, two threads", "forward", of, "backward", of), lines)


def figure(rows: Sequence[Row]) -> Figure:
    """Draw the time of a head against the length: head dim 64, two threads."""
    import matplotlib.pyplot as plt

    points: dict[tuple[str, ...], list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        problem = AttentionProblem.parse(row["problem"])
        if (problem.head_dim_qk, row["threads"]) == (64, "2"):
            key = problem.dtype, row["direction"], problem.mask.notation, row["provider"]
            heads = problem.batch * problem.num_heads_q
            points[key].append((problem.seqlen_q, float(row["median_ms"]) / heads))
    panels = product(("fp32", "bf16"), PASSES, ("causal", "window(255,0)"))
    drawn, axes = plt.subplots(2, 4, figsize=(13.0, 6.2), sharex=True, sharey=True)
    for axis, (dtype, direction, mask) in zip(axes.flat, panels, strict=True):
        for provider, (colour, label) in STYLES.items():
            if curve := sorted(points[dtype, direction, mask, provider]):
                x, y = zip(*curve, strict=True)
                axis.plot(x, y, marker="o", markersize=4, color=colour, label=label)
        axis.set_title(f"{direction}, {dtype}, {mask}", fontsize=10)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    for axis in axes[:, 0]:
        axis.set_ylabel("ms a head, two threads")
    axes[0, 0].legend()
    drawn.tight_layout()
    return drawn


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = OUT,
    minutes: Minutes = 40.0,
    seconds: Seconds = 0.15,
    threads: Threads = "1,2",
    only_summary: Summary = False,
) -> None:
    """Measure the cases that the result file does not have yet.

    Example: python -m benchmarks.cpu_calls --minutes 40
    """
    if only_summary:
        rows = shown(out)
        print(*summary(rows), "", readme_table(rows), sep="\n")
        plots.require_matplotlib()
        plots.save(figure(rows), out.with_suffix(".svg"))
        return
    done = same_values(read(out), ("problem", "threads", "direction", "provider"))
    numbers = [int(text) for text in threads.split(",")]
    peaks = {number: peak_gflops(number) for number in numbers}
    print(*(f"{n} threads: peak {peak:.0f} GFLOP/s in fp32" for n, peak in peaks.items()), sep="\n")
    todo = [
        (problem, number)
        for number in numbers
        for problem in cases()
        if (problem.key, str(number), "backward", "tilegen") not in done
    ]
    for problem, number in in_time(todo, minutes):
        keep(out, measure(problem, number, seconds, peaks[number]), line)


if __name__ == "__main__":
    typer.run(main)
