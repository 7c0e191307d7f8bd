"""Traced functions compute what the functions themselves compute, called with index tensors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

import tilegen
from tests.support import user_forms
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks import predicate
from tilegen.masks.language.derivatives import text_of
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.texts import from_text, to_text
from tilegen.masks.tiles.tile_ranges import is_solved
from tilegen.masks.tracing.trace import trace_mask, trace_score
from tilegen.masks.tracing.tracer import MAX_ELEMENTS

BATCH, HEADS, SEQLEN_Q, SEQLEN_KV = 2, 3, 11, 13
GRID = [
    torch.arange(size).reshape([-1 if axis == i else 1 for axis in range(4)])
    for i, size in enumerate((BATCH, HEADS, SEQLEN_Q, SEQLEN_KV))
]
SHAPE = (BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)
SCORES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4])
OFFSETS = torch.tensor([0, 3, 5, 9, 12], dtype=torch.int32)
WINDOW = torch.tensor(4)
IS_PREFIX = torch.arange(SEQLEN_KV) < 5
LAYOUT = torch.arange(BATCH * 4 * 5).reshape(BATCH, 4, 5) % 3 == 0
BIAS = torch.linspace(-1, 1, HEADS * 25, dtype=torch.float64).reshape(HEADS, 25)
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1, dtype=torch.float64)
TEMPERATURE = torch.tensor(1.7, dtype=torch.float64)
ROWS = torch.randn(13, MAX_ELEMENTS, generator=torch.Generator().manual_seed(1)).double()


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def sliding(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx - kv_idx <= 4


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx < 5


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def document_causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    q_logical = q_idx - OFFSETS[DOCUMENTS[q_idx]]
    kv_logical = kv_idx - OFFSETS[DOCUMENTS[kv_idx]]
    return document(b, h, q_idx, kv_idx) & causal(b, h, q_logical, kv_logical)


def natten(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    width, reach = 4, 1
    q_x, q_y = q_idx // width, q_idx % width
    kv_x, kv_y = kv_idx // width, kv_idx % width
    centre_x = q_x.clamp(reach, width - 1 - reach)
    centre_y = torch.clamp(q_y, min=reach, max=width - 1 - reach)
    return ((centre_x - kv_x).abs() <= reach) & (torch.abs(centre_y - kv_y) <= reach)


def block_diffusion(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    half, block = 6, 2
    q_clean, kv_clean = q_idx >= half, kv_idx >= half
    q_block = torch.where(q_clean, (q_idx - half) // block, q_idx // block)
    kv_block = torch.where(kv_clean, (kv_idx - half) // block, kv_idx // block)
    diagonal = (q_block == kv_block) & (q_clean == kv_clean)
    offset = (q_block > kv_block) & kv_clean & (q_clean == 0)
    return diagonal | offset | ((q_block >= kv_block) & kv_clean & q_clean)


MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "noop": noop_mask,
    "and": and_masks(causal, sliding),
    "or": or_masks(prefix, and_masks(causal, sliding)),
    "prefix_lm": or_masks(causal, prefix),
    "document": document,
    "document_causal": document_causal,
    "natten": natten,
    "block_diffusion": block_diffusion,
    "dilated": lambda b, h, q, k: ((q - k) % 3 == 0) & (q >= k),
    "negative_modulus": lambda b, h, q, k: (k - q) % -4 + (k - q) // -3 > 0,
    "floor": lambda b, h, q, k: ((q - k) // 3 == (k - 4) // -2) | ((q - k) % 3 == (k - 4) % -2),
    "head_window": lambda b, h, q, k: (q - k).abs() < h * 2 + 1,
    "scalar": lambda b, h, q, k: q - k <= WINDOW,
    "reversed": lambda b, h, q, k: (WINDOW > q - k) & (3 < k + 2) & (WINDOW - q < 2 * WINDOW),  # noqa: SIM300
    "bool_tensor": lambda b, h, q, k: IS_PREFIX[k] | causal(b, h, q, k),
    "bool_as_number": lambda b, h, q, k: IS_PREFIX[k] * q + IS_PREFIX[q].int() > 4,
    "block_sparse": lambda b, h, q, k: LAYOUT[b, q // 3, k // 3],
    "xor": lambda b, h, q, k: (q > 3) ^ (k > 5) ^ True,
    "equal_conditions": lambda b, h, q, k: (q > 3) == (k > 5),
    "unequal_conditions": lambda b, h, q, k: (q > 3) != (k > 5),
    "functions": lambda b, h, q, k: torch.logical_or(
        torch.logical_and(torch.ge(q, k), torch.lt(q - k, 3)), torch.logical_not(torch.gt(k, 2))
    ),
    "more_functions": lambda b, h, q, k: (
        torch.eq(torch.remainder(q, 3), torch.floor_divide(k, 5))
        | torch.ne(torch.minimum(q, k), torch.maximum(q - 2, k - 4))
        & torch.le(torch.div(q, 2, rounding_mode="trunc"), torch.div(k, 3, rounding_mode="floor"))
    ),
    "where": lambda b, h, q, k: torch.where(h < 2, q >= k, q < k),
    "where_numbers": lambda b, h, q, k: (
        torch.where(q > 4, q - 2, k * h) <= torch.where(k > q, 3, k)
    ),
    "numpy": lambda b, h, q, k: np.int64(2) * q - np.int32(1) <= k,
    "fractions": lambda b, h, q, k: q / 2 + 1 / 4 > k / 3,
    "floats": lambda b, h, q, k: (q.float() * 0.5).to(torch.int32) > k.to(torch.float32) - 1.5,
    "truncation": lambda b, h, q, k: ((q - k) / 2).int() == ((q - k) / 3).to(torch.long),
    "rounding": lambda b, h, q, k: (
        torch.floor((q - k) / 2) + torch.ceil(q / 4) < torch.trunc(k / 5)
    ),
    "bool_of": lambda b, h, q, k: (q % 3).bool() & (k % 2).to(torch.bool),
    "powers": lambda b, h, q, k: (q - 4) ** 2 + (k - 5) ** 2 <= torch.square(h + 2),
    "new_tensors": lambda b, h, q, k: (
        torch.ones_like(q) + torch.full_like(q, 2) > k - q.new_zeros(())
    ),
    "negative_index": lambda b, h, q, k: DOCUMENTS[q - k] > 1,
    "constant": lambda b, h, q, k: True,
    "constant_tensor": lambda b, h, q, k: torch.tensor(False),
}


@pytest.mark.parametrize("name", MASKS)
def test_traced_masks_equal_the_functions(name: str) -> None:
    function = MASKS[name]
    traced = trace_mask(function)
    expected = torch.as_tensor(function(*GRID)).expand(SHAPE)
    for expr in (
        traced.expr,
        from_text(to_text(traced.expr), tuple([one.kind for one in traced.tables])),
    ):
        b, h, q, k = GRID
        actual = evaluate(
            expr, traced.captured, b=b, h=h, q=q, k=k, seqlen_q=SEQLEN_Q, seqlen_kv=SEQLEN_KV
        )
        assert actual.dtype == torch.bool
        assert torch.equal(actual.expand(SHAPE), expected)


def in_place(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    same = kv_idx
    kv_idx += 2
    kv_idx -= h
    q_idx *= 3
    q_idx //= 2
    q_idx %= 7
    q_idx ^= 1
    q_idx |= 4
    h <<= 1
    h &= 6
    keep = q_idx + h <= same.add_(1)
    keep &= b + kv_idx > 2
    keep |= same == 5
    keep ^= q_idx == 4
    return keep


def test_in_place_changes_are_seen_under_all_names() -> None:
    traced = trace_mask(in_place)
    b, h, q, k = GRID
    actual = evaluate(traced.expr, [], b=b, h=h, q=q, k=k, seqlen_q=SEQLEN_Q, seqlen_kv=SEQLEN_KV)
    expected = in_place(*(one.expand(SHAPE).clone() for one in GRID))
    assert torch.equal(actual.expand(SHAPE), expected)


def t5_bucket(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """T5's buckets of past distances: exact ones, then logarithmically wider ones."""
    distance = torch.clamp(q_idx - kv_idx, min=0)
    # Off the boundaries, where rounding would decide.
    far = 4 + (torch.log((distance + 0.01) / 4) / math.log(20 / 4) * 4).to(torch.int64)
    bucket = torch.where(distance < 4, distance, torch.minimum(far, torch.full_like(far, 7)))
    return score + BIAS[h, bucket]


SCORE_MODS: dict[str, Callable[..., Any]] = {
    "identity": lambda s, b, h, q, k: s,
    "times_two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "inverse_causal": lambda s, b, h, q, k: torch.where(q <= k, s, -float("inf")),
    "added_mask": lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -float("inf")),
    "rel_bias": lambda s, b, h, q, k: s + (q - k),
    "rel_causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -float("inf")),
    "alibi": lambda s, b, h, q, k: s + (k - q) * SLOPES[h],
    "alibi_computed": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "softcap_method": lambda s, b, h, q, k: (s / 5.0).tanh().mul(5.0),
    "trig": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "head_offset": lambda s, b, h, q, k: s * SLOPES[h],
    "table": lambda s, b, h, q, k: s + BIAS[h, k - q + 12],
    "constant_index": lambda s, b, h, q, k: s + BIAS[0, 3] + BIAS[1, k] + BIAS[h, -1],
    "temperature": lambda s, b, h, q, k: s / TEMPERATURE,
    "scalar_first": lambda s, b, h, q, k: (
        TEMPERATURE * s - TEMPERATURE**2 + TEMPERATURE / (s**2 + 1)
    ),
    "t5": t5_bucket,
    "clamp": lambda s, b, h, q, k: torch.clamp(s, -2, 2) + s.clamp(min=-1) + s.clip(max=1.5),
    "extremes": lambda s, b, h, q, k: torch.maximum(s, BIAS[h, k]) - torch.min(s, TEMPERATURE),
    "compare_scores": lambda s, b, h, q, k: torch.where(s > BIAS[h, k], s, 0.5 * s),
    "logs": lambda s, b, h, q, k: (
        torch.log(1 + s.abs()) + torch.log2(s**2 + 2) + torch.exp(-s.square())
    ),
    "roots": lambda s, b, h, q, k: (
        torch.sqrt(s * s + 1) + torch.rsqrt(s * s + 2) + (s.abs() + 1) ** 1.5
    ),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) + s.sigmoid() * torch.nn.functional.silu(s),
    "relu": lambda s, b, h, q, k: torch.nn.functional.relu(s) + torch.relu(-s) / 2,
    "signs": lambda s, b, h, q, k: s.sign() * torch.floor(s) + torch.neg(s) - abs(s) + +s,
    "float_remainders": lambda s, b, h, q, k: s % 0.75 + torch.fmod(s, 0.4) + s // 0.3,
    "pow": lambda s, b, h, q, k: torch.pow(s, 3) + s**2.0 + 1.5**s + torch.pow(2.0, s),
    "arithmetic": lambda s, b, h, q, k: (
        torch.add(s, q, alpha=2) - torch.sub(s, k, alpha=3) * (2 - s) / 3
    ),
    "reverse": lambda s, b, h, q, k: (
        1 / (s * s + 1) + 2 - s + torch.rsub(s, 3) + 3 // (q + 1) + 7 % (k + 2)
    ),
    "condition_as_number": lambda s, b, h, q, k: (
        s * (q >= k) + (q < k).float() + (q == k).to(s.dtype)
    ),
    "dtype": lambda s, b, h, q, k: s + torch.zeros((), dtype=s.dtype, device=s.device),
    "infinite": lambda s, b, h, q, k: torch.where(
        torch.isinf(s - torch.where(q < k, math.inf, 0.0)), 0.0, s
    ),
    "constant": lambda s, b, h, q, k: 0.0 * s + 1,
    "rows": lambda s, b, h, q, k: (
        s - (ROWS[q] - ROWS[k]).pow(2).sum(-1).sqrt() + (1 + ROWS[k] / 100).prod(-1) * s
    ),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_traced_scores_equal_the_functions(name: str) -> None:
    function = SCORE_MODS[name]
    traced = trace_score(function)
    expected = torch.as_tensor(function(SCORES, *GRID)).double().expand(SHAPE)
    for expr in (
        traced.expr,
        from_text(to_text(traced.expr), tuple([one.kind for one in traced.tables])),
    ):
        b, h, q, k = GRID
        actual = evaluate(
            expr,
            traced.captured,
            b=b,
            h=h,
            q=q,
            k=k,
            s=SCORES,
            seqlen_q=SEQLEN_Q,
            seqlen_kv=SEQLEN_KV,
        )
        assert actual.dtype == torch.float64
        # fp32 where the function itself computes in it: `q / 2` of integer tensors.
        torch.testing.assert_close(actual.expand(SHAPE), expected, rtol=1e-6, atol=1e-6)


def test_a_tensor_takes_one_slot_if_it_is_read() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (
            s
            + SLOPES[h]
            + torch.where(q < 0, BIAS[h, k], 0.0)
            + SLOPES[0] * DOCUMENTS[q]
            + SLOPES[h] * TEMPERATURE
        )

    traced = trace_score(score_mod)
    assert [tuple(tensor.shape) for tensor in traced.captured] == [(HEADS,), (13,), (), ()]
    assert traced.captured[0] is SLOPES
    assert traced.captured[3] is TEMPERATURE
    assert text_of(traced.expr) == "s+t0[h]+t1[q]*t2[()]+t0[h]*t3[()]"


def test_an_index_out_of_range_reads_zero() -> None:
    values = torch.tensor([5, 6, 7])
    traced = trace_score(lambda s, b, h, q, k: values[q - 5] + 0.5 * IS_PREFIX[k + 3])
    b, h, q, k = GRID
    actual = evaluate(
        traced.expr, traced.captured, b=b, h=h, q=q, k=k, s=SCORES, seqlen_q=11, seqlen_kv=13
    )
    rows = torch.tensor([0, 0, 5, 6, 7, 5, 6, 7, 0, 0, 0])
    assert torch.equal(actual[0, 0], rows[:, None] + 0.5 * (torch.arange(13) + 3 < 5).double())


def test_rows_may_be_indexed_first() -> None:
    traced = trace_mask(lambda b, h, q, k: LAYOUT[b][q // 3][k // 3] & LAYOUT[b, 1][k])
    assert to_text(traced.expr) == "(t0[b,1,k]!=0)&(t0[b,q//3,k//3]!=0)"


def test_a_few_elements_may_be_taken_apart() -> None:
    bounds = torch.tensor([[1, 2], [3, 4]])

    def between(b: Any, h: Any, q: Any, k: Any) -> Any:
        low, high = bounds[h]
        return (q >= low) & (k < high)

    assert to_text(trace_mask(between).expr) == "(k<t0[h,1])&(t0[h,0]<=q)"


def test_a_score_function_returns_a_number() -> None:
    with pytest.raises(Unsupported, match="returns a number, got"):
        trace_score(lambda s, b, h, q, k: q >= k)
    with pytest.raises(InvalidProblem, match="score, b, h"):
        trace_score(causal)


def test_remainders_of_numbers_are_numbers() -> None:
    assert tilegen.predicate(lambda b, h, q, k: (q - q) % 2 == 0) == tilegen.full()
    shifted = tilegen.score(lambda s, b, h, q, k: s + (q - q - 7) % 4)
    assert shifted.text == "s+1.0"


def test_masks_hold_no_choice_between_numbers() -> None:
    assert "where" not in to_text(trace_mask(MASKS["where_numbers"]).expr)
    many = trace_mask(
        lambda b, h, q, k: sum(torch.where(q > i, i * k, k - i) for i in range(12)) > 3
    )
    assert "where" in to_text(many.expr)  # split, they would be 4096 comparisons


@pytest.mark.parametrize(
    "name, notation",
    [
        ("documents", "causal&matched(@k:64)"),
        ("chunks", "keep(k//16==q//16)"),
        ("chunks before", "keep((k//16<=q//16)&(q//16<=k//16+2))"),
    ],
)
def test_closed_forms_of_masks_that_users_write(name: str, notation: str) -> None:
    """No lists of tiles, on either side."""
    mask = predicate(user_forms.MASKS[name])
    assert mask.notation == notation
    assert is_solved(mask, "rows")
    assert is_solved(mask, "columns")


def test_dilated_masks_are_known_however_they_are_written() -> None:
    """So that their rows and columns are regrouped."""
    assert predicate(user_forms.MASKS["dilated"]).notation == "dilated(3)&window(39,0)"
    alone = predicate(lambda b, h, q, k: (k - q) % 4 == 0)
    assert alone.notation == "dilated(4)"
    other = predicate(lambda b, h, q, k: ((k - q) % 4 == 0) & (k < 9))
    assert other.notation == "dilated(4)&kv_prefix(9)"
