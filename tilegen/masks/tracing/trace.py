"""Trace Python functions of (b, h, q_idx, kv_idx) into expressions.

FlexAttention's mask_mod and score_mod functions work unchanged: each is called once, with values
that record the operations on them: Python's operators, torch's functions, and indexing of real
tensors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any
from weakref import ref

import torch
from cachetools import LRUCache
from torch.compiler import is_compiling

from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.masks.language.algebra import both, either, load, opposite
from tilegen.masks.language.derivatives import in_single, merged, text_of
from tilegen.masks.language.elements import kind_of
from tilegen.masks.language.expr import Expr, captured_slots
from tilegen.masks.language.rewriting import made, rename, renamed, replaced
from tilegen.masks.language.texts import to_text
from tilegen.masks.made import OfFunction, assume_constant_result, never
from tilegen.masks.tables import OfTables
from tilegen.masks.tracing.mode import actual, call, finished
from tilegen.masks.tracing.reads import Reads, holds
from tilegen.masks.tracing.tracer import Tracer
from tilegen.masks.values import LIMIT, Table, table_of

MAX_CHOICES = 8
"""Most choices between numbers (`torch.where`) in a mask that are made choices between comparisons:
each may double the number of comparisons."""
MAX_LEVELS = 160
"""Most operations of a function each on the result of the last: what reads expressions recurses."""


@dataclass(frozen=True, eq=False)
class Traced(OfTables):
    """The expression that a function computes: t<i> in it is `tables[i]`."""

    expr: Expr
    tables: tuple[Table, ...]
    unused: tuple[Table, ...] = ()
    read: tuple[torch.Tensor, ...] = ()
    """The tensors that the function reads and does not make itself."""


def trace_mask(fn: Callable[..., Any]) -> Traced:
    """Return the predicate that `fn(b, h, q_idx, kv_idx)` computes, FlexAttention's `mask_mod`.

    Raises Unsupported, naming the term, for what has no expression.
    """
    return _traced(fn, "(b, h, q_idx, kv_idx)", is_score=False)


def trace_score(fn: Callable[..., Any]) -> Traced:
    """Return the score that `fn(score, b, h, q_idx, kv_idx)` computes, FlexAttention's `score_mod`.

    Raises Unsupported, naming the term, for what has no expression.
    """
    return _traced(fn, "(score, b, h, q_idx, kv_idx)", is_score=True)


def followed(
    fn: Callable[..., Any], traced: Traced, make: Callable[[Any], Any]
) -> OfFunction | None:
    """Return the function, which `make(fn)` follows, if it reads attributes of objects; else
    None."""
    reads = Reads(fn)
    if reads.are_known:
        return None
    places = reads.attributes(traced.read)
    if places == ():
        return None
    return OfFunction(fn, make, never if places is None else partial(holds, places))


def trace_compiled(
    fn: Callable[..., Any], *, is_score: bool
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """Trace a function while torch.compile traces its caller. Return the text of the expression,
    the tensors of the graph that it reads, and those without effect on the result. Raises
    Unsupported."""
    # Where a size must be known, as in `q ** n`, torch.compile fixes it.
    for keeps_sizes in (is_compiling(), False):
        try:
            number, mode, told = call(fn, is_score=is_score, keeps_sizes=keeps_sizes)
        except Unsupported:
            if keeps_sizes:
                continue
            raise
        answer = _text(number, told, is_score)
        if not isinstance(answer, str):
            break
    if isinstance(answer, str):
        raise Unsupported(answer)
    text, slots, unused = answer
    tables = mode.captured
    return text, [tables[i] for i in slots], [tables[i] for i in unused]


@assume_constant_result
def _text(number: int, told: Any, is_score: bool) -> Any:
    """Return the text of a trace, the slots that it reads, and those without effect on the
    result; or the reason for an error."""
    try:
        expr, slots, unused = _result(finished(number), told, is_score)
        return (text_of(expr) if is_score else to_text(expr)), slots, unused
    except TilegenError as error:
        return str(error)


def _traced(fn: Callable[..., Any], arguments: str, *, is_score: bool) -> Traced:
    try:
        inspect.signature(fn).bind(*arguments.split(", "))
    except ValueError:
        pass  # a built-in function: calling it will tell
    except TypeError:
        raise InvalidProblem(f"expected a function of {arguments}, got {fn}") from None
    number, mode, told = call(fn, is_score=is_score)
    expr, *slots = _result(finished(number), told, is_score)
    of = partial(mode.derived.table, is_score=is_score)
    tables, unused = (tuple([of(mode.captured[i]) for i in some]) for some in slots)
    return Traced(expr, tables, unused, mode.derived.read((*tables, *unused)))


def _result(
    tracer: Tracer, told: Any, is_score: bool
) -> tuple[Expr, tuple[int, ...], tuple[int, ...]]:
    """Return the score, or the mask, that a function computes, with the slots that it reads, and
    those without effect on the result. Raises Unsupported."""
    result = tracer.expression(actual(tracer, told))
    if (levels := result.levels() - 1) > MAX_LEVELS:
        raise Unsupported(
            f"expected at most {MAX_LEVELS} operations each on the result of the last, got "
            f"{levels}; compute what needs no score or index outside, and read it from a tensor"
        )
    kinds = [kind_of(str(table.dtype).removeprefix("torch.")) for table in tracer.read]
    result = renamed(result, dict(enumerate(zip(range(len(kinds)), kinds, strict=True))))
    if is_score:
        result = merged(in_single(result))
    # Only tensors that still matter keep a slot: `0 * bias[q]` needs none.
    read = captured_slots(result)
    places = [read.index(i) if i in read else -1 for i in range(len(tracer.read))]
    expr = rename(result, places)
    if expr.is_condition == is_score:
        what = (
            "score function that returns a number"
            if is_score
            else "mask function that returns a bool"
        )
        raise Unsupported(f"expected a {what}, got {expr}")
    slots = [table.slot for table in tracer.read]
    captured = tuple(slots[i] for i in read)
    unused = tuple(slot for slot in slots if slot not in captured)
    return expr if is_score else _without_where(expr), captured, unused


def _without_where(expr: Expr) -> Expr:
    """Rewrite a predicate into comparisons alone, from which tiles are solved: `where(c, a, b) <
    x` is a choice of two comparisons."""
    choices = [node for node in expr.walk() if node.op == "where"]
    if not 0 < len(choices) <= MAX_CHOICES:
        return expr
    inner = (one for one in choices if not any(part.op == "where" for part in _below(one)))
    choice = min(inner, key=lambda one: one.key)
    condition, then, otherwise = choice.args
    comparisons = {
        node: either(
            both(condition, replaced(node, {choice: then})),
            both(opposite(condition), replaced(node, {choice: otherwise})),
        )
        for node in expr.walk()
        if node.op in ("lt", "le", "eq") and node.has(choice)
    }
    return _without_where(replaced(expr, comparisons)) if comparisons else expr


def _below(expr: Expr) -> list[Expr]:
    return [part for arg in expr.args for part in arg.walk()]


# --------------------------------------------------------------------------------------------------
# Captured numbers


MAX_CODES = 512
_KINDS = {"int64": "int64", "float32": "float"}
"""Kinds of tables for numbers, by dtype: scores make floats of integers."""
_firsts: LRUCache[Hashable, tuple[ref[Any], Expr]] = LRUCache(MAX_CODES)
"""The first function that was called of each code, and its expression."""
_lock = Lock()


def at_call(fn: Any, traced: Traced) -> Traced:
    """Return the trace of a function that is called, with tensors in the place of integers that
    differ from those of an earlier function of the same code.

    While the earlier function lives, as that of a module does, both keep their constants.
    """
    code = getattr(getattr(fn, "__func__", fn), "__code__", None)
    if code is None or traced.makes_tensors:
        return traced
    key = (code, *((one.dtype, one.ndim) for one in traced.captured))
    with _lock:
        alive, first = _firsts.setdefault(key, (ref(fn), traced.expr))
    if first is traced.expr or alive() is not None:
        return traced
    slots: dict[tuple[Expr, Expr], Expr] = {}
    expr = _general(first, traced.expr, slots, len(traced.captured))
    numbers = {slot: constant for (_, constant), slot in slots.items()}
    # Equal where the numbers are filled in: for this call it is the same mask or score.
    if expr is None or replaced(expr, numbers) is not traced.expr:
        return traced
    tensors = (
        torch.tensor(one.value, dtype=getattr(torch, one.dtype), device="cpu")
        for one in numbers.values()
    )
    return replace(traced, expr=expr, tables=(*traced.tables, *map(table_of, tensors)))


def _general(
    first: Expr, second: Expr, slots: dict[tuple[Expr, Expr], Expr], count: int
) -> Expr | None:
    """Return an expression of which both are cases, with look-ups in `slots`, from `count` on, in
    the place of integers that differ; None if something else differs."""
    if first is second:
        return second
    if first.is_const and second.is_const:
        kind = _KINDS.get(second.dtype)
        if kind is None or first.dtype != second.dtype or not -LIMIT < second.value < LIMIT:
            return None
        return slots.setdefault((first, second), load(count + len(slots), kind))
    same = (first.op, first.dtype, first.value) == (second.op, second.dtype, second.value)
    if not same or len(first.args) != len(second.args):
        return None
    pairs = zip(first.args, second.args, strict=True)
    args = [_general(one, other, slots, count) for one, other in pairs]
    parts = tuple(one for one in args if one is not None)
    return made(second, parts) if len(parts) == len(args) else None


class OfNumbers:
    """The function of a mask or a score with integers, which may be read at run time at a call.
    Stays in its process."""

    def __init__(self, function: Any, traced: Traced, make: Callable[[Traced], Any]) -> None:
        """`make` makes a mask or a score of a trace."""
        self.function = function
        self._traced, self._make = traced, make
        self._latest: Any = None

    def now(self, given: Any) -> Any:
        """Return the mask or score of a call: the `given` one, or one that reads numbers."""
        if self._latest is None:
            traced = at_call(self.function, self._traced)
            if traced is self._traced:  # constants, from now on
                vars(given).pop("follows", None)
                return given
            self._latest = self._make(traced)
        return self._latest

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        return None


def followed_numbers(fn: Any, traced: Traced, make: Callable[[Traced], Any]) -> OfNumbers | None:
    """Return the function, if its mask or score has integers that calls may read; else None."""
    has = any(one.is_const and one.dtype in _KINDS for one in traced.expr.walk())
    return OfNumbers(fn, traced, make) if has and not traced.makes_tensors else None
