"""Stand-ins of tensors: an expression for each element, or a table with some indices given. Small
ones are reduced and reshaped as PyTorch does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tilegen.masks.language.algebra import (
    add,
    both,
    divide,
    either,
    in_halves,
    maximum,
    minimum,
    multiply,
)
from tilegen.masks.language.expr import const
from tilegen.masks.language.operations import logical

Elements = np.ndarray[Any, np.dtype[np.object_]]

MAX_ELEMENTS = 256
"""Most elements of a row that a function computes with: each is a look-up of its own."""
REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "any": lambda parts: either(*map(logical, parts)),
    "all": lambda parts: both(*map(logical, parts)),
    "sum": lambda parts: in_halves(add, parts) if parts else const(0),
    "prod": lambda parts: in_halves(multiply, parts) if parts else const(1),
    "mean": lambda parts: divide(in_halves(add, parts), len(parts)) if parts else const(math.nan),
    "amax": lambda parts: maximum(*parts),
    "amin": lambda parts: minimum(*parts),
}
"""PyTorch's reductions by name, of the elements along a dimension."""

RESHAPES: dict[str, Callable[..., Any]] = {
    "unsqueeze": lambda values, dim: np.expand_dims(values, dim),
    "squeeze": lambda values, dim=None: (
        values if dim is not None and values.shape[dim] != 1 else np.squeeze(values, dim)
    ),
    "flatten": lambda values: values.reshape(-1),
    "view_as": lambda values, other: values.reshape(other.shape),
    "unbind": lambda values, dim=0: tuple(np.moveaxis(values, dim, 0)),
}
"""PyTorch's methods of another shape by name: numpy's views, as PyTorch's are."""


@dataclass(eq=False)
class Computed:
    """A tensor that a function computes: an expression for each element."""

    elements: Elements
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension; a number has none."""
        return self.elements.shape

    def __repr__(self) -> str:
        return str(self.elements.item() if self.elements.size == 1 else self.elements)


@dataclass(eq=False)
class CapturedTable:
    """A tensor that a function reads: `bias`; or with its first indices given: `bias[h]`."""

    slot: int
    dtype: torch.dtype
    sizes: tuple[int, ...]
    index: tuple[Any, ...] = ()
    """The expressions of the indices given so far."""
    is_number: bool = False
    """Whether it is a number of Python, which changes no dtype of its kind."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each dimension that lacks an index."""
        return self.sizes[len(self.index) :]

    def __repr__(self) -> str:
        return f"a tensor of shape {self.sizes}"


def is_row(value: Any) -> bool:
    """Return whether a value has elements to compute with, one by one."""
    return isinstance(value, Computed | CapturedTable) and bool(value.shape)


def boxed(value: Any) -> Elements:
    """Return an expression as an array without dimensions; an array as it is."""
    if isinstance(value, np.ndarray):
        return value
    elements = np.empty((), dtype=object)
    elements[()] = value
    return elements


def broadcast(
    arrays: Sequence[Elements],
) -> tuple[tuple[int, ...], Iterator[tuple[Any, ...]]]:
    """Return the shape that arrays are broadcast to, and their elements place by place. Raises
    ValueError."""
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    flat = [np.broadcast_to(array, shape).ravel().tolist() for array in arrays]
    return shape, zip(*flat, strict=True)


def reduced(name: str, values: Any, dim: Any = None, keepdim: bool = False) -> Elements:
    """Return a reduction along one dimension, several, or all."""
    every = tuple(range(values.ndim))
    chosen = every if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    axes = {axis % max(1, values.ndim) for axis in chosen}
    kept = [axis for axis in every if axis not in axes]
    moved = np.moveaxis(values, kept, range(len(kept)))
    flat = moved.reshape(*(values.shape[axis] for axis in kept), -1)
    results = np.empty(flat.shape[:-1], dtype=object)
    for place in np.ndindex(results.shape):
        results[place] = REDUCTIONS[name](list(flat[place]))
    return np.expand_dims(results, tuple(sorted(axes))) if keepdim else results
