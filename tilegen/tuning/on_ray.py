"""The driver of a Ray cluster: nodes measure parts of jobs, the driver keeps what they find.

A part that is lost with its worker or node is begun again, without the trials that the driver has.
Parts are pinned to a node of their device, since Ray has one name for variants of a GPU.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from tilegen.choose.ranker import search_space
from tilegen.device import ONE_THREAD, Device
from tilegen.devices import device_named
from tilegen.disk import log
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord, save
from tilegen.store.election import why_not_valid
from tilegen.store.fields import fields_of
from tilegen.store.trials import Trial
from tilegen.store.versions import Versions, now
from tilegen.tuning import on_node
from tilegen.tuning.campaign import Budget, Outcome, Standing
from tilegen.tuning.jobs import Job, Shard, jobs_of
from tilegen.tuning.machine import ReplayMachine
from tilegen.tuning.measure import Measurement, one_line
from tilegen.tuning.parts import Node, Task, Work, next_part, progress
from tilegen.tuning.trials import credible_trial, trials_of
from tilegen.version import __version__

LOCAL = "local"
"""Ray's word for a cluster of its own on this machine."""
ANY = "a device to tune for"
GRACE_SECONDS = 60.0
"""Time for which a device may be missing before it is named [s]."""
LOOK_SECONDS, SAY_SECONDS = 1.0, 10.0
"""Pauses between looks at the nodes, and between lines of progress [s]."""


class Cluster:
    """A Ray cluster that tunes the problems of a catalogue."""

    def __init__(
        self,
        address: str,
        replay: Path | None,
        problems: Sequence[AttentionProblem],
        kernels: Sequence[Kernel] | None,
        wanted: Sequence[str],
        shard: Shard | None,
    ) -> None:
        """`wanted` names the devices to tune for; by default those that nodes have: their GPUs, or
        else their processors. Raises Unsupported without Ray."""
        try:
            self._ray: Any = import_module("ray")
        except ImportError:
            raise Unsupported("--ray needs Ray: pip install 'tilegen[ray]'") from None
        self._address, self._replay = address, replay
        self._recorded = ReplayMachine(replay) if replay else None
        self._problems, self._kernels, self._shard = problems, kernels, shard
        self._wanted = [device_named(name).name for name in wanted]
        self._budget = Budget()
        self._nodes: dict[str, Node] = {}
        self._probes: dict[Any, dict[str, Any]] = {}
        self._asked: set[str] = set()
        self._works: dict[str, list[Work]] = {}
        self._versions: dict[str, Versions] = {}
        self._tasks: dict[Any, Task] = {}
        self._missing: dict[str, float] = {}
        """Devices that no node has, and since when."""
        self._looked = self._said = 0.0
        self._measured = 0
        self._quiet = ExitStack()

    def __enter__(self) -> Cluster:
        """Connect. Raises Unsupported."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {}
        if self._address == LOCAL:
            options["include_dashboard"] = False
        before = signal.getsignal(signal.SIGTERM)
        # Ray prints the ends of workers, which are logged here, on the standard output.
        self._quiet.enter_context(redirect_stdout(sys.stderr))
        try:
            self._ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                **options,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            self._quiet.close()
            raise Unsupported(
                f"expected a Ray cluster at --ray {self._address!r}: {one_line(error)}"
            ) from error
        signal.signal(signal.SIGTERM, before)  # Ray's would end without a word
        # On a GPU each part needs a process of its own, which is Ray's default: a process that has
        # used one GPU cannot use another.
        calls = {"max_calls": 0} if self._recorded else {}
        self._measure = self._ray.remote(
            num_returns="streaming", max_retries=0, _generator_backpressure_num_objects=1, **calls
        )(on_node.measure)
        self._probe = self._ray.remote(max_retries=0)(on_node.probe)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()
        self._quiet.close()

    @property
    def devices(self) -> list[str]:
        """The device of each slot of the cluster."""
        return [node.device.name for node in self._nodes.values() for _ in range(node.slots)]

    def standings(self, budget: Budget) -> list[Standing]:
        """Return how far the jobs are, for the nodes of now."""
        self._budget = budget
        self._look()
        while self._probes:
            self._wait()
        return [work.standing for works in self._works.values() for work in works]

    def tune(self, budget: Budget) -> Outcome:
        """Tune until all jobs are done that a node can do. Raises Unsupported if no node has a
        device."""
        self._budget = budget
        while time.monotonic() < budget.until:
            self._look()
            self._begin()
            self._say()
            if not (self._tasks or self._probes or self._is_waiting()):
                break
            self._wait()
        works = [work for works in self._works.values() for work in works]
        if not works and not self._wanted:
            raise Unsupported(
                "expected a node with a GPU, or a processor that kernels can be compiled for, "
                f"found none among {len(self._asked)} nodes"
            )
        late = [device for device in self._missing if self._is_late(device)]
        return Outcome(
            measured=self._measured,
            records=[work.standing.record for work in works if work.standing.record],
            left=[str(work.standing.job) for work in works if not work.is_over],
            skipped={str(work.standing.job): work.refusal for work in works if work.refusal},
            missing=late,
        )

    def _look(self) -> None:
        """Compare the nodes with those known; ask new ones for their devices."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        alive = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        for gone in self._nodes.keys() - alive.keys():
            del self._nodes[gone]
        for node, resources in alive.items():
            if node in self._asked or not {"CPU", "GPU"} & resources.keys():
                continue
            self._asked.add(node)
            options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 1 if "GPU" in resources else 0}
            name = ""
            if self._recorded:
                options["num_gpus"] = 0
                name = next((one for one in self._recorded.gpus if one in resources), "")
                name = name or self._recorded.gpus[0]
            probe = self._probe.options(**options, scheduling_strategy=self._on(node))
            self._probes[probe.remote(name)] = {"node": node, "resources": resources}
        has = {node.device.name for node in self._nodes.values()}
        waits = {one for one, works in self._works.items() if not all(w.is_over for w in works)}
        if not (self._works or self._wanted):
            waits.add(ANY)
        for device in {*self._wanted, *waits} - has:
            before = self._missing.setdefault(device, time.monotonic())
            if self._is_late(device) and before > 0:
                self._missing[device] = -before
                log.warning("no node has %s, for which work waits; the rest goes on", device)
        self._missing = {k: v for k, v in self._missing.items() if k not in has}
        if self._works:
            self._missing.pop(ANY, None)

    def _is_late(self, device: str) -> bool:
        return time.monotonic() - abs(self._missing[device]) >= GRACE_SECONDS

    def _is_waiting(self) -> bool:
        """Return True if a node may still come for work that waits."""
        return any(not self._is_late(device) for device in self._missing)

    def _on(self, node: str) -> Any:
        strategies = import_module("ray.util.scheduling_strategies")
        return strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def _wait(self) -> None:
        """Wait for the next message of a task or a probe, and take it."""
        waiting = [*self._probes, *self._tasks]
        if not waiting:
            time.sleep(LOOK_SECONDS / 4)
            return
        for ready in self._ray.wait(waiting, num_returns=1, timeout=LOOK_SECONDS)[0]:
            if ready in self._probes:
                self._join(ready)
            else:
                self._take(ready)

    def _join(self, probe: Any) -> None:
        """Take a node's answer: its device joins, unless its versions differ."""
        asked = self._probes.pop(probe)
        short, resources = asked["node"][:8], asked["resources"]
        try:
            device, versions = self._ray.get(probe)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            log.warning("node %s is not used: %s", short, one_line(cause))
            return
        is_processor = device.policy == ONE_THREAD
        if self._wanted and device.name not in self._wanted:
            return
        if (
            is_processor
            and not self._wanted
            and any(node.device.policy != ONE_THREAD for node in self._nodes.values())
        ):
            return
        same = self._versions.setdefault(device.name, versions)
        if versions.tilegen != __version__ or versions != same:
            log.warning("node %s is not used: it has %s, not %s", short, versions, same)
            return
        gpus, cpus = int(resources.get("GPU", 0)), resources.get("CPU", 1)
        options: dict[str, Any] = {"num_cpus": cpus, "num_gpus": 0}
        if gpus:
            options = {"num_cpus": 0, "num_gpus": 1}
        elif self._recorded:
            options["num_cpus"] = 1
        slots = gpus or (int(cpus) if self._recorded else 1)
        node = Node(asked["node"], device, versions, slots, options)
        self._nodes[node.id] = node
        log.info("node %s has %s, for %d at once", short, device.name, slots)
        if device.name not in self._works:
            self._works[device.name] = [self._work(job) for job in self._jobs(device, versions)]

    def _jobs(self, device: Device, versions: Versions) -> list[Job]:
        if self._recorded:
            jobs = self._recorded.jobs(self._problems, device.name)
            jobs = [job for job in jobs if not self._kernels or job.kernel in self._kernels]
        else:
            jobs = jobs_of(self._problems, device, self._kernels, versions)
        return [job for job in jobs if self._shard is None or self._shard.has(job)]

    def _work(self, job: Job) -> Work:
        space = self._recorded.space(job) if self._recorded else search_space(job.task)
        return Work(Standing.of(job, space, self._budget))

    def _begin(self) -> None:
        """Give every free device of the cluster a part."""
        devices = self.devices
        for node in self._nodes.values():
            works = self._works[node.device.name]
            while node.busy < node.slots:
                chosen = next_part(works, devices.count(node.device.name))
                if chosen is None:
                    break
                work, part = chosen
                options = {**node.options, "scheduling_strategy": self._on(node.id)}
                task = self._measure.options(**options).remote(part, str(self._replay or ""))
                self._tasks[task] = Task(node, work, part)
                node.busy += 1

    def _take(self, ready: Any) -> None:
        """Take the next message of a task, or its end."""
        task = self._tasks[ready]
        try:
            kind, value = self._ray.get(next(ready))
        except StopIteration:
            self._end(ready)
        except self._ray.exceptions.RayError as error:
            self._end(ready)
            self._lost(task, error)
        else:
            try:
                self._keep(task, kind, value)
            except InvalidRecord as error:  # measured again, but not for ever
                log.warning("node %s: refused a result: %s", task.node.id[:8], one_line(error))
                self._blame(task, f"its result is refused: {one_line(error)}")

    def _keep(self, task: Task, kind: str, value: Any) -> None:
        """Store what a node found. Raises InvalidRecord for what no device can find."""
        work, job = task.work, task.part.job
        if kind == on_node.BEGUN:
            task.begun = TileConfig.parse(value)
            log.debug("node %s: %s begins %s", task.node.id[:8], job, value)
        elif kind == on_node.TRIAL:
            trial = trial_of(job, value)
            self._measured += trial.config not in work.standing.trials
            self._add(work, trial)
            task.begun = None
        elif kind == on_node.RECORD:
            record = record_of(job, value)
            save(record)
            work.standing = replace(work.standing, record=record)
        elif kind == on_node.REFUSED:
            work.refusal = value
            log.warning("%s skipped: %s", job, value)

    def _add(self, work: Work, trial: Trial) -> None:
        job = work.standing.job
        trials_of(job.gpu.name, job.kernel, job.problem, job.conditions).append(trial)
        if trial.is_final:
            work.add(trial)

    def _end(self, ready: Any) -> None:
        task = self._tasks.pop(ready)
        task.node.busy -= 1
        task.work.end(task.part)

    def _lost(self, task: Task, error: Exception) -> None:
        """Note the loss of a part; a config that ended two workers is recorded as failed."""
        job, node = task.part.job, task.node.id
        alive = {one["NodeID"] for one in self._ray.nodes() if one["Alive"]}
        cause = one_line(getattr(error, "cause", None) or str(error).split(".")[0])
        log.warning("%s lost on node %s (%s); what it measured is kept", job, node[:8], cause)
        ended = (self._ray.exceptions.WorkerCrashedError, self._ray.exceptions.OutOfMemoryError)
        if node not in alive or not isinstance(error, (*ended, self._ray.exceptions.RayTaskError)):
            log.warning("node %s left, with %s", node[:8], job.gpu.name)
            self._nodes.pop(node, None)  # if it is there after all, it is asked again
            self._asked.discard(node)
        else:
            self._blame(task, f"its worker ended: {cause}")

    def _blame(self, task: Task, why: str) -> None:
        work, config, job = task.work, task.begun, task.part.job
        if not work.is_to_blame(config):
            return
        if config is None:
            work.refusal = why
            return
        failed = Measurement(status="launch_failed", message=one_line(f"twice {why}"))
        trial = Trial(
            config=config,
            measurement=failed,
            device_lost=True,
            versions=task.node.versions,
            date=now(),
        )
        self._add(work, trial)
        log.warning("%s: %s ended two workers, and counts as failed", job, config.key)

    def _say(self) -> None:
        """Log the progress, from time to time."""
        if time.monotonic() < self._said + SAY_SECONDS:
            return
        self._said = time.monotonic()
        for device, works in self._works.items():
            running = sum(task.node.device.name == device for task in self._tasks.values())
            log.info("%s: %s", device, progress(works, self.devices.count(device), running))


def trial_of(job: Job, sent: Any) -> Trial:
    """Parse a trial that a node has sent for a job. Raises InvalidRecord for anything else, and for
    impossible times."""
    of = job.gpu.name, job.kernel, job.problem, job.conditions
    if (trial := credible_trial(fields_of(sent, ""), *of)) is None:
        raise InvalidRecord(f"expected a trial under {job.conditions}")
    return trial


def record_of(job: Job, sent: str) -> TuningRecord:
    """Parse a record that a node has sent for a job. Raises InvalidRecord for a record of another
    kernel, problem or device, and for impossible times."""
    record = TuningRecord.from_json(sent)
    key = record.gpu, record.kernel, record.problem
    if key != (job.gpu.name, job.kernel, job.problem.rounded):
        raise InvalidRecord(f"expected a record of {job}, got {' '.join(map(str, key))}")
    if reason := why_not_valid(record):
        raise InvalidRecord(reason)
    return record
