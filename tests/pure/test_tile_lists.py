"""Lists of live tiles: every tile classified as brute force does, at the cost of the live ones."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from functools import reduce
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sympy
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tilegen.errors import Unsupported
from tilegen.masks import evaluation, list_cache, tile_classes
from tilegen.masks.list_cache import ListCache
from tilegen.masks.nodes import Sigmoid, Where
from tilegen.masks.symbols import SEQLEN_KV, SEQLEN_Q, B, H, K, Lookup, Q, captured_name
from tilegen.masks.tile_classes import Shape, TileClasses
from tilegen.masks.tile_lists import TileLists, build, lists_of

CPU = torch.device("cpu")
EMPTY, FULL, PARTIAL = 0, 1, 2

# --------------------------------------------------------------------------------------------------
# Brute force, in numpy


TINY = 1e-6
"""Less than what two fractions here differ by, more than what they are rounded by."""
MEANING: dict[Any, Callable[..., Any]] = {
    sympy.Add: lambda *x: reduce(np.add, x),
    sympy.Pow: lambda x, n: x**n,
    sympy.floor: lambda x: np.floor(x + TINY),
    sympy.ceiling: lambda x: np.ceil(x - TINY),
    sympy.Mod: np.mod,
    sympy.Abs: np.abs,
    sympy.Min: lambda *x: reduce(np.minimum, x),
    sympy.Max: lambda *x: reduce(np.maximum, x),
    sympy.Lt: lambda x, y: x < y - TINY,
    sympy.Le: lambda x, y: x <= y + TINY,
    sympy.Gt: lambda x, y: x > y + TINY,
    sympy.Ge: lambda x, y: x >= y - TINY,
    sympy.Eq: np.equal,
    sympy.Ne: np.not_equal,
    sympy.And: lambda *x: reduce(np.logical_and, x),
    sympy.Or: lambda *x: reduce(np.logical_or, x),
    sympy.Not: np.logical_not,
    sympy.Xor: lambda *x: reduce(np.logical_xor, x),
    sympy.ITE: np.where,
    Where: np.where,
    sympy.sign: np.sign,
    sympy.exp: np.exp,
    sympy.log: np.log,
    sympy.tanh: np.tanh,
    sympy.sin: np.sin,
    sympy.cos: np.cos,
    Sigmoid: lambda x: 1 / (1 + np.exp(-x)),
}


def dense(keep: Any, captured: list[torch.Tensor], shape: Shape) -> NDArray[np.bool_]:
    """Return the mask of all pairs, (batch, heads, seqlen_q, seqlen_kv)."""
    sizes = (shape.batch, shape.heads, shape.seqlen_q, shape.seqlen_kv)
    values: dict[Any, Any] = dict(zip((B, H, Q, K), np.indices(sizes), strict=True))
    values |= {SEQLEN_Q: shape.seqlen_q, SEQLEN_KV: shape.seqlen_kv}

    def look_up(name: Any, *indices: Any) -> Any:
        tensor = captured[int(name.name[1:])].numpy()
        places = [np.broadcast_to(index, sizes).astype(int) for index in indices]
        inside = np.ones(sizes, dtype=bool)
        for place, size in zip(places, tensor.shape, strict=True):
            inside &= (place >= -size) & (place < size)
        found = np.zeros(sizes)
        found[inside] = tensor[tuple(place[inside] for place in places)]
        return found

    def value(expr: Any) -> Any:
        if expr in values:
            return values[expr]
        if isinstance(expr, Lookup):
            return look_up(expr.args[0], *map(value, expr.args[1:]))
        if isinstance(expr, sympy.Piecewise):
            (one, condition), (other, _) = expr.args
            return np.where(value(condition), value(one), value(other))
        if expr.is_Mul:  # a third of 3 is 1, whatever the order
            numerator, denominator = expr.as_numer_denom()
            factors = numerator.args if numerator.is_Mul else [numerator]
            return reduce(np.multiply, map(value, factors)) / value(denominator)
        if expr.is_Atom:
            return bool(expr) if expr in (True, False) else float(expr)
        return MEANING[expr.func](*map(value, expr.args))

    with np.errstate(invalid="ignore"):
        return np.broadcast_to(value(keep), sizes)


def brute_force(kept: NDArray[np.bool_], shape: Shape) -> NDArray[np.int64]:
    """Return the class of every tile, (batch, heads, rows, columns)."""
    classes = np.zeros((*kept.shape[:2], shape.rows, shape.columns), dtype=np.int64)
    pairs = shape.block_m * shape.block_n
    for row in range(shape.rows):
        for column in range(shape.columns):
            tile = kept[
                :,
                :,
                row * shape.block_m : (row + 1) * shape.block_m,
                column * shape.block_n : (column + 1) * shape.block_n,
            ].sum((2, 3))
            classes[:, :, row, column] = np.where(tile == 0, EMPTY, PARTIAL)
            classes[:, :, row, column][tile == pairs] = FULL
    return classes


def listed(lists: TileLists, streamed: int) -> NDArray[np.int64]:
    """Return the class of every tile as the lists have it, (batch, heads, stationary, streamed)."""
    sizes = (lists.batch, lists.heads, lists.num_stationary)
    assert lists.tiles.dtype == torch.int32
    assert lists.starts.dtype == torch.int64
    assert lists.starts.shape == (2 * np.prod(sizes) + 1,)
    assert lists.starts[0] == 0
    assert lists.starts[-1] == lists.visited_tiles == len(lists.tiles)
    classes = np.zeros((int(np.prod(sizes)) * 2, streamed), dtype=np.int64)
    starts = lists.starts.tolist()
    for segment, (start, end) in enumerate(itertools.pairwise(starts)):
        tiles = lists.tiles[start:end].tolist()
        assert tiles == sorted(set(tiles))
        classes[segment, tiles] = PARTIAL if segment % 2 else FULL
    full, partial = classes[::2], classes[1::2]
    assert not (full * partial).any()
    assert lists.full_tiles == (full > 0).sum()
    assert lists.partial_tiles == (partial > 0).sum()
    return (full + partial).reshape(*sizes, streamed)


def check(keep: Any, captured: list[torch.Tensor], shape: Shape) -> TileClasses:
    """Compare the lists of both sides with brute force; return the classification."""
    keep = sympy.sympify(keep)
    expected = brute_force(dense(keep, captured, shape), shape)
    classes = tile_classes.classify(keep, captured, shape, CPU)
    rows, columns = lists_of(classes, "rows"), lists_of(classes, "columns")
    found = listed(rows, shape.columns)
    assert (np.broadcast_to(found, expected.shape) == expected).all()
    assert (listed(columns, shape.rows) == found.swapaxes(2, 3)).all()
    return classes


def shape_of(
    seqlen: int | tuple[int, int], block: int | tuple[int, int], *, batch: int = 1, heads: int = 1
) -> Shape:
    seqlen_q, seqlen_kv = seqlen if isinstance(seqlen, tuple) else (seqlen, seqlen)
    block_m, block_n = block if isinstance(block, tuple) else (block, block)
    return Shape(
        batch=batch,
        heads=heads,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block_m=block_m,
        block_n=block_n,
    )


# --------------------------------------------------------------------------------------------------
# Random predicates

PER_BATCH, IDS, LAYOUT, WEIGHTS, SCALAR = (
    captured_name(slot, kind) for slot, kind in enumerate(("int", "int", "bool", "float", "int"))
)
CONSTANTS = st.integers(-6, 12).map(sympy.Integer)
DIVISORS = st.sampled_from([2, 3, 4, 7, -3]).map(sympy.Integer)
LEAVES = st.one_of(
    st.sampled_from([Q, K, Q, K, Q - K, B, H, SEQLEN_Q, SEQLEN_KV, Lookup(SCALAR)]),
    st.sampled_from([Lookup(PER_BATCH, B), Lookup(IDS, Q), Lookup(IDS, K), Lookup(IDS, K + 5)]),
    CONSTANTS,
)
OPERATIONS: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: a + b,
    lambda a, b, c: a - b,
    lambda a, b, c: a * b,
    lambda a, b, c: sympy.Min(a, b),
    lambda a, b, c: sympy.Max(a, b),
    lambda a, b, c: sympy.Abs(a),
    lambda a, b, c: a**2,
    lambda a, b, c: sympy.floor(a / c),
    lambda a, b, c: sympy.ceiling(a / c),
    lambda a, b, c: sympy.Mod(a, c),
    lambda a, b, c: Lookup(IDS, a),
    lambda a, b, c: Lookup(LAYOUT, a, b),
    lambda a, b, c: sympy.Piecewise((a, a < c), (b, True)),
]
COMPARISONS = [sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.Eq, sympy.Ne]
SPECIAL = [
    K <= Q,
    sympy.Eq(Lookup(IDS, Q), Lookup(IDS, K)),
    sympy.Ne(Lookup(LAYOUT, sympy.floor(Q / 4), sympy.floor(K / 4)), 0),
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
            return Lookup(WEIGHTS, numbers(draw, 1)) > sympy.Rational(1, 2)
        case 2:
            return numbers(draw, 1) / 3 < K - Q / 2
        case 3 | 4:
            comparison = draw(st.sampled_from(COMPARISONS))
            return comparison(numbers(draw, 2), numbers(draw, 2))
        case 5 | 6:
            return sympy.And(*map(draw, parts[:2]))
        case 7:
            return sympy.Or(*map(draw, parts[:2]))
        case 8:
            return sympy.Not(sympy.Xor(*map(draw, parts[:2])))
        case _:
            return sympy.ITE(*map(draw, parts))


SHAPES = st.builds(
    Shape,
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
@settings(max_examples=150, deadline=None, phases=[Phase.generate])
def test_random_predicates(
    keep: Any, shape: Shape, seed: int, is_sorted: bool, chunk_bytes: int, first_squares: int
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

SAME_DOCUMENT = sympy.Eq(Lookup(captured_name(0, "int"), Q), Lookup(captured_name(0, "int"), K))


def block_layout(block: int) -> Any:
    layout = captured_name(0, "bool")
    return sympy.Ne(Lookup(layout, sympy.floor(Q / block), sympy.floor(K / block)), 0)


def neighbourhood(width: int, radius: int) -> Any:
    rows = sympy.floor(Q / width) - sympy.floor(K / width)
    columns = sympy.Mod(Q, width) - sympy.Mod(K, width)
    return (sympy.Abs(rows) <= radius) & (sympy.Abs(columns) <= radius)


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
        check(sympy.Eq(sympy.Mod(Q - K, step), 0) & causal, [], shape)
    check(block_layout(8), [layout], shape)
    check(neighbourhood(10, 2), [], shape)
    check((K < 4) | (Q - K < 9) & causal, [], shape)


def test_masks_of_batches_and_heads() -> None:
    shape = shape_of((40, 50), 8, batch=2, heads=3)
    lengths = Lookup(captured_name(0, "int"), B)
    layout = Lookup(captured_name(1, "bool"), H, sympy.floor(Q / 8), sympy.floor(K / 8))
    captured = [torch.tensor([50, 13]), torch.rand(3, 5, 7) < 0.4]
    for keep, batch, heads in [
        (lengths > K, 2, 1),
        (sympy.Ne(layout, 0), 1, 3),
        ((lengths > K) & sympy.Ne(layout, 0), 2, 3),
        (sympy.Eq(B, 1) | sympy.Eq(H, 2), 2, 3),
    ]:
        classes = check(keep, captured, shape)
        assert (classes.shape.batch, classes.shape.heads) == (batch, heads)
        assert classes.evaluated_tiles == 0


@pytest.mark.parametrize("seqlen", [(1, 1), (3, 70), (70, 3), (33, 64)])
def test_tiles_beyond_the_sequence_are_partial(seqlen: tuple[int, int]) -> None:
    check(sympy.true, [], shape_of(seqlen, 64))
    check(sympy.false, [], shape_of(seqlen, 64))
    check(sympy.Eq(sympy.Mod(K, 3), 1), [], shape_of(seqlen, (16, 128)))


def test_rows_without_columns_have_empty_lists() -> None:
    kept = sympy.Ge(Q, 24) & sympy.Lt(K, 8)
    check(kept, [], shape_of(64, 8))
    rows, columns = build(
        kept, [], batch=1, heads=1, seqlen_q=64, seqlen_kv=64, block_m=8, block_n=8, device="cpu"
    )
    assert rows.tiles.tolist() == [0] * 5
    assert rows.starts.tolist() == [0] * 7 + [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert columns.tiles.tolist() == [3, 4, 5, 6, 7]
    assert columns.starts.tolist() == [0] + [5] * 16


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    for lists in build(
        sympy.sympify(K <= Q),
        [],
        batch=1,
        heads=1,
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        block_m=4,
        block_n=4,
        device="cpu",
    ):
        assert lists.visited_tiles == 0
        assert len(lists.starts) == 2 * lists.num_stationary + 1


def test_empty_captured_tensors_read_zero() -> None:
    check(sympy.Eq(Lookup(captured_name(0, "int"), Q), 0), [torch.zeros(0)], shape_of(20, 8))


def test_exact_where_rounding_would_show() -> None:
    # 16_777_217 is no float32.
    far = captured_name(0, "int")
    check(
        Q / 2 + Lookup(far) / 2 <= K + sympy.Rational(16_777_217, 2),
        [torch.tensor(16_777_217)],
        shape_of(9, 2),
    )


def test_not_a_number_is_never_kept() -> None:
    weights = torch.arange(40.0)
    weights[[3, 17]] = torch.nan
    weights[30] = torch.inf
    weight = captured_name(0, "float")
    for keep in (
        Lookup(weight, K) < Lookup(weight, Q),
        Lookup(weight, K) - Lookup(weight, Q) < 100,
        sympy.floor(Lookup(weight, K) / 2) < 100,
        sympy.Min(Lookup(weight, K), 3) <= 3,
    ):
        check(keep, [weights], shape_of(40, 8))


@pytest.mark.parametrize("block", [4, 16])
def test_expressions_that_are_hard_to_bound(block: int) -> None:
    shape = shape_of((37, 45), block)
    ids = torch.randint(0, 6, (20,), generator=torch.Generator().manual_seed(0))
    weight = Lookup(captured_name(0, "int"), Q - K)
    check((Q - K) ** 2 < 50, [], shape)
    check((Q - K) ** 3 < -50, [], shape)
    check(sympy.Abs(Q - K) * (Q - 20) > 30, [], shape)
    check(weight >= 3, [ids], shape)  # negative indices count from the end, far ones read 0
    check(sympy.Eq(Lookup(captured_name(0, "int"), K - 50), 2), [ids], shape)
    check(sympy.Eq(Lookup(captured_name(0, "int"), Q - 30), 0), [ids], shape)


@pytest.mark.parametrize("index, seqlen", [(Q, (10, 40)), (K, (40, 10))])
def test_pairs_beyond_the_sequence_do_not_count(index: Any, seqlen: tuple[int, int]) -> None:
    # 4 i modulo 11 is 7 at i = 10 and nowhere before.
    classes = check(sympy.Eq(sympy.Mod(4 * index, 11), 7), [], shape_of(seqlen, 16))
    assert classes.evaluated_tiles == 3
    assert len(classes.codes) == 0


def test_functions() -> None:
    weight = Lookup(captured_name(0, "float"), K)
    weights = torch.randint(-8, 8, (40,), generator=torch.Generator().manual_seed(0)) / 4
    shape = shape_of(40, 8)
    check(sympy.exp(weight) < sympy.Float(1.1), [weights], shape)
    check(sympy.tanh(weight) > sympy.sin(weight), [weights], shape)
    check(sympy.sqrt(Q + 1) > sympy.log(K + 1) + sympy.Float(2.3), [], shape)
    check(sympy.Eq(sympy.sign(Q - K), Where(Q < 20, 0, 1)), [], shape)
    check(Sigmoid(weight) + sympy.cos(K) > sympy.Float(0.7), [weights], shape)


def test_divisors_that_are_looked_up() -> None:
    steps = captured_name(0, "int")
    captured = [torch.tensor([3, -4, 1, 7, 2, -1])]
    step = Lookup(steps, sympy.Mod(Q, 6))
    check(sympy.Eq(sympy.Mod(K - 9, step), 0), captured, shape_of(40, 4))
    check(sympy.floor((K - 9) / step) < 3, captured, shape_of(40, 4))
    check((K - 9) / step < 3, captured, shape_of(40, 4))


@pytest.mark.parametrize(
    "keep, term",
    [
        (sympy.gamma(Q) < 0, r"the term gamma\(q\)"),
        (sympy.Symbol("x") < K, "the term x"),
        (Lookup(captured_name(0, "int"), Q, K) < 3, r"1 dimensions .* Lookup\(t0, q, k\)"),
    ],
)
def test_terms_without_meaning_are_named(keep: Any, term: str) -> None:
    with pytest.raises(Unsupported, match=term):
        tile_classes.classify(keep, [torch.zeros(5)], shape_of(8, 8), CPU)


# --------------------------------------------------------------------------------------------------
# What it costs


@pytest.fixture
def largest_result(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that gives the bytes of the largest result of any operation so far."""
    largest = 0
    computed = evaluation.Evaluation._compute

    def compute(self: evaluation.Evaluation, expr: Any) -> Any:
        nonlocal largest
        result = computed(self, expr)
        parts = vars(result).values() if not isinstance(result, torch.Tensor) else [result]
        largest = max(largest, *(part.nbytes for part in parts))
        return result

    monkeypatch.setattr(evaluation.Evaluation, "_compute", compute)
    return lambda: largest


@pytest.mark.parametrize("seqlen", [65_536, 262_144])
def test_documents_take_memory_for_live_tiles_only(
    seqlen: int, largest_result: Callable[[], int]
) -> None:
    ids = torch.arange(seqlen, dtype=torch.int32) // 1000
    shape = shape_of(seqlen, 128)
    classes = tile_classes.classify(SAME_DOCUMENT & (K <= Q), [ids], shape, CPU)
    rows = lists_of(classes, "rows")
    # A document of 1000 rows meets at most 9 row tiles, and each of them at most 9 column tiles.
    assert rows.visited_tiles <= 9 * 9 * -(-seqlen // 1000)
    assert rows.visited_tiles >= 8 * 9 / 2 * (seqlen // 1000)
    assert rows.bytes == 4 * rows.visited_tiles + 8 * (2 * shape.rows + 1)
    assert classes.evaluated_tiles == 0
    assert largest_result() <= tile_classes.CHUNK_BYTES // 8


def test_pairs_are_evaluated_in_chunks(
    largest_result: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_classes, "CHUNK_BYTES", 1 << 20)
    ids = torch.randint(0, 400, (4096,), generator=torch.Generator().manual_seed(0))
    classes = tile_classes.classify(SAME_DOCUMENT, [ids], shape_of(4096, 128), CPU)
    assert classes.open_tiles == 32 * 32
    assert classes.evaluated_tiles > 100
    assert largest_result() <= 1 << 18


@pytest.mark.parametrize(
    "keep, seqlen, evaluated",
    [
        (K <= Q, 65_536, 0),
        ((K <= Q) & (Q - K < 4096), 65_536, 0),
        (sympy.Eq(sympy.Mod(Q - K, 4), 0) & (K <= Q), 16_384, 0),
        (sympy.Eq(sympy.Mod(Q - K, 100), 0) & (K <= Q), 16_384, 0),
        (neighbourhood(64, 3), 65_536, 0),
        (neighbourhood(100, 3), 10_000, 250),
    ],
)
def test_few_tiles_are_evaluated_pair_by_pair(keep: Any, seqlen: int, evaluated: int) -> None:
    classes = tile_classes.classify(keep, [], shape_of(seqlen, 128), CPU)
    assert classes.evaluated_tiles <= evaluated


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (64, 256)])
def test_no_tile_of_a_layout_is_evaluated(block: int, tile: tuple[int, int]) -> None:
    blocks = 4096 // block
    layout = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.05
    shape = shape_of(4096, tile)
    classes = tile_classes.classify(block_layout(block), [layout], shape, CPU)
    assert classes.evaluated_tiles == 0
    if block >= max(tile):
        assert classes.open_tiles == 0
    expected = layout.repeat_interleave(block, 0).repeat_interleave(block, 1)
    kept = expected.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).sum((1, 3))
    lists = lists_of(classes, "rows")
    assert lists.visited_tiles == int((kept > 0).sum())
    assert lists.full_tiles == int((kept == tile[0] * tile[1]).sum())


# --------------------------------------------------------------------------------------------------
# The cache


SIZES: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "seqlen_q": 64,
    "seqlen_kv": 64,
    "block_m": 16,
    "block_n": 16,
    "device": "cpu",
}


def test_lists_are_built_once_for_each_mask_and_shape() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    first = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    assert cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES) is first
    # The mask is the same for all batches and heads.
    assert cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"batch": 7})) is first
    others = [
        cache.get(SAME_DOCUMENT, [ids], side="columns", **SIZES),
        cache.get(SAME_DOCUMENT, [ids.clone()], side="rows", **SIZES),
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"block_m": 32})),
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"seqlen_q": 60})),
        cache.get(~SAME_DOCUMENT, [ids], side="rows", **SIZES),
    ]
    assert first not in others


def test_a_modified_tensor_gives_new_lists() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    before = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    ids.zero_()
    after = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    assert before.visited_tiles < after.visited_tiles == 16


def test_lists_die_with_their_tensors_and_are_few() -> None:
    cache, ids = ListCache(capacity=3), torch.arange(64) // 10
    for seqlen in range(40, 50):
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"seqlen_q": seqlen}))
    assert len(cache) == 3
    del ids
    gc.collect()
    assert len(cache) == 0


def test_threads_build_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    entered = threading.Barrier(4, timeout=10)

    def slow_build(*arguments: Any, **options: Any) -> TileLists:
        builds.append(1)
        return build(*arguments, **options)

    monkeypatch.setattr(list_cache, "build", slow_build)
    cache, ids = ListCache(), torch.arange(64) // 10
    found: list[TileLists] = []

    def ask() -> None:
        entered.wait()
        found.append(cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
