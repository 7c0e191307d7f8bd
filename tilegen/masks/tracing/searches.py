"""PyTorch's functions that look for a number in a small table, as comparisons with each element.

The elements are read when a kernel runs, as those of all captured tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tilegen.errors import Unsupported
from tilegen.masks.tracing.dtypes import Kinds, kinds_of
from tilegen.masks.tracing.stand_ins import MAX_ELEMENTS

Apply = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
"""Applies a function or method of torch to values."""


def _isin(
    apply: Apply,
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: bool = False,
    invert: bool = False,
) -> Any:
    """Return whether elements are among others; `assume_unique` changes no result."""
    if _shape(test_elements):
        test_elements = apply(torch.Tensor.flatten, (test_elements,), {})
    sides = (_last(apply, elements), test_elements)
    # torch.eq takes no number of Python first.
    equal = apply(torch.eq, sides if hasattr(elements, "dtype") else sides[::-1], {})
    is_in = apply(torch.any, (equal, -1), {}) if equal.shape else equal
    return apply(torch.logical_not, (is_in,), {}) if invert else is_in


def _searchsorted(
    apply: Apply,
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return the number of elements below a number, or at most as large where `right`: their order,
    which a `sorter` gives, does not matter."""
    options = {"out_int32": out_int32, "right": right, "side": side}
    kinds = kinds_of("searchsorted", torch.searchsorted, (sorted_sequence, input), options)
    shape = _shape(sorted_sequence)
    if sorter is not None and _shape(sorter) != shape:
        raise Unsupported(f"expected a sorter of shape {shape}, got {_shape(sorter)}")
    if len(shape) > 1:
        if shape[:-1] != _shape(input)[:-1]:
            raise Unsupported(
                f"expected dimensions {shape[:-1]} before the last in both tensors of "
                f"torch.searchsorted, got {_shape(input)}"
            )
        sorted_sequence = apply(torch.Tensor.unsqueeze, (sorted_sequence, -2), {})
    return _counted(apply, sorted_sequence, input, right or side == "right", kinds)


def _bucketize(
    apply: Apply, input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False
) -> Any:
    """Return the number of boundaries below a number, or at most as large where `right`."""
    options = {"out_int32": out_int32, "right": right}
    kinds = kinds_of("bucketize", torch.bucketize, (input, boundaries), options)
    return _counted(apply, boundaries, input, right, kinds)


def _counted(apply: Apply, table: Any, values: Any, right: bool, kinds: Kinds) -> Any:
    # NaN lies behind all elements: not below any of them.
    is_behind = apply(torch.gt if right else torch.ge, (table, _last(apply, values)), {})
    counts = apply(torch.sum, (apply(torch.logical_not, (is_behind,), {}), -1), {})
    return apply(torch.Tensor.to, (counts, kinds.result), {})


def _last(apply: Apply, value: Any) -> Any:
    """Return a value with one more dimension behind its own, if it has any."""
    return apply(torch.Tensor.unsqueeze, (value, -1), {}) if _shape(value) else value


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


_SEARCHES = {"isin": _isin, "searchsorted": _searchsorted, "bucketize": _bucketize}


def searched(apply: Apply, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a search by its name; None for other functions. Raises Unsupported."""
    if name not in _SEARCHES:
        return None
    if any(prod(_shape(one)) > MAX_ELEMENTS for one in (*args, *kwargs.values())):
        raise Unsupported(
            f"expected at most {MAX_ELEMENTS} elements in the tensors of torch.{name}, got more; "
            "compute the results for all positions before, and index them by q_idx or kv_idx"
        )
    try:
        return _SEARCHES[name](apply, *args, **kwargs)
    except TypeError as error:
        raise Unsupported(f"expected the arguments of torch.{name}: {error}") from None
