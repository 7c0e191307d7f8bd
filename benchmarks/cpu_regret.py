"""Regret of the model's tiles on a processor: every tile of 36 kernels timed, the choice judged.

    python -m benchmarks.cpu_regret sweep --minutes 25
    python -m benchmarks.cpu_regret judge|fit|cross|ship

`sweep` times all tiles of each kernel in turns with the choice without records, on one thread, and
appends them to recordings that `python -m benchmarks.tuner_quality` reads:
benchmarks/results/<processor>/exhaustive. A run that was stopped goes on where it was. `judge`
measures the model's first choice and the winner of the sweep once more, in pairs, and beside them
the winner with itself, which is the noise.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, zip_longest
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import tilegen
from benchmarks.environment import RESULTS, ROOT, Environment, Minutes
from benchmarks.quantile_fit import descend
from benchmarks.recordings import Recorder, Recording, file_of, new_session, read
from benchmarks.rows import in_time, keep, same_values
from benchmarks.rows import read as read_rows
from tilegen.choose.on_cpu import chosen_config, space, tuned_space, usual_config
from tilegen.cpus.host import current_cpu
from tilegen.cpus.spec import CpuSpec, catalogue
from tilegen.kernels.config import TileConfig
from tilegen.model.cpu_time import LAUNCH_SECONDS, TERMS, UNFITTED, terms_of
from tilegen.problem import AttentionProblem
from tilegen.store import Location, save
from tilegen.store.trials import Trial
from tilegen.task import KernelTask
from tilegen.tuning.bench import Timed
from tilegen.tuning.in_turns import InTurns, alone_on_this_machine, pairs_of
from tilegen.tuning.tuner import tune

FORWARD = """
b1 hq8 hkv8 q256 kv256 d64 fp32 full
b1 hq4 hkv4 q1024 kv1024 d64 fp32 full
b1 hq1 hkv1 q4096 kv4096 d64 fp32 full
b1 hq4 hkv4 q512 kv512 d128 fp32 causal
b1 hq2 hkv2 q2048 kv2048 d128 fp32 causal
b1 hq1 hkv1 q8192 kv8192 d128 fp32 causal
b1 hq2 hkv2 q1024 kv1024 d256 fp32 full
b1 hq1 hkv1 q2048 kv2048 d512 fp32 causal
b1 hq8 hkv8 q256 kv256 d128 bf16 full
b1 hq4 hkv4 q1024 kv1024 d64 bf16 full
b1 hq8 hkv8 q512 kv512 d64 bf16 causal
b1 hq2 hkv2 q4096 kv4096 d64 bf16 causal
b1 hq8 hkv2 q1024 kv1024 d128 bf16 causal
b1 hq2 hkv2 q2048 kv2048 d128 bf16 full
b1 hq1 hkv1 q8192 kv8192 d128 bf16 causal
b1 hq4 hkv4 q1024 kv1024 d256 bf16 causal
b1 hq1 hkv1 q2048 kv2048 d512 bf16 full
b1 hq2 hkv2 q8192 kv8192 d64 fp32 window(255,0)
b1 hq2 hkv2 q8192 kv8192 d128 bf16 window(255,0)
b1 hq2 hkv2 q4096 kv4096 d64 fp32 documents(@q:512)
b1 hq2 hkv2 q4096 kv4096 d128 bf16 documents(@q:512)
"""
DECODE = """
b1 hq32 hkv8 q1 kv8192 d128 bf16 full
b1 hq8 hkv8 q1 kv4096 d64 fp32 full
b4 hq16 hkv4 q1 kv2048 d128 fp32 full
"""
BACKWARD = """
b1 hq8 hkv8 q256 kv256 d64 fp32 full
b1 hq4 hkv4 q512 kv512 d128 fp32 causal
b1 hq2 hkv2 q2048 kv2048 d64 fp32 causal
b1 hq1 hkv1 q4096 kv4096 d64 fp32 full
b1 hq1 hkv1 q1024 kv1024 d256 fp32 full
b1 hq4 hkv4 q512 kv512 d64 bf16 causal
b1 hq8 hkv2 q1024 kv1024 d128 bf16 causal
b1 hq2 hkv2 q2048 kv2048 d128 bf16 full
b1 hq1 hkv1 q8192 kv8192 d64 bf16 causal
b1 hq1 hkv1 q1024 kv1024 d512 bf16 causal
b1 hq2 hkv2 q8192 kv8192 d64 bf16 window(255,0)
b1 hq2 hkv2 q4096 kv4096 d128 fp32 documents(@q:512)
"""
KERNELS = {"fwd": FORWARD, "fwd_split": DECODE, "bwd_one_pass": BACKWARD}
OUT = RESULTS / "cpu" / "regret.csv"
Table = tuple[np.ndarray, np.ndarray]
SWEEPS = 3000
"""Rounds of the fit."""
WORTH, MOST_TRIED = 0.985, 4
"""Part of the choice's time below which a tile may be worth a record, and most such tiles that are
timed again."""
LEAST, SECONDS = 15, 1.5
"""Pairs of launches of a judged choice, at least, and seconds for them."""


@dataclass(frozen=True, kw_only=True)
class RegretRow(Environment):
    """The model's choice for one kernel beside the winner of the sweep."""

    processor: str
    kernel: str
    problem: str
    timed: int
    """Tiles of the sweep."""
    choice: str
    winner: str
    swept_regret: float
    """Time of the choice over the winner's, less one, in the sweep."""
    regret: float
    """The same, measured again in pairs."""
    noise: float
    """The same of the winner with itself."""
    usual: str
    """The tile in hand in the sweep: that of the rules before the model, most often."""
    usual_regret: float
    """Its regret in the sweep."""
    worst: float
    """Regret of the slowest tile in the sweep."""


def tasks(device: CpuSpec | None = None) -> list[KernelTask]:
    """Return the kernels and problems of the study, passes and dtypes in turn, for a processor or
    this machine's."""
    columns = [
        [
            KernelTask.of(kernel, AttentionProblem.parse(text).bucket, device or current_cpu())
            for text in texts.strip().splitlines()
        ]
        for kernel, texts in KERNELS.items()
    ]
    return [task for row in zip_longest(*columns) for task in row if task]


def recorded(device: CpuSpec | None = None) -> Iterator[tuple[KernelTask, Recording]]:
    """Yield the kernels that have been swept on a processor, or on this machine's."""
    for task in tasks(device):
        if path_of(task).is_file():
            yield task, read(path_of(task))


def path_of(task: KernelTask) -> Path:
    """Return the file of a task's recording."""
    folder = RESULTS / task.device.name / "exhaustive"
    return file_of(folder, task.kernel, task.problem.bucket)


def record(task: KernelTask, deadline: float) -> int:
    """Time the tiles of a kernel that are not on disk yet; return how many are left."""
    configs = space(task)
    recorder = Recorder(
        path_of(task), new_session(task.device, task.kernel, task.problem, len(configs))
    )
    hand = in_hand(recorder.trials) if recorder.trials else usual_config(task)
    turns = InTurns(hand, lambda: Timed.of(task, "cpu").runs)
    todo = recorder.todo(configs)
    known = recorder.trials.get(turns.in_hand)
    if known:
        turns.resume(known.measurement)
    elif turns.in_hand in todo:
        todo = [turns.in_hand, *(config for config in todo if config != turns.in_hand)]
    for done, config in enumerate(todo):
        if time.monotonic() > deadline:
            return len(todo) - done
        started = time.monotonic()
        measurement = turns.measure(config)
        seconds = round(time.monotonic() - started, 3)
        recorder.append(Trial(config=config, measurement=measurement, seconds=seconds))
    return 0


def regret_of(task: KernelTask, recording: Recording) -> RegretRow:
    """Measure the model's choice again, in pairs with the winner of the sweep."""
    times = recording.times()
    winner = min(times, key=times.__getitem__)
    choice, usual = chosen_config(task), in_hand(recording.trials)
    run_of = Timed.of(task, "cpu").runs
    best = run_of(winner)

    def ratio(config: TileConfig) -> float:
        with alone_on_this_machine():
            pairs = pairs_of(best, run_of(config), least=LEAST, seconds=SECONDS)
        return statistics.median(b / a for a, b in pairs) - 1

    return RegretRow(
        processor=task.device.name,
        kernel=task.kernel,
        problem=task.problem.key,
        timed=len(times),
        choice=choice.key,
        winner=winner.key,
        swept_regret=times[choice] / times[winner] - 1,
        regret=0.0 if choice == winner else ratio(choice),
        noise=ratio(winner),
        usual=usual.key,
        usual_regret=times[usual] / times[winner] - 1,
        worst=max(times.values()) / times[winner] - 1,
    )


def in_hand(trials: Mapping[TileConfig, Trial]) -> TileConfig:
    """Return the config that those of a recording were timed in turns with."""
    trial = next(iter(trials.values()))
    return TileConfig.parse(trial.measurement.message.rpartition(" ")[2])


app = typer.Typer(no_args_is_help=True)


@app.command()
def sweep(minutes: Minutes = 25.0) -> None:
    """Time every tile of the kernels that have no complete recording."""
    deadline = time.monotonic() + 60 * minutes
    left = 0
    for task in tasks():
        started = time.monotonic()
        left += (missing := record(task, deadline))
        if (took := time.monotonic() - started) > 0.5:
            state = f"{missing} left" if missing else "complete"
            print(f"{task.kernel:13} {task.problem.key:50} {took:5.1f} s  {state}", flush=True)
    if left:
        print(f"time is up: {left} tiles left; type the same command again")


@app.command()
def judge(minutes: Minutes = 10.0, out: Annotated[Path, typer.Option()] = OUT) -> None:
    """Measure the model's choices against the winners of the sweeps."""
    done = same_values(read_rows(out), ("kernel", "problem", "choice"))
    todo = [
        (task, recording)
        for task, recording in recorded()
        if (task.kernel, task.problem.key, chosen_config(task).key) not in done
    ]
    for task, recording in in_time(todo, minutes):
        keep(out, [regret_of(task, recording)], line)


def line(row: RegretRow) -> str:
    """Return a row as a terminal shows it."""
    return (
        f"{row.kernel:13} {row.problem:50} {row.choice:18} {row.winner:18} "
        f"{row.swept_regret:7.1%} {row.regret:7.1%} {row.noise:7.1%}  "
        f"{row.usual:18} {row.usual_regret:7.1%}"
    )


@app.command()
def ship(
    out: Annotated[Path, typer.Option(help="location of records")] = ROOT / "cache",
    minutes: Minutes = 10.0,
) -> None:
    """Tune among the fastest tiles of each sweep, and save the records whose tile beat the model's
    choice in a second run."""
    for task, recording in in_time(list(recorded()), minutes):
        times, choice = recording.times(), chosen_config(task)
        if task.spec.packs or choice not in times:
            continue
        better = [c for c in tuned_space(task) if times[c] < WORTH * times[choice]]
        if not better:
            continue
        fastest = sorted(better, key=times.__getitem__)[:MOST_TRIED]
        with (
            tempfile.TemporaryDirectory() as empty,
            tilegen.settings(cache_dir=empty, cache_path=""),
        ):
            record = tune(task, space=[choice, *fastest], candidates=[], progress=False)
        beats = record.config != choice
        told = save(record, location=Location(str(out), "shared")).reason if beats else "not kept"
        what = f"{task.kernel:13} {task.problem.key:50} {choice.key:18} {record.config.key:18}"
        print(what, told, flush=True)


@app.command()
def fit() -> None:
    """Fit the weights of the model's terms to the sweeps, and print them for cpu_weights.toml.

    Beside them: the mean error of a predicted time, and the regrets of choices by weights that were
    fitted without the problem of the choice.
    """
    for (direction, kind), tables in _tables(current_cpu()).items():
        weights = _least_squares(tables)
        errors = np.concatenate([np.abs(terms @ weights / times - 1) for terms, times in tables])
        print("[[weights]]", f'pass = "{direction}"', f'operands = "{kind}"', sep="\n")
        fitted = (name for name in TERMS if name != UNFITTED)
        for name, weight in zip(fitted, weights, strict=True):
            if weight > 1e-3:
                print(f"{name} = {weight:.3g}")
        regrets = [
            _regret(*tables[i], _least_squares(tables[:i] + tables[i + 1 :]))
            for i in range(len(tables))
        ]
        print(
            f"# {len(errors)} times, mean error {errors.mean():.1%}; regrets by weights that were "
            f"fitted without the problem: median {statistics.median(regrets):.1%}, "
            f"worst {max(regrets):.1%}\n"
        )


@app.command()
def cross() -> None:
    """Fit the weights to the sweeps on each processor, and judge the choices by them on every
    other: a line of regrets for each pass. Only products in fp32 are on all processors."""
    swept = {path.parent.name for path in RESULTS.glob("*/exhaustive")}
    tables = {spec.name: _tables(spec) for spec in catalogue() if spec.name in swept}
    print("fitted,judged,pass,problems,median_regret,worst_regret")
    for fitted, judged in permutations(tables, 2):
        for direction in ("forward", "backward"):
            weights = _least_squares(tables[fitted][direction, "fp32"])
            regrets = [_regret(*table, weights) for table in tables[judged][direction, "fp32"]]
            worst = f"{statistics.median(regrets):.3f},{max(regrets):.3f}"
            print(f"{fitted},{judged},{direction},{len(regrets)},{worst}")


def _tables(device: CpuSpec) -> dict[tuple[str, str], list[Table]]:
    """Return the table of each kernel that was swept on a processor, by pass and products."""
    tables: dict[tuple[str, str], list[Table]] = {}
    for task, recording in recorded(device):
        if not task.spec.packs:
            paired = task.problem.dtype == "bf16" and device.pairs
            kind = task.direction, "pairs" if paired else "fp32"
            tables.setdefault(kind, []).append(_table(task, recording))
    return tables


def _table(task: KernelTask, recording: Recording) -> Table:
    """Return the fitted terms of each timed tile of a kernel, and the times less that of a launch
    and the term that is not fitted [s]."""
    times = recording.times()
    terms = [terms_of(task.tiled(config)) for config in times]
    known = LAUNCH_SECONDS + np.array([of_tile.pop(UNFITTED) for of_tile in terms])
    fitted = np.array([[*of_tile.values()] for of_tile in terms])
    return fitted, 1e-6 * np.array([*times.values()]) - known


def _least_squares(tables: Sequence[Table]) -> np.ndarray:
    """Return the weights, at least 0, that make the relative errors of all times smallest."""
    terms = np.concatenate([terms / times[:, None] for terms, times in tables])
    normal, right = terms.T @ terms, terms.sum(0)
    weights = np.zeros(len(right))
    for _ in range(SWEEPS):
        descend(normal, right, weights)
    return weights


def _regret(terms: np.ndarray, times: np.ndarray, weights: np.ndarray) -> float:
    return float(times[(terms @ weights).argmin()] / times.min() - 1)


if __name__ == "__main__":
    app()
