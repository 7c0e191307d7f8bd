"""Scores: constructors, composition, and derivatives against autograd."""

import math
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilegen
from tests.support import expression_trees
from tests.support.expression_trees import (
    B_IDX,
    BATCH,
    H_IDX,
    HEADS,
    K_IDX,
    Q_IDX,
    SEQLEN,
    SHAPE,
    tensor,
    value_of,
)
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.derivatives import derivatives, text_of
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import S, slot_of
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.score import (
    Score,
    alibi,
    bias,
    relative_bias,
    score,
    sinks,
    softcap,
    temperature,
)
from tilegen.masks.score_source import ScoreSource, score_source
from tilegen.masks.values import table_of

pytestmark = pytest.mark.oldest

SLOPES, TABLE, BIAS = tensor(HEADS), tensor(HEADS, 5), tensor(1, HEADS, 1, SEQLEN)
SCORES: dict[str, tuple[Score, Callable[..., Any]]] = {
    "softcap": (softcap(20), lambda s, b, h, q, k: 20 * torch.tanh(s / 20)),
    "alibi": (alibi(SLOPES), lambda s, b, h, q, k: s + SLOPES[h] * (k - q)),
    "temperature": (temperature(SLOPES), lambda s, b, h, q, k: s / SLOPES[h]),
    "relative_bias": (
        relative_bias(TABLE),
        lambda s, b, h, q, k: s + TABLE[h, (k - q).clamp(-2, 2) + 2],
    ),
    "shared_relative_bias": (
        relative_bias(TABLE[0]),
        lambda s, b, h, q, k: s + TABLE[0][(k - q).clamp(-2, 2) + 2],
    ),
    "bias": (bias(BIAS), lambda s, b, h, q, k: s + BIAS[0, h, 0, k]),
    "small_bias": (bias(BIAS[0, :, 0]), lambda s, b, h, q, k: s + BIAS[0, q % 3, 0, k]),
    "identity": (Score(), lambda s, b, h, q, k: s),
    "composed": (
        alibi(SLOPES).then(softcap(3)).then(bias(BIAS)).then(temperature(SLOPES)),
        lambda s, b, h, q, k: (
            (3 * torch.tanh((s + SLOPES[h] * (k - q)) / 3) + BIAS[0, h, 0, k]) / SLOPES[h]
        ),
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_equal_their_formulas(name: str) -> None:
    made, formula = SCORES[name]
    assert text_of(made.expression()) == made.text
    s = tensor(*SHAPE)
    if name == "small_bias":  # its rows are the heads of BIAS
        s = tensor(BATCH, HEADS, 3, SEQLEN)
        value = evaluate(
            made.expression(),
            made.captured,
            b=B_IDX,
            h=H_IDX,
            q=Q_IDX[:, :, :3],
            k=K_IDX,
            s=s,
            seqlen_q=3,
            seqlen_kv=SEQLEN,
        )
        expected = formula(s, B_IDX, H_IDX, Q_IDX[:, :, :3], K_IDX)
    else:
        value = value_of(made.expression(), made.captured, s)
        expected = formula(s, B_IDX, H_IDX, Q_IDX, K_IDX)
    torch.testing.assert_close(value.expand(expected.shape), expected)


def test_traced_values_as_numbers_are_refused_in_the_words_of_the_trace() -> None:
    q = torch.randn(1, 1, 16, 16)
    with pytest.raises(Unsupported, match=r"got float\(s\); write torch\.where"):
        tilegen.attention(q, q, q, score=lambda s, b, h, i, j: softcap(s))
    with pytest.raises(Unsupported, match=r"got torch.as_tensor; write it"):
        tilegen.attention(q, q, q, mask=lambda b, h, i, j: tilegen.documents([i, j]))


def test_scores_are_values() -> None:
    assert softcap(20) == softcap(20.0)
    assert hash(softcap(20)) == hash(softcap(20.0))
    assert softcap(20) != softcap(30)
    assert alibi(SLOPES) == alibi(SLOPES)
    assert alibi(SLOPES) != alibi(SLOPES.detach().clone())
    assert sinks(SLOPES) != Score()
    assert sinks(SLOPES) == sinks(SLOPES)
    assert alibi(SLOPES) == score(lambda s, b, h, q, k: s + SLOPES[h] * (k - q))
    assert alibi(SLOPES) != 3


def test_equal_tensors_of_composed_scores_take_one_slot() -> None:
    composed = alibi(SLOPES).then(temperature(SLOPES))
    assert composed.captured == (SLOPES,)
    assert composed.form.kinds == ("float64",)
    assert [id(t) for t in alibi(TABLE[0]).then(alibi(SLOPES)).captured][1:] == [id(SLOPES)]


def test_sinks_stay_beside_the_expression() -> None:
    composed = sinks(SLOPES).then(softcap(5))
    assert composed.sink_logits is SLOPES
    assert softcap(5).then(sinks(SLOPES)) == composed
    assert composed.text == softcap(5).text
    assert str(composed).endswith("with sinks")
    with pytest.raises(InvalidProblem, match="two"):
        composed.then(sinks(SLOPES))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: softcap(0), "positive cap, got 0"),
        (lambda: softcap(math.inf), "got inf"),
        (lambda: alibi(TABLE), "slopes to be floating with 1"),
        (lambda: alibi(torch.arange(3)), "int64"),
        (lambda: relative_bias(TABLE[:, :4]), "odd number"),
        (lambda: bias(torch.zeros(())), "bias"),
        (lambda: sinks(TABLE), "sinks"),
        (lambda: Score("s+t0[h]").expression(), "t0"),
    ],
)
def test_wrong_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        make()


def test_importing_scores_loads_no_sympy() -> None:
    program = (
        "import sys, tilegen.masks.score as m; m.softcap(3); hash(m.Score());"
        "assert 'sympy' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def gradients(made: Score, s: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of s and of the captured tensors, from symbolic derivatives."""
    value = made.expression()
    sums = [torch.zeros_like(t, dtype=torch.float64) for t in made.captured]
    for lookup in value.loads():
        slot = slot_of(lookup)
        if not made.captured[slot].requires_grad:
            continue
        index: list[torch.Tensor] = []
        target = sums[slot]
        by_element = value_of(derivatives(value, [lookup])[0], made.captured, s)
        change = (by_element * dout).expand(SHAPE).clone()
        for size, expr in zip(target.shape, lookup.args, strict=True):
            at = value_of(expr, made.captured, s).long().expand(SHAPE)
            at = torch.where(at < 0, at + size, at)
            change[(at < 0) | (at >= size)] = 0
            index.append(at.clamp(0, size - 1))
        target.index_put_(tuple(index), change, accumulate=True)
    return [value_of(derivatives(value, [S])[0], made.captured, s).expand(SHAPE) * dout, *sums]


def check_gradients(made: Score, seed: int) -> None:
    s, dout = tensor(*SHAPE, seed=seed), tensor(*SHAPE, seed=seed + 1).detach()
    for t in made.captured:
        t.grad = None
    wanted = [s, *(t for t in made.captured if t.requires_grad)]
    out = value_of(made.expression(), made.captured, s).expand(SHAPE)
    expected = torch.autograd.grad((out * dout).sum() + 0 * s.sum(), wanted, allow_unused=True)
    grads = gradients(made, s.detach(), dout)
    kept = [g for g, t in zip(grads, (s, *made.captured), strict=True) if t.requires_grad or t is s]
    for left, other in zip(kept, expected, strict=True):
        other = torch.zeros_like(left) if other is None else other
        torch.testing.assert_close(left.detach(), other, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "small_bias"])
def test_derivatives_of_usual_scores_equal_autograd(name: str) -> None:
    made, formula = SCORES[name]
    check_gradients(made, 3)
    check_gradients(score(formula), 4)


@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_derivatives_of_random_scores_equal_autograd(random: Random, depth: int, seed: int) -> None:
    expr = expression_trees.score(random, depth)
    captured = (
        tensor(HEADS, 10, seed=seed),
        torch.arange(7) % 5 - 2,
        torch.arange(5) % 3 == 0,
    )
    check_gradients(Score(to_text(expr), tuple(map(table_of, captured))), seed)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("s**2", "2.0*s"),
        ("abs(s)", "sign(s)"),
        ("max(0,s)", "where(0.0<=s,1.0,0.0)"),
        ("min(max(s,-2),3)", "where(-2.0<=s,where(max(-2.0,s)<=3.0,1.0,0.0),0.0)"),
        ("max(s,t0[h])", "where(s<t0[h],0.0,where(t0[h]==s,0.5,1.0))"),
        ("where(k<=q,s,-inf)", "where(k<=q,1.0,0.0)"),
        ("where(k<=q,s,-inf)**2", "where(k<=q,2.0*where(k<=q,s,-inf),0.0)"),
        ("s//1+sign(s)", "0.0"),
        ("tanh(s)", "1.0-tanh(s)**2"),
        ("sigmoid(s)", "(1.0-sigmoid(s))*sigmoid(s)"),
        ("s*t0[h]", "t0[h]"),
    ],
)
def test_derivatives_by_the_score(text: str, expected: str) -> None:
    assert to_text(derivatives(from_text(text, ["float"]), [S])[0]) == expected


def test_kernels_train_what_requires_a_gradient_alone() -> None:
    made = relative_bias(TABLE).then(temperature(SLOPES))
    actual = score_source(made.form, trains=True, precise=True)
    assert [part.where for part in actual.gradients] == ["dc0_ptr + c0_0_at", "dc1_ptr + head"]
    assert [part.reduce for part in actual.gradients] == ["part", "tl.sum(part)"]
    assert not score_source(made.form, trains=False, precise=True).gradients
    assert not score_source(alibi(SLOPES.detach()).form, trains=True, precise=True).gradients


def test_operations_without_derivative_are_named() -> None:
    with pytest.raises(Unsupported, match=r"got int64\(s\) in t0\["):
        source_of(score(lambda s, b, h, q, k: s + SLOPES[s.to(torch.int64)]))
    with pytest.raises(Unsupported, match=r"t0\[h\] in t1\[.*t0\[h\].*\]; pass it detached"):
        source_of(score(lambda s, b, h, q, k: s + BIAS[0, 0, 0][(2 * SLOPES[h]).long()]))


def source_of(made: Score) -> ScoreSource:
    return score_source(made.form, trains=True, precise=True)
