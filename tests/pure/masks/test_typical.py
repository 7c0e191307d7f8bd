"""Tensors that stand for those of a score: as large as its indices need, with values that suit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.score_inputs import random
from tilegen.errors import InvalidProblem
from tilegen.masks.form import Shape
from tilegen.masks.packed_score import within_documents
from tilegen.masks.score import (
    Score,
    alibi,
    bias,
    parse_score,
    relative_bias,
    score,
    sinks,
    softcap,
    temperature,
)
from tilegen.masks.tensors import INTEGERS, LEAST, check_sizes, typical_score

HEADS, ROWS, COLUMNS = 4, 50, 83
SHAPE = Shape(2, HEADS, ROWS, COLUMNS)
SCALAR, BY_PLACE, BY_HEAD, PAIR = torch.tensor(0.7), random(INTEGERS), random(HEADS), random(2)
BLOCKS, FLAT, NEAR, ONE_OF_FOUR = random(4, 7), random(HEADS * ROWS), random(9), random(4, HEADS)
IDS, PLACES = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(INTEGERS, dtype=torch.int64)
FLAGS = torch.zeros(COLUMNS, dtype=torch.bool)


def of(function: Callable[..., Any]) -> Score:
    """Return the score of a function, with a type for its arguments."""
    return score(function)


SAME: dict[str, Score] = {
    "alibi": alibi(random(HEADS)),
    "temperature": temperature(random(HEADS).to(torch.float16)),
    "relative_bias": relative_bias(random(HEADS, 41)),
    "shared_relative_bias": relative_bias(random(11).to(torch.bfloat16)),
    "one_distance": relative_bias(random(HEADS, 1)),
    "bias": bias(random(2, HEADS, ROWS, COLUMNS)),
    "bias_of_heads": bias(random(1, HEADS, 1, COLUMNS)),
    "bias_of_pairs": bias(random(ROWS, COLUMNS).to(torch.float64)),
    "bias_of_rows": bias(random(2, 1, ROWS, 1)),
    "bias_of_columns": bias(random(COLUMNS)),
    "trained_bias": bias(random(HEADS, ROWS, COLUMNS).requires_grad_()),
    "sinks": sinks(random(HEADS)),
    "softcap": softcap(20.0),
    "composed": alibi(random(HEADS)).then(softcap(3.0)).then(bias(random(COLUMNS))),
    "trained_and_sinks": relative_bias(random(HEADS, 9).requires_grad_())
    .then(temperature(random(HEADS)))
    .then(sinks(random(HEADS))),
    "scalar": of(lambda s, b, h, q, k: s * SCALAR),
    "nested": of(lambda s, b, h, q, k: s + BY_PLACE[PLACES[IDS[q]]]),
    "flags": of(lambda s, b, h, q, k: torch.where(FLAGS[k], s, -s)),
    "of_a_flag": of(lambda s, b, h, q, k: s + PAIR[FLAGS[k].int()]),
    "from_the_end": of(lambda s, b, h, q, k: s + BY_HEAD[h - HEADS] + BY_HEAD[-1 - h]),
    "blocks": of(lambda s, b, h, q, k: s + BLOCKS[q // 16, (k - q) % 7]),
    "flat": of(lambda s, b, h, q, k: s + FLAT[h * ROWS + q]),
    "clamped": of(lambda s, b, h, q, k: s + NEAR[(q - k).abs().clamp(max=8)]),
    "constants": of(lambda s, b, h, q, k: s + ONE_OF_FOUR[3, h]),
}


@pytest.mark.parametrize("name", SAME)
def test_typical_tensors_are_as_large_as_real_ones(name: str) -> None:
    real = SAME[name]
    made = typical_score(real.form, SHAPE)
    assert made is not None
    assert made.form == real.form
    assert [one.shape for one in made.captured] == [one.shape for one in real.captured]
    assert [one.dtype for one in made.captured] == [one.dtype for one in real.captured]
    sizes = [one if one is None else one.shape for one in (made.sink_logits, real.sink_logits)]
    assert sizes[0] == sizes[1]
    tables = zip(made.tables, real.tables, strict=True)
    sized = tuple(one.but(axes=other.axes) for one, other in tables)
    check_sizes(Score(made.text, sized, made.sinks), SHAPE)


@pytest.mark.parametrize("name", SAME)
def test_a_record_says_enough_to_make_them(name: str) -> None:
    form = SAME[name].form
    again = typical_score(parse_score(form.notation), SHAPE)
    first = typical_score(form, SHAPE)
    assert again is not None
    assert first is not None
    for left, other in zip(again.captured, first.captured, strict=True):
        assert torch.equal(left, other)


def test_no_score_reads_nothing() -> None:
    assert typical_score(None, SHAPE) is None


@pytest.mark.parametrize(
    "text, sizes",
    [
        ("s+t0[k-q]", (COLUMNS,)),  # indices before the first count from the end
        ("s+t0[(q*q)//1000]", (3,)),
        ("s+t0[h]+t0[h+3]", (HEADS + 3,)),
        ("s+t0[seqlen_kv-1-k]", (COLUMNS,)),
        ("s+t0[q%(h+1)]", (HEADS,)),
        ("s+t0[q//seqlen_q]", (1,)),
        ("s+t0[(0.1*q)//1]", (5,)),
        ("s+t0[where(sin(k)<0,2,1)]", (3,)),
        ("s", (1,)),
    ],
)
def test_sizes_follow_from_the_bounds_of_an_index(text: str, sizes: tuple[int, ...]) -> None:
    made = typical_score(parse_score(f"score({text},float32)"), SHAPE)
    assert made is not None
    assert made.captured[0].shape == sizes


def test_an_index_of_which_nothing_is_known_takes_the_longest() -> None:
    """The index is a function of floats, rounded down; 0 is read beyond."""
    made = typical_score(of(lambda s, b, h, q, k: s + NEAR[torch.exp(0.1 * q).int()]).form, SHAPE)
    assert made is not None
    assert made.captured[0].shape == (COLUMNS,)


def test_indices_of_documents_stay_small() -> None:
    """A score of packed sequences looks up where its documents begin, by looked-up documents."""
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)
    packed = within_documents(bias(random(2, HEADS, 30, 30)), cu, cu, (50, 50))
    made = typical_score(packed.form, Shape(1, HEADS, 50, 50))
    assert made is not None
    table, *places = made.captured
    assert table.shape == (INTEGERS, HEADS, 50, 50)
    assert all(place.shape == (50,) for place in places)


@pytest.mark.parametrize("text", ["s/t0[q]", "s+1/t0[q]**2", "s*log(t0[q])", "s*sqrt(t0[q])"])
@pytest.mark.parametrize("element", ["float16", "float32", "int64"])
def test_divisors_of_a_score_are_positive(text: str, element: str) -> None:
    made = typical_score(parse_score(f"score({text},{element})"), Shape(1, 1, 5000, 1))
    assert made is not None
    assert made.captured[0].min() >= LEAST


def test_values_suit_their_elements() -> None:
    made = typical_score(
        parse_score("score(s+t0[q]+t1[q]*where(t2[q]<1,1.0,2.0),float32,int8,bool)"),
        Shape(1, 1, 5000, 1),
    )
    assert made is not None
    floats, integers, flags = made.captured
    assert floats.mean().abs() < 0.05
    assert integers.unique().tolist() == list(range(INTEGERS))
    assert flags.unique().tolist() == [False, True]


def test_every_seed_gives_other_values() -> None:
    form = alibi(random(HEADS)).then(sinks(random(HEADS))).form
    first, again, other = (typical_score(form, SHAPE, seed=seed) for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.captured[0], again.captured[0])
    assert not torch.equal(first.captured[0], other.captured[0])
    assert first.sink_logits is not None
    assert other.sink_logits is not None
    assert not torch.equal(first.sink_logits, other.sink_logits)


def test_one_tensor_has_one_number_of_dimensions() -> None:
    with pytest.raises(InvalidProblem, match="one number of indices for t0, got"):
        typical_score(parse_score("score(s+t0[h]+t0[h,q],float32)"), SHAPE)


@pytest.mark.parametrize("element", ["int32+", "bool+"])
def test_integers_have_no_gradient(element: str) -> None:
    with pytest.raises(InvalidProblem, match="gradients of floating-point tensors only"):
        parse_score(f"score(s+t0[h],{element})")
