"""Many processes on one store, a third of them killed.

In a process of its own, because it forks: the children share what is imported, and start at once.
Every child saves ever later findings about two keys, reads others' records in between, and writes
down what it was told is saved. Victims go on until SIGKILL hits them. Prints one line of JSON:
what was acknowledged, and everything that any child found wrong.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
import traceback
from pathlib import Path

from tests.support.records import H200, record
from tilegen.problem import AttentionProblem
from tilegen.store import Location, look_up, remote, save
from tilegen.store.transfer import put_trials
from tilegen.store.trials import Conditions, Trial, trial_line, trials_path
from tilegen.task import KernelTask

KEYS = [
    AttentionProblem.parse(f"b{1 << n} hq8 q{length} d64 bf16")
    for n in range(4)
    for length in (64, 128)
]
"""Of two keys a process: 32 processes are eight writers of each, and no finding is one too many."""
SEED = 20261121


def finding(process: int, key: int, step: int) -> dict[str, object]:
    """Return the arguments of a record: a later step is a later finding of the same machine."""
    chance = random.Random(f"{process} {key} {step}")
    return {
        "problem": KEYS[key],
        "us": 100.0 + chance.randrange(400) / 4,
        "source": f"{process:04x}",
        "trials": step,
        "date": f"2026-11-21T{step // 3600:02}:{step // 60 % 60:02}:{step % 60:02}Z",
    }


def keys_of(process: int) -> tuple[int, int]:
    return process % len(KEYS), (process + 1 + process // len(KEYS)) % len(KEYS)


class Heard(logging.Handler):
    """Keeps every warning: in this test none is in order."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def child(where: Location, process: int, steps: int, log: Path) -> None:
    """Save and read until done, or for ever if `steps` is 0; write down each save that returned."""
    heard = Heard()
    logging.getLogger("tilegen").addHandler(heard)
    chance = random.Random(f"{SEED} {process}")
    told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    step = 0
    try:
        trial = Trial(
            config=record().config,
            measurement=record().measurement,
            seconds=process,
            date=record().date,
        )
        problem = KEYS[process % len(KEYS)]
        conditions = Conditions(
            problem=problem.key, arch="sm_90", triton="3", driver="5", template_digest="a"
        )
        line = json.dumps(trial_line(trial, conditions)).encode()
        put_trials(str(trials_path("h200", "fwd", problem)), [line], where)
        os.write(told, json.dumps(["trial", process]).encode() + b"\n")
        while not steps or step < steps:
            key = keys_of(process)[step % 2]
            save(record(**finding(process, key, step)), location=where)
            os.write(told, json.dumps(["record", key, process, step]).encode() + b"\n")
            entry = look_up(
                KernelTask.of("fwd", chance.choice(KEYS), H200), where=[where], borrow=False
            )
            assert entry is None or entry.record.is_measured
            step += 1
        trouble = heard.said
    except BaseException:  # whatever it is, the test must hear of it
        trouble = [*heard.said, traceback.format_exc()]
    if trouble:
        os.write(told, json.dumps(["trouble", *trouble]).encode() + b"\n")


def main(url: str, folder: Path, steps: int, processes: int) -> None:
    if url.startswith("s3"):
        import s3fs  # noqa: F401 (before the forks, so that it is done once)
    # Every read goes to the store, and all processes on two cores may wait for one server.
    remote.FRESH_SECONDS = 0.0
    remote.ANSWER_SECONDS = remote.WRITE_SECONDS = 300.0
    where = Location(url, "shared" if "://" in url else "own")
    victims = set(random.Random(SEED).sample(range(processes), processes // 3))
    logs = [folder / f"{process}.log" for process in range(processes)]
    children: dict[int, int] = {}
    for process, log in enumerate(logs):
        if (pid := os.fork()) == 0:
            child(where, process, 0 if process in victims else steps, log)
            os._exit(0)
        children[process] = pid
    chance = random.Random(SEED)
    waiting = sorted(victims)
    while waiting:
        # At any moment, but not before it has done something that could be lost.
        time.sleep(chance.uniform(0, 0.05))
        process = chance.choice(waiting)
        if logs[process].exists() and logs[process].stat().st_size > 60:
            os.kill(children[process], signal.SIGKILL)
            waiting.remove(process)
    ends = {process: os.waitpid(pid, 0)[1] for process, pid in children.items()}
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    trouble = [line for line in lines if line[0] == "trouble"]
    trouble += [
        f"process {process} ended with {status}"
        for process, status in ends.items()
        if status != (signal.SIGKILL if process in victims else 0)
    ]
    last: dict[str, int] = {}
    for kind, *values in lines:
        if kind == "record":
            key, process, step = values
            last[f"{key} {process}"] = max(step, last.get(f"{key} {process}", 0))
    trials = [values[0] for kind, *values in lines if kind == "trial"]
    saves = sum(kind == "record" for kind, *_ in lines)
    print(json.dumps({"last": last, "trials": trials, "saves": saves, "trouble": trouble}))
