"""Tensors that a traced function derives from captured tensors: `(ids + 1)[q_idx]`, `t % 2 == 0`.

The steps that made such a tensor are recorded, and run again at each call of a kernel. The elements
of the traced call would be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilegen.masks.values import Recipe


@dataclass(frozen=True, eq=False)
class _Step:
    """A call of a torch function that made a tensor, which is held so that its id stays taken."""

    result: torch.Tensor
    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]


class Derived:
    """The calls by which a function makes tensors from other tensors."""

    def __init__(self) -> None:
        """`made` holds the steps by the id of what they made."""
        self.made: dict[int, _Step] = {}

    def note(
        self, result: Any, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        """Record the call that gave a result, if the result is a new tensor made of others, or a
        view that depends on others: `table[at]`."""
        if isinstance(result, torch.Tensor):
            sources = _tensors((args, kwargs))
            is_new = not any(result is source for source in sources)
            if is_new and not all(_same_memory(result, source) for source in sources):
                self.made.setdefault(id(result), _Step(result, function, args, kwargs))

    def recipe(self, tensor: torch.Tensor, dtype: torch.dtype) -> Recipe | None:
        """Return a recipe for making a tensor anew, in a dtype; None for a captured tensor."""
        if id(tensor) not in self.made:
            return None
        sources: list[torch.Tensor] = []
        self._find(tensor, sources)

        def make(*given: Any) -> tuple[torch.Tensor]:
            *tables, _ = given  # the lengths
            known = {id(source): table for source, table in zip(sources, tables, strict=True)}
            return (self._made(tensor, known).to(dtype).contiguous(),)

        return Recipe(make, tuple(sources))

    def anew(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute a tensor again by its steps, differentiably."""
        return self._made(tensor, {})

    def _find(self, tensor: torch.Tensor, sources: list[torch.Tensor]) -> None:
        step = self.made.get(id(tensor))
        if step is None:
            if not any(source is tensor for source in sources):
                sources.append(tensor)
            return
        for source in _tensors((step.args, step.kwargs)):
            self._find(source, sources)

    def _made(self, tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
        if id(tensor) not in known:
            step = self.made.get(id(tensor))
            if step is None:
                return tensor
            args, kwargs = self._replaced((step.args, step.kwargs), known)
            known[id(tensor)] = step.function(*args, **kwargs)
        return known[id(tensor)]

    def _replaced(self, value: Any, known: dict[int, torch.Tensor]) -> Any:
        match value:
            case torch.Tensor():
                return self._made(value, known)
            case tuple() | list():
                return type(value)([self._replaced(one, known) for one in value])
            case dict():
                return {name: self._replaced(one, known) for name, one in value.items()}
            case _:
                return value


def _same_memory(first_tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Check whether a tensor is a view of another tensor, and so follows the changes of that
    tensor."""
    first, second = (tensor.untyped_storage().data_ptr() for tensor in (first_tensor, other))
    return first_tensor is other or first == second != 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return [tensor for one in value for tensor in _tensors(one)]
    return [value] if isinstance(value, torch.Tensor) else []
