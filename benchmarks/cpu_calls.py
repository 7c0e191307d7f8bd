"""Calls of `tilegen.attention` on a CPU beside PyTorch's attention, paired in one run.

    python -m benchmarks.cpu_calls --minutes 40

Forward and backward are timed in turns with SDPA's back ends and with standard attention (two
products and a softmax), with one thread and with two. A run that was stopped goes on where it was.
`--flex` times compiled FlexAttention's forward, which takes a minute to compile a case.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.cpu_peak import peak_gflops
from benchmarks.environment import RESULTS, Environment, environment, path_of_calls
from benchmarks.rows import append, read, same_values, with_environment
from tilegen import cpu, pipeline
from tilegen.check.peers import AttentionFunction, flex, sdpa
from tilegen.check.peers import standard as peers_standard
from tilegen.check.reference import dense_mask
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.target import host
from tilegen.cpu.timing import timed_in_turns
from tilegen.cpus.host import current_cpu
from tilegen.emit.render import render
from tilegen.errors import TilegenError
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask
from tilegen.problem import AttentionProblem

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
FLEX = product(("fp32", "bf16"), (64, 128), ("full", "causal", "window(255,0)"))
"""Cases of FlexAttention, at 2048."""


@dataclass(frozen=True, kw_only=True)
class CallRow(Environment):
    """One pass of one case by one provider."""

    problem: str
    threads: int
    direction: str
    provider: str
    path: str
    """Name of the code that computes tilegen's calls: kernels with their target, or the reason why
    PyTorch computes. Empty for other providers."""
    config: str
    """Tiles of tilegen's kernels."""
    median_ms: float
    least_ms: float
    rounds: int
    gflops: float
    """Products of the kept pairs over the median: 2 for a forward, 5 for a backward [1e9/s]."""
    peak_fraction: float
    """The same over the measured peak of the threads' cores."""
    tilegen_speedup: float
    """Time of this provider over tilegen's, the median over rounds: below 1, tilegen is slower."""
    compile_ms: float
    """Time that compiling tilegen's kernels took; 0 for others."""


def cases() -> Iterator[AttentionProblem]:
    """Yield the problems of the table, shortest first."""
    for length, dtype, width, mask in product(HEADS, ("fp32", "bf16"), (64, 128, 256, 512), MASKS):
        heads = HEADS[length]
        text = f"hq{heads} q{length} d{width} {dtype} {mask.format(document=length // DOCUMENTS)}"
        problem = AttentionProblem.parse(text)
        if products(problem, 2) <= MOST_FLOPS:
            yield problem


def flex_cases() -> Iterator[AttentionProblem]:
    """Yield the problems that FlexAttention is timed on."""
    for dtype, width, mask in FLEX:
        yield AttentionProblem.parse(f"hq4 q2048 d{width} {dtype} {mask}")


def products(problem: AttentionProblem, number: int) -> float:
    """Return the operations of matrix products over the kept pairs [flops]."""
    pairs = _kept_pairs(problem.mask, problem.shape)
    return 2.0 * number * pairs * problem.head_dim_qk * problem.batch * problem.num_heads_q


@cache
def _kept_pairs(mask: Mask, shape: Shape) -> int:
    """Count the pairs of a head that a mask keeps."""
    lengths = shape.seqlen_q, shape.seqlen_kv
    return int(dense_mask(mask.realized(shape, "cpu"), *lengths, "cpu").count_nonzero())


def standard(problem: AttentionProblem) -> AttentionFunction | None:
    """Return attention by two products and a softmax, None if its scores are too many."""
    scores = problem.batch * problem.num_heads_q * problem.seqlen_q * problem.seqlen_kv
    emulated = problem.dtype == "bf16" and not host().pairs
    if scores > (MOST_EMULATED if emulated else MOST_SCORES):
        return None
    return peers_standard(problem, "cpu")


def peers(problem: AttentionProblem, *, with_flex: bool) -> dict[str, AttentionFunction]:
    """Return the attention functions that a case is compared with."""
    problem = replace(problem, mask=problem.mask.realized(problem.shape, "cpu"))
    if with_flex:
        return {"flex": flex(problem, "cpu")}
    functions: dict[str, AttentionFunction] = {}
    for name, backend in (("sdpa", None), ("sdpa math", "MATH")):
        try:
            functions[name] = sdpa(problem, "cpu", backend=backend)
        except TilegenError:  # too many scores for the back end
            continue
    if (attention := standard(problem)) is not None:
        functions["standard"] = attention
    return functions


def measure(
    problem: AttentionProblem,
    threads: int,
    seconds: float,
    peak: float,
    machine: Environment,
    *,
    with_flex: bool,
) -> Iterator[CallRow]:
    """Yield the rows of one case; with FlexAttention, which has no backward on a CPU, its forward
    alone."""
    torch.set_num_threads(threads)
    path = path_of_calls()
    compared = peers(problem, with_flex=with_flex)
    functions_of = passes_to_time(problem, compared)
    for direction in ("forward",) if with_flex else PASSES:
        functions = functions_of[direction]
        chosen = pipeline.choose(problem, current_cpu(), direction)
        configs = {kernel: choice.config for kernel, choice in chosen.items()}
        compiled = sum(compile_seconds(problem, *choice) for choice in configs.items())
        flops = products(problem, 2 if direction == "forward" else 5)
        for provider, timing in timed_in_turns(functions, seconds=seconds).items():
            own = provider == "tilegen"
            gflops = flops / timing.median / 1e9
            yield with_environment(
                CallRow,
                machine,
                problem=problem.key,
                threads=threads,
                direction=direction,
                provider=provider,
                path=path if own else "",
                config=" ".join(config.key for config in configs.values()) if own else "",
                median_ms=1e3 * timing.median,
                least_ms=1e3 * timing.least,
                rounds=timing.rounds,
                gflops=gflops,
                peak_fraction=gflops / peak,
                tilegen_speedup=timing.ratio,
                compile_ms=1e3 * compiled if own else 0.0,
            )


def compile_seconds(problem: AttentionProblem, kernel: Kernel, config: TileConfig) -> float:
    """Return the time that compiling a kernel of a call took, when it was not yet on disk."""
    return cpu.load(render(problem.normal().bucket, config, kernel)).made.seconds


def main(
    out: Annotated[Path, typer.Option(help="result file")] = OUT,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 40.0,
    seconds: Annotated[float, typer.Option(help="time for each provider of a case")] = 0.15,
    threads: Annotated[str, typer.Option(help="numbers of threads")] = "1,2",
    only_flex: Annotated[bool, typer.Option("--flex", help="FlexAttention's forward")] = False,
) -> None:
    """Measure cases that the result file does not have yet."""
    end = time.monotonic() + 60 * minutes
    machine = environment()
    names = "problem", "threads", "direction", "provider"
    done = same_values(read(out), names)
    left = 0
    for number in [int(text) for text in threads.split(",")]:
        peak = peak_gflops(number)
        print(f"{number} threads: peak {peak:.0f} GFLOP/s in fp32", flush=True)
        for problem in flex_cases() if only_flex else cases():
            last = ("forward", "flex") if only_flex else ("backward", "tilegen")
            if (problem.key, str(number), *last) in done:
                continue
            if time.monotonic() > end:
                left += 1
                continue
            for row in measure(problem, number, seconds, peak, machine, with_flex=only_flex):
                append(out, row)
                print(_line(row), flush=True)
    if left:
        print(f"time is up: {left} cases left; type the same command again")


def _line(row: CallRow) -> str:
    verdict = "" if row.provider == "tilegen" else f"{row.tilegen_speedup:6.2f} x"
    speed = f"{row.gflops:7.1f} GFLOP/s {100 * row.peak_fraction:4.0f} %"
    return (
        f"{row.problem:50} {row.direction:9} {row.threads} {row.provider:10} "
        f"{row.median_ms:9.3f} ms {speed} {verdict}"
    )


if __name__ == "__main__":
    typer.run(main)
