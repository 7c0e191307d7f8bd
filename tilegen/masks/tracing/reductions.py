"""Reductions of small tensors of expressions: the rows of a tensor that a traced function
captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import sympy

from tilegen.errors import Unsupported
from tilegen.masks.language.operations import condition, number

REDUCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "any": lambda parts: sympy.Or(*(condition(part, "any") for part in parts)),
    "all": lambda parts: sympy.And(*(condition(part, "all") for part in parts)),
    "sum": lambda parts: sympy.Add(*map(number, parts)),
    "prod": lambda parts: sympy.Mul(*map(number, parts)),
    "mean": lambda parts: sympy.Add(*map(number, parts)) / max(1, len(parts)),
    "amax": lambda parts: sympy.Max(*map(number, parts)),
    "amin": lambda parts: sympy.Min(*map(number, parts)),
}
"""PyTorch's reductions by name, of the elements along a dimension."""

RESHAPES: dict[str, Callable[..., Any]] = {
    "unsqueeze": lambda values, dim: np.expand_dims(values, dim),
    "squeeze": lambda values, dim=None: np.squeeze(values, dim),
    "flatten": lambda values: values.reshape(-1),
}


def reduced(name: str, values: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return a reduction along one dimension, several, or all. Raises Unsupported."""
    every = tuple(range(values.ndim))
    chosen = every if dim is None else dim if isinstance(dim, tuple | list) else (dim,)
    axes = {axis % max(1, values.ndim) for axis in chosen}
    if not axes <= set(every):
        raise Unsupported(f"expected dimensions of {values.shape} in {name}, got {dim}")
    kept = [axis for axis in every if axis not in axes]
    moved = np.moveaxis(values, kept, range(len(kept)))
    flat = moved.reshape(*(values.shape[axis] for axis in kept), -1)
    found = np.empty(flat.shape[:-1], dtype=object)
    for place in np.ndindex(found.shape):
        found[place] = REDUCTIONS[name](list(flat[place]))
    return np.expand_dims(found, tuple(sorted(axes))) if keepdim else found
