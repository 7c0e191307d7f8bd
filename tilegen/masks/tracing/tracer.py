"""Expressions of a function's results: each operation of PyTorch on stand-ins of tensors gives
another stand-in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.overrides import resolve_name

from tilegen.errors import Unsupported
from tilegen.masks.language.algebra import as_expr, cast, equal, load, number_of, opposite
from tilegen.masks.language.elements import BOUNDS, ELEMENTS, kind_of
from tilegen.masks.language.expr import ELEMENT_OF_KIND, FLOATS, B, Expr, H, K, Q, S, const
from tilegen.masks.language.operations import OPERATIONS, integer_power
from tilegen.masks.tracing.dtypes import Kinds, kinds_of
from tilegen.masks.tracing.searches import searched
from tilegen.masks.tracing.stand_ins import (
    MAX_ELEMENTS,
    REDUCTIONS,
    RESHAPES,
    CapturedTable,
    Computed,
    Elements,
    boxed,
    broadcast,
    is_row,
    reduced,
)

_PLACEMENT = ("device", "layout", "memory_format", "non_blocking", "copy", "pin_memory")
"""Arguments of torch's functions that change no value."""
_CONVERSIONS = frozenset(
    "bool byte char short int long half bfloat16 float double".split()  # noqa: SIM905
)
"""Methods that convert to the dtype that they are named after."""
_OF_BOOLS = {
    **dict.fromkeys(("add", "maximum", "max"), "or"),
    **dict.fromkeys(("mul", "multiply", "minimum", "min"), "and"),
}
"""Operations that equal another operation on two bools."""
_OF_PYTHON = {
    "__bool__": "if, and, or, not, min(), max() or chained comparisons on",
    "__contains__": "in on",
    "__index__": "range(), list indices or int() of",
    "__int__": "int() of",
    "__float__": "float() or math functions of",
    "__complex__": "complex() of",
    "__iter__": "loops over",
    "__len__": "len() of",
}
"""Uses of a value in Python that need its number, by the method that Python calls."""
_OPERANDS = ("input", "other", "min", "max", "end", "weight", "exponent", "fill_value")
"""Arguments that are converted to the dtype that an operation is computed in."""


class Tracer:
    """The values of a function that is traced, in the order in which they were made."""

    def __init__(self, *, is_score: bool) -> None:
        """Begin with the arguments of a function of a score, or of a mask."""
        self._is_score = is_score
        self.values: list[Computed | CapturedTable] = [
            Computed(boxed(symbol), torch.int64) for symbol in (B, H, Q, K)
        ]
        if is_score:
            self.values.insert(0, Computed(boxed(S), torch.float32))
        self.read: list[CapturedTable] = []
        """A table of each slot whose elements are looked up: t0, t1, ... of expressions."""

    def expression(self, value: Any) -> Any:
        """Return the expression of an operand: a traced value, a number, a 0-dimensional table."""
        match value:
            case Computed() if not value.shape:
                return value.elements.item()
            case Computed():
                raise Unsupported(
                    f"expected one value, got {value.shape}; index the tensor, by b, h, q_idx or "
                    "kv_idx, or ask for the sum, any or all of its elements"
                )
            case CapturedTable(sizes=()):
                return self._element(value, ())
            case CapturedTable(index=()):
                raise Unsupported(
                    f"expected {value} to be indexed, by b, h, q_idx or kv_idx, before it is "
                    "computed with"
                )
            case CapturedTable():
                self._refuse_rows(value)
            case bool() | int() | float():
                return const(value)
            case _:
                raise Unsupported(f"expected a traced value, a number or a tensor, got {value!r}")

    def apply(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Apply a function or method of torch to values."""
        name = function.__name__
        if name in _OF_PYTHON:
            raise refusal(name, args[0])
        if function is torch.Tensor.where:  # whose first argument is the second of torch.where
            function, args = torch.where, (args[1], args[0], *args[2:])
        if (result := searched(self.apply, name, args, kwargs)) is not None:
            return result
        if not args and name != "where":
            kwargs = dict(kwargs)
            args = (kwargs.pop("input", None),)
        is_operator = name.startswith("__") or getattr(function, "__module__", "") == "_operator"
        name = name.strip("_") if is_operator else name  # operator.and_ is that of `&`
        in_place, reflected = (is_operator and name[:1] == one and name[1:] for one in "ir")
        if name not in OPERATIONS and in_place in OPERATIONS:  # `x &= y` is __iand__ of x
            return self._in_place(in_place, getattr(torch.Tensor, f"__{in_place}__"), args, kwargs)
        if name[:-1] in OPERATIONS and name.endswith("_"):
            place = torch.Tensor if hasattr(torch.Tensor, name[:-1]) else torch.nn.functional
            return self._in_place(name[:-1], getattr(place, name[:-1]), args, kwargs)
        if name in OPERATIONS and "inplace" in _signature(name).parameters:
            options = _bound(name, args, kwargs).arguments
            if options.pop("inplace", False):
                del options["input"]
                return self._in_place(name, function, args[:1], options)
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}
        if name in ("rtruediv", "rdiv"):  # PyTorch's own way, which rounds twice
            inverse = self.apply(torch.reciprocal, args[:1], {})
            return self.apply(torch.mul, (inverse, *args[1:]), {})
        if name not in OPERATIONS and reflected in OPERATIONS:  # `2 ** q` is __rpow__ of q
            # PyTorch's function takes them as they are, and `pow` the other way round.
            kinds = kinds_of(reflected, function, args, kwargs)
            return self._elementwise(reflected, args[::-1], kwargs, kinds)
        return self._applied(name.removeprefix("special_"), function, args, kwargs)

    def _applied(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if name == "getitem":
            return self._indexed(*args)
        if name in ("to", "type", "type_as"):
            return self._converted(args[0], (*args[1:], *kwargs.values()))
        if name in _CONVERSIONS:
            return self._converted(args[0], [kinds_of(name, function, args[:1], {}).result])
        has_rows = any(is_row(one) for one in args)
        if name in RESHAPES:
            return self._reshaped(name, *args, **kwargs)
        if name in REDUCTIONS and has_rows:
            kinds = kinds_of(name, function, args, kwargs)
            given, options = args[0], dict(kwargs)
            if dtype := options.pop("dtype", None):  # elements are converted first
                given = self._converted(given, [dtype])
            parts = reduced(name, self._elements(given), *args[1:], **options)
            return self._cast_each(parts, kinds.result)
        if name in ("dot", "vdot", "inner", "matmul") and has_rows:
            kinds = kinds_of(name, function, args, kwargs)
            left, right = map(self._elements, args)
            if left.ndim != 1 or right.shape != left.shape:
                raise Unsupported(
                    f"expected two vectors in {name}, got {left.shape}, {right.shape}"
                )
            products = self.apply(torch.mul, args, {}).elements
            return self._cast_each(reduced("sum", products), kinds.result)
        if name not in OPERATIONS:
            raise Unsupported(
                f"expected arithmetic, comparisons, torch.where and torch's elementary functions, "
                f"got {resolve_name(function) or name}; {_ADVICE.get(name, 'write it with those')}"
            )
        _bound(name, args, kwargs)  # refuses before PyTorch does
        kinds = kinds_of(name, function, args, kwargs)
        if name == "isclose":  # its tolerances are no operands
            kinds = Kinds(args[0].dtype, kinds.result)
        return self._elementwise(name, args, kwargs, kinds)

    def _in_place(
        self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Computed:
        """Assign the result of an operation to its first argument, under all its names, as torch
        does."""
        changed, result = args[0], self._applied(name, function, args, kwargs)
        fits = isinstance(changed, Computed) and changed.shape == result.shape
        if not fits or not torch.can_cast(result.dtype, changed.dtype):
            raise Unsupported(
                f"expected {name} in place to give a {changed.dtype} of the same shape, got "
                f"{result.dtype}; write x = x + y in the place of x += y"
            )
        changed.elements[...] = self._cast_each(result.elements, changed.dtype).elements
        return changed

    def _reshaped(self, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a view of a small tensor, or a tuple of views."""
        try:
            reshaped = RESHAPES[name](self._elements(value), *args, **kwargs)
        except (TypeError, ValueError, IndexError) as error:
            raise Unsupported(
                f"expected {name} of the {len(value.shape)} dimensions of {value}: {error}"
            ) from None
        if isinstance(reshaped, tuple):
            return tuple(Computed(boxed(part), value.dtype) for part in reshaped)
        return Computed(reshaped, value.dtype)

    def _indexed(self, target: Any, index: Any) -> Computed | CapturedTable:
        """Return an element, rows that still lack an index, or a part of a few elements."""
        index = index if isinstance(index, tuple) else (index,)
        odd = [one for one in index if isinstance(one, slice | list) or one in (None, Ellipsis)]
        if isinstance(target, Computed) and not target.shape:
            raise Unsupported(f"expected only real tensors to be indexed, got {target}")
        if isinstance(target, Computed) or (target.index and odd):
            try:
                return Computed(boxed(self._elements(target)[index]), target.dtype)
            except (IndexError, TypeError):
                raise Unsupported(
                    f"expected constant indices of {len(target.shape)} computed dimensions, got "
                    f"{index}"
                ) from None
        if odd:
            raise Unsupported(f"expected one index per dimension of {target}, got {odd[0]!r}")
        parts = list(target.index)
        for part in index:
            expr = self.expression(part)
            if not expr.is_int:
                raise Unsupported(
                    f"expected an integer index, got {expr}; use //, or `.to(torch.int32)`"
                )
            parts.append(expr)
        if len(parts) > len(target.sizes):
            raise Unsupported(f"expected {len(target.sizes)} indices of {target}, got {len(parts)}")
        if len(parts) < len(target.sizes):
            return CapturedTable(target.slot, target.dtype, target.sizes, tuple(parts))
        return Computed(boxed(self._element(target, parts)), target.dtype)

    def _element(self, table: CapturedTable, index: Sequence[Any]) -> Any:
        """Return an element of a table, which takes a slot."""
        places = [i for i, known in enumerate(self.read) if known.slot == table.slot]
        if not places:
            places = [len(self.read)]
            self.read.append(table)
        kind = _kind(table)
        element = load(places[0], kind, *index)
        return opposite(equal(element, 0)) if kind == "bool" else element

    def _elements(self, value: Any) -> Elements:
        """Return the expressions of all elements. Raises Unsupported where there are many."""
        if isinstance(value, Computed):
            return value.elements
        if not isinstance(value, CapturedTable) or not value.shape:
            return boxed(self.expression(value))
        if np.prod(value.shape) > MAX_ELEMENTS:
            self._refuse_rows(value)
        as_nodes = np.empty(value.shape, dtype=object)
        for place in np.ndindex(*value.shape):
            as_nodes[place] = self._element(value, (*value.index, *place))
        return as_nodes

    def _refuse_rows(self, table: CapturedTable) -> Any:
        raise Unsupported(
            f"expected {len(table.sizes)} indices of {table}, or at most {MAX_ELEMENTS} elements "
            f"left, got {len(table.index)}: {table.index}"
        )

    def _elementwise(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], kinds: Kinds
    ) -> Computed:
        """Apply an operation to each element of operands that are broadcast."""
        bound = _bound(name, args, kwargs)
        if kinds.result == kinds.common == torch.bool:
            name = _OF_BOOLS.get(name, name)
        is_power = name == "pow" and not kinds.result.is_floating_point
        function = integer_power if is_power else OPERATIONS[name]
        has_rows = any(is_row(one) for one in bound.arguments.values())
        dtype = kinds.common
        if kinds.result.is_floating_point:
            dtype = torch.promote_types(dtype, kinds.result)
        operands: dict[str, Elements] = {}
        for key, value in bound.arguments.items():
            if isinstance(value, Computed | CapturedTable):
                operands[key] = self._elements(value) if has_rows else boxed(self.expression(value))
            elif isinstance(value, bool | int | float) and key in _OPERANDS:
                bound.arguments[key] = self._cast(value, dtype)  # as PyTorch does under vmap
        try:
            shape, parts = broadcast(list(operands.values()))
        except ValueError:
            shapes = ", ".join(str(one.shape) for one in operands.values())
            raise Unsupported(f"expected shapes that broadcast in {name}, got {shapes}") from None
        if np.prod(shape) > MAX_ELEMENTS**2:
            raise Unsupported(
                f"expected at most {MAX_ELEMENTS**2} elements in {name}, got a result of shape "
                f"{shape}"
            )
        results = np.empty(shape, dtype=object)
        for place, values in zip(np.ndindex(shape), parts, strict=True):
            for key, value in zip(operands, values, strict=True):
                bound.arguments[key] = self._cast(value, dtype) if key in _OPERANDS else value
            results[place] = self._cast(function(*bound.args, **bound.kwargs), kinds.result)
        return Computed(results, kinds.result)

    def _converted(self, value: Any, to: Sequence[Any]) -> Any:
        """Return a value in the dtype that the arguments of `to` name, or that one of them has."""
        dtypes = (
            one if isinstance(one, torch.dtype) else getattr(one, "dtype", None) for one in to
        )
        dtype = next((one for one in dtypes if one is not None), value.dtype)
        if value.dtype == dtype:
            return value  # PyTorch, too, gives the same tensor
        return self._cast_each(self._elements(value), dtype)

    def _cast_each(self, elements: Elements, dtype: torch.dtype) -> Computed:
        results = np.empty(elements.shape, dtype=object)
        for place in np.ndindex(elements.shape):
            results[place] = self._cast(elements[place], dtype)
        return Computed(results, dtype)

    def _cast(self, value: Any, dtype: torch.dtype) -> Expr:
        """Return an expression in another dtype. Scores are computed in single precision, as
        FlexAttention's kernels do: nothing is rounded to 16 bits."""
        name = str(dtype).removeprefix("torch.")
        if name not in ELEMENTS:
            raise Unsupported(f"expected numbers of {', '.join(ELEMENTS)}, got a value of {dtype}")
        if self._is_score and name in ("float16", "bfloat16"):
            name = "float32"
        if isinstance(value, float) and name in FLOATS:
            return number_of(value, name)
        return cast(as_expr(value), name)


def refusal(name: str, value: Any) -> Unsupported:
    """Return the error for a function that needs the number of a value, for `if x:` or `int(x)`."""
    return Unsupported(
        f"expected a function without {_OF_PYTHON[name]} traced values, got "
        f"{name.strip('_')}({value}); write torch.where, &, |, ~, torch.minimum, torch.maximum, "
        ".to(dtype)"
    )


def _bound(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    options = {key: value for key, value in kwargs.items() if key != "dtype"}
    try:
        return _signature(name).bind(*args, **options)
    except TypeError as error:
        raise Unsupported(f"expected torch's elementwise {name}: {error}") from None


@lru_cache(maxsize=512)
def _signature(name: str) -> inspect.Signature:
    return inspect.signature(OPERATIONS[name])


def _kind(table: CapturedTable) -> str:
    """Return the kind of a table's elements, narrow integers by their dtype."""
    if table.dtype.is_complex:
        raise Unsupported(f"expected captured tensors of real numbers, got {table.dtype}")
    element = str(table.dtype).removeprefix("torch.")
    return element if element in ELEMENT_OF_KIND and element in BOUNDS else kind_of(element)


_ADVICE = {
    "item": "a captured 0-dimensional tensor can be used as it is",
    "detach": "a score is differentiated as written; detach captured tensors outside the function",
    "sum": "a function sees one score at a time; only rows of a captured tensor can be summed",
    "stack": "write torch.where or torch.minimum",
    "index_select": "index the tensor: table[i]",
    "take": "index the tensor: table[i]",
    "gather": "index the tensor: table[i]",
}
