"""Generate with models of transformers and each attention: time to first token, and per token.

    python -m benchmarks.generate --minutes 5

Greedy and beam search are transformers' own; `paged` serves four requests at once over a paged
cache with tilegen, and one after the other with the others. Tokens are compared with those of
eager attention; in bf16, where they may part, logits are, on the same tokens.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.environment import (
    Environment,
    gpu_folder,
    has_gpu,
    path_of_calls,
)
from benchmarks.rows import append, read, same_values
from benchmarks.whole.generation import Case, Generated, Generating, Way
from benchmarks.whole.models import require_transformers
from benchmarks.whole.progress import progress
from tilegen.comparing import memory
from tilegen.comparing.children import DoesNotFit, Failed, Worker

ATTENTIONS = "tilegen", "eager", "sdpa"
ROUNDS = 5
WAYS: tuple[Way, ...] = "greedy", "beam", "paged"
MOST_OF_SDPA = 2.0
"""Error of logits in bf16 that is right, of SDPA's."""


@dataclass(frozen=True, kw_only=True)
class GenerateRow(Environment):
    """Generation of a case with one attention."""

    case: str
    threads: int
    attention: str
    status: str
    first_ms: float | None = None
    """Time to the first token, the mean over requests, the median over rounds."""
    per_token_ms: float | None = None
    """Time of each further token; over a paged cache all time over all tokens."""
    first_over_tilegen: float | None = None
    per_token_over_tilegen: float | None = None
    same_tokens: float | None = None
    """Share of tokens before the first that differs from eager attention's."""
    logits_error: float | None = None
    """Largest difference of logits from eager attention in fp32, on the same tokens."""
    logits_of_sdpa: float | None = None
    """That error over SDPA's."""
    accepted: float | None = None
    """Share of drafts that were right."""
    detail: str = ""


def cases(*, tiny: bool) -> list[Case]:
    """Return the cases of the table."""
    if tiny:
        small = Case(model="llama-tiny", way="greedy", prompt=48, new=12, dtype="fp32")
        return [replace(small, way=way) for way in WAYS]
    sizes = [("llama", 1024, 32), ("gpt2", 512, 32)]
    both = product(sizes, ("fp32", "bf16"), WAYS)
    return [
        Case(model=model, way=way, prompt=prompt, new=new, dtype=dtype)
        for (model, prompt, new), dtype, way in both
        if way != "paged" or model == "llama"  # GPT-2 has no place for a step's arguments
    ]


def measure(case: Case, *, threads: int, gib: float) -> Iterator[GenerateRow]:
    """Yield the rows of a case, all attentions timed in turns."""
    device = "cuda" if has_gpu() else "cpu"
    lost: dict[str, Exception] = {}
    runs: dict[str, list[Generated]] = {}
    logits: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        own = dict.fromkeys(ATTENTIONS, case)
        if case.way != "paged":  # whose attention goes over pages alone
            own["exact"] = replace(case, dtype="fp32")
        for name, row_values in own.items():
            attention = "eager" if name == "exact" else name
            try:
                worker = Worker(
                    *(Generating, row_values, attention, device),
                    gib=gib,
                    device=device,
                    threads=threads,
                )
                workers[name] = stack.enter_context(worker)
                if name != "exact":
                    worker.call("run")
            except (DoesNotFit, Failed) as error:
                lost[name] = error
        runs = {name: [] for name in ATTENTIONS if name not in lost}
        for _, name in product(range(ROUNDS), tuple(runs)):
            runs[name].append(workers[name].call("run"))
        if case.way != "paged" and not lost:
            given = runs["eager"][0].tokens
            logits = {name: worker.call("logits", given) for name, worker in workers.items()}
    errors = {
        name: float(np.abs(row_values - logits["exact"]).max())
        for name, row_values in logits.items()
    }
    for name in ATTENTIONS:
        known = {"case": case.key, "threads": threads, "attention": name}
        if name in lost:
            status = "does not fit" if isinstance(lost[name], DoesNotFit) else "failed"
            yield GenerateRow(status=status, detail=str(lost[name]), **known)
        else:
            values = _values(name, runs, errors)
            yield GenerateRow(status="ok", **known, **values)


def _values(
    name: str, runs: Mapping[str, Sequence[Generated]], errors: Mapping[str, float]
) -> dict[str, Any]:
    """Return the columns of an attention."""
    of_name = runs[name]
    ours, theirs = runs.get("tilegen", ()), runs.get("eager", ())

    def over(what: str) -> float | None:
        both = zip(of_name, ours, strict=False)
        ratios = [getattr(one, what) / getattr(other, what) for one, other in both]
        return statistics.median(ratios) if ratios else None

    return {
        "first_ms": 1e3 * statistics.median(one.first_s for one in of_name),
        "per_token_ms": 1e3 * statistics.median(one.per_token_s for one in of_name),
        "first_over_tilegen": over("first_s"),
        "per_token_over_tilegen": over("per_token_s"),
        "same_tokens": same(of_name[0].tokens, theirs[0].tokens) if theirs else None,
        "logits_error": errors.get(name),
        "logits_of_sdpa": errors[name] / errors["sdpa"] if errors.get("sdpa") else None,
        "accepted": of_name[0].accepted,
        "detail": path_of_calls() if name == "tilegen" else "",
    }


def same(tokens: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before the first of each request that differs."""
    equal = 0
    for left, other in zip(tokens, expected, strict=True):
        pairs = zip(left, other, strict=True)
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(left))
    return equal / sum(map(len, expected))


def main(
    out: Annotated[Path | None, typer.Option(help="result file")] = None,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 5.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="a small model, in seconds")] = False,
    threads: Annotated[int, typer.Option(help="threads of each process; 0: as PyTorch does")] = 0,
    gib: Annotated[
        float, typer.Option(help="memory of each process; 0: half of what is free")
    ] = 0.0,
) -> None:
    """Generate each case that the result file does not have yet.

    Example: python -m benchmarks.generate --tiny --out generate.csv
    """
    require_transformers()
    path = out or gpu_folder() / "generate.csv"
    end = time.monotonic() + 60 * minutes
    number = threads or torch.get_num_threads()
    if not gib:
        free = torch.cuda.mem_get_info()[0] if has_gpu() else memory.available()
        gib = free / memory.GIB / 2
    done = same_values(read(path), ("case", "threads"))
    left = 0
    for case in progress(cases(tiny=tiny), describe=lambda case: case.key):
        if (case.key, str(number)) in done:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        for row in measure(case, threads=number, gib=gib):
            append(path, row)
            print(line(row), flush=True)
    if left:
        print(f"time is up: {left} cases left; type the same command again")


def line(row: GenerateRow) -> str:
    """Return a row as a person reads it."""
    if row.status != "ok":
        return f"{row.case:42} {row.attention:8} {row.status}: {row.detail}"
    error = "" if row.logits_of_sdpa is None else f", logits off {row.logits_of_sdpa:.2f} of SDPA's"
    accepted = "" if row.accepted is None else f", {100 * row.accepted:.0f} % of drafts right"
    return (
        f"{row.case:42} {row.attention:8} first {row.first_ms:8.1f} ms "
        f"({row.first_over_tilegen:.2f} x), each {row.per_token_ms:7.2f} ms "
        f"({row.per_token_over_tilegen:.2f} x), same {row.same_tokens:.2f}{error}{accepted}"
    )


if __name__ == "__main__":
    typer.run(main)
