"""The dtypes that PyTorch computes in, derived by running an operation on tensors of ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tilegen import private_torch
from tilegen.errors import Unsupported

_PROMOTE = frozenset(
    "lt less le less_equal gt greater ge greater_equal eq ne not_equal where "  # noqa: SIM905
    "clamp clip clamp_min clamp_max".split()
)
"""Operations that, under vmap, do not convert a wide element beside a narrow row."""


class Kinds(NamedTuple):
    """The dtype that operands are converted to, and the dtype of the result."""

    common: torch.dtype
    result: torch.dtype


def kinds_of(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Kinds:
    """Compute the dtypes of an operation on traced values, tables and numbers. Raises Unsupported
    where PyTorch has no such operation on these dtypes."""
    if private_torch.count_modes():
        with private_torch.without_modes():  # torch.export would record these operations
            return kinds_of(name, function, args, kwargs)
    flat = name in _PROMOTE
    given = [_stand_in(one, flat) for one in args]
    named = {key: _stand_in(one, flat) for key, one in kwargs.items()}
    values = [*given[name == "where" :], *(one for key, one in named.items() if key != "alpha")]
    try:
        # A mode would record these operations.
        with private_torch.without_overrides():
            return Kinds(_common(values), function(*given, **named).dtype)
    except (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        reason = str(error).partition("\n")[0]
        raise Unsupported(
            f"expected an operation that PyTorch has, got {name} of "
            f"{', '.join(map(_described, args))}: {reason}"
        ) from None


def _stand_in(value: Any, flat: bool) -> Any:
    """Return a tensor of ones in place of a traced value or a table; a `flat` tensor has no
    dimensions."""
    if isinstance(value, tuple | list):
        return type(value)([_stand_in(one, flat) for one in value])
    if isinstance(value, torch.dtype) or not hasattr(value, "dtype"):
        return value
    if getattr(value, "is_number", False):
        return 1.0 if value.dtype.is_floating_point else 1
    return _ones(value.dtype, 0 if flat else len(value.shape))


@lru_cache(maxsize=256)
def _ones(dtype: torch.dtype, dimensions: int) -> torch.Tensor:
    return torch.ones((1,) * dimensions, dtype=dtype, device="cpu")


def _common(values: Iterable[Any]) -> torch.dtype:
    """Compute the dtype that values are converted to before they are computed with."""
    numbers: Iterator[Any] = (
        number for number in values if isinstance(number, torch.Tensor | bool | int | float)
    )
    first = next(numbers)
    dimensions = first.ndim if isinstance(first, torch.Tensor) else 0
    common = first.dtype if isinstance(first, torch.Tensor) else torch.result_type(first, first)
    for number in numbers:
        common = torch.result_type(first, number)
        dimensions = max(dimensions, number.ndim if isinstance(number, torch.Tensor) else 0)
        first = _ones(common, dimensions)
    return common


def _described(value: Any) -> str:
    dtype = getattr(value, "dtype", None)
    return repr(value) if dtype is None else str(dtype).removeprefix("torch.")
