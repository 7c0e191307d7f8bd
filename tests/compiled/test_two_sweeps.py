"""A family that only tests register computes attention with the bytes of its record."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.counted import moved_by
from tests.support.problems import tiled
from tests.two_sweeps import FWD_TWO_SWEEPS, registered
from tilegen import gpu
from tilegen.check.reference import make_inputs
from tilegen.check.verification import require, verify
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.bench import Timed, check_config

NAME = FWD_TWO_SWEEPS.name
CONFIG = TileConfig(block_m=32, block_n=32)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with registered(alone=True):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "window(9,30)", "prefix_lm(20)"])
def test_it_is_right_and_moves_the_bytes_of_its_record(mask: str) -> None:
    problem = AttentionProblem.parse(f"b1 hq2 hkv1 q100 kv77 d40/24 fp16 {mask}")
    require(verify(problem, {NAME: CONFIG}))
    assert check_config(problem, NAME, CONFIG) is None
    x = make_inputs(problem)
    actual = moved_by(render(problem, CONFIG, NAME, aligned=False), x.q, x.k, x.v, 0.1)
    expected = traffic_of(tiled(NAME, problem, CONFIG))
    assert actual == (expected.read_bytes, expected.write_bytes)


def test_it_is_right_where_tiles_are_listed() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv77 d40/24 fp16 dilated(3)")
    require(verify(problem, {NAME: CONFIG}))


def test_the_tuner_runs_it() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q40 kv50 d16 fp16 causal")
    Timed.of(KernelTask.of(NAME, problem, gpu("h200")), "cpu").runs(CONFIG)()
