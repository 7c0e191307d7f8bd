"""Masks that compare numbers of rows with numbers of columns: the right pairs, and tiles in closed
form that are never too few, whatever the numbers are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import user_forms
from tilegen.check.reference import dense_mask
from tilegen.masks import parse_mask, predicate
from tilegen.masks.comparison import MATCHED, ORDERED
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.spans import visit
from tilegen.masks.tiles.tile_ranges import tile_ranges

LENGTH = 90
SOLVED = ("packed", "padding", "two tables of ids", "times", "window of time", "rising floats",
          "tokens", "not the tokens")  # fmt: skip
RELATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda x, y: x < y,
    "<=": lambda x, y: x <= y,
    ">": lambda x, y: x > y,
    ">=": lambda x, y: x >= y,
    "==": lambda x, y: x == y,
}
NAN = float("nan")
INF = float("inf")


def dense(fn: Callable[..., Any], rows: int, columns: int, batch: int) -> torch.Tensor:
    """Evaluate a function for all pairs, (batch, rows, columns)."""
    b = torch.arange(batch)[:, None, None]
    keep = fn(b, 0, torch.arange(rows)[:, None], torch.arange(columns))
    return torch.as_tensor(keep).expand(batch, rows, columns)


def tiles(keep: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tiles keep anything, and which keep all, (batch, rows, columns)."""
    batch, rows, columns = keep.shape
    more = [-size % block for size in (columns, rows)]
    whole = torch.nn.functional.pad(keep, (0, more[0], 0, more[1]))
    whole = whole.reshape(batch, -(-rows // block), block, -1, block)
    every = torch.nn.functional.pad(keep, (0, 0, 0, more[1]), value=True)
    every = torch.nn.functional.pad(every, (0, more[0])).reshape(whole.shape)
    return whole.any(4).any(2), every.all(4).all(2)


def visits(mask: Mask, side: Any, rows: int, columns: int, batch: int, block: int) -> Any:
    """Return which tiles are visited, and which of them without mask code."""
    visited = tile_ranges(
        mask, side, seqlen_q=rows, seqlen_kv=columns, block_m=block, block_n=block, batch=batch
    )
    across = -(-(columns if side == "rows" else rows) // block)
    index = torch.arange(across)
    flags: list[torch.Tensor] = []
    for part in visited.pieces:
        ranges = [tuple(torch.as_tensor(end.copy())[:, 0, :, None] for end in one) for one in part]
        inside = [(lo <= index) & (index < hi) for lo, hi in ranges]
        flags.append(torch.stack(inside).any(0) if inside else torch.zeros(1, 1, across).bool())
    partial, full = (one.expand(batch, -1, -1) for one in flags)
    return (partial | full, full) if side == "rows" else ((partial | full).mT, full.mT)


@pytest.mark.parametrize("name", SOLVED)
def test_users_forms_have_an_exact_closed_form(name: str) -> None:
    fn = user_forms.MASKS[name]
    mask = predicate(fn)
    keep = dense(fn, LENGTH, LENGTH, 2)
    live, full = tiles(keep, 16)
    assert any(part.form in (ORDERED, MATCHED) for part in (mask, *mask.parts))
    assert parse_mask(mask.notation) == mask.stand_in
    for side in ("rows", "columns"):
        assert visit(mask.general, side).sets
        visited, without = visits(mask, side, LENGTH, LENGTH, 2, 16)
        assert not (live & ~visited).any()
        # Where documents end inside a tile, what its rows see is taken together.
        assert (visited & ~live).sum() <= (2 if name == "padding" else 0)
        cut = slice(
            0, LENGTH // 16
        )  # the last tile is cut off: whether it is full, sides see apart
        torch.testing.assert_close(without[:, cut, cut], full[:, cut, cut])


NUMBERS = st.lists(st.integers(-3, 6), min_size=1, max_size=40)
DECIMALS = st.lists(st.sampled_from([-INF, -1.5, -0.0, 0.0, 2.0, INF, NAN]), min_size=1, max_size=9)


@pytest.mark.slow
@settings(max_examples=75)
@given(
    relation=st.sampled_from(sorted(RELATIONS)),
    columns=st.one_of(NUMBERS, NUMBERS.map(sorted), DECIMALS),
    rows=st.one_of(NUMBERS, NUMBERS.map(sorted), DECIMALS),
    wide=st.sampled_from([torch.int64, torch.int32, torch.float32, torch.float64]),
    block=st.sampled_from([2, 4]),
    is_inverted=st.booleans(),
)
def test_no_tile_is_too_few_whatever_the_numbers(
    relation: str,
    columns: list[float],
    rows: list[float],
    wide: torch.dtype,
    block: int,
    is_inverted: bool,
) -> None:
    def tensor(numbers: list[float]) -> torch.Tensor:
        is_whole = all(isinstance(one, int) for one in (*columns, *rows))
        return torch.tensor(numbers, dtype=wide if is_whole else torch.float32)

    x, y = torch.zeros(len(columns), dtype=tensor(columns).dtype), tensor(rows).clone()
    y.zero_()
    mask = predicate(lambda b, h, q, k: RELATIONS[relation](x[k], y[q]))
    assert mask.form in (ORDERED, MATCHED)
    x.copy_(tensor(columns))  # in place: what was compiled for numbers that rise must stay right
    y.copy_(tensor(rows))

    def fn(b: Any, h: Any, q: Any, k: Any) -> Any:
        return RELATIONS[relation](x[k], y[q]) ^ is_inverted

    mask = ~mask if is_inverted else mask
    keep = dense(fn, len(rows), len(columns), 1)
    at = torch.arange(len(rows))[:, None], torch.arange(len(columns))
    torch.testing.assert_close(mask.kept(*at, len(rows), len(columns)), keep[0])
    live, full = tiles(keep, block)
    for side in ("rows", "columns"):
        visited, without = visits(mask, side, len(rows), len(columns), 1, block)
        assert not (live & ~visited).any()
        size = len(columns) if side == "rows" else len(rows)
        inside = slice(0, size // block)  # tiles that the end cuts off are partial
        seen = without[..., inside] if side == "rows" else without[:, inside]
        truth = full if side == "rows" else tiles(keep.mT, block)[1].mT
        assert not (seen & ~(truth[..., inside] if side == "rows" else truth[:, inside])).any()


def test_numbers_that_rise_and_fall_are_left_to_lists() -> None:
    ids = torch.tensor([0, 1] * 40)
    times = torch.tensor([5, 1, 9, 3] * 20)
    assert predicate(lambda b, h, q, k: times[k] <= times[q]).form is not ORDERED
    assert predicate(lambda b, h, q, k: ids[q] != ids[k] + 1).form not in (ORDERED, MATCHED)


BACK = torch.arange(9600) // 100 % 48
"""Documents that come back, all of them behind the first 4,096 tokens."""
VALUES = torch.cat([torch.tensor([5, 1, 9, 3]), torch.zeros(5000, dtype=torch.int64)])
TURNS = torch.arange(80) % 4
BY_LENGTH: dict[str, Any] = {
    "the whole table": lambda b, h, q, k: BACK[q] + 0 == BACK[k],
    "a number for sixteen tokens": lambda b, h, q, k: BACK[::16][q // 16] <= BACK[::16][k // 16],
    "no padding": lambda b, h, q, k: VALUES[TURNS[k]] <= VALUES[TURNS[q]],
}


@pytest.mark.parametrize("judged", BY_LENGTH)
def test_bounds_are_judged_by_all_tokens_that_tables_have(judged: str) -> None:
    length = len(TURNS) if judged == "no padding" else len(BACK)
    at = torch.arange(length)
    keep = BY_LENGTH[judged](0, 0, at[::16, None], at)
    first, end = keep.byte().argmax(1), length - keep.flip(1).byte().argmax(1)
    assert (end - first).double().mean() > 1.25 * keep.sum(1).double().mean()  # loose
    mask = predicate(BY_LENGTH[judged])
    assert {visit(mask.general, side).strategy for side in ("rows", "columns")} == {"lists"}


def test_a_table_for_more_batches_than_a_call_has() -> None:
    is_token = torch.arange(20) < torch.tensor([5, 12, 20])[:, None]
    mask = predicate(lambda b, h, q, k: is_token[b, k])
    batch = dense_mask(mask, 20, 20, batch=2, heads=1)
    torch.testing.assert_close(batch[:, 0, 0], is_token[:2])
    shape = Shape(2, 1, 20, 20)
    assert all(len(one) == 2 for one in tensors_of(mask, shape, torch.device("cpu")))
