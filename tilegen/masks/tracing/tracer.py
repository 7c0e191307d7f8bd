"""The tracer: makes expressions of what is done to traced values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import sympy
import torch

from tilegen.errors import Unsupported
from tilegen.masks.language.comparisons import check_kept
from tilegen.masks.language.elements import BOUNDS, kind_of
from tilegen.masks.language.integer_bounds import Sizes
from tilegen.masks.language.integers import prepared
from tilegen.masks.language.nodes import is_whole
from tilegen.masks.language.operations import OPERATIONS, cast, integer_power, number
from tilegen.masks.language.symbols import B, H, K, Lookup, Q, S, captured_name, is_condition
from tilegen.masks.language.texts import kind_of_tensor
from tilegen.masks.language.widths import WRAPPED
from tilegen.masks.tracing.dtypes import Kinds, kinds_of
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

_PLACEMENT = ("device", "layout", "memory_format", "non_blocking", "copy", "pin_memory")
"""Arguments of torch's functions that change no value."""

_CONVERSIONS = {
    "bool": torch.bool,
    "byte": torch.uint8,
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long": torch.int64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
"""Dtypes by the names of the methods that convert to them."""
_OF_BOOLS = {
    **dict.fromkeys(("add", "maximum", "max"), "or"),
    **dict.fromkeys(("mul", "multiply", "minimum", "min"), "and"),
}
"""Operations that on two bools do what another does."""


@dataclass(eq=False)
class Tracer:
    """Collects the tensors one function captures."""

    captured: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    _sizes: tuple[int, Sizes] = (0, Sizes({}, set()))
    """Bounds of integers, with the number of captured tensors that they know."""

    def arguments(self, *, is_score: bool) -> list[Term]:
        """Return the arguments to call a function of a score, or of a mask, with."""
        pair = [Term(self, symbol, torch.int64) for symbol in (B, H, Q, K)]
        return [Term(self, S, torch.float32), *pair] if is_score else pair

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
            if is_condition(expr) or not is_whole(expr):
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
        return Term(self, self.element(tensor, parts), tensor.dtype)

    def _in_place(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Term:
        """Give the first argument what an operation makes of it, under all its names, as torch
        does."""
        changed, found = args[0], self.apply(name, args, kwargs)
        fits = isinstance(changed, Term) and isinstance(found, Term)
        if not fits or not torch.can_cast(found.dtype, changed.dtype):
            raise Unsupported(
                f"expected {name} in place to give a {changed.dtype} of the same shape, got "
                f"{found.dtype}; write x = x + y in the place of x += y"
            )
        changed.expr = self._cast(found.expr, found.dtype, changed.dtype)
        return changed

    def apply(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Apply one of torch's functions or methods to traced arguments."""
        if name.startswith("__"):
            name = name.strip("_")
            if name not in OPERATIONS and name[0] == "r" and name[1:] in OPERATIONS:
                name, args = name[1:], args[::-1]  # `2 ** q` is __rpow__ of q
            elif name not in OPERATIONS and name[0] == "i" and name[1:] in OPERATIONS:
                name = f"{name[1:]}_"  # `x &= y` is __iand__ of x
        name = name.removeprefix("special_")
        if name.endswith("_") and name[:-1] in OPERATIONS:
            return self._in_place(name[:-1], args, kwargs)
        if name == "getitem":
            tensor, index = args
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"expected only real tensors to be indexed, got {tensor}")
            return self.index(tensor, index if isinstance(index, tuple) else (index,))
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}
        if name in ("to", "type", "type_as"):
            return self._converted(args[0], (*args[1:], *kwargs.values()))
        if name in _CONVERSIONS:
            return self._converted(args[0], [_CONVERSIONS[name]])
        if any(isinstance(arg, (Rows, Several)) for arg in args):
            return self._on_several(name, args, kwargs)
        if name == "unsqueeze":
            return self.several(np.array([self.expression(args[0])], dtype=object), args[0].dtype)
        kinds = self._kinds(name, args, kwargs)
        return Term(self, self._computed(name, args, kwargs, kinds), kinds.result)

    def _kinds(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Kinds:
        """Return the dtypes of an elementwise operation. Raises Unsupported for any other."""
        if name not in OPERATIONS:
            raise Unsupported(
                f"expected arithmetic, comparisons, torch.where and torch's elementary functions, "
                f"got {name}; {_ADVICE.get(name, 'write it with those')}"
            )
        try:
            inspect.signature(OPERATIONS[name]).bind(*args, **_without_dtype(kwargs))
        except TypeError as error:
            raise Unsupported(f"expected torch's elementwise {name}: {error}") from None
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.numel() > MAX_ELEMENTS:
                self.expression(arg)  # refuses
        return kinds_of(name, args, kwargs)

    def _computed(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], kinds: Kinds
    ) -> sympy.Basic:
        """Return the expression of an operation on one value of each operand."""
        if kinds.result == kinds.common == torch.bool:
            name = _OF_BOOLS.get(name, name)
        is_power = name == "pow" and not kinds.result.is_floating_point
        function = integer_power if is_power else OPERATIONS[name]
        bound = inspect.signature(function).bind(*args, **_without_dtype(kwargs))
        for key, value in bound.arguments.items():
            if _is_value(value):
                expr = self.expression(value)
                own = value.dtype if isinstance(value, Value | torch.Tensor) else None
                fits = own is not None and torch.promote_types(own, kinds.common) == kinds.common
                bound.arguments[key] = expr if fits else self._fitted(expr, kinds.common)
        result = sympy.sympify(function(*bound.args, **bound.kwargs))
        if result.has(sympy.nan, sympy.zoo, sympy.I):
            raise Unsupported(f"expected a real number, got {result}")
        if name != "where":
            given = [one for one in bound.arguments.values() if _is_number(one)]
            is_quotient = name in ("truediv", "true_divide", "div", "divide")
            if is_quotient and kinds.result.is_floating_point:
                given.append(1 / number(given[1]))
            check_kept(name, given, result)
        return self._cast(result, *kinds)

    def _converted(self, value: Any, to: Iterable[Any]) -> Term | Several:
        """Return a value in the dtype that the arguments of `to` name, or that one of them has."""
        dtypes = (
            one if isinstance(one, torch.dtype) else getattr(one, "dtype", None) for one in to
        )
        dtype = next((one for one in dtypes if one is not None), value.dtype)
        return self._each(
            [self._elements(value)], lambda one: self._cast(one, value.dtype, dtype), dtype
        )

    def _cast(self, expr: Any, own: torch.dtype, dtype: torch.dtype) -> Any:
        """Return an expression in another dtype. What no integer of 32 bits holds of a float is
        undefined in PyTorch."""
        is_whole = not (own.is_floating_point or dtype.is_floating_point or dtype == torch.bool)
        expr = number(expr) if is_whole else cast(expr, dtype)
        is_undefined = own.is_floating_point and dtype == torch.int32
        return expr if is_undefined else self._fitted(expr, dtype)

    def _fitted(self, expr: Any, dtype: torch.dtype) -> Any:
        """Return an integer expression, which wraps around where it may not fit a dtype."""
        if is_condition(expr) or dtype.is_floating_point or dtype in (torch.bool, torch.int64):
            return expr
        kind = WRAPPED.get(str(dtype).removeprefix("torch."))
        if kind is None:
            raise Unsupported(f"expected integers of {', '.join(WRAPPED)} or int64, got {dtype}")
        if self._sizes[0] != len(self.captured):
            elements = [str(one.dtype).removeprefix("torch.") for one in self.captured]
            names = [captured_name(i, kind_of(one)) for i, one in enumerate(elements)]
            known = {n: BOUNDS[e] for n, e in zip(names, elements, strict=True) if e in BOUNDS}
            self._sizes = len(elements), Sizes(known, set())
        low, high = self._sizes[1].bounds(prepared(expr))
        return expr if kind.low <= low and high <= kind.high else kind(expr)

    def several(self, elements: Any, dtype: torch.dtype) -> Term | Several:
        """Return a small tensor, or the one value of one without dimensions."""
        if isinstance(elements, np.ndarray) and elements.ndim:
            if elements.size > MAX_ELEMENTS:
                raise Unsupported(
                    f"expected at most {MAX_ELEMENTS} elements to compute with, got {elements.size}"
                )
            return Several(self, elements, dtype)
        expr = elements.item() if isinstance(elements, np.ndarray) else elements
        return Term(self, expr, dtype)

    def _on_several(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Apply a function to small tensors, element by element or along dimensions."""
        if name in RESHAPES:
            found = RESHAPES[name](self._elements(args[0]), *args[1:], **kwargs)
            return self.several(found, args[0].dtype)
        if name in REDUCTIONS:
            kinds = kinds_of(name, args, kwargs)
            given, options = args[0], dict(kwargs)
            if dtype := options.pop("dtype", None):  # elements are converted first
                given = self._converted(given, [dtype])
            found = reduced(name, self._elements(given), *args[1:], **options)
            return self._each([found], lambda one: self._cast(one, *kinds), kinds.result)
        if name in ("dot", "vdot", "inner", "matmul"):
            kinds = kinds_of(name, args, kwargs)
            left, right = map(self._elements, args)
            if left.ndim != 1 or right.shape != left.shape:
                raise Unsupported(
                    f"expected two vectors in {name}, got {left.shape}, {right.shape}"
                )
            found = reduced("sum", self._on_several("mul", args, {}).elements)
            return self._each([found], lambda one: self._cast(one, *kinds), kinds.result)
        kinds = self._kinds(name, args, kwargs)
        places = [i for i, arg in enumerate(args) if isinstance(arg, Value | torch.Tensor)]

        def compute(*parts: Any) -> Any:
            given = list(args)
            for i, part in zip(places, parts, strict=True):
                given[i] = Term(self, part, args[i].dtype)
            return self._computed(name, given, kwargs, kinds)

        return self._each([self._elements(args[i]) for i in places], compute, kinds.result)

    def _each(
        self, arrays: Sequence[Elements], compute: Callable[..., Any], dtype: torch.dtype
    ) -> Term | Several:
        """Apply a function to each element of arrays that broadcast."""
        arrays = np.broadcast_arrays(*arrays)
        found = np.empty(arrays[0].shape, dtype=object)
        for place in np.ndindex(found.shape):
            found[place] = compute(*(array[place] for array in arrays))
        return self.several(found, dtype)

    def _elements(self, value: Any) -> Elements:
        if isinstance(value, (Rows, Several)):
            return value.elements
        if isinstance(value, torch.Tensor) and value.ndim:
            return Rows(self, value, ()).elements
        found = np.empty((), dtype=object)
        found[()] = self.expression(value)
        return found


def _without_dtype(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key != "dtype"}


def _is_number(argument: Any) -> bool:
    return isinstance(argument, sympy.Expr)


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
