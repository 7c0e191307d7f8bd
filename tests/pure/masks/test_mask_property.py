"""Random combinations of masks: every tile in its class, compared with brute force over pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.tiles import brute_force, found_classes
from tilegen.masks import (
    Mask,
    Table,
    block_sparse,
    causal,
    dilated,
    documents,
    full,
    global_tokens,
    intersect,
    kv_lengths,
    predicate,
    prefix_lm,
    sliding_window,
    values,
)
from tilegen.masks.form import Form
from tilegen.masks.language.algebra import as_expr
from tilegen.masks.language.evaluation import points
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, SEQLEN_Q, B, H
from tilegen.masks.mask import Side
from tilegen.masks.tiles.spans import stream_sets
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.masks.usual import kv_prefix
from tilegen.masks.values import Pair

BATCH, HEADS = 2, 3
BLOCKS = (4, 8, 16)
EVERY_TIME = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def _affine(at: Pair, _: Side, a: int, b: int, c: int, d: int, e: int) -> Any:
    return a * at.q + b * at.k + c + d * at.seqlen_q + e * at.seqlen_kv >= 0


AFFINE = Form("affine", _affine)


def affine(a: int, b: int, c: int, d: int = 0, e: int = 0) -> Mask:
    """Return the mask `a * q + b * k + c + d * seqlen_q + e * seqlen_kv >= 0`."""
    return Mask.of(AFFINE, a, b, c, d, e)


def pairs(mask: Mask, seqlen_q: int, seqlen_kv: int) -> np.ndarray[Any, Any]:
    """Every pair from the mask's definition, which the zoo compares with oracles, and its values
    element by element."""
    sizes = (BATCH, HEADS, seqlen_q, seqlen_kv)
    b, h, q, k = (torch.arange(n).view(-1, *[1] * (3 - i)) for i, n in enumerate(sizes))
    return mask.kept(q, k, seqlen_q, seqlen_kv, b, h).expand(sizes).numpy()


# --------------------------------------------------------------------------------------------------
# What masks are made of

NUMBERS = st.integers(0, 30)
UNIT = st.builds(
    affine,
    *(st.sampled_from([-1, 0, 1]),) * 2,
    c=st.integers(-25, 25),
    d=st.sampled_from([0, 0, -1, 1]),
    e=st.sampled_from([0, 0, -1, 1]),
)
ANY_AFFINE = st.builds(affine, *(st.integers(-4, 4),) * 2, c=st.integers(-60, 60))
ALIGNMENTS = st.sampled_from(["top_left", "bottom_right"])


def run_time(axes: str) -> st.SearchStrategy[Table]:
    sizes = [{"b": BATCH, "h": HEADS}[axis] for axis in axes]
    count = int(np.prod(sizes, dtype=int))
    tensors = st.lists(NUMBERS, min_size=count, max_size=count).map(
        lambda numbers: torch.tensor(numbers).view(sizes)
    )
    return tensors.map(lambda tensor: values(tensor, axes))


NUMBER = NUMBERS | st.sampled_from(["", "b", "h", "bh"]).flatmap(run_time)
USUAL = (
    st.builds(causal, ALIGNMENTS)
    | st.builds(sliding_window, NUMBER | st.none(), NUMBER | st.none(), ALIGNMENTS)
    | st.builds(prefix_lm, NUMBER)
    | st.builds(global_tokens, NUMBER)
    | st.builds(kv_prefix, NUMBER)
    | st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH).map(kv_lengths)
)


@st.composite
def combined(draw: st.DrawFn, leaves: st.SearchStrategy[Mask]) -> Mask:
    """A leaf, or up to three levels of `& | ~` over leaves."""

    def level(depth: int) -> Mask:
        if depth == 0:
            return draw(leaves)
        way = draw(st.sampled_from("&|&|~"))
        if way == "~":
            return ~level(depth - 1)
        left, other = level(depth - 1), level(draw(st.integers(0, depth - 1)))
        return left & other if way == "&" else left | other

    return level(draw(st.sampled_from([2, 3, 1, 2, 0])))


LENGTHS = st.integers(1, 45)
WHERE = {
    "seqlen_q": LENGTHS,
    "seqlen_kv": LENGTHS,
    "block_m": st.sampled_from(BLOCKS),
    "block_n": st.sampled_from(BLOCKS),
    "side": st.sampled_from(["rows", "columns"]),
}


def check(
    mask: Mask,
    side: Side,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    *,
    exact: bool,
) -> None:
    batch, listed = found_classes(
        mask,
        side,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        block_m=block_m,
        block_n=block_n,
        batch=BATCH,
        heads=HEADS,
    )
    keep = pairs(mask, seqlen_q, seqlen_kv)
    expected = brute_force(keep, side, block_m, block_n, listed=listed)
    if exact or listed:
        assert (batch == expected).all(), (batch, expected)
    else:
        assert ((batch > 0) >= (expected > 0)).all(), "a kept pair is missed"
        assert ((batch == 2) <= (expected == 2)).all(), "a dropped pair is kept"


# --------------------------------------------------------------------------------------------------
# Properties


@EVERY_TIME
@given(mask=combined(UNIT), **WHERE)
@example(affine(0, 0, -1) | affine(0, 0, 0), 9, 9, 4, 4, "rows")
def test_unit_coefficients_are_exact(
    mask: Mask, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=True)


@EVERY_TIME
@given(mask=combined(USUAL), **WHERE)
def test_usual_masks_with_run_time_values_are_exact(
    mask: Mask, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=True)


@EVERY_TIME
@given(mask=combined(ANY_AFFINE | USUAL), **WHERE)
def test_other_coefficients_are_never_unsafe(
    mask: Mask, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=False)


@settings(EVERY_TIME, max_examples=30)
@given(
    numbers=st.tuples(*(st.integers(-2, 2),) * 2, *(st.integers(-20, 30),) * 3),
    which=st.sampled_from(["abs", "far", "nested", "min", "max", "equal", "clamp"]),
    **WHERE,
)
@example((1, -1, 0, 9, 3), "abs", 40, 40, 8, 8, "rows")
@example((0, 0, -5, 9, 3), "nested", 20, 20, 8, 8, "rows")  # what is constant says nothing
def test_absolute_values_minima_and_maxima(
    numbers: tuple[int, int, int, int, int],
    which: str,
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    side: Side,
) -> None:
    x, y, c, d, e = numbers

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        sum_ = x * q + y * k + c
        return {
            "abs": lambda: abs(sum_) <= d,
            "far": lambda: abs(sum_) + k > d,
            "nested": lambda: abs(abs(sum_) - d) < e,
            "min": lambda: torch.minimum(q + c, k + d) <= e,
            "max": lambda: torch.maximum(q + c, k + d) - q <= e,
            "equal": lambda: abs(sum_) == d,
            "clamp": lambda: (q + c).clamp(min=d) >= k,
        }[which]()

    mask = predicate(keep)
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=False)
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None]
    expected = keep(None, None, q, k).expand(BATCH, HEADS, seqlen_q, seqlen_kv)
    assert (pairs(mask, seqlen_q, seqlen_kv) == expected.numpy()).all()


@EVERY_TIME
@given(data=st.data(), **WHERE)
def test_numbers_that_rise_along_rows_are_never_unsafe(
    data: st.DataObject, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    def rising(axis: str, length: int) -> Table:
        batches = data.draw(st.booleans())
        shape = (BATCH, length) if batches else (length,)
        size = int(np.prod(shape))
        steps = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
        tensor = torch.tensor(steps, dtype=torch.int32).view(shape).cumsum(-1, dtype=torch.int32)
        return Table("b" * batches + axis, 8, tensor=tensor, pattern="ends")

    rows = kv_prefix(rising("q", seqlen_q)) | ~kv_prefix(rising("q", seqlen_q))
    window = sliding_window(rising("q", seqlen_q), data.draw(NUMBERS))
    columns = sliding_window(None, rising("k", seqlen_kv))
    leaves = st.sampled_from([rows, kv_prefix(rising("q", seqlen_q)), window, columns, causal()])
    mask = data.draw(combined(leaves))
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=False)


@EVERY_TIME
@given(data=st.data(), **WHERE)
def test_documents_with_other_masks(
    data: st.DataObject, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    """Alone, and with causal or a window, exactly; joined with more, never on the unsafe side."""
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    packed = documents(cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    size = sum(lengths)
    window = st.builds(sliding_window, st.integers(0, 9), st.integers(0, 9))
    near = data.draw(st.just(full()) | st.just(causal()) | window)
    check(packed & near, side, size, size, block_m, block_n, exact=True)
    mask = data.draw(combined(st.just(packed) | USUAL))
    check(mask, side, size, size, block_m, block_n, exact=False)


@settings(EVERY_TIME, max_examples=20)
@given(data=st.data(), **WHERE)
def test_masks_that_need_lists_are_exact(
    data: st.DataObject, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    layout = torch.rand((HEADS, 6, 6), generator=generator) < 0.4
    ids = torch.randint(0, 4, (seqlen_q,), generator=generator)
    leaves = [block_sparse(layout, data.draw(st.integers(1, 9))), dilated(3), causal()]
    leaves += [~kv_lengths([5, 30]), predicate(lambda b, h, q, k: ids[q] == k % 4)]
    mask = data.draw(combined(st.sampled_from(leaves)))
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=False)


@settings(EVERY_TIME, max_examples=30)
@given(
    coefficients=st.lists(
        st.tuples(st.integers(-3, 3), st.integers(-3, 3), st.integers(-40, 40)),
        min_size=1,
        max_size=3,
    ),
    ways=st.lists(st.sampled_from("&|~"), min_size=3, max_size=3),
    **WHERE,
)
def test_functions_are_traced_as_computed(
    coefficients: list[tuple[int, int, int]],
    ways: list[str],
    seqlen_q: int,
    seqlen_kv: int,
    block_m: int,
    block_n: int,
    side: Side,
) -> None:
    """FlexAttention's `mask_mod`, called with numbers and traced."""

    def keep(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q - 3 * h <= k + b
        for (x, y, z), way in zip(coefficients, ways, strict=False):
            term = x * q + y * k < z
            result = result & term if way == "&" else result | term if way == "|" else term ^ result
        return result

    mask = predicate(keep)
    check(mask, side, seqlen_q, seqlen_kv, block_m, block_n, exact=False)
    sizes = (BATCH, HEADS, seqlen_q, seqlen_kv)
    expected = np.array([bool(keep(*index)) for index in np.ndindex(*sizes)]).reshape(sizes)
    assert (pairs(mask, seqlen_q, seqlen_kv) == expected).all()


@settings(EVERY_TIME, max_examples=15)
@given(mask=st.lists(USUAL, min_size=1, max_size=2).map(lambda parts: intersect(*parts)), **WHERE)
@example(sliding_window(7, 2), 40, 45, 8, 4, "rows")
@example(causal("bottom_right"), 9, 40, 4, 8, "columns")
def test_one_interval_leaves_the_tiles_that_several_merged_do(
    mask: Mask, seqlen_q: int, seqlen_kv: int, block_m: int, block_n: int, side: Side
) -> None:
    """Kernels of one interval compute with its ends, as `_mask.jinja` has it; the model merges."""
    sizes = {"seqlen_q": seqlen_q, "seqlen_kv": seqlen_kv, "block_m": block_m, "block_n": block_n}
    sets = stream_sets(mask, side)
    if sets.full is None:
        return
    stays, step, block = (
        (seqlen_q, block_m, block_n) if side == "rows" else (seqlen_kv, block_n, block_m)
    )
    first = torch.arange(0, stays, step)
    ends = {FIRST: first, LAST: (first + step).clamp(max=stays) - 1}
    lengths = {SEQLEN_Q: torch.tensor(seqlen_q), SEQLEN_KV: torch.tensor(seqlen_kv)}
    heads = {B: torch.arange(BATCH)[:, None, None], H: torch.arange(HEADS)[:, None]}
    tables = [value.on("cpu") for value in mask.tables]
    computed = points(tables, ends | lengths | heads, torch.device("cpu"))

    def number(expr: Any) -> torch.Tensor:
        shape = (BATCH, HEADS, len(first))
        return computed(as_expr(expr)).expand(shape).clone()

    live, full = sets.live[0], sets.full
    tile_lo = number(live.lo) // block
    tile_hi = torch.where(number(live.nonempty), -(-number(live.hi) // block), tile_lo)
    kept_lo = number(0 if full.lo is None else full.lo)
    full_lo = (-(-kept_lo // block)).maximum(tile_lo).minimum(tile_hi)
    full_hi = (number(full.hi) // block).minimum(tile_hi).maximum(full_lo)
    merged = tile_ranges(mask, side, **sizes, batch=BATCH, heads=HEADS)
    assert (np.broadcast_to(merged.visited, tile_lo.shape) == (tile_hi - tile_lo).numpy()).all()
    assert (np.broadcast_to(merged.full, tile_lo.shape) == (full_hi - full_lo).numpy()).all()


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 70), st.integers(0, 70))
@settings(EVERY_TIME, max_examples=30)
def test_areas_count_the_tiles_that_hold_pairs(
    seqlen_q: int, seqlen_kv: int, left: int, right: int
) -> None:
    mask = sliding_window(left, right)
    for block_m, block_n in ((4, 8), (16, 4)):
        ranges = tile_ranges(
            mask, "rows", seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n
        )
        tiles = {
            (q // block_m, k // block_n)
            for q in range(seqlen_q)
            for k in range(max(0, q - left), min(seqlen_kv, q + right + 1))
        }
        assert ranges.visited_tiles == len(tiles)
