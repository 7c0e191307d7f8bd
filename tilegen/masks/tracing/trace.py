"""Traces Python functions of (b, h, q_idx, kv_idx) into expressions.

FlexAttention's mask_mod and score_mod functions work unchanged: each is called once, with values
that remember what is done to them, be it by Python's operators, by torch's functions or by
indexing a real tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import sympy
import torch
from sympy.core.relational import Relational

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.nodes import Where, normalise
from tilegen.masks.language.operations import OPERATIONS, cast
from tilegen.masks.language.symbols import B, H, K, Lookup, Q, S, captured_name, is_condition
from tilegen.masks.language.texts import kind_of_tensor, merge, without
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.no_numbers import MAY_GIVE_NONE, check_numbers
from tilegen.masks.tracing.terms import (
    MAX_ELEMENTS,
    REDUCTIONS,
    RESHAPES,
    Elements,
    Rows,
    Several,
    Term,
    Value,
    reduced,
)

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
    may_give_none: bool
    """True: it uses an operation that gives no number for some numbers."""

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
    found = tracer.traced(value, derived, is_score=is_score)
    if found.may_give_none:
        check_numbers(fn, found.expr, found.captured, is_score=is_score)
    return found


def _without_where(expr: sympy.Basic) -> sympy.Basic:
    """Return an equal predicate of comparisons alone, which tiles are solved from: `where(c, a, b)
    < x` is a choice of two."""
    choices = sorted(expr.atoms(Where), key=lambda choice: (choice.count(Where), str(choice)))
    if not 0 < len(choices) <= MAX_CHOICES:
        return expr
    choice = choices[0]  # holds no other
    condition, then, otherwise = choice.args
    comparisons = {
        atom: (condition & atom.xreplace({choice: then}))
        | (~condition & atom.xreplace({choice: otherwise}))
        for atom in expr.atoms(Relational)
        if atom.has(choice)
    }
    return _without_where(normalise(expr.xreplace(comparisons)))


_PLACEMENT = ("device", "layout", "memory_format", "non_blocking", "copy", "pin_memory")
"""Arguments of torch's functions that change no value."""


@dataclass(eq=False)
class Tracer:
    """Collects the tensors one function captures."""

    captured: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    may_give_none: bool = False
    """True once an operation was met that gives no number for some numbers."""

    def arguments(self, *, is_score: bool) -> list[Term]:
        """Return what a function of a score, or of a mask, is called with."""
        return [Term(self, symbol) for symbol in ((S,) * is_score + (B, H, Q, K))]

    def traced(self, value: Any, derived: Derived, *, is_score: bool) -> Traced:
        """Return the score, or the mask, that a traced value is. Raises Unsupported."""
        result = normalise(self.expression(value))
        # Only tensors that still matter keep a slot: `0 * bias[q]` needs none.
        (expr,), captured = merge([(result, self.captured)])
        if is_condition(expr) == is_score:
            what = (
                "score function that returns a number"
                if is_score
                else "mask function that returns a bool"
            )
            raise Unsupported(f"expected a {what}, got {expr}")
        unused = without(self.captured, captured)
        expr = expr if is_score else _without_where(expr)
        return Traced(expr, captured, unused, derived, self.may_give_none)

    def expression(self, value: Any) -> Any:
        """Return the expression of an operand: a traced value, a number, a 0-dimensional
        tensor."""
        match value:
            case Term():
                return value.expr
            case Rows():
                value.incomplete()
            case Several():
                raise Unsupported(
                    f"expected one value, got {tuple(value.shape)}; sum it, or ask for any or all"
                )
            case torch.Tensor():
                if value.ndim:
                    raise Unsupported(
                        f"expected a tensor of shape {tuple(value.shape)} to be indexed, by b, h, "
                        "q_idx or kv_idx, before it is computed with"
                    )
                return self.element(value, ())
            case bool() | int() | float():
                return sympy.sympify(value)
            case np.generic():
                return self.expression(value.item())
            case _:
                raise Unsupported(f"expected a traced value, a number or a tensor, got {value!r}")

    def element(self, tensor: torch.Tensor, index: Sequence[Any]) -> Any:
        """Return one element of a real tensor, which takes a slot."""
        kind = kind_of_tensor(tensor)
        slots = [i for i, known in enumerate(self.captured) if known is tensor]
        if not slots:
            slots = [len(self.captured)]
            self.captured.append(tensor)
        found = Lookup(captured_name(slots[0], kind), *index)
        return sympy.Ne(found, 0) if kind == "bool" else found

    def index(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Term | Rows:
        """Return `tensor[index]`: an element, or rows that still lack an index."""
        parts: list[Any] = []
        for part in index:
            if isinstance(part, (slice, list)) or part is None or part is Ellipsis:
                raise Unsupported(
                    f"expected one index per dimension of a tensor of shape "
                    f"{tuple(tensor.shape)}, got {part!r}"
                )
            expr = self.expression(part)
            if is_condition(expr) or not expr.is_integer:
                raise Unsupported(
                    f"expected an integer index, got {expr}; use //, or `.to(torch.int32)`"
                )
            parts.append(expr)
        if len(parts) > tensor.ndim:
            raise Unsupported(
                f"expected {tensor.ndim} indices of a tensor of shape {tuple(tensor.shape)}, "
                f"got {len(parts)}"
            )
        if len(parts) < tensor.ndim:
            return Rows(self, tensor, tuple(parts))
        return Term(self, self.element(tensor, parts))

    def _in_place(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Term:
        """Give the first argument what an operation makes of it, under all its names, as torch
        does."""
        changed, found = args[0], self.apply(name, args, kwargs)
        fits = isinstance(changed, Term) and isinstance(found, Term)
        # Whether a number is an integer, a value that was cast does not say.
        if not fits or (changed.dtype == torch.bool) != (found.dtype == torch.bool):
            raise Unsupported(
                f"expected {name} in place to leave a number a number, a condition a condition, "
                "and a shape as it is; write x = x + y in the place of x += y"
            )
        changed.expr = found.expr
        return changed

    def apply(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what one of torch's functions or methods makes of its arguments."""
        if name.startswith("__"):
            name = name.strip("_")
            if name not in OPERATIONS and name[0] == "r" and name[1:] in OPERATIONS:
                name, args = name[1:], args[::-1]  # `2 ** q` is __rpow__ of q
            elif name not in OPERATIONS and name[0] == "i" and name[1:] in OPERATIONS:
                name = f"{name[1:]}_"  # `x &= y` is __iand__ of x
        name = name.removeprefix("special_")
        if name.endswith("_") and name[:-1] in OPERATIONS:
            return self._in_place(name[:-1], args, kwargs)
        self.may_give_none |= name in MAY_GIVE_NONE and not _is_safe(name, args)
        if name == "getitem":
            tensor, index = args
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"expected only real tensors to be indexed, got {tensor}")
            return self.index(tensor, index if isinstance(index, tuple) else (index,))
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}
        dtype = kwargs.pop("dtype", None)
        if name in ("to", "type"):
            dtypes = [a for a in (*args[1:], dtype) if isinstance(a, torch.dtype)]
            value = self.expression(args[0])
            return Term(self, cast(value, dtypes[0]) if dtypes else value)
        if any(isinstance(arg, (Rows, Several)) for arg in args):
            return self._on_several(name, args, kwargs)
        if name == "unsqueeze":
            return self.several(np.array([self.expression(args[0])], dtype=object))
        if name not in OPERATIONS:
            raise Unsupported(
                f"expected arithmetic, comparisons, torch.where and torch's elementary functions, "
                f"got {name}; {_ADVICE.get(name, 'write it with those')}"
            )
        function = OPERATIONS[name]
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise Unsupported(f"expected torch's elementwise {name}: {error}") from None
        for key, value in bound.arguments.items():
            if _is_value(value):
                bound.arguments[key] = self.expression(value)
        result = sympy.sympify(function(*bound.args, **bound.kwargs))
        if result.has(sympy.nan, sympy.zoo, sympy.I):
            raise Unsupported(f"expected a real number, got {result}")
        return Term(self, result if dtype is None else cast(result, dtype))

    def several(self, elements: Any) -> Term | Several:
        """Return a small tensor, or the one value of one without dimensions."""
        if isinstance(elements, np.ndarray) and elements.ndim:
            if elements.size > MAX_ELEMENTS:
                raise Unsupported(
                    f"expected at most {MAX_ELEMENTS} elements to compute with, got {elements.size}"
                )
            return Several(self, elements)
        return Term(self, elements.item() if isinstance(elements, np.ndarray) else elements)

    def _on_several(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what a function makes of small tensors, element by element or along
        dimensions."""
        if name in REDUCTIONS:
            return self.several(reduced(name, self._elements(args[0]), *args[1:], **kwargs))
        if name in ("dot", "vdot", "inner", "matmul"):
            left, right = map(self._elements, args)
            if left.ndim != 1 or right.shape != left.shape:
                raise Unsupported(
                    f"expected two vectors in {name}, got {left.shape}, {right.shape}"
                )
            return self.several(reduced("sum", left * right))
        if name in RESHAPES:
            return self.several(RESHAPES[name](self._elements(args[0]), *args[1:], **kwargs))
        arrays = np.broadcast_arrays(*(self._elements(arg) for arg in args if _is_value(arg)))
        found = np.empty(arrays[0].shape, dtype=object)
        for place in np.ndindex(found.shape):
            each = iter(arrays)
            parts = [Term(self, next(each)[place]) if _is_value(arg) else arg for arg in args]
            found[place] = self.apply(name, parts, dict(kwargs)).expr
        return self.several(found)

    def _elements(self, value: Any) -> Elements:
        if isinstance(value, (Rows, Several)):
            return value.elements
        if isinstance(value, torch.Tensor) and value.ndim:
            return Rows(self, value, ()).elements
        found = np.empty((), dtype=object)
        found[()] = self.expression(value)
        return found


def _is_safe(name: str, args: Sequence[Any]) -> bool:
    """Whether an operand is a number for which the result is always one."""
    divides = "div" in name or name in ("mod", "fmod", "remainder")
    match args:
        case (int() | float() as base, *_) if name == "pow":
            return base > 0 and isfinite(base)
        case (_, bool() | int() | float() as number, *_):
            return isfinite(number) and (
                number != 0 if divides else name == "pow" and number in (1, 2, 3)
            )
        case _:
            return False


def _is_value(argument: Any) -> bool:
    kinds = (Value, torch.Tensor, bool, int, float, np.generic)
    return isinstance(argument, kinds)


_ADVICE = {
    "item": "a captured 0-dimensional tensor can be used as it is",
    "detach": "a score is differentiated as written; detach captured tensors outside the function",
    "sum": "a function sees one score at a time; only rows of a captured tensor can be summed",
    "stack": "write torch.where or torch.minimum",
    "index_select": "index the tensor: table[i]",
    "take": "index the tensor: table[i]",
    "gather": "index the tensor: table[i]",
}
