"""Name the device of a Ray node, and measure parts of jobs on it.

Nothing is stored on the node: each trial goes to the driver as soon as it is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

from tilegen.choose.ranker import ranked_space
from tilegen.compiling.workers import Pool
from tilegen.device import Device
from tilegen.errors import NoRecord, TilegenError
from tilegen.kernels.config import TileConfig
from tilegen.store.trials import Trial, trial_line
from tilegen.store.versions import Versions, versions_for
from tilegen.tuning.bench import Bench
from tilegen.tuning.machine import RealMachine, ReplayMachine
from tilegen.tuning.measure import DeviceLost, Measurement, one_line
from tilegen.tuning.parts import Part
from tilegen.tuning.tuner import tune

BEGUN, TRIAL, RECORD, REFUSED = "begun", "trial", "record", "refused"
"""Kinds of messages to the driver: a config begins, its trial, the record, why there is none."""
Message = tuple[str, Any]
Send = Callable[[Message], None]


def probe(name: str) -> tuple[Device, Versions]:
    """Return the device of this node, or the named one that recordings stand for."""
    from tilegen.devices import device_named
    from tilegen.tuning.here import tuned_device

    device = device_named(name) if name else tuned_device()
    return device, versions_for(device)


def measure(part: Part, replay: str) -> Iterator[Message]:
    """Measure a part on the device of this process, or by recordings; yield messages.

    A config is measured only after the message that it begins was taken. The process ends if its
    device does not work any more.
    """
    messages: SimpleQueue[Message | BaseException | None] = SimpleQueue()
    taken = Semaphore(0)

    def send(message: Message) -> None:
        messages.put(message)
        taken.acquire()

    def work() -> None:
        try:
            _measure(part, replay, send)
        except BaseException as error:  # raised below, in the thread that Ray watches
            messages.put(error)
        else:
            messages.put(None)

    Thread(target=work, name="tilegen-measure", daemon=True).start()
    while (message := messages.get()) is not None:
        if isinstance(message, DeviceLost):
            os._exit(1)
        if isinstance(message, TilegenError):
            yield REFUSED, one_line(message)
            return
        if isinstance(message, BaseException):
            raise message
        yield message
        taken.release()


class _Sent:
    """A log of trials that sends each to the driver."""

    def __init__(self, part: Part, send: Send) -> None:
        self._trials = {trial.config: trial for trial in part.trials}
        self._conditions = part.job.conditions
        self._send = send

    def read(self) -> dict[TileConfig, Trial]:
        return dict(self._trials)

    def append(self, trial: Trial) -> None:
        self._trials[trial.config] = trial
        self._send((TRIAL, trial_line(trial, self._conditions)))


def _measure(part: Part, replay: str, send: Send) -> None:
    with Pool() as pool:
        machine = ReplayMachine(Path(replay)) if replay else RealMachine(pool)
        bench = _announced(machine.bench(part.job), send)
        if not part.is_whole:  # whoever has all trials checks the winner
            bench = replace(bench, check=None, confirm=None)
        space, candidates = ranked_space(part.job.task, part.configs)
        with suppress(*(() if part.is_whole else (NoRecord,))):
            record = tune(
                part.job.task,
                bench=bench,
                candidates=candidates,
                space=space,
                seconds=part.seconds,
                progress=False,
                log=_Sent(part, send),
            )
            if part.is_whole:
                send((RECORD, record.to_json()))


def _announced(bench: Bench, send: Send) -> Bench:
    """Return a bench that announces each config before a kernel of it runs in this process."""
    check = bench.check

    def announce(config: TileConfig) -> Measurement:
        send((BEGUN, config.key))
        return bench.measure(config)

    def check_announced(config: TileConfig) -> Measurement | None:
        send((BEGUN, config.key))
        assert check is not None
        return check(config)

    return replace(bench, measure=announce, check=check_announced if check else None)
