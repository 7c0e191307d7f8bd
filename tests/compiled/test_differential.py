"""A sample of tests/differential, and that it catches broken kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.differential import oracle, trial
from tests.differential.chunk import examine
from tests.differential.draw import draw
from tests.differential.problems import PLAIN, Problem, parse
from tests.differential.report import Line, append, read, summary
from tests.differential.trial import attempt
from tests.support.calls import broken
from tilegen.kernels.config import Kernel

SEED = 20


@pytest.mark.slow
@pytest.mark.parametrize("number", range(16))
def test_random_problems(number: int) -> None:
    """The first of a seed; `python -m tests.differential --seed 20 --range 16:` goes on."""
    problem = draw(SEED, number)
    outcome = attempt(problem)
    assert outcome.what in ("right", "refused"), f"{outcome.detail}\n{problem}"


def test_a_problem_is_a_function_of_seed_and_number() -> None:
    problems = [draw(SEED, number) for number in range(6)]
    assert problems == [draw(SEED, number) for number in reversed(range(6))][::-1]
    texts = [str(problem) for problem in problems]
    assert [str(parse(text)) for text in texts] == texts
    assert len(set(texts)) == 6


RICH = Problem(
    heads=4,
    heads_kv=2,
    rows=20,
    columns=17,
    head_dim=24,
    head_dim_v=16,
    dtype="fp16",
    mask="((causal() | predicate(lambda b, h, q, k: t1[k])) & (sliding_window(12, 5) | full()))",
    score="score(lambda s, b, h, q, k: s + t0[h] * 0.25 * (k - q)).then(softcap(9.5))",
    tables={"t0": "floats(1, heads)", "t1": "bools(2, 10, columns)"},
    trained=("t0",),
    layouts=("inside", "padded", "dense", "sliced"),
    configs=PLAIN | {"fwd": "m32n32w4s2", "bwd_dkdv": "m32n32w4s2"},
    trains_lse=True,
    changed=True,
    seed=3,
)


@pytest.mark.slow
def test_a_rich_problem_is_right() -> None:
    assert attempt(RICH).what == "right", attempt(RICH)


@pytest.mark.slow
def test_a_broken_mask_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    load_broken = broken("k_idx <= q_idx", "k_idx < q_idx", ("fwd",))
    monkeypatch.setattr(trial, "executable", load_broken)
    outcome, small, why = examine(RICH)
    assert (outcome.what, why.what) == ("wrong", "wrong")
    expected = Problem(rows=1, columns=1, mask="causal()", configs=PLAIN, backward=False)
    assert replace(small, head_dim=16, head_dim_v=16) == expected


@pytest.mark.slow
def test_a_broken_gradient_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    load_broken = broken("head // GROUP_SIZE", "head % (num_heads_q // GROUP_SIZE)", ("bwd_dq",))
    monkeypatch.setattr(trial, "executable", load_broken)
    outcome, small, why = examine(RICH)
    assert outcome.what == "wrong"
    assert "dq" in why.detail
    assert "out" not in why.detail
    assert small.heads > small.heads_kv > 1  # what it takes to be seen
    assert (small.mask, small.score, small.tables) == ("full()", "", {})
    assert small.rows * small.columns <= 2


SPLIT = {"fwd_paged": "m16n16k128w4s2", "fwd_combine": "m1n16w4s1"}
LONGEST = {"rows": 20, "columns": 37, "batch": 3, "requests": ((20, 37), (7, 30), (0, 5))}
CALLS = {
    "packed": Problem(
        **LONGEST,
        call="varlen",
        mask="predicate(lambda b, h, q, k: (b % 2 == 0) | (k <= q))",
        configs=PLAIN,
    ),
    "pages": Problem(
        **LONGEST,
        call="packed pages",
        page=4,
        mask="causal('bottom_right')",
        configs=SPLIT,
        backward=False,
    ),
    "dropout": Problem(rows=20, columns=37, heads=2, dropout=0.3, configs=PLAIN),
}
BREAKS: dict[str, tuple[str, str, Kernel]] = {
    "packed": ("t0_q_idx % 2", "0 % 2", "fwd"),
    "pages": ("table_ptr + batch * table_row", "table_ptr", "fwd_paged"),
    "dropout": ("tl.load(dropout_ptr)", "tl.load(dropout_ptr) + 1", "bwd_dkdv"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_kind_are_right_and_found_where_they_are_broken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CALLS[name]
    assert attempt(problem).what == "right", attempt(problem)
    old, new, kernel = BREAKS[name]
    monkeypatch.setattr(trial, "executable", broken(old, new, (kernel,)))
    assert attempt(problem).what == "wrong", attempt(problem)


@pytest.mark.slow
def test_a_row_of_one_key_may_round_as_a_backward_rounds() -> None:
    """Its weight is 1, but a backward computes its score again, in another order of sums."""
    problem = Problem(
        heads=2,
        heads_kv=2,
        rows=19,
        columns=20,
        head_dim=128,
        head_dim_v=8,
        mask="tree(t0, t1)",
        tables={
            "t0": 'parents(974, rows + 7, dtype="int64")',
            "t1": "ints(492, 0, columns, batch)",
        },
        configs=PLAIN,
        seed=746,
    )
    assert attempt(problem).what == "right", attempt(problem)


@pytest.mark.slow
def test_a_stale_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In-place changes must be seen: here, the call's table stays stale."""
    kept = oracle.evaluate
    problem = replace(RICH, mask="full()", score="alibi(t0)", tables={"t0": "floats(1, heads)"})
    assert attempt(problem).what == "right"

    def stale(
        text: str, item: Problem, tables: dict[str, object], names: dict[str, object]
    ) -> object:
        if names is trial.TILEGEN_NAMES:
            tables = {
                name: table.detach().clone().requires_grad_(table.requires_grad)
                if isinstance(table, torch.Tensor)
                else table
                for name, table in tables.items()
            }
        return kept(text, item, tables, names)

    monkeypatch.setattr(oracle, "evaluate", stale)
    outcome = attempt(replace(problem, trained=()))
    assert outcome.what == "wrong", outcome


STEEP = Problem(
    rows=1,
    columns=54,
    score="score(lambda s, b, h, q, k: s - torch.cos(torch.exp2(k / 7)))",
    configs=PLAIN,
    backward=False,
    seed=540,
)


def test_a_steep_score_may_round_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel multiplies by a seventh that is rounded once, and the cosine's argument is large."""
    assert attempt(STEEP).what == "right", attempt(STEEP)
    load_broken = broken("0.14285714285714285", "0.142857", ("fwd",))
    monkeypatch.setattr(trial, "executable", load_broken)
    assert attempt(STEEP).what == "wrong"  # a seventh that is off by a millionth is no rounding


def test_roundings_follow_the_slope_and_are_zero_for_exact_values() -> None:
    noise = oracle.Noise(0.0, torch.Generator().manual_seed(0))
    k = torch.arange(1, 4097)
    for exact in (lambda: k / 4, lambda: torch.floor(k / 3), lambda: torch.exp2(-(k % 9) + 0.0)):
        before = exact()
        with oracle.Roundings(noise):
            assert torch.equal(exact(), before)
    ones = torch.full((4096,), 1.1)
    with oracle.Roundings(noise):
        moved = torch.cos(1000 * torch.sqrt(ones)).double()
    slope = abs(math.sin(1000 * math.sqrt(1.1))) * 1000 * math.sqrt(1.1)
    spread = float(moved.std()) / (slope * 2.0**-24)
    assert 1.4 < spread < 2.0  # sqrt(2) for the root and the product, and their sums round too


def test_problems_that_depend_on_rounding_are_left_out() -> None:
    for mask in ("0.1 * q >= 0.7", "torch.exp(q * 1e-7) > 1.0", "torch.floor(0.3 * q) == 3"):
        problem = Problem(rows=20, columns=20, mask=f"predicate(lambda b, h, q, k: {mask})")
        assert attempt(problem).what == "unclear", mask
    for mask in ("q / 3 >= k / 7", "0.25 * q >= k", "0.31 * q >= k + 0.5"):
        problem = Problem(rows=20, columns=20, mask=f"predicate(lambda b, h, q, k: {mask})")
        assert trial.Question(problem).answers[0].keeps_any, mask


def test_scores_that_are_numbers_only_in_fp64_are_no_problem() -> None:
    """A factor of e^-200 vanishes in fp32, and then -inf * 0 is NaN."""
    score = 'score(lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")) * {})'
    rows = {"rows": 1, "columns": 20, "configs": PLAIN, "backward": False}
    assert attempt(Problem(score=score.format("torch.exp(k * -10.0)"), **rows)).what == "unclear"
    assert attempt(Problem(score=score.format("torch.exp(k * -1.0)"), **rows)).what == "right"


def test_results_are_kept_and_summarised(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    wrong = trial.Outcome("wrong", "out", 0.5)
    refused = trial.Outcome("refused", "expected this, got 3", 0.5)
    append(path, Line.of(1, 0, RICH, trial.Outcome("right"), True, None))
    append(path, Line.of(1, 1, RICH, refused, False, None))
    append(path, Line.of(1, 2, RICH, wrong, False, (replace(RICH, score=""), wrong)))
    with path.open("a") as file:
        file.write('{"seed": 1, "number"')  # a run that was killed
    lines = read([path])
    assert [line.outcome for line in lines] == ["right", "refused", "wrong"]
    told = summary(lines)
    assert "3 problems of seed 1: 1 right, 1 refused, 1 wrong, 0 crashed." in told
    assert "| fp16 | 1 | 1 | 1 | 0 |" in told
    assert "| expected this | 1 |" in told
