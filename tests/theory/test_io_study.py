"""The study of I/O: tiles, closed forms, counting, and the page that shows them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import io_study
from benchmarks.rows import read
from benchmarks.study import closed, masks, page, sweep
from benchmarks.study.counting import Counters
from benchmarks.study.masks import Case
from benchmarks.study.tiles import best_at, frontier, held_words, moved_words, problem_of
from tests.support.problems import tiled
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.symbols import B_r, M, c
from tilegen.model.traffic import traffic_of
from tilegen.theory.optimum import product_tiles

RESULTS = io_study.OUT
COUNTED = read(RESULTS / "counts.csv")
BYTES = {"fp32": 4, "fp16": 2}


def test_footprints_by_hand() -> None:
    """Q, O, m and l, S, one K and V tile at d = 64; then score tiles; then a slice of dK."""
    config = TileConfig(block_m=128, block_n=16)
    assert held_words("fwd", config, 64, 4) == 128 * (64 + 64 + 2) + 128 * 16 + 16 * 128
    scores = TileConfig(block_m=64, block_n=128, block_d=32)
    assert held_words("fwd_scores", scores, 512, 4) == 64 * 128 + 32 * (64 + 128) + 2 * 64
    assert held_words("bwd_scores", scores, 512, 2) == 2 * (2 * 64 * 128 + 2 * 64) + 32 * 192
    columns = TileConfig(block_m=16, block_n=64, block_d=128)
    assert held_words("bwd_columns", columns, 512, 4) == 64 * 128 + 16 * (64 + 128)


@pytest.mark.parametrize("family", ["q_stationary", "q_streamed", "small_cache"])
def test_the_frontier_is_the_best_that_fits(family: Any) -> None:
    steps = frontier(family, "forward", 128, 4, sweep.LONG)
    assert [step.memory for step in steps] == sorted(step.memory for step in steps)
    assert [step.words for step in steps] == sorted((step.words for step in steps), reverse=True)
    for step in steps:
        needs = [held_words(kernel, config, 128, 4) for kernel, config in step.configs.items()]
        assert max(needs) <= step.memory
        assert best_at(steps, step.memory) is step
    assert best_at(steps, steps[0].memory - 1) is None


def test_flash_attention_at_the_best_tiles_moves_the_predicted_words() -> None:
    """Words / N^2 = 2 d / B_r, and the largest B_r that fits is the best."""
    steps = frontier("q_stationary", "forward", 64, 4, sweep.LONG)
    assert [step.configs["fwd"].block_m for step in steps] == [16, 32, 64, 128, 256]
    for step in steps:
        per_score = step.words / sweep.LONG**2
        assert per_score == pytest.approx(2 * 64 / step.configs["fwd"].block_m, rel=0.01)


def test_score_width_enters_the_words_of_the_kernel_of_values() -> None:
    problem = problem_of(256, 64, 4)
    values = TileConfig(block_m=64, block_n=32, block_d=64)
    for width in (64, 128):
        scores = TileConfig(block_m=32, block_n=width, block_d=32)
        expected = (
            traffic_of(tiled("fwd_scores", problem, scores)),
            traffic_of(tiled("fwd_values", problem, values), score_width=width),
        )
        total = sum(one.read_bytes + one.write_bytes for one in expected)
        assert 4 * moved_words(problem, {"fwd_scores": scores, "fwd_values": values}) == total


# --------------------------------------------------------------------------------------------------
# Closed forms


def test_closed_forms_have_the_constants_of_the_model() -> None:
    d = 512
    for ratio in (0.1, 0.5, 2.0, 8.0):
        memory, x = ratio * d * d, ratio**-0.5
        assert closed.ideal_large("forward", memory, d, 4) == pytest.approx(4 * x**2)
        assert closed.ideal_large("backward", memory, d, 4) == pytest.approx(14 * x**2)
        if x > 1:
            assert closed.ideal_small("forward", memory, d, 4) == pytest.approx(1 + 4 * x)
            assert closed.ideal_small("backward", memory, d, 4) == pytest.approx(3 + 10 * x)
        actual = closed.lower_bounds("forward", 2**20, d, memory, 4)
        assert actual["lb1"] == pytest.approx(1 / (4 + 1 / x**2), rel=1e-3)
        assert actual["lb2"] == pytest.approx(2 * x - 1, rel=1e-2, abs=1e-3)
        assert actual["floor"] == pytest.approx((4 * d + 1) / 2**20)


def test_slopes_of_the_closed_forms() -> None:
    """-1 above M = d^2, towards -1/2 far below; chunks stop mattering when M grows."""

    def slope(curve: Any, memory: float, d: int) -> float:
        return sweep.slope([(at, curve("forward", at, d, 4)) for at in (memory, 2 * memory)])

    assert slope(closed.ideal, 64.0**2, 64) == pytest.approx(-1)
    assert slope(closed.ideal, 2.0**10, 2**12) == pytest.approx(-0.5, abs=0.01)
    assert slope(closed.chunked_large, 2.0**24, 64) == pytest.approx(-1, abs=0.001)
    assert slope(closed.chunked_small, 2.0**24, 2**16) == pytest.approx(-0.5, abs=0.02)
    assert closed.chunked_large("forward", 32 * 64, 64, 4) is None


@pytest.mark.slow
def test_square_tiles_are_those_of_the_model() -> None:
    expected = float(product_tiles()[B_r].subs({M: 50_000, c: 32}))
    assert closed.square_tile(50_000, 1.0, 32) == pytest.approx(expected)
    side = closed.square_tile(50_000, 2.0, 16)
    assert 2 * side**2 + 2 * 16 * side == pytest.approx(50_000)
    narrow = closed.product_words(2.0**22, 64, 1.0)  # B_e = d reads the scores once
    assert narrow == pytest.approx(1 + 64 / ((2.0**22 - 16 * 64) / (64 + 16)))


def test_where_staircases_cross() -> None:
    large = [(10.0, 16.0), (20.0, 8.0), (40.0, 4.0)]
    small = [(5.0, 9.0), (30.0, 6.0)]
    assert sweep.last_small_win(large, small) == 40.0
    assert sweep.last_small_win(large, [(50.0, 5.0)]) is None
    assert sweep.crossing(lambda memory: 1000 / memory - 10, 1, 1e6) == pytest.approx(100)
    assert sweep.growing_as_square(3 * 100 + 7 * 10, 3 * 400 + 7 * 20, 10) == 3.0


# --------------------------------------------------------------------------------------------------
# Masks


@pytest.mark.parametrize(
    "case, ratio",
    [
        (Case(pattern="dense"), 1.43),
        (Case(pattern="causal"), 1.02),
        (Case(pattern="window", parameter=4096), 0.37),
        (Case(pattern="window", parameter=512), 0.19),
        (Case(pattern="block_diagonal", parameter=128), 0.13),
        (Case(pattern="block_diagonal", parameter=2048), 0.27),
        (Case(pattern="unstructured", parameter=16), 5.7),
        (Case(pattern="unstructured", parameter=1024), 46),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_the_sparse_formula_at_known_numbers(case: Case, ratio: float) -> None:
    """N = 65536, d = 128, tiles of 128 x 128, M = 33408 words."""
    problem = case.problem(65536, 128) or Case(pattern="dense").problem(65536, 128)
    assert problem is not None
    words = moved_words(problem, {"fwd": TileConfig(block_m=128, block_n=128)})
    actual = words / masks.theorem_4_5(case, 65536, 128, 33408)
    assert actual == pytest.approx(ratio, rel=0.03)


def test_the_bound_of_a_dense_mask_is_lb1() -> None:
    actual = masks.bound(Case(pattern="dense"), 4096, 64, 20_480)
    expected = closed.lower_bounds("forward", 4096, 64, 20_480, 4)["lb1"] * 4096**2
    assert actual == pytest.approx(expected, rel=0.01)


def test_no_prediction_is_below_the_pattern_bound() -> None:
    config = TileConfig(block_m=64, block_n=64)
    for case in masks.COUNTED:
        row = masks.mask_row(case, 4096, 64, config, None)
        assert row.over_bound >= 1, case


# --------------------------------------------------------------------------------------------------
# Counting, and the committed results


@pytest.mark.slow
def test_counting_runs_the_emitted_kernels() -> None:
    configs: dict[Kernel, TileConfig] = {"fwd": TileConfig(block_m=32, block_n=16)}
    (small, *_) = frontier("small_cache", "backward", 64, 4, sweep.LONG)
    with Counters(1) as counters:
        (several,) = counters.count([(problem_of(64, 64, 4), small.configs)])  # two of bwd_columns
        dense, causal = counters.count(
            [
                (problem_of(64, 16, size, mask), configs)
                for size, mask in ((4, "full"), (2, "causal"))
            ]
        )
        with pytest.raises(RuntimeError, match="died"):
            counters.count(
                [(problem_of(64, 16, 4), {"fwd": TileConfig(block_m=16, block_n=16, block_d=32)})]
            )
    assert sum(map(sum, several.values())) == 4 * moved_words(problem_of(64, 64, 4), small.configs)
    assert dense["fwd"] == (4 * (64 * 16 + 2 * 64 * 32), 4 * 64 * 17)
    assert causal["fwd"] == (2 * (64 * 16 + (32 + 64) * 32), 2 * 64 * 16 + 4 * 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, direction, head_dim, dtype",
    sorted({(r["family"], r["direction"], r["head_dim"], r["dtype"]) for r in COUNTED[::10]}),
)
def test_committed_tiles_are_those_of_today_s_frontier(
    family: Any, direction: Any, head_dim: str, dtype: str
) -> None:
    steps = frontier(family, direction, int(head_dim), BYTES[dtype], sweep.LONG)
    where = {"family": family, "direction": direction, "head_dim": head_dim, "dtype": dtype}
    for row in COUNTED[::10]:
        if where.items() <= row.items():
            assert [step.key for step in steps].count(row["tiles"]) == 1


def test_committed_counts_equal_today_s_formula() -> None:
    assert len(COUNTED) > 300
    assert {row["equal"] for row in COUNTED} == {"True"}
    for row in COUNTED[::10]:
        size = BYTES[row["dtype"]]
        configs: dict[Any, TileConfig] = {}
        for kernel, tile in (text.split() for text in row["tiles"].split(", ")):
            m, n, d = (*map(int, tile.split("x")), 0)[:3]
            configs[kernel] = TileConfig(block_m=m, block_n=n, block_d=d)
        problem = problem_of(int(row["seqlen"]), int(row["head_dim"]), size)
        assert moved_words(problem, configs) == int(row["counted_words"])


def test_committed_masks_are_never_below_the_bound_and_structured_ones_below_the_formula() -> None:
    rows = [row for row in read(RESULTS / "masks.csv") if row["counted_words"]]
    assert all(row["counted_words"] == row["predicted_words"] for row in rows)
    assert all(float(row["over_bound"]) >= 1 for row in rows)
    for name in ("window 64", "window 256", "block_diagonal 64", "block_diagonal 256"):
        mine = {
            int(row["seqlen"]): float(row["over_theorem"]) for row in rows if row["mask"] == name
        }
        longest = max(mine)
        assert mine[longest] < 0.5
        falls = math.log(mine[longest] / mine[longest // 4]) / math.log(4)
        assert falls == pytest.approx(-0.5, abs=0.02)


def test_committed_slopes_show_both_regimes() -> None:
    def slope(family: str, head_dim: int) -> float:
        where = {"direction": "forward", "dtype": "fp32", "head_dim": str(head_dim)}
        return sweep.slope(sweep.points(COUNTED, family, where))

    assert slope("q_stationary", 64) < -0.95
    assert -0.65 < slope("small_cache", 512) < -0.45


@pytest.mark.slow
def test_the_page_shows_the_committed_results() -> None:
    text = io_study.PAGE.read_text(encoding="utf-8")
    assert text == page.fill(text, RESULTS)
    assert set(page.TABLES) == set(page.tables_of(text))
    for target in page.links_of(text):
        assert (io_study.PAGE.parent / target).exists(), target


def test_without_matplotlib_the_study_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import sys

    import typer

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(typer.Exit):
        io_study.main(out=tmp_path, processes=1, quick=True, draw=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert "pip install" in line
    assert list(tmp_path.iterdir()) == []
