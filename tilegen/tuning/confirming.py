"""Confirmation of a winner that another machine found: `confirm`."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from tilegen.choose.ranker import ranked_space
from tilegen.compiling.workers import Pool
from tilegen.disk import log
from tilegen.emit.identity import template_digest
from tilegen.errors import NoRecord
from tilegen.kernels.config import TileConfig
from tilegen.pipeline import choose_by_model
from tilegen.store import TuningRecord, locations, look_up, save, this_machine
from tilegen.store.election import join
from tilegen.store.trials import Conditions, Trial
from tilegen.store.versions import versions_for
from tilegen.task import KernelTask
from tilegen.tuning.bench import Bench, real_bench, refused
from tilegen.tuning.in_turns import is_faster
from tilegen.tuning.measure import Measurement
from tilegen.tuning.report import describe
from tilegen.tuning.trials import TrialLog, alone, trials_of
from tilegen.tuning.tuner import tune

PAIRS = 5
"""Number of measurements of each of the two configs; odd, so that one has the median."""


def confirm(task: KernelTask, *, bench: Bench | None = None) -> TuningRecord | None:
    """Time the winner of another machine in turns with the own choice, and save what this machine
    found; return the record. None if the winner is a finding of this machine.

    The own choice is the config of this machine's finding, or the choice without records. It is
    recorded only if it is faster beyond noise, or the winner does not run here, or gives wrong
    results. Raises NoRecord without a record, Unsupported without the device, and DeviceLost.
    """
    task = replace(task, problem=task.problem.bucket)
    findings = _findings(task)
    if not findings:
        raise NoRecord(
            f"expected a record of {task.kernel} for '{task.problem}' on {task.device.name} to "
            f"confirm, found none; make one: tilegen tune '{task.problem}'"
        )
    winner, here = findings[0], (this_machine(), task.device.name)
    own = [finding.config for finding in findings if (finding.source, finding.gpu) == here]
    if (winner.source, winner.gpu) == here:
        log.info("nothing to confirm: this machine found %s", describe(winner))
        return None
    with Pool() as pool, alone(task.device.name, task.kernel, task.problem):
        bench = bench or real_bench(task, pool)
        own += [bench.in_hand] if bench.in_hand else []
        record = _compared(task, bench, winner.config, (own or [choose_by_model(task).config])[0])
    saved = save(record)
    log.info("%s %s: %s", saved.file, "written" if saved.wins else "not won", saved.reason)
    return record


def _findings(task: KernelTask) -> tuple[TuningRecord, ...]:
    """Return the findings of all locations about a task, or else those of the nearest device, the
    winner first."""
    look = partial(
        look_up,
        task,
        versions=versions_for(task.device),
        template_digest=template_digest(task.kernel),
    )
    entries = [entry for place in locations() if (entry := look(where=[place], borrow=False))]
    entries = entries or [entry for entry in [look(borrow="only")] if entry]
    records = [one for entry in entries for one in (entry.record, *entry.others)]
    return join(records).findings if records else ()


def _compared(task: KernelTask, bench: Bench, theirs: TileConfig, own: TileConfig) -> TuningRecord:
    """Measure two configs in turns; return the record of the own one if it is faster, otherwise of
    the other. Trials are kept."""
    configs = list(dict.fromkeys([theirs, own]))
    results: dict[TileConfig, Measurement] = {}
    for config, built in bench.compile(configs) if bench.compile else ():
        if failure := refused(built, task.device):
            results[config] = failure
    running = [config for config in configs if config not in results]
    runs: dict[TileConfig, list[Measurement]] = {config: [] for config in running}
    spent = dict.fromkeys(configs, 0.0)
    for pair in range(PAIRS):
        for config in running[:: -1 if pair % 2 else 1]:  # either is first in turn
            started = time.monotonic()
            runs[config].append(bench.measure(config))
            spent[config] += time.monotonic() - started
    for config, measured in runs.items():
        failed = [one for one in measured if one.median_us is None]
        ordered = sorted(measured, key=lambda one: one.median_us or 0.0)
        results[config] = failed[0] if failed else ordered[PAIRS // 2]
    ratios = [
        (b.median_us or 0.0) / a.median_us
        for a, b in zip(runs.get(theirs, ()), runs.get(own, ()), strict=False)
        if a.median_us
    ]
    versions = versions_for(task.device)
    conditions = Conditions.of(task.problem, task.device, versions, template_digest(task.kernel))
    trials = trials_of(task.device.name, task.kernel, task.problem, conditions)
    space, candidates = ranked_space(task, configs)
    record = tune(
        task,
        bench=Bench(
            measure=results.__getitem__,
            check=bench.check,
            confirm=lambda _: is_faster(ratios),
            in_hand=theirs,
        ),
        space=space,
        candidates=candidates,
        log=_Afresh(trials, spent),
        progress=False,
        command=f"tilegen tune '{task.problem}' --kernel {task.kernel} --confirm",
    )
    known = trials.read().values()
    seconds = round(sum(trial.seconds for trial in known), 3)
    return replace(record, trials=len(known), seconds_spent=seconds)


class _Afresh:
    """A log whose earlier trials do not count."""

    def __init__(self, kept: TrialLog, spent: dict[TileConfig, float]) -> None:
        self._kept, self._spent = kept, spent

    def read(self) -> dict[TileConfig, Trial]:
        return {}

    def append(self, trial: Trial) -> None:
        self._kept.append(replace(trial, seconds=round(self._spent[trial.config], 3)))
