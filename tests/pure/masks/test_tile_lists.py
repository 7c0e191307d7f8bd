"""Lists of live tiles: every tile classified as brute force does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.tiles import CPU, SAME_DOCUMENT, block_layout, check, neighbourhood, shape_of
from tilegen.errors import Unsupported
from tilegen.masks.form import TiledShape
from tilegen.masks.language.algebra import (
    as_expr,
    at_most,
    both,
    cast,
    either,
    equal,
    floor,
    less,
    load,
    maximum,
    minimum,
    unequal,
    where,
)
from tilegen.masks.language.expr import FALSE, SEQLEN_KV, SEQLEN_Q, TRUE, B, H, K, Q
from tilegen.masks.language.functions import elementary, sign
from tilegen.masks.tiles import tile_classes
from tilegen.masks.tiles.tile_lists import build

# --------------------------------------------------------------------------------------------------
# Random predicates

PER_BATCH, IDS, LAYOUT, WEIGHTS, SCALAR = (
    partial(load, slot, kind) for slot, kind in enumerate(("int", "int", "bool", "float", "int"))
)
CONSTANTS = st.integers(-6, 12).map(as_expr)
DIVISORS = st.sampled_from([2, 3, 4, 7, -3]).map(as_expr)
LEAVES = st.one_of(
    st.sampled_from([Q, K, Q, K, Q - K, B, H, SEQLEN_Q, SEQLEN_KV, SCALAR()]),
    st.sampled_from([PER_BATCH(B), IDS(Q), IDS(K), IDS(K + 5)]),
    CONSTANTS,
)
OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: a + b,
    lambda a, b, c: a - b,
    lambda a, b, c: a * b,
    lambda a, b, c: minimum(a, b),
    lambda a, b, c: maximum(a, b),
    lambda a, b, c: abs(a),
    lambda a, b, c: a**2,
    lambda a, b, c: a // c,
    lambda a, b, c: -(-a // c),
    lambda a, b, c: a % c,
    lambda a, b, c: IDS(a),
    lambda a, b, c: LAYOUT(a, b),
    lambda a, b, c: where(a < c, a, b),
]
COMPARISONS = [less, at_most, equal, unequal]
SPECIAL = [
    K <= Q,
    equal(IDS(Q), IDS(K)),
    unequal(LAYOUT(Q // 4, K // 4), 0),
]


def numbers(draw: st.DrawFn, depth: int) -> Any:
    """Draw an integer expression."""
    if depth == 0 or draw(st.booleans()):
        return draw(LEAVES)
    operation = draw(st.sampled_from(OPERATIONS))
    return operation(numbers(draw, depth - 1), numbers(draw, depth - 1), draw(DIVISORS))


@st.composite
def predicates(draw: st.DrawFn, depth: int = 2) -> Any:
    """Draw a predicate."""
    parts = [predicates(depth - 1) if depth else st.nothing()] * 3
    match draw(st.integers(0, 9 if depth else 4)):
        case 0:
            return draw(st.sampled_from(SPECIAL))
        case 1:
            return WEIGHTS(numbers(draw, 1)) > 0.5
        case 2:
            return numbers(draw, 1) / 3 < K - Q / 2
        case 3 | 4:
            comparison = draw(st.sampled_from(COMPARISONS))
            return comparison(numbers(draw, 2), numbers(draw, 2))
        case 5 | 6:
            return both(*map(draw, parts[:2]))
        case 7:
            return either(*map(draw, parts[:2]))
        case 8:
            left, right = map(draw, parts[:2])
            return (left & right) | (~left & ~right)
        case _:
            condition, then, otherwise = map(draw, parts)
            return (condition & then) | (~condition & otherwise)


SHAPES = st.builds(
    TiledShape,
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    seqlen_q=st.integers(1, 40),
    seqlen_kv=st.integers(1, 40),
    block_m=st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
    block_n=st.sampled_from([1, 2, 4, 5, 8, 16, 64]),
)


@given(
    keep=predicates(),
    shape=SHAPES,
    seed=st.integers(0, 5),
    is_sorted=st.booleans(),
    chunk_bytes=st.sampled_from([1, 5000, tile_classes.CHUNK_BYTES]),
    first_squares=st.sampled_from([1, 20, tile_classes.FIRST_SQUARES]),
)
@settings(max_examples=75, deadline=None, phases=[Phase.generate])
def test_random_predicates(
    keep: Any, shape: TiledShape, seed: int, is_sorted: bool, chunk_bytes: int, first_squares: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, 6, (30,), generator=generator, dtype=torch.int32)
    captured = [
        torch.tensor([3, 11]),
        ids.sort().values if is_sorted else ids,
        torch.rand(5, 9, generator=generator) < 0.3,
        # Few bits, so that sums are exact in any precision.
        torch.randint(-8, 8, (17,), generator=generator) / 4,
        torch.tensor(7),
    ]
    with mock.patch.multiple(tile_classes, CHUNK_BYTES=chunk_bytes, FIRST_SQUARES=first_squares):
        check(keep, captured, shape)


# --------------------------------------------------------------------------------------------------
# The families that need lists


@pytest.mark.parametrize("block", [(8, 8), (16, 4), (4, 32)])
@pytest.mark.parametrize("seqlen", [(96, 96), (100, 61)])
def test_families(seqlen: tuple[int, int], block: tuple[int, int]) -> None:
    shape = shape_of(seqlen, block)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (100,), generator=generator)
    layout = torch.rand(13, 13, generator=generator) < 0.3
    causal = K <= Q
    for document_ids in (ids, ids.sort().values):
        check(SAME_DOCUMENT, [document_ids], shape)
        check(SAME_DOCUMENT & causal, [document_ids], shape)
    for step in (2, 3, 16, 50):
        check(equal((Q - K) % step, 0) & causal, [], shape)
    check(block_layout(8), [layout], shape)
    check(neighbourhood(10, 2), [], shape)
    check((K < 4) | (Q - K < 9) & causal, [], shape)


def test_masks_of_batches_and_heads() -> None:
    shape = shape_of((40, 50), 8, batch=2, heads=3)
    lengths = load(0, "int", B)
    layout = load(1, "bool", H, Q // 8, K // 8)
    captured = [torch.tensor([50, 13]), torch.rand(3, 5, 7) < 0.4]
    for keep, batch, heads in [
        (lengths > K, 2, 1),
        (unequal(layout, 0), 1, 3),
        ((lengths > K) & unequal(layout, 0), 2, 3),
        (equal(B, 1) | equal(H, 2), 2, 3),
    ]:
        classes = check(keep, captured, shape)
        assert (classes.shape.batch, classes.shape.heads) == (batch, heads)
        assert classes.evaluated_tiles == 0


@pytest.mark.parametrize("seqlen", [(1, 1), (3, 70), (70, 3), (33, 64)])
def test_tiles_beyond_the_sequence_are_partial(seqlen: tuple[int, int]) -> None:
    check(TRUE, [], shape_of(seqlen, 64))
    check(FALSE, [], shape_of(seqlen, 64))
    check(equal(K % 3, 1), [], shape_of(seqlen, (16, 128)))


def test_rows_without_columns_have_empty_lists() -> None:
    kept = (Q >= 24) & (K < 8)
    check(kept, [], shape_of(64, 8))
    rows, columns = (
        build(kept, [], shape_of(64, 8), device="cpu", side=side) for side in ("rows", "columns")
    )
    assert rows.tiles.tolist() == [0] * 5
    assert rows.starts.tolist() == [0] * 7 + [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert columns.tiles.tolist() == [3, 4, 5, 6, 7]
    assert columns.starts.tolist() == [0] + [5] * 16


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    for side in ("rows", "columns"):
        keep = as_expr(K <= Q)
        lists = build(keep, [], shape_of(lengths, 4), device="cpu", side=side)
        assert lists.visited_tiles == 0
        assert len(lists.starts) == 2 * lists.num_stationary + 1


def test_empty_captured_tensors_read_zero() -> None:
    check(equal(load(0, "int", Q), 0), [torch.zeros(0)], shape_of(20, 8))


def test_exact_where_rounding_would_show() -> None:
    # 16_777_217 is no float32.
    check(
        Q / 2 + load(0, "int") / 2 <= K + 16_777_217 / 2,
        [torch.tensor(16_777_217)],
        shape_of(9, 2),
    )


def test_not_a_number_is_never_kept() -> None:
    weights = torch.arange(40.0)
    weights[[3, 17]] = torch.nan
    weights[30] = torch.inf
    weight = partial(load, 0, "float")
    for keep in (
        weight(K) < weight(Q),
        weight(K) - weight(Q) < 100,
        floor(weight(K) / 2) < 100,
        minimum(weight(K), 3) <= 3,
    ):
        check(keep, [weights], shape_of(40, 8))


def test_functions_that_may_be_no_number() -> None:
    """Bounds of a logarithm, or of a product with an infinity, say nothing, not something wrong."""
    layout = load(0, "int", cast(floor(elementary("exp", -K / 50) * (Q % 4)), "int64"))
    check(unequal(layout, 0), [torch.tensor([0, 0, 1, 1])], shape_of(40, 8))
    check(minimum(5, elementary("log", Q - K)) <= 6, [], shape_of(40, 8))
    check(minimum(5, elementary("sqrt", Q - K)) <= 6, [], shape_of(40, 8))
    check(minimum(5, Q / floor(K - 7.5)) <= 6, [], shape_of(40, 8))


@pytest.mark.parametrize("block", [4, 16])
def test_expressions_that_are_hard_to_bound(block: int) -> None:
    shape = shape_of((37, 45), block)
    ids = torch.randint(0, 6, (20,), generator=torch.Generator().manual_seed(0))
    weight = load(0, "int", Q - K)
    check((Q - K) ** 2 < 50, [], shape)
    check((Q - K) ** 3 < -50, [], shape)
    check(abs(Q - K) * (Q - 20) > 30, [], shape)
    check(weight >= 3, [ids], shape)  # negative indices count from the end, far ones read 0
    check(equal(load(0, "int", K - 50), 2), [ids], shape)
    check(equal(load(0, "int", Q - 30), 0), [ids], shape)


@pytest.mark.parametrize("index, seqlen", [(Q, (10, 40)), (K, (40, 10))])
def test_pairs_beyond_the_sequence_do_not_count(index: Any, seqlen: tuple[int, int]) -> None:
    # 4 i modulo 11 is 7 at i = 10 and nowhere before.
    classes = check(equal((4 * index) % 11, 7), [], shape_of(seqlen, 16))
    assert classes.evaluated_tiles == 3
    assert len(classes.codes) == 0


def test_functions() -> None:
    weight = load(0, "float", K)
    weights = torch.randint(-8, 8, (40,), generator=torch.Generator().manual_seed(0)) / 4
    shape = shape_of(40, 8)
    check(elementary("exp", weight) < 1.1, [weights], shape)
    check(elementary("tanh", weight) > elementary("sin", weight), [weights], shape)
    check(elementary("sqrt", Q + 1) > elementary("log", K + 1) + 2.3, [], shape)
    check(equal(sign(Q - K), where(Q < 20, 0, 1)), [], shape)
    check(elementary("sigmoid", weight) + elementary("cos", K) > 0.7, [weights], shape)


def test_divisors_that_are_looked_up() -> None:
    captured = [torch.tensor([3, -4, 1, 7, 2, -1])]
    step = load(0, "int", Q % 6)
    check(equal((K - 9) % step, 0), captured, shape_of(40, 4))
    check((K - 9) // step < 3, captured, shape_of(40, 4))
    check((K - 9) / step < 3, captured, shape_of(40, 4))


@pytest.mark.parametrize(
    "keep, term",
    [
        (load(0, "int", Q, K) < 3, r"1 dimensions .* t0\[q,k\]"),
    ],
)
def test_terms_without_meaning_are_named(keep: Any, term: str) -> None:
    with pytest.raises(Unsupported, match=term):
        tile_classes.classify(keep, [torch.zeros(5)], shape_of(8, 8), CPU)
