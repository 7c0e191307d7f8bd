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

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.comparisons import again, either, opposite
from tilegen.masks.language.nodes import Where, normalise
from tilegen.masks.language.symbols import is_condition
from tilegen.masks.language.texts import merge, without
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.tracer import Tracer

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


def _traced(fn: Callable[..., Any], arguments: str, *, is_score: bool) -> Traced:
    tracer = Tracer()
    terms = tracer.arguments(is_score=is_score)
    try:
        inspect.signature(fn).bind(*terms)
    except ValueError:
        pass  # a built-in function: calling it will tell
    except TypeError:
        raise InvalidProblem(f"expected a function of {arguments}, got {fn}") from None
    with Derived() as derived:
        value = fn(*terms)
    return traced(tracer, value, derived, is_score=is_score)


def traced(tracer: Tracer, value: Any, derived: Derived, *, is_score: bool) -> Traced:
    """Return the score, or the mask, that a traced value is. Raises Unsupported."""
    result = normalise(tracer.expression(value))
    # Only tensors that still matter keep a slot: `0 * bias[q]` needs none.
    (expr,), captured = merge([(result, tracer.captured)])
    if is_condition(expr) == is_score:
        what = (
            "score function that returns a number"
            if is_score
            else "mask function that returns a bool"
        )
        raise Unsupported(f"expected a {what}, got {expr}")
    unused = without(tracer.captured, captured)
    expr = expr if is_score else _without_where(expr)
    return Traced(expr, captured, unused, derived)


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
