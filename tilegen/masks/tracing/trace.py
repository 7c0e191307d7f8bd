"""Traces Python functions of (b, h, q_idx, kv_idx) into expressions.

FlexAttention's mask_mod and score_mod functions work unchanged: each is called once, with values
that remember what is done to them, be it by Python's operators, by torch's functions or by
indexing a real tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.relational import Relational
from torch.compiler import assume_constant_result

from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.masks.language.comparisons import again, either, opposite
from tilegen.masks.language.nodes import Where, normalise
from tilegen.masks.language.symbols import captured_slots, is_condition
from tilegen.masks.language.texts import rename, to_text
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.mode import actual, call, finished
from tilegen.masks.tracing.tracer import Tracer
from tilegen.sympy_lock import lock

MAX_CHOICES = 8
"""Most choices between numbers (`torch.where`) in a mask that are made choices between comparisons:
each may double the number of comparisons."""


@dataclass(frozen=True, eq=False)
class Traced:
    """The expression that a function computes: t<i> in it is `captured[i]`."""

    expr: sympy.Basic
    captured: tuple[torch.Tensor, ...]
    unused: tuple[torch.Tensor, ...]
    """Tensors that the function reads and does not depend on: `bias` in `s + 0 * bias[q]`."""
    derived: Derived
    """The steps by which the function made tensors of those it captures."""

    @property
    def makes_tensors(self) -> bool:
        """Whether the function reads tensors that it made itself."""
        return any(id(tensor) in self.derived.made for tensor in (*self.captured, *self.unused))


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


def trace_compiled(
    fn: Callable[..., Any], *, is_score: bool
) -> tuple[str, list[torch.Tensor], list[torch.Tensor]]:
    """Trace a function while torch.compile traces its caller. Return the text of the expression,
    the tensors of the graph that it reads, and those it reads in vain. Raises Unsupported."""
    number, mode, told = call(fn, is_score=is_score)
    answer = _text(number, told, is_score)
    if isinstance(answer, str):
        raise Unsupported(answer)
    text, slots, unused = answer
    tables = mode.captured
    return text, [tables[i] for i in slots], [tables[i] for i in unused]


@assume_constant_result
def _text(number: int, told: Any, is_score: bool) -> Any:
    """Return the text of a trace, the slots that it reads, and those it reads in vain; or why there
    is none."""
    try:
        with lock:
            expr, slots, unused = _result(finished(number), told, is_score)
            return to_text(expr), slots, unused
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
    captured, unused = (tuple(mode.captured[i] for i in some) for some in slots)
    return Traced(expr, captured, unused, mode.derived)


def _result(
    tracer: Tracer, told: Any, is_score: bool
) -> tuple[sympy.Basic, tuple[int, ...], tuple[int, ...]]:
    """Return the score, or the mask, that a function computes, with the slots that it reads, and
    those it reads in vain. Raises Unsupported."""
    result = normalise(tracer.expression(actual(tracer, told)))
    # Only tensors that still matter keep a slot: `0 * bias[q]` needs none.
    read = captured_slots(result)
    places = [read.index(i) if i in read else -1 for i in range(len(tracer.read))]
    expr: Any = rename(result, places)
    if is_condition(expr) == is_score:
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


def _without_where(expr: sympy.Basic) -> sympy.Basic:
    """Return an equal predicate of comparisons alone, which tiles are solved from: `where(c, a, b)
    < x` is a choice of two."""
    choices = sorted(expr.atoms(Where), key=lambda choice: (choice.count(Where), str(choice)))
    if not 0 < len(choices) <= MAX_CHOICES:
        return expr
    choice = choices[0]  # holds no other
    condition, then, otherwise = choice.args
    comparisons = {
        atom: either(
            condition & again(atom.xreplace({choice: then})),
            opposite(condition) & again(atom.xreplace({choice: otherwise})),
        )
        for atom in expr.atoms(Relational)
        if atom.has(choice)
    }
    return _without_where(normalise(expr.xreplace(comparisons)))
