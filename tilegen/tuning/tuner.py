"""Tuning of one kernel on the local GPU or processor: `tune`."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.compiling.workers import Pool
from tilegen.emit.identity import template_digest
from tilegen.errors import BuildFailed, NoRecord, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.store import (
    EstimateSummary,
    TuningRecord,
    Versions,
    dated,
    now,
    save,
    this_machine,
)
from tilegen.store.trials import Conditions, Trial, of_one_binary, one_binary_line
from tilegen.store.versions import versions_for
from tilegen.task import KernelTask
from tilegen.tuning.bench import Ahead, Bench, CheckConfig, CompileAll, Measure, real_bench, refused
from tilegen.tuning.measure import DeviceLost, Measurement, tie_limit
from tilegen.tuning.report import Report, describe
from tilegen.tuning.search import Search
from tilegen.tuning.trials import Log, alone, trials_of

if TYPE_CHECKING:
    from tilegen.model.estimate import Candidate

SEEDS = 10
"""Number of the model's proposals that are tried before Optuna's."""
BATCH = 4
"""Number of configs compiled together after the seeds. The next are proposed when half are left.

Larger batches would keep more cores busy, but their configs are chosen before the configs ahead are
measured. On recorded timings, batches of 16 searched no better than chance.
"""
CPU_SECONDS = 20.0
"""Time to tune a kernel on a processor, unless a budget says otherwise [s]."""
SAMPLER_SEED = 0
PATIENCE = 4.0
"""Longest wait for another process that tunes, as a multiple of the budget: besides measuring, that
process compiles and checks."""


def tune(
    task: KernelTask,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    measure: Measure | None = None,
    compile: CompileAll | None = None,
    check: CheckConfig | None = None,
    bench: Bench | None = None,
    candidates: Sequence[Candidate] | None = None,
    space: Sequence[TileConfig] | None = None,
    progress: bool | None = None,
    command: str | None = None,
    log: Log | None = None,
) -> TuningRecord:
    """Tune a kernel: measure configs, save the record of the best in the local cache, return it.

    The problem of the bucket is measured. The budget is `trials` over all runs, `seconds` of this
    run, or both; without a budget the whole space is tried. Each trial is on disk as soon as its
    result is known. A later run repeats a trial only if its launch failed without breaking the CUDA
    context.

    `candidates` (ranked) and `space` default to the model's. `measure`, `compile` and `check`
    default to those of `bench`, by default the local device's; if `measure` is given, `compile` and
    `check` default to None and are left out. On a processor the winner must beat the choice without
    tuning in a second run, or that choice is recorded. `progress` draws a progress bar; by default
    there is a bar on a terminal. With a `log` of the caller's nothing is written here.

    Raises Unsupported without the task's device, NoRecord if no config runs, WrongResult if the
    kernel cannot be checked, and DeviceLost if a launch breaks the CUDA context. The best config so
    far is also saved before KeyboardInterrupt or DeviceLost is raised.
    """
    if trials is not None and trials < 1:
        raise Unsupported(f"trials must be at least 1, got {trials}")
    if seconds is not None and not seconds > 0:
        raise Unsupported(f"seconds must be above 0, got {seconds}")
    task = _of_bucket(task)
    pool = Pool()  # starts no process until a worker is needed
    if measure is None:
        real = bench or real_bench(task, pool)
        bench = replace(real, compile=compile or real.compile, check=check or real.check)
    else:
        bench = Bench(measure=measure, compile=compile, check=check)
    if space is None or candidates is None:
        from tilegen.choose.ranker import ranked_space  # loads the model

        space, proposed = ranked_space(task, space)
        candidates = proposed if candidates is None else candidates
    space = list(dict.fromkeys([*(candidate.config for candidate in candidates), *space]))
    total = len(space) if trials is None else min(trials, len(space))
    command = command or _command(task, trials, seconds)
    # Wait for another process that tunes the same, whose trials this process then reads.
    alone_with = alone(task.device.name, task.kernel, task.problem) if log is None else None
    with (
        alone_with or contextlib.nullcontext(),
        pool,
        Report(task.kernel, total, enabled=progress) as report,
    ):
        run = _Run(task, bench, space, candidates, report, log)
        try:
            run.go(total, math.inf if seconds is None else seconds)
        except (KeyboardInterrupt, DeviceLost) as stop:
            why = "interrupted" if isinstance(stop, KeyboardInterrupt) else str(stop)
            kept = "none of them ran"
            if run.winner is not None and log is None:
                kept = f"the best so far is in {save(run.record(run.winner, command)).file}"
            report.say(
                f"{why}; {len(run.trials)} trials are kept, {kept}; to go on from here: {command}"
            )
            raise
        if run.winner is None:
            raise NoRecord(run.nothing_ran())
        if len(run.trials) < total:
            report.say(
                f"{len(run.trials)} of {total} tiles tried within {seconds:.3g} s; to try others "
                f"type this again: {command}"
            )
        record = run.record(run.winner, command)
        if log is None:
            saved = save(record)
            report.say(f"{saved.file} {'written' if saved.wins else 'not won'}: {saved.reason}")
        for configs in of_one_binary(run.trials.values()):
            report.say(one_binary_line(configs))
        report.say(f"{record.config!r}  # {describe(record)}")
    return record


def tune_once(
    task: KernelTask, *, seconds: float, known: Callable[[], TuningRecord | None]
) -> TuningRecord:
    """Wait for other tuners of this problem, then return the record that `known` finds, or tune.
    Raises the errors of `tune`, and Unsupported if another tuner takes longer than `PATIENCE`
    budgets."""
    with alone(task.device.name, task.kernel, task.problem.bucket, seconds=PATIENCE * seconds):
        return known() or tune(task, seconds=seconds)


def _of_bucket(task: KernelTask) -> KernelTask:
    return KernelTask(task.spec, task.problem.bucket, task.device)


class _Run:
    """A call of `tune`: the trials so far, and the winner among them."""

    def __init__(
        self,
        task: KernelTask,
        bench: Bench,
        space: Sequence[TileConfig],
        candidates: Sequence[Candidate],
        report: Report,
        log: Log | None = None,
    ) -> None:
        kernel, problem, gpu = task.kernel, task.problem, task.device
        self.kernel, self.problem, self.gpu = kernel, problem, gpu
        self.bench = bench
        self.report = report
        self.estimates = {candidate.config: candidate.estimate for candidate in candidates}
        self.versions: Versions = versions_for(gpu)
        self.template_digest = template_digest(kernel)
        conditions = Conditions.of(problem, gpu, self.versions, self.template_digest)
        self.log = log or trials_of(gpu.name, kernel, problem, conditions)
        # Earlier versions may have tried configs that are not in this version's space.
        legal = set(space)
        known = {config: trial for config, trial in self.log.read().items() if config in legal}
        self.trials = {config: trial for config, trial in known.items() if trial.is_final}
        again = [config for config in known if config not in self.trials]
        self.winner: TileConfig | None = None
        self._right: set[TileConfig] = set()
        in_hand = [] if bench.in_hand is None else [bench.in_hand]
        seeds = [*in_hand, *(candidate.config for candidate in candidates[:SEEDS])]
        if bench.resume and bench.in_hand in self.trials:
            bench.resume(self.trials[bench.in_hand].measurement)
        self.search = Search(space, first=[*again, *seeds], seed=SAMPLER_SEED)

    def go(self, total: int, seconds: float) -> None:
        """Try configs, up to `total` trials of all runs and for up to `seconds`."""
        deadline = time.monotonic() + seconds
        self.report.resumed(list(self.trials.values()))
        self._settle()
        for trial in self.trials.values():
            self.search.replay(trial.config, trial.measurement.median_us)
        ahead = Ahead(self.bench.compile) if self.bench.compile else None
        with contextlib.closing(ahead) if ahead else contextlib.nullcontext():
            self._search(total, deadline, ahead)
        # If no config has run, measure the declined configs, those that spill least first.
        declined = sorted(filter(_is_declined, self.trials.values()), key=lambda t: t.spill_bytes)
        if self.winner is None:
            for trial in declined[:SEEDS]:
                if self.winner is None or time.monotonic() < deadline:
                    self._measure(trial.config, time.monotonic(), trial.spill_bytes)
        self._confirm()

    def _confirm(self) -> None:
        """Go back to the config in hand if the winner does not beat it in a second run."""
        in_hand, winner = self.bench.in_hand, self.winner
        if winner is None or self.bench.confirm is None or in_hand in (None, winner):
            return
        if in_hand not in self.trials or self.trials[in_hand].measurement.status != "ok":
            return
        if self.bench.confirm(winner) or (self.bench.check and self.bench.check(in_hand)):
            return
        self.report.say(
            f"{winner.key} does not beat {in_hand.key} in a second run: {in_hand.key} stays"
        )
        self.winner = in_hand

    def _search(self, total: int, deadline: float, ahead: Ahead | None) -> None:
        waiting: deque[TileConfig] = deque()
        batch_size = max(SEEDS, BATCH)
        while True:
            if len(waiting) <= BATCH // 2:
                room = total - len(self.trials) - len(waiting)
                batch = list(itertools.islice(iter(self.search.ask, None), min(batch_size, room)))
                batch_size = BATCH
                waiting += batch
                if ahead and batch:
                    ahead.submit(batch)
            # The deadline counts only once a config may win: a short budget still gives a result.
            left = deadline - time.monotonic() if self._has_something() else math.inf
            if not waiting or left <= 0:
                return
            try:
                self._try(waiting.popleft(), ahead, None if left == math.inf else left)
            except TimeoutError:  # the budget ended before the compiler was done
                return

    def _has_something(self) -> bool:
        return self.winner is not None or any(map(_is_declined, self.trials.values()))

    def record(self, winner: TileConfig, command: str) -> TuningRecord:
        """Make the record of these trials: a finding of the machine that measured the winner."""
        estimate, trial = self.estimates.get(winner), self.trials[winner]
        finding = TuningRecord(
            gpu=self.gpu.name,
            arch=self.gpu.arch,
            policy=self.gpu.policy,
            kernel=self.kernel,
            problem=self.problem,
            config=winner,
            measurement=trial.measurement,
            estimate=None if estimate is None else EstimateSummary.of(estimate),
            versions=trial.versions,
            template_digest=self.template_digest,
            trials=len(self.trials),
            seconds_spent=round(sum(trial.seconds for trial in self.trials.values()), 3),
            source=trial.source,
            date=trial.date,
            command=command,
        )
        # Another machine's finding keeps its date: that machine may have a later finding. This
        # machine's finding gets a new date, as it has just been compared with all trials.
        is_own = trial.source == this_machine()
        return dated(replace(finding, date=now())) if is_own else finding

    def nothing_ran(self) -> str:
        """Format the error message for a search in which every config failed."""
        reasons = [
            f"{trial.config.key} {trial.measurement.status}: {trial.measurement.message}"
            for trial in list(self.trials.values())[:3]
        ]
        return (
            f"expected a config of {self.kernel} that runs on {self.gpu.name} for "
            f"'{self.problem}', none of {len(self.trials)} tried did"
            + (f" ({'; '.join(reasons)})" if reasons else "")
            + f"; look at what the model proposes: tilegen explain '{self.problem}'"
        )

    def _try(self, config: TileConfig, ahead: Ahead | None, timeout: float | None) -> None:
        """Compile and measure a config, and log the trial. Raises TimeoutError, DeviceLost."""
        started = time.monotonic()
        built = ahead.result(config, timeout) if ahead else None
        spill_bytes = 0 if built is None or isinstance(built, BuildFailed) else built.spill_bytes
        measurement = None if built is None else refused(built, self.gpu)
        if measurement is None:
            self._measure(config, started, spill_bytes)
        else:
            self._keep(config, measurement, started, spill_bytes)
            self.report.trial(self.trials, config, self.estimates.get(config), self.winner)
        self.search.tell(config, self.trials[config].measurement.median_us)

    def _measure(self, config: TileConfig, started: float, spill_bytes: int = 0) -> None:
        """Measure a config, log the trial and update the winner. Raises DeviceLost."""
        try:
            measurement = self.bench.measure(config)
        except DeviceLost as lost:
            self._keep(config, lost.measurement, started, spill_bytes, device_lost=True)
            raise
        self._keep(config, measurement, started, spill_bytes)
        self._settle()
        self.report.trial(self.trials, config, self.estimates.get(config), self.winner)

    def _keep(
        self,
        config: TileConfig,
        measurement: Measurement,
        started: float,
        spill_bytes: int = 0,
        *,
        device_lost: bool = False,
    ) -> None:
        """Log the trial of a config, whose time runs since `started`."""
        spent = time.monotonic() - started
        if (before := self.trials.get(config)) is not None:
            spent += before.seconds
        trial = Trial(
            config=config,
            measurement=measurement,
            seconds=round(spent, 3),
            spill_bytes=spill_bytes,
            device_lost=device_lost,
            source=this_machine(),
            versions=self.versions,
            date=now(),
        )
        self.log.append(trial)  # first, so that the result survives a crash
        self.trials[config] = trial

    def _settle(self) -> None:
        """Update the winner of the trials so far. A config with wrong results loses its time."""
        while (best := pick(self.trials, self.bench.in_hand)) and best not in self._right:
            started = time.monotonic()
            try:
                mistake = self.bench.check(best) if self.bench.check else None
            except DeviceLost as lost:
                self._keep(best, lost.measurement, started, device_lost=True)
                right = {c: trial for c, trial in self.trials.items() if c in self._right}
                self.winner = pick(right, self.bench.in_hand)
                raise
            if mistake is None:
                self._right.add(best)
            else:
                self._keep(best, mistake, started)
                self.report.say(f"{best!r} is fastest but {mistake.failure}")
        self.winner = best


def _is_declined(trial: Trial) -> bool:
    return trial.measurement.status == "declined"


def pick(trials: dict[TileConfig, Trial], in_hand: TileConfig | None = None) -> TileConfig | None:
    """Pick the winner: of the configs that tie with the fastest, the config in hand, or else the
    first in the order of configs.

    Medians tie within the fastest config's spread and within `TIE_LIMIT`, so that machines whose
    timings differ only by noise agree. None without any timing.
    """
    times = {
        config: trial.measurement
        for config, trial in trials.items()
        if trial.measurement.median_us is not None
    }
    if not times:
        return None
    fastest = min(times.values(), key=_median)
    limit = tie_limit(fastest)
    tied = [config for config, time_ in times.items() if _median(time_) <= limit]
    return in_hand if in_hand in tied else min(tied)


def _median(measurement: Measurement) -> float:
    return math.inf if measurement.median_us is None else measurement.median_us


def _command(task: KernelTask, trials: int | None, seconds: float | None) -> str:
    budget = "" if trials is None else f" --trials {trials}"
    budget += "" if seconds is None else f" --seconds {seconds:g}"
    return f"tilegen tune '{task.problem}' --kernel {task.kernel}{budget}"
