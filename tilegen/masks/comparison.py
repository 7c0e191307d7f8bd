"""Masks that compare a number of each column with one of each row: `times[k] <= times[q]`,
`k >= offsets[ids[q]]`, `ids_q[q] == ids_kv[k]`, `is_token[b, k]`.

The numbers are replaced by their ranks, which fit into 32 bits whatever they were. Running minima
and maxima of what each row sees never fall from one row to the next, whatever the numbers are, so
tiles are solved in closed form from O(seqlen) numbers: exactly where the numbers rise or fall with
their index, and never a tile too few where they do not. All tables are made anew at each call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from tilegen.masks.form import Condition, Form, Side
from tilegen.masks.language.algebra import negative, number, opposite, subtract
from tilegen.masks.language.bounds import LENGTH, bounded
from tilegen.masks.language.evaluation import points
from tilegen.masks.language.expr import ONE, SEQLEN_KV, SEQLEN_Q, ZERO, B, Expr, H, K, Q, slot_of
from tilegen.masks.language.integers import combined, linear
from tilegen.masks.language.rewriting import merge
from tilegen.masks.mask import Mask
from tilegen.masks.tracing.trace import Traced
from tilegen.masks.usual import equal
from tilegen.masks.values import Lengths, Pair, Recipe, Table, power_of_two_near, table_of

Relation = Literal["<=", "<", ">=", ">", "=="]
Tables = tuple[torch.Tensor, ...]
LOOSE = 1.25
"""Bounds that hold more than LOOSE times the kept pairs cost more than lists of tiles."""


def _enclosing(
    at: Pair, side: Side, column: Table, row: Table, *bounds: Table
) -> tuple[Condition, Condition]:
    by_side, index = (bounds[:4], at.k) if side == "rows" else (bounds[4:], at.q)
    first, end, sure_first, sure_end = (bound.at(at) for bound in by_side)
    return (first <= index) & (index < end), (sure_first <= index) & (index < sure_end)


ORDERED = Form(
    "ordered",
    lambda at, side, column, row, *_: column.at(at) < row.at(at),
    enclosing=_enclosing,
    spelt=lambda column, *_: f"ordered({column.notation})",
)
"""`column[k] < row[q]` between ranks. Four bounds by row follow, then four by column: first and end
of the indices that are kept at most, then of those kept for certain. None of the four falls as the
row, or column, rises."""
MATCHED = Form(
    "matched",
    lambda at, side, column, row, *_: equal(column.at(at), row.at(at)),
    enclosing=_enclosing,
    spelt=lambda column, *_: f"matched({column.notation})",
)
"""`column[k] == row[q]`, with the same bounds."""


def compared(form: Form, column: Table) -> Mask:
    """Return a comparison whose other tables come from the same recipe as `column`, the first
    table, or are stand-ins like `column`."""
    axes = (column.axes or "")[:-1]

    def bounds(axis: str, part: int) -> list[Table]:
        return [column.beside(part + i, "rising", axes + axis) for i in range(4)]

    row = column.beside(1, "table", f"{axes}q")
    return Mask.of(form, column, row, *bounds("q", 2), *bounds("k", 6))


# --------------------------------------------------------------------------------------------------
# From a traced condition


class Sides(NamedTuple):
    """A condition as `column relation row`: `column` does not depend on q, nor `row` on k."""

    column: Expr
    relation: Relation
    row: Expr


def comparison_of(part: Any, traced: Traced) -> Mask | None:
    """Convert a condition to a comparison; None if it is not a comparison, or if its numbers
    rise and fall so much that lists of tiles cost less."""
    ((expr,), tables) = merge([(part, traced.tables)])
    sources = tuple([one.tensor for one in tables])
    sides, is_batched = _separated(expr), expr.has(B)
    is_made = any(one.recipe is not None or one.tensor.is_meta for one in tables)
    if not sources or sides is None or is_made:
        return None
    given = (sides, is_batched)
    length = _length_of_tables(expr, sources)
    made = _tables(*(one.detach() for one in sources), (length, length), *given)
    column, row, first, end = (one.long() for one in made[:4])
    kept = float(_counts(column, row, sides.relation).double().mean())
    if float((end - first).clamp(min=0).double().mean()) > LOOSE * kept + 1:
        return None
    like = Table(
        axes="bk" if is_batched else "k",
        typical=min(100, power_of_two_near(max(1, round(100 * kept / length)))),
        pattern="table",
        recipe=Recipe(_tables, sources, given),
    )
    return compared(MATCHED if sides.relation == "==" else ORDERED, like)


def _length_of_tables(expr: Expr, sources: Sequence[torch.Tensor]) -> int:
    """Return the length of sequences whose positions reach the ends of all tables."""
    longest = 1
    for element in expr.loads():
        for index, size in zip(element.args, sources[slot_of(element)].shape, strict=True):
            highest = min(size - 1, bounded(index)[1])
            if not index.free.isdisjoint((Q, K)) and not index.loads():
                last = bisect_left(range(LENGTH), highest, key=lambda n: bounded(index, n)[1])
                longest = max(longest, last + 1)
    return longest


def _separated(expr: Any) -> Sides | None:
    """Separate a condition into a side that depends on k and a side that depends on q."""
    loads = expr.loads()
    batched = all(
        one.args[0] is B and not any(index.has(B) for index in one.args[1:])
        for one in loads
        if one.has(B)
    )
    if H in expr.free or not batched or _reads_batch(expr):
        return None
    if K not in expr.free:  # the rank of True is 1, of False 0
        return Sides(ZERO, "<", number(expr))
    if Q not in expr.free:
        return Sides(number(opposite(expr)), "<", ONE)
    relation = _RELATIONS.get(expr.op)
    if relation is None:
        return None
    left, right = expr.args
    if left.is_int:  # terms change sides without rounding
        terms, constant = linear(subtract(left, right))
        column = combined({term: factor for term, factor in terms.items() if term.has(K)})
        rest = {term: factor for term, factor in terms.items() if not term.has(K)}
        left, right = column, negative(combined(rest, constant))
    if right.has(K):
        left, relation, right = right, _SWAPPED[relation], left
    return None if left.has(Q) or right.has(K) else Sides(left, relation, right)


def _reads_batch(expr: Expr) -> bool:
    """Return whether an expression depends on the batch outside of look-ups."""
    return expr is B or (expr.op != "load" and any(map(_reads_batch, expr.args)))


_RELATIONS: dict[str, Relation] = {"le": "<=", "lt": "<", "eq": "=="}
_SWAPPED: dict[Relation, Relation] = {"<=": ">=", "<": ">", ">=": "<=", ">": "<", "==": "=="}


# --------------------------------------------------------------------------------------------------
# Tables


def _tables(*given: Any) -> Tables:
    """Return ranks of columns and rows, bounds by row and bounds by column."""
    *tensors, lengths, sides, is_batched = given
    column, row = _numbers(tensors, lengths, sides, is_batched)
    column, row = _ranks(column, row, sides.relation)
    if sides.relation == "==":
        by_row, by_column = _matches(column, row), _matches(row, column)
    else:
        by_row, by_column = _below(column, row), _below(-row, -column)
    return tuple(
        one.int().contiguous()
        for one in (column, row, *_rising(by_row, lengths[1]), *_rising(by_column, lengths[0]))
    )


def _numbers(
    tensors: Sequence[torch.Tensor], lengths: Lengths, sides: Sides, is_batched: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two numbers that are compared: (..., seqlen_kv) of columns and (..., seqlen_q) of
    rows, in one dtype; a batch comes first where the condition depends on it."""
    device = tensors[0].device
    captured = [table_of(one).on(device) for one in tensors]
    by_batch = [one for side in (sides.column, sides.row) for one in side.loads() if one.has(B)]
    batch = min((len(captured[slot_of(one)]) for one in by_batch), default=1)
    shape = (batch,) if is_batched else ()
    numbers: list[torch.Tensor] = []
    for expr, symbol, length in ((sides.column, K, lengths[1]), (sides.row, Q, lengths[0])):
        index = torch.arange(length, device=device)
        symbols = {symbol: index, B: torch.arange(batch, device=device)[:, None]}
        for name, value in zip((SEQLEN_Q, SEQLEN_KV), lengths, strict=True):
            symbols[name] = torch.full((), value, device=device)  # a copy could not be captured
        numbers.append(points(captured, symbols, device)(expr).expand(*shape, length))
    common = torch.promote_types(numbers[0].dtype, numbers[1].dtype)
    return numbers[0].to(common), numbers[1].to(common)


def _ranks(
    column: torch.Tensor, row: torch.Tensor, relation: Relation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers that compare by `<`, or `==`, as the numbers do by `relation`."""
    if relation in (">=", ">"):
        column, row = (-one if one.is_floating_point() else ~one for one in (column, row))
    is_nan = column.isnan(), row.isnan()
    if column.is_floating_point():  # in order, as ranks are found by halving
        column = column.masked_fill(is_nan[0], float("inf"))
    ordered = column.sort(-1).values
    below_column = torch.searchsorted(ordered, column.contiguous())
    below_row = torch.searchsorted(ordered, row.contiguous(), right=relation in ("<=", ">="))
    none = -1 if relation == "==" else 0
    if relation == "==":
        up_to_row = torch.searchsorted(ordered, row.contiguous(), right=True)
        below_row = torch.where(up_to_row > below_row, below_row, none)
    length = column.shape[-1]
    return (  # NaN compares with nothing
        torch.where(is_nan[0], length, below_column),
        torch.where(is_nan[1], none, below_row),
    )


Spans = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""First and end of the columns that each row keeps at most, then of those it keeps for certain."""


def _below(column: torch.Tensor, row: torch.Tensor) -> Spans:
    """Return the spans of a mask in which each row keeps the columns of smaller rank."""
    row, length = row.contiguous(), column.shape[-1]
    lowest, highest = column.cummin(-1).values, column.cummax(-1).values
    lowest_on, highest_on = _smallest_on(column), -_smallest_on(-column)
    first = torch.searchsorted(-lowest, -row, right=True)
    end = torch.searchsorted(lowest_on.contiguous(), row)
    dropped_first = torch.searchsorted(highest, row)
    dropped_end = torch.searchsorted(-highest_on, -row, right=True)
    # Columns that are surely kept lie on one side of the others: the same side for all rows, so
    # that their ends rise.
    before = dropped_first.sum(-1, keepdim=True) >= (length - dropped_end).sum(-1, keepdim=True)
    return (
        first,
        end,
        torch.where(before, 0, dropped_end),
        torch.where(before, dropped_first, length),
    )


def _matches(column: torch.Tensor, row: torch.Tensor) -> Spans:
    """Return the spans of a mask in which each row keeps the columns of its own rank."""
    ordered, order = column.sort(dim=-1, stable=True)
    low = torch.searchsorted(ordered, row.contiguous())
    high = torch.searchsorted(ordered, row.contiguous(), right=True)
    length, any_seen = column.shape[-1], high > low
    first = order.gather(-1, low.clamp(max=length - 1))
    end = order.gather(-1, (high - 1).clamp(min=0)) + 1
    first, end = torch.where(any_seen, first, length), torch.where(any_seen, end, 0)
    is_whole = end - first == high - low
    return first, end, torch.where(is_whole, first, length), torch.where(is_whole, end, 0)


def _rising(spans: Spans, length: int) -> Spans:
    """Widen the outer and narrow the inner spans until no end falls from one row to the next."""
    first, end, sure_first, sure_end = spans
    # A row that keeps nothing for certain spoils the rows before it, or those after it: the latter
    # where all of them are such rows.
    is_empty = sure_first >= sure_end
    ends_so = _smallest_on(is_empty.int()).bool()
    edge = torch.where(ends_so, length, 0)
    sure_first = torch.where(is_empty, edge, sure_first)
    sure_end = torch.where(is_empty, edge, sure_end)
    return (
        _smallest_on(first),
        end.cummax(-1).values,
        sure_first.cummax(-1).values,
        _smallest_on(sure_end),
    )


def _smallest_on(numbers: torch.Tensor) -> torch.Tensor:
    """Return the smallest number of each place and those behind it."""
    return numbers.flip(-1).cummin(-1).values.flip(-1)


def _counts(column: torch.Tensor, row: torch.Tensor, relation: Relation) -> torch.Tensor:
    """Count the columns that each row keeps, from ranks."""
    ordered = column.sort(-1).values
    below = torch.searchsorted(ordered, row.contiguous())
    if relation != "==":
        return below
    return torch.searchsorted(ordered, row.contiguous(), right=True) - below
