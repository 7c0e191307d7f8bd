"""Judges of the model by published times, on rankings and times made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import (
    fit,
    judge,
)
from benchmarks.published.records import Sweep, Winners
from tilegen import gpu
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

PARSE, CONFIG = AttentionProblem.parse, TileConfig.parse

# --------------------------------------------------------------------------------------------------
# Judges

TILES = [CONFIG(key) for key in ("m64n32w4s2", "m64n64w4s2", "m128n64w8s2", "m128n128w8s2")]


def sweep(*times: float, length: int = 2048, name: str = "made up") -> Sweep:
    return Sweep(
        source="here",
        name=name,
        gpu="rtx3090",
        problem=PARSE(f"b4 hq12 q{length} d128 fp16 full"),
        kernels=("fwd",),
        seconds=dict(zip(TILES, times, strict=True)),
    )


def test_a_ranking_made_by_hand() -> None:
    measured = sweep(1.0, 1.1, 1.015, 2.0)
    predicted = dict(zip(TILES, (0.9, 0.6, 0.7, 0.8), strict=True))
    verdict = judge.judge_sweep(measured, predicted)
    assert verdict.regret == pytest.approx(0.1)
    assert (verdict.trials, verdict.chosen, verdict.best) == (2, TILES[1].key, TILES[0].key)
    assert verdict.spearman == pytest.approx(-0.4)
    assert verdict.ratio == pytest.approx(0.9)
    assert verdict.spread == 2.0


def test_within_noise_is_found() -> None:
    predicted = dict(zip(TILES, (2.0, 1.0, 3.0, 4.0), strict=True))
    short, long = (
        judge.judge_sweep(sweep(1, 1.05, 3, 4, length=n), predicted) for n in (512, 4096)
    )
    assert (short.trials, long.trials) == (1, 2)


def test_ties_come_before_the_winner() -> None:
    assert judge.rank([1.0, 2.0, 2.0, 3.0], 2.0) == 3
    assert judge.rank([1.0, 2.0], 1.0) == 1


def test_hits_of_winners() -> None:
    problem, spec = PARSE("b4 hq16 q2048 d64 bf16 full"), gpu("h100")
    grid = Winners(
        source="here",
        name="made up",
        measured_on="H100",
        gpu="h100",
        kernel="fwd",
        rows=((problem, TILES[0]), (problem, TILES[3]), (problem, CONFIG("m64n32w2s2"))),
    )
    verdict = judge.judge_winners(grid)
    assert verdict
    assert verdict.grid == 2 * 2 * 3
    assert verdict.first_1 <= verdict.first_4 <= verdict.first_8 <= verdict.first_16 <= 1
    assert verdict.in_own == pytest.approx(2 / 3), "two warps are not in tilegen's space"
    times = {one: judge.hoped(problem, spec, one, "fwd") for one in grid.grid}
    places = sorted(judge.rank(times.values(), times[winner]) for _, winner in grid.rows)
    assert verdict.median_rank == places[1]
    assert verdict.first_8 == pytest.approx(sum(place <= 8 for place in places) / 3)
    assert judge.judge_winners(replace(grid, rows=())) is None


def test_a_winner_that_does_not_fit_is_left_out_and_named() -> None:
    problem = PARSE("hq4 q2048 d512 bf16 full")
    table = Winners(
        source="here",
        name="made up",
        measured_on="RTX 5090",
        gpu="rtx5090",
        kernel="fwd_streamed",
        rows=((problem, CONFIG("m64n128d64w8s3")), (problem, CONFIG("m32n32d64w4s2"))),
    )
    verdict = judge.judge_winners(table)
    assert verdict
    assert verdict.judged == 1
    assert verdict.left_out == "1 tile that does not fit tilegen's kernel"


def test_configs_that_do_not_fit_come_last() -> None:
    problem, spec = PARSE("hq4 q2048 d256 bf16 full"), gpu("rtx5090")
    assert judge.hoped(problem, spec, CONFIG("m256n256w8s4"), "fwd") > 1e6
    assert judge.hoped(problem, spec, CONFIG("m64n32w4s1"), "fwd") < 1


# --------------------------------------------------------------------------------------------------
# The fit

TRUE = {"rates.tensor_efficiency": 0.7, "rates.latency_seconds": 4.0}


def made_up(length: int) -> Sweep:
    """A sweep whose times the model made, with other constants."""
    empty = sweep(0.0, 0.0, 0.0, 0.0, length=length)
    with fit.scaled(TRUE):
        return replace(empty, seconds=dict(judge.predictions(empty)))


@pytest.mark.slow
def test_known_constants_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sweep, "noise", 0.0)
    lengths = (1024, 2048, 4096)
    results = list(
        fit.leave_one_length_out(
            [made_up(one) for one in lengths], list(TRUE), absolute=lambda _: True
        )
    )
    assert [verdict.length for verdict, _ in results] == list(lengths)
    for verdict, factors in results:
        assert factors == pytest.approx(TRUE, rel=0.12)
        assert verdict.regret < 0.01
        assert verdict.spearman == 1.0


def test_errors_within_noise_do_not_count() -> None:
    measured = sweep(1.0, 1.1, 1.2, 1.3, length=512)
    near = {c: 1.02 * s for c, s in measured.seconds.items()}
    assert not any(fit.errors(near, measured, absolute=True))
    twice = {c: 2 * s for c, s in measured.seconds.items()}
    assert min(fit.errors(twice, measured, absolute=True)) > 0.1
    assert not any(fit.errors(twice, measured, absolute=False))
