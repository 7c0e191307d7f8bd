"""The effect of rounding: sums of absolute values, written out term by term."""

import math

import pytest
import torch

from tilegen.check.reference import Inputs, attention_reference, make_inputs
from tilegen.check.rounding import UNIT, UNITS, rounding_floors
from tilegen.masks import causal
from tilegen.masks.score import Score, score, sinks
from tilegen.problem import AttentionProblem

pytestmark = pytest.mark.oldest

TEXT = "b1 hq4 hkv2 q5 kv7 d8/16 fp32 full"


def inputs(text: str = TEXT) -> Inputs:
    return make_inputs(AttentionProblem.parse(text)).to(torch.float64)


def test_a_row_with_one_key_has_no_gradient_but_roundings() -> None:
    """Both parts of its dS cancel, as far as the order of their sums is the same."""
    x = inputs()
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)]
    out, _ = attention_reference(*leaves, mask=causal())
    (dq,) = torch.autograd.grad(out, leaves[:1], x.dout)
    assert dq[:, :, 0].abs().max() < 1e-15
    floors = rounding_floors(x, mask=causal(), scale=8**-0.5)
    assert (floors["dq"][:, :, 0] > UNIT).all()
    assert (floors["dq"] < 1e-4).all()


def test_sizes_are_those_of_fully_expanded_terms() -> None:
    x, scale = inputs(), 0.3
    floors = rounding_floors(x, scale=scale)
    q, k, v, dout = (t[0] for t in (x.q, x.k, x.v, x.dout))
    for head in (0, 3):
        for row in range(5):
            s = [scale * float(q[head, row] @ key) for key in k[head // 2]]
            total = sum(map(math.exp, s))
            lse, p = math.log(total), [math.exp(one) / total for one in s]
            reach = [scale * float(q[head, row].abs() @ key.abs()) for key in k[head // 2]]
            size = [a + abs(b) for a, b in zip(reach, s, strict=True)]
            shared = abs(lse) + sum(a * b for a, b in zip(p, size, strict=True))
            assert floors["lse"][0, head, row] == pytest.approx(UNITS * UNIT * (1 + shared))
            w = torch.tensor([a * (1 + b + shared) for a, b in zip(p, size, strict=True)])
            out = w.double() @ v[head // 2].abs()
            torch.testing.assert_close(floors["out"][0, head, row], UNITS * UNIT * out)
            g, weights = dout[head, row], torch.tensor(p).double()
            delta = g @ (weights @ v[head // 2])
            ds = w * (v[head // 2] @ g - delta).abs()
            ds += weights * (v[head // 2].abs() @ g.abs() + g.abs() @ out)
            dq = UNITS * UNIT * scale * ds @ k[head // 2].abs()
            torch.testing.assert_close(floors["dq"][0, head, row], dq)


def test_a_floor_does_not_depend_on_the_dtype_of_the_inputs() -> None:
    floors = [rounding_floors(inputs(TEXT.replace("fp32", d)), scale=1.0) for d in ("fp32", "bf16")]
    for name, floor in floors[0].items():
        torch.testing.assert_close(floor, floors[1][name], rtol=0.1, atol=1e-6)


def test_terms_of_a_scores_tensors_do_not_cancel() -> None:
    """Neither over pairs, whose factors k - 2 have both signs, nor over the places of a read."""
    x = inputs()

    def of(table: torch.Tensor, made: Score) -> torch.Tensor:
        return rounding_floors(x, score=made, scale=1.0, leaves=[table])["leaf 0"]

    slopes = torch.zeros(4, dtype=torch.float64).requires_grad_()
    signed = of(slopes, score(lambda s, b, h, q, k: s + (k - 2) * slopes[h]))
    positive = of(slopes, score(lambda s, b, h, q, k: s + abs(k - 2) * slopes[h]))
    torch.testing.assert_close(signed, positive)
    table = torch.zeros(7, dtype=torch.float64).requires_grad_()
    once = of(table, score(lambda s, b, h, q, k: s + table[q]))
    assert (once[:5] > 0).all()
    assert (once[5:] == 0).all()
    twice = of(table, score(lambda s, b, h, q, k: s + table[q] - table[k]))
    assert (twice[:5] > once[:5]).all()
    assert (twice > 0).all()


def test_sinks_are_answered_too() -> None:
    x = inputs()
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64).requires_grad_()
    sunk = rounding_floors(x, score=sinks(logits), scale=1.0, leaves=[logits])
    assert (sunk["leaf 0"] > 0).all()
    assert sunk["leaf 0"].shape == (4,)


def test_scores_that_are_constant_or_kept_nowhere() -> None:
    x = inputs()
    constant = rounding_floors(x, score=score(lambda s, b, h, q, k: 0 * s), scale=1.0)
    assert (constant["dq"] == 0).all()
    nothing = rounding_floors(x, mask=~causal() & causal(), scale=1.0)
    for name in ("out", "dq", "dk", "dv"):
        assert (nothing[name] == 0).all(), name
