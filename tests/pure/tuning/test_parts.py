"""Parts of jobs for many devices, by a clock that only this file moves."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter

import pytest

from tests.support.records import H200, PROBLEM, record
from tests.support.replay import candidate, said
from tilegen.choose.ranker import search_space
from tilegen.errors import InvalidRecord
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.store.trials import Trial, trial_line
from tilegen.tuning.campaign import Budget, Standing
from tilegen.tuning.jobs import Job
from tilegen.tuning.on_ray import record_of, trial_of
from tilegen.tuning.parts import LEAST_PART, Work, next_part

JOB = Job(gpu=H200, kernel="fwd", problem=PROBLEM)
TIMES = {config: 100.0 + rank for rank, config in enumerate(search_space(JOB.task))}
START = 3.0
"""Time that a process takes before it measures [s]."""


def work(budget: Budget | None = None, count: int = len(TIMES)) -> Work:
    configs = [*TIMES][:count]
    return Work(
        Standing(
            job=JOB,
            configs=configs,
            candidates=[candidate(configs[0], 1e-4)],
            trials={},
            record=None,
            budget=budget or Budget(),
        )
    )


def seconds_with(devices: int, work: Work) -> float:
    """Return the time in which devices measure a job, a second a config; no config twice."""
    now, free, order = 0.0, devices, itertools.count()
    running: list[tuple[float, int, object]] = []
    measured: Counter[TileConfig] = Counter()
    is_recorded = False
    while True:
        while free and not is_recorded and (chosen := next_part([work], devices)):
            part = chosen[1]
            fresh = [one for one in part.configs if one not in work.standing.trials]
            heapq.heappush(running, (now + START + len(fresh), next(order), (part, fresh)))
            free -= 1
        if not running:
            break
        now, _, ended = heapq.heappop(running)
        part, fresh = ended  # type: ignore[misc]
        measured.update(fresh)
        for config in fresh:
            work.add(Trial(config=config, measurement=said(TIMES[config], 0.005), seconds=1.0))
        work.end(part)
        is_recorded |= part.is_whole
        free += 1
    assert is_recorded
    assert set(measured.values()) == {1}
    assert len(measured) == len(work.standing.configs)
    return now


def test_eight_devices_are_six_times_as_fast_as_one() -> None:
    assert len(TIMES) > 100
    assert seconds_with(1, work()) >= 6 * seconds_with(8, work())


def test_a_part_is_a_whole_job_while_there_are_more_jobs_than_devices() -> None:
    jobs = [work(count=20) for _ in range(8)]
    parts = [next_part(jobs, 4) for _ in range(4)]
    assert [part is not None and len(part[1].configs) for part in parts] == [20] * 4
    assert all(part and part[1].is_whole for part in parts)


def test_what_a_lost_part_has_measured_is_not_measured_again() -> None:
    job = work(count=20)
    part = job.next_part(LEAST_PART)
    assert part
    assert len(part.configs) == LEAST_PART
    done = part.configs[:3]
    for config in done:
        job.add(Trial(config=config, measurement=said(TIMES[config], 0.005)))
    job.end(part)
    again = job.next_part(20)
    assert again
    assert again.is_whole
    assert [trial.config for trial in again.trials] == list(done)


def test_a_budget_of_seconds_is_one_part_at_a_time() -> None:
    job = work(Budget(seconds=40.0))
    part = job.next_part(1)
    assert part
    assert part.is_whole
    assert part.seconds == 40.0
    assert job.next_part(1) is None


@pytest.mark.parametrize("config", [None, next(iter(TIMES))])
def test_the_second_loss_is_the_last(config: TileConfig | None) -> None:
    job = work()
    assert not job.is_to_blame(config)
    assert job.is_to_blame(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": "a100", "arch": "sm_80"},
        {"kernel": "bwd_dq"},
        {"problem": AttentionProblem.parse("b4 hq32 hkv8 q64 kv64 d128 bf16 full")},
        {"us": 0.1},
    ],
    ids=str,
)
def test_a_node_cannot_send_records_of_other_jobs_or_impossible_times(
    changes: dict[str, object],
) -> None:
    assert record_of(JOB, record().to_json()) == record()
    with pytest.raises(InvalidRecord):
        record_of(JOB, record(**changes).to_json())


def test_a_node_cannot_send_impossible_trials() -> None:
    (config, *_) = TIMES
    for us, is_credible in ((TIMES[config], True), (0.1, False)):
        trial = Trial(config=config, measurement=said(us, 0.005), seconds=1.0)
        sent = trial_line(trial, JOB.conditions)
        if is_credible:
            assert trial_of(JOB, sent).measurement == trial.measurement
        else:
            with pytest.raises(InvalidRecord, match="median_us must be at least"):
                trial_of(JOB, sent)
    with pytest.raises(InvalidRecord):
        trial_of(JOB, {"config": "m64"})
