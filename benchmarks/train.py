"""Train models of transformers with each attention: tokens per second, memory, losses.

    python -m benchmarks.train --minutes 25 [--figure]

Eager attention, SDPA and tilegen (and FlexAttention on a GPU) train the same random weights on the
same batches, each in a process of its own with a memory limit, step by step in turns. A case that
does not fit is a row. A stopped run continues where it stopped.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import (
    Environment,
    gpu_folder,
    has_gpu,
    path_of_calls,
)
from benchmarks.rows import append, read, same_values
from benchmarks.whole.losses import CASES as OF_LOSSES
from benchmarks.whole.losses import LossRow, compare
from benchmarks.whole.models import FEATURES, MODELS, require_transformers
from benchmarks.whole.progress import progress
from benchmarks.whole.training import Case, Training, why_not
from tilegen.comparing import memory
from tilegen.comparing.children import DoesNotFit, Failed, Worker

ATTENTIONS = "tilegen", "eager", "sdpa", "flex_attention"
"""In the order of turns."""
ROUNDS, MOST_ROUNDS, WARM = 3, 20, 1
"""Timed rounds at least and at most, and steps before them."""
SECONDS = 10.0
"""Time after which a case with ROUNDS rounds is done."""
MOST_RATIO = 5.0
"""An attention whose step takes more than this many times tilegen's is timed once."""
ON_CPU = (
    "gpt2 b1 q1024 bf16 plain", "gpt2 b1 q1024 fp32 plain", "classifier b1 q4096 bf16 plain",
    "classifier b1 q4096 fp32 plain", "gpt2 b1 q2048 bf16 plain", "bert b2 q512 bf16 plain",
    "gpt2 b1 q2048 bf16 documents", "classifier b1 q8192 bf16 window",
    "classifier b1 q8192 bf16 plain", "gpt2 b1 q2048 fp32 plain", "bert b2 q512 fp32 plain",
    "classifier b1 q8192 fp32 plain", "classifier b1 q8192 fp32 window",
    "gpt2 b1 q2048 fp32 documents", "llama b1 q2048 bf16 plain", "llama b1 q2048 fp32 plain",
    "llama b1 q4096 bf16 window", "llama b1 q4096 bf16 documents",
    "classifier b1 q16384 bf16 plain", "gpt2 b1 q1024 bf16 dropout",
    "gpt2 b1 q1024 bf16 checkpointing", "llama b1 q2048 bf16 compile",
    "classifier b1 q2048 fp32 plain",
)  # fmt: skip
"""Cases on a CPU, the most important first."""
ON_GPU = (
    "gpt2 b16 q1024 bf16 plain", "gpt2 b8 q4096 bf16 documents", "bert-large b32 q512 bf16 plain",
    "llama b8 q4096 bf16 window", "classifier b4 q16384 bf16 plain", "path-x b8 q16384 bf16 plain",
    "gpt2 b8 q2048 bf16 plain", "gpt2 b4 q4096 bf16 plain", "path-x b1 q65536 bf16 window",
    "gpt2 b16 q1024 bf16 dropout", "gpt2 b16 q1024 bf16 compile", "llama b8 q4096 bf16 documents",
    "gpt2 b16 q1024 fp32 plain", "llama b8 q4096 bf16 checkpointing",
)  # fmt: skip
"""Cases on a GPU."""
TINY = ("gpt2-tiny b1 q256 fp32 plain", "llama-tiny b1 q256 bf16 documents")
"""Cases that take seconds."""


@dataclass(frozen=True, kw_only=True)
class TrainRow(Environment):
    """Training of a case with one attention."""

    case: str
    threads: int
    attention: str
    status: str
    """ok, does not fit, unsupported or failed."""
    step_ms: float | None = None
    """The median of the timed steps."""
    least_ms: float | None = None
    rounds: int = 0
    cpu_ms: float | None = None
    """The median time of all cores, which other programs change less than `step_ms`."""
    tokens_per_s: float | None = None
    over_tilegen: float | None = None
    """Time of this attention over tilegen's, the median over rounds: below 1, tilegen is slower."""
    cpu_over_tilegen: float | None = None
    """The same of `cpu_ms`."""
    attention_share: float | None = None
    """Share of a step that attention takes, forward and backward."""
    peak_mib: float | None = None
    """The most memory of the timed steps, beyond what the process began with."""
    limit_gib: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    deviation: float | None = None
    """Largest difference from the losses of eager attention in this case."""
    detail: str = ""
    """The code that computes tilegen's calls, or why there is no time."""


def parse(text: str) -> Case:
    """Return the case of a line such as `gpt2 b1 q1024 bf16 window+dropout`. Raises ValueError."""
    try:
        model, batch, seqlen, dtype, features = text.split()
        case = Case(
            model=model,
            batch=int(batch.removeprefix("b")),
            seqlen=int(seqlen.removeprefix("q")),
            dtype=dtype,
            features=frozenset(features.replace("plain", "").split("+")) - {""},  # type: ignore
        )
    except ValueError:
        raise ValueError(
            f"expected a case such as 'gpt2 b1 q1024 bf16 plain', got {text!r}"
        ) from None
    known = {"model": MODELS, "dtype": ("fp32", "bf16")}
    for name, values in known.items():
        if (value := getattr(case, name)) not in values:
            raise ValueError(f"expected a {name} of {', '.join(values)}, got {value!r}")
    if other := case.features - set(FEATURES):
        raise ValueError(f"expected features of {', '.join(FEATURES)}, got {min(other)!r}")
    return case


def measure(
    case: Case,
    attentions: Sequence[str],
    *,
    threads: int,
    gib: float,
) -> Iterator[TrainRow]:
    """Yield the rows of a case, all attentions timed in turns."""
    device = "cuda" if has_gpu() else "cpu"
    known = {"case": case.key, "threads": threads, "limit_gib": gib}

    def missing(attention: str, error: Exception) -> TrainRow:
        status = "does not fit" if isinstance(error, DoesNotFit) else "failed"
        if "ValueError" in str(error):
            status = "unsupported"
        return TrainRow(attention=attention, status=status, detail=str(error), **known)

    lost: dict[str, Exception] = {}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        warm: dict[str, float] = {}
        for attention in attentions:
            if why_not(attention, device):
                continue
            try:
                worker = Worker(
                    *(Training, case, attention, device), gib=gib, device=device, threads=threads
                )
                workers[attention] = stack.enter_context(worker)
                for _ in range(WARM):
                    warm[attention] = worker.call("step")[0]
                worker.call("start_over")
            except (DoesNotFit, Failed) as error:
                lost[attention] = error
        workers = {name: worker for name, worker in workers.items() if name not in lost}
        times = _in_turns(workers, warm, lost)
        ends: dict[str, dict[str, Any]] = {}
        for attention, worker in workers.items():
            if attention in lost:
                continue
            try:
                peak = worker.call("peak")  # of the timed steps
                share = worker.call("share")
                ends[attention] = {
                    "peak_mib": peak / 2**20, "attention_share": share,
                    "losses": worker.call("seen"),
                }  # fmt: skip
            except (DoesNotFit, Failed) as error:
                lost[attention] = error
    for attention in attentions:
        if attention in lost:
            yield missing(attention, lost[attention])
        elif reason := why_not(attention, device):
            yield TrainRow(attention=attention, status="unsupported", detail=reason, **known)
        else:
            values = _values(attention, times, ends, case)
            values["detail"] = path_of_calls() if attention == "tilegen" else ""
            yield TrainRow(attention=attention, status="ok", **known, **values)


def _in_turns(
    workers: Mapping[str, Worker],
    warm: Mapping[str, float],
    lost: dict[str, Exception],
) -> dict[str, list[tuple[float, float]]]:
    """Return the times of steps that workers take in turns, each with that of all cores; a worker
    that fails goes to `lost`."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
    fastest = warm.get("tilegen", min(warm.values(), default=0.0))
    end = time.monotonic() + SECONDS
    rounds = 0
    while workers and (rounds < ROUNDS or (time.monotonic() < end and rounds < MOST_ROUNDS)):
        for name, worker in workers.items():
            if name in lost or (rounds and warm[name] > MOST_RATIO * fastest):
                continue
            try:
                times[name].append(worker.call("step"))
            except (DoesNotFit, Failed) as error:
                lost[name] = error
        rounds += 1
    return times


def _values(
    attention: str,
    times: Mapping[str, Sequence[tuple[float, float]]],
    ends: Mapping[str, Mapping[str, Any]],
    case: Case,
) -> dict[str, Any]:
    """Return the columns of an attention that was timed."""
    (taken, busy), end = zip(*times[attention], strict=True), dict(ends[attention])
    losses = end.pop("losses")
    median = statistics.median(taken)
    pairs = list(zip(times[attention], times.get("tilegen", ()), strict=False))
    ratios: dict[str, float] = {}
    if pairs:
        for place, name in enumerate(("over_tilegen", "cpu_over_tilegen")):
            ratios[name] = statistics.median(one[place] / own[place] for one, own in pairs)
    deviation = None
    if "eager" in ends:
        both = zip(losses, ends["eager"]["losses"], strict=False)
        deviation = max(abs(a - b) for a, b in both)
    measured = {
        "step_ms": 1e3 * median,
        "least_ms": 1e3 * min(taken),
        "rounds": len(taken),
        "cpu_ms": 1e3 * statistics.median(busy),
        "tokens_per_s": case.batch * case.seqlen / median,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "deviation": deviation,
    }
    return end | ratios | measured


def main(
    out: Annotated[Path | None, typer.Option(help="result file")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="a case, may be repeated; default: the table")
    ] = None,
    attention: Annotated[
        list[str] | None, typer.Option(help="an attention, may be repeated; default: all")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="small cases, in seconds")] = False,
    minutes: Annotated[float, typer.Option(help="time to spend")] = 25.0,
    threads: Annotated[int, typer.Option(help="threads of each process; 0: as PyTorch does")] = 0,
    gib: Annotated[
        float, typer.Option(help="memory of each process; 0: half of what is free")
    ] = 0.0,
    draw: Annotated[bool, typer.Option("--figure", help="draw the figure and end")] = False,
) -> None:
    """Train each case that the result file does not have yet, with each attention.

    Example: python -m benchmarks.train --case "gpt2 b1 q1024 fp32 plain" --minutes 5
    """
    path = out or gpu_folder() / "train.csv"
    attentions = attention or ATTENTIONS
    if draw:
        from benchmarks.whole import figures

        figures.save_training(read(path), path)
        return
    require_transformers()
    end = time.monotonic() + 60 * minutes
    number = threads or torch.get_num_threads()
    if not gib:
        free = torch.cuda.mem_get_info()[0] if has_gpu() else memory.available()
        gib = free / memory.GIB / 2
    chosen = [parse(text) for text in case or (TINY if tiny else ON_GPU if has_gpu() else ON_CPU)]
    if not (case or tiny):
        losses(path.with_name("losses.csv"), attentions)
    done = same_values(read(path), ("case", "threads", "attention"))
    left = 0
    for chosen_case in progress(chosen, describe=lambda chosen_case: chosen_case.key):
        wanted = [name for name in attentions if (chosen_case.key, str(number), name) not in done]
        if not wanted:
            continue
        if time.monotonic() > end:
            left += 1
            continue
        # Ratios are between attentions of one run: a case is done as a whole.
        for row in measure(chosen_case, attentions, threads=number, gib=gib):
            append(path, row)
            print(line(row), flush=True)
    if left:
        print(f"time is up: {left} cases left; type the same command again")


def losses(path: Path, attentions: Sequence[str], cases: Sequence[Case] = OF_LOSSES) -> None:
    """Compare the losses of small models, where the result file does not have them yet."""
    device = "cuda" if has_gpu() else "cpu"
    both = [replace(one, dtype=dtype) for one in cases for dtype in ("fp32", "bf16")]
    done = same_values(read(path), ("case",))
    for case in progress([one for one in both if (one.key,) not in done], describe=_key):
        for row in compare(case, attentions, device):
            append(path, row)
            print(loss_line(row), flush=True)


def _key(case: Case) -> str:
    return f"losses of {case.key}"


def loss_line(row: LossRow) -> str:
    """Return a row of losses as a person reads it."""
    return (
        f"{row.case:38} {row.attention:14} {row.steps} losses within {row.deviation:.2g} of eager "
        f"fp32, {row.of_sdpa:.2f} of SDPA's; a repeat within {row.noise:.2g}"
    )


def line(row: TrainRow) -> str:
    """Return a row as a person reads it."""
    if row.status != "ok":
        return f"{row.case:38} {row.attention:14} {row.status}: {row.detail}"
    share = "" if row.attention_share is None else f"attention {100 * row.attention_share:3.0f} %"
    ratio = "" if row.over_tilegen is None else f"{row.over_tilegen:5.2f} x"
    return (
        f"{row.case:38} {row.attention:14} {row.step_ms:9.1f} ms {row.tokens_per_s:8.0f} tokens/s "
        f"{ratio} {share} {row.peak_mib:7.0f} MiB, loss {row.last_loss:.4f}"
    )


if __name__ == "__main__":
    typer.run(main)
