"""Train models of transformers with each attention: tokens per second, memory, losses.

Eager attention, SDPA and tilegen (and FlexAttention on a GPU) train the same random weights on the
same batches, each in a process of its own with a memory limit, step by step in turns. A case that
does not fit is a row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.environment import Environment, Minutes, gpu_folder, has_gpu, path_of_calls
from benchmarks.rows import in_time, keep, read, same_values
from benchmarks.whole.models import FEATURES, MODELS
from benchmarks.whole.training import Case, Training, why_not
from benchmarks.whole.turns import Gib, Threads, Tiny, Turns, limits

ATTENTIONS = "tilegen", "eager", "sdpa", "flex_attention"
"""In the order of turns."""
ROUNDS, MOST_ROUNDS = 3, 20
"""Timed rounds at least and at most."""
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
OF_LOSSES = (
    "gpt2-tiny b4 q128 {} plain", "gpt2-tiny b4 q128 {} documents", "llama-tiny b2 q300 {} window",
    "bert-tiny b4 q128 {} plain", "classifier-tiny b4 q128 {} plain",
)  # fmt: skip
"""Small models of each family in fp32 and bf16, without dropout: each attention drops other
weights."""
STEPS, SEEDS = 50, 3
MOST_OF_SDPA = 2.0
"""Deviation of losses that is right, of SDPA's at the same dtype."""


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


@dataclass(frozen=True, kw_only=True)
class LossRow(Environment):
    """Losses of a case with one attention."""

    case: str
    attention: str
    steps: int
    seeds: int
    deviation: float
    """Largest difference from the losses of eager attention in fp32, over all steps and seeds."""
    noise: float
    """Largest difference between two such runs with the same seed."""
    of_sdpa: float
    """The deviation over SDPA's at the same dtype, which counts as a rounding of the loss at
    least."""
    last_loss: float


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
    case: Case, attentions: Sequence[str], *, threads: int, gib: float
) -> Iterator[TrainRow]:
    """Yield the rows of a case, all attentions timed in turns."""
    with Turns(threads=threads, gib=gib) as turns:
        refused = {name: why for name in attentions if (why := why_not(name, turns.device))}
        warm: dict[str, float] = {}
        for name in attentions:
            if name not in refused:
                turns.start(name, Training, case, name, turns.device)
                warm[name], _ = turns.call(name, "step") or (0.0, 0.0)
                turns.call(name, "start_over")
        times = _in_turns(turns, warm)
        ends = {
            name: {of: turns.call(name, of) for of in ("peak", "share", "seen")} for name in times
        }
    for name in attentions:
        if name in refused:
            columns = {"status": "unsupported", "detail": refused[name]}
        elif name in turns.lost:
            columns = turns.why(name)
        else:
            columns = _columns(name, times, ends, case)
        yield TrainRow(case=case.key, threads=threads, limit_gib=gib, attention=name, **columns)


def _in_turns(turns: Turns, warm: Mapping[str, float]) -> dict[str, list[tuple[float, float]]]:
    """Return the times of steps that workers take in turns, each with that of all cores."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns.workers}
    fastest = warm.get("tilegen", min(warm.values(), default=0.0))
    end = time.monotonic() + SECONDS
    rounds = 0
    while turns.workers and (rounds < ROUNDS or (time.monotonic() < end and rounds < MOST_ROUNDS)):
        for name in list(turns.workers):
            again = not rounds or warm[name] <= MOST_RATIO * fastest
            if again and (step := turns.call(name, "step")):
                times[name].append(step)
        rounds += 1
    return {name: of_name for name, of_name in times.items() if name in turns.workers}


def _columns(
    name: str,
    times: Mapping[str, Sequence[tuple[float, float]]],
    ends: Mapping[str, Mapping[str, Any]],
    case: Case,
) -> dict[str, Any]:
    """Return the columns of an attention that was timed."""
    (taken, busy), end = zip(*times[name], strict=True), ends[name]
    median, losses = statistics.median(taken), end["seen"]
    pairs = list(zip(times[name], times.get("tilegen", ()), strict=False))
    ratios = {
        column: statistics.median(one[place] / own[place] for one, own in pairs)
        for place, column in enumerate(("over_tilegen", "cpu_over_tilegen"))
        if pairs
    }
    eager = ends["eager"]["seen"] if "eager" in ends else []
    apart = [abs(a - b) for a, b in zip(losses, eager, strict=False)]
    return ratios | {
        "status": "ok",
        "step_ms": 1e3 * median,
        "least_ms": 1e3 * min(taken),
        "rounds": len(taken),
        "cpu_ms": 1e3 * statistics.median(busy),
        "tokens_per_s": case.batch * case.seqlen / median,
        "attention_share": end["share"],
        "peak_mib": end["peak"] / 2**20,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "deviation": max(apart, default=None),
        "detail": path_of_calls() if name == "tilegen" else "",
    }


def compare(
    case: Case, attentions: Sequence[str], device: str, *, steps: int = STEPS, seeds: int = SEEDS
) -> Iterator[LossRow]:
    """Yield the distance of each attention's losses from eager attention's in fp32."""
    apart: dict[str, float] = {}
    noise: dict[str, float] = {}
    last: dict[str, float] = {}
    able = [name for name in attentions if not why_not(name, device)]
    rounding = 0.0
    for seed in range(seeds):
        seeded = replace(case, seed=seed)
        exact = Training(replace(seeded, dtype="fp32"), "eager", device).steps(steps)
        rounding = max(rounding, torch.finfo(torch.float32).eps * max(exact))
        for name in able:
            training = Training(seeded, name, device)
            losses = training.steps(steps)
            training.begin()
            again = training.steps(steps)
            apart[name] = max(apart.get(name, 0.0), _distance(losses, exact))
            noise[name] = max(noise.get(name, 0.0), _distance(losses, again))
            last[name] = losses[-1]
    for name in able:
        yield LossRow(
            case=case.key,
            attention=name,
            steps=steps,
            seeds=seeds,
            deviation=apart[name],
            noise=noise[name],
            of_sdpa=apart[name] / max(apart["sdpa"], rounding),
            last_loss=last[name],
        )


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def loss_line(row: LossRow) -> str:
    """Return a row of losses as a terminal shows it."""
    return (
        f"{row.case:38} {row.attention:14} {row.steps} losses within {row.deviation:.2g} of eager "
        f"fp32, {row.of_sdpa:.2f} of SDPA's; a repeat within {row.noise:.2g}"
    )


def line(row: TrainRow) -> str:
    """Return a row as a terminal shows it."""
    if row.status != "ok":
        return f"{row.case:38} {row.attention:14} {row.status}: {row.detail}"
    share = "" if row.attention_share is None else f"attention {100 * row.attention_share:3.0f} %"
    ratio = "" if row.over_tilegen is None else f"{row.over_tilegen:5.2f} x"
    return (
        f"{row.case:38} {row.attention:14} {row.step_ms:9.1f} ms {row.tokens_per_s:8.0f} tokens/s "
        f"{ratio} {share} {row.peak_mib:7.0f} MiB, loss {row.last_loss:.4f}"
    )


def main(
    out: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="A case, may be repeated; default: the table.")
    ] = None,
    tiny: Tiny = False,
    minutes: Minutes = 25.0,
    threads: Threads = 0,
    gib: Gib = 0.0,
) -> None:
    """Train each case that the result file does not have yet, with each attention.

    Example: python -m benchmarks.whole train --case "gpt2 b1 q1024 fp32 plain" --minutes 5
    """
    path = out or gpu_folder() / "train.csv"
    each = limits(threads, gib)
    texts = case or (TINY if tiny else ON_GPU if has_gpu() else ON_CPU)
    if not (case or tiny):
        losses, device = path.with_name("losses.csv"), "cuda" if has_gpu() else "cpu"
        known = same_values(read(losses), ("case",))
        pairs = [parse(text.format(dtype)) for text in OF_LOSSES for dtype in ("fp32", "bf16")]
        for chosen in in_time([one for one in pairs if (one.key,) not in known], minutes):
            keep(losses, compare(chosen, ATTENTIONS, device), loss_line)
    done = same_values(read(path), ("case", "threads", "attention"))
    # Ratios are between attentions of one run: a case is done as a whole.
    todo = [
        chosen
        for chosen in map(parse, texts)
        if any((chosen.key, str(each["threads"]), name) not in done for name in ATTENTIONS)
    ]
    for chosen in in_time(todo, minutes):
        keep(path, measure(chosen, ATTENTIONS, **each), line)
