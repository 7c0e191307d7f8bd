"""A worker of a fleet: claims unfinished configs, measures them and publishes winners."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from tilegen.choose.ranker import ranked_space
from tilegen.disk import log
from tilegen.environment import current
from tilegen.errors import NoRecord, TilegenError, Unsupported
from tilegen.fleet.bench import Machine
from tilegen.fleet.jobs import Job
from tilegen.fleet.queue import PUBLISHED, STALE_SECONDS, Claim, Queue
from tilegen.fleet.storage import StorageAway, StorageBroken, in_a_hurry
from tilegen.kernels.config import TileConfig
from tilegen.model.estimate import Candidate
from tilegen.store import Location, TuningRecord, now, this_machine
from tilegen.store.transfer import put, put_trials
from tilegen.store.trials import Trial, trial_line, trials_path
from tilegen.store.versions import versions_for
from tilegen.tuning.bench import Ahead, Bench, refused
from tilegen.tuning.measure import DeviceLost, one_line
from tilegen.tuning.trials import trials_of
from tilegen.tuning.tuner import tune
from tilegen.units import us_text

if TYPE_CHECKING:
    from optuna.storages import BaseStorage

AT_ONCE = 4
"""Number of configs that a worker claims at once if it compiles ahead of the GPU."""
GIVE_BACK_SECONDS = 2.0
"""Time limit for putting claims back when a worker ends early [seconds]; the rest go stale."""
SHORTEST_POLL, LONGEST_POLL = 0.1, 5.0
"""Pauses between polls of studies whose last configs other workers measure [seconds]."""


class Worker:
    """A process of a fleet, with one GPU or with recordings."""

    def __init__(
        self,
        storage: BaseStorage,
        machine: Machine,
        *,
        trials: int | None = None,
        store: Location | None = None,
        stale_seconds: float = STALE_SECONDS,
        again: bool = False,
    ) -> None:
        """Measure up to `trials` configs of each job, in the model's order; None means all.

        Winners go to the local cache and to `store`. With `again`, winners that another worker has
        published there are published once more.
        """
        self._storage, self._machine = storage, machine
        self._most = trials
        self._own = Location(str(current().cache_dir), "own")
        self._store = store or self._own
        self._stale, self._again = stale_seconds, again
        self._queues: dict[Job, Queue] = {}
        self._plans: dict[Job, tuple[list[TileConfig], list[Candidate]]] = {}
        self._held: list[Claim] = []
        self._lock = threading.Lock()
        self.measured = 0
        """Number of configs that this worker has measured, without results that came too late."""
        self.unsaved: dict[Job, str] = {}
        """Jobs of the last run whose winner was measured but not saved, with the reasons."""

    def run(self, jobs: Sequence[Job]) -> dict[Job, TuningRecord | None]:
        """Work until this or other workers have done all jobs.

        Return the records that this worker published, None for jobs in which no config runs. A
        TilegenError ends only its job and is logged. Raises DeviceLost, StorageAway, StorageBroken
        and any other error; claims are put back first.
        """
        left = deque(jobs)
        left.rotate(random.randrange(len(left)) if left else 0)  # spread workers over studies
        published: dict[Job, TuningRecord | None] = {}
        idle, pause = 0, SHORTEST_POLL
        self.unsaved.clear()
        with self._beating():
            while left:
                job, before, is_measured = left.popleft(), self.measured, False
                try:
                    if not self._work_on(job):
                        left.append(job)
                    elif self._again or not self._queue(job).marked(self._mark):
                        is_measured = True
                        record, is_news = self._publish(job)
                        if self._again or is_news:
                            published[job] = record
                except (DeviceLost, StorageAway, StorageBroken):
                    raise
                except TilegenError as error:  # other jobs may succeed
                    outcome = "measured, not saved" if is_measured else "skipped"
                    log.warning("%s %s: %s", job, outcome, one_line(error))
                    if is_measured:
                        self.unsaved[job] = one_line(error)
                if self.measured > before:
                    idle, pause = 0, SHORTEST_POLL
                    continue
                idle += 1
                if left and idle >= len(left):  # other workers hold all remaining configs
                    time.sleep(pause * random.uniform(0.5, 1))
                    idle, pause = 0, min(2 * pause, LONGEST_POLL, self._stale / 4)
        return published

    def require_saved(self) -> None:
        """Check that all winners of the last run were saved. Raises Unsupported."""
        if self.unsaved:
            job, why = next(iter(self.unsaved.items()))
            winners = "1 winner" if len(self.unsaved) == 1 else f"{len(self.unsaved)} winners"
            raise Unsupported(
                f"{winners} measured, not saved, first {job}: {why}; the storage keeps what was "
                "measured: start the worker again when winners can be written"
            )

    def _work_on(self, job: Job) -> bool:
        """Measure the waiting configs of a study; return True if all its configs are measured."""
        queue, (configs, _) = self._queue(job), self._plan(job)
        if not queue.ready(configs, lambda: self._known(job)):
            return False
        queue.reap(configs)
        claim = queue.claim()
        if claim is not None:
            self._measure_all(job, queue, claim)
        return queue.results(configs) is not None

    def _measure_all(self, job: Job, queue: Queue, first: Claim) -> None:
        """Measure one config after the other until no config is waiting."""
        waiting: deque[Claim] = deque()
        try:
            self._hold(first)
            bench = self._machine.bench(job)
            ahead = Ahead(bench.compile) if bench.compile else None
            with closing(ahead) if ahead else contextlib.nullcontext():
                claim: Claim | None = first
                while claim or waiting:
                    if claim:
                        waiting.append(claim)
                        if ahead:
                            ahead.submit([claim.config])
                    if not claim or len(waiting) >= (AT_ONCE if ahead else 1):
                        self._measure(job, queue, waiting.popleft(), bench, ahead)
                    claim = self._hold(queue.claim())
        finally:
            self._give_back(queue)

    def _give_back(self, queue: Queue) -> None:
        """Put back unmeasured claims, for at most GIVE_BACK_SECONDS."""
        with self._lock:
            claims, self._held[:] = list(self._held), []
        if not claims:
            return
        released: list[Claim] = []
        is_late = threading.Event()

        def give() -> None:
            for claim in claims:
                if not is_late.is_set():
                    with contextlib.suppress(TilegenError):  # the storage is away, or broken
                        queue.release(claim)
                        released.append(claim)

        many = "1 claim" if len(claims) == 1 else f"{len(claims)} claims"
        log.info("giving back %s, for at most %g s", many, GIVE_BACK_SECONDS)
        # A thread, since a call may hang in a network or file system and cannot be interrupted.
        thread = threading.Thread(target=give, name="tilegen-give-back", daemon=True)
        with in_a_hurry(self._storage, GIVE_BACK_SECONDS):
            thread.start()
            thread.join(GIVE_BACK_SECONDS)
            is_late.set()
        if left := len(claims) - len(released):
            log.warning(
                "%d of %s could not be given back; other workers take over after %g s of silence",
                *(left, many, self._stale),
            )

    def _measure(
        self, job: Job, queue: Queue, claim: Claim, bench: Bench, ahead: Ahead | None
    ) -> None:
        """Compile and measure a config, and store the result. Raises DeviceLost after that."""
        started = time.monotonic()
        built = ahead.result(claim.config) if ahead else None
        lost: DeviceLost | None = None
        measurement = None if built is None else refused(built, job.gpu)
        if measurement is None:
            try:
                measurement = bench.measure(claim.config)
            except DeviceLost as error:
                measurement, lost = error.measurement, error
        trial = Trial(
            config=claim.config,
            measurement=measurement,
            seconds=round(time.monotonic() - started, 3),
            spill_bytes=getattr(built, "spill_bytes", 0),
            device_lost=lost is not None,
            source=this_machine(),
            versions=versions_for(job.gpu),
            date=now(),
        )
        counts = queue.finish(claim, trial, job.conditions)
        self._drop(claim)
        self.measured += counts
        time_us = measurement.median_us
        time_or_why = measurement.failure if time_us is None else us_text(time_us)
        log.info("%s %s %s%s", job, claim.config.key, time_or_why, "" if counts else " (too late)")
        if lost:
            raise lost

    def _publish(self, job: Job) -> tuple[TuningRecord | None, bool]:
        """Save the trials of a study, and the winner that `tune` finds among them. Return the
        winner, and True unless another worker has published the study meanwhile."""
        queue, (configs, candidates) = self._queue(job), self._plan(job)
        results = queue.results(configs)
        assert results is not None
        lines = "".join(json.dumps(result, allow_nan=False) + "\n" for result in results.values())
        name = str(trials_path(job.gpu.name, job.kernel, job.problem))
        for store in dict.fromkeys((self._own, self._store)):
            put_trials(name, [lines.encode()], store)
        bench = self._machine.bench(job)
        record: TuningRecord | None = None
        try:
            record = tune(
                job.task,
                bench=bench,
                candidates=candidates,
                space=configs,
                progress=False,
                command=f"tilegen worker --storage URL --catalog '{job.problem}'",
            )
        except NoRecord as error:
            log.warning("%s", error)
        # On a processor winners are confirmed by a second run, in which two workers may differ:
        # the first winner to be published stays.
        is_news = not queue.marked(self._mark)
        if record is not None and self._store != self._own and (is_news or self._again):
            moved = put(record, self._store)
            if moved.action == "refused":  # no mark is set, so another worker may publish
                raise Unsupported(str(moved))
            log.info("%s", moved)
        if is_news or self._again:
            queue.mark(self._mark, "none runs" if record is None else record.config.key)
        return record, is_news

    @property
    def _mark(self) -> str:
        """Mark of studies whose winner is in the store; for a local cache it names the machine."""
        where = f"{socket.gethostname()}:" if self._store == self._own else ""
        return f"{PUBLISHED}{where}{self._store.address()}"

    def _queue(self, job: Job) -> Queue:
        if job not in self._queues:
            self._queues[job] = Queue(
                self._storage, job.study, job.attributes, stale_seconds=self._stale
            )
        return self._queues[job]

    def _plan(self, job: Job) -> tuple[list[TileConfig], list[Candidate]]:
        """Return the configs to measure, in the model's order, and the model's candidates among
        them."""
        if job not in self._plans:
            space = self._machine.space(job)
            order, candidates = ranked_space(job.task, space)
            chosen = set(order[: self._most])
            proposed = [candidate for candidate in candidates if candidate.config in chosen]
            self._plans[job] = (order[: self._most], proposed)
        return self._plans[job]

    def _known(self, job: Job) -> list[dict[str, Any]]:
        """Return final results of tuning without this storage, on this machine or at shared
        locations."""
        configs, _ = self._plan(job)
        trials = trials_of(job.gpu.name, job.kernel, job.problem, job.conditions).read()
        return [
            trial_line(trials[config], job.conditions)
            for config in configs
            if config in trials and trials[config].is_final
        ]

    def _hold(self, claim: Claim | None) -> Claim | None:
        if claim is not None:
            with self._lock:
                self._held.append(claim)
        return claim

    def _drop(self, claim: Claim) -> None:
        with self._lock:
            self._held.remove(claim)

    @contextlib.contextmanager
    def _beating(self) -> Generator[None, None, None]:
        """Renew all claims of this worker in a thread during the block."""
        stop = threading.Event()

        def beat() -> None:
            count = 0
            while not stop.wait(self._stale / 4):
                count += 1
                with self._lock:
                    held = list(self._held)
                for claim in held:
                    with contextlib.suppress(StorageAway):  # the main thread will raise it
                        claim.beat(count)

        thread = threading.Thread(target=beat, name="tilegen-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
