"""Integers that a function captures: constants until a call has a second value for the same code,
then numbers that kernels read at run time. Decoding compiles two kernels, not one for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from threading import Lock
from typing import Any
from weakref import ref

import torch
from cachetools import LRUCache

from tilegen.masks.language.algebra import load
from tilegen.masks.language.expr import Expr
from tilegen.masks.language.rewriting import made, replaced
from tilegen.masks.tracing.trace import Traced
from tilegen.masks.values import LIMIT

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
    return replace(traced, expr=expr, captured=(*traced.captured, *tensors))


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
