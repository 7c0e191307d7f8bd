"""Tensors that a traced function derives from captured tensors: `(ids + 1)[q_idx]`, `t % 2 == 0`.

The steps that made such a tensor are recorded, changes in place among them, and run again at each
call of a kernel. The elements of the traced call would be stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilegen.errors import Unsupported
from tilegen.masks.values import Recipe, Table, table_of


@dataclass(frozen=True, eq=False)
class _Step:
    """A call of a torch function. Tensors are held, so that their ids stay taken."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    sources: list[torch.Tensor]
    results: list[torch.Tensor]
    written: set[int]
    """The memory that the call allocated or wrote to."""


class Derived:
    """The calls by which a function makes tensors, and changes them in place."""

    def __init__(self) -> None:
        """Begin with no steps."""
        self._steps: list[_Step] = []
        self._own: set[int] = set()
        """The memory that steps allocated."""
        self._derived: set[int] = set()
        """The part of it with elements that depend on captured tensors."""
        self._views: set[int] = set()
        """Ids of views of captured tensors that depend on other tensors, as `table[at]` does. Other
    views change with the tensor."""

    def call(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        read: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Call a torch function, and record the call if it makes or changes tensors. Raises
        Unsupported for a change of a tensor that the trace has `read` already."""
        sources = _tensors((args, kwargs))
        versions = [_version(one) for one in sources]
        result = function(*args, **kwargs)
        changed = {
            memory_of(one)
            for one, version in zip(sources, versions, strict=True)
            if (_changes(function, kwargs) if version is None else version != one._version)
        }
        if changed and any(memory_of(one) in changed for one in read):
            raise Unsupported(
                f"expected {function.__name__} before the tensor that it changes is indexed by b, "
                "h, q_idx or kv_idx, not behind; change a clone of it"
            )
        self._note(_Step(function, args, kwargs, sources, _tensors(result), changed))
        return result

    def _note(self, step: _Step) -> None:
        if not (step.results or step.written):
            return
        given = {memory_of(one) for one in step.sources}
        new = {memory_of(one) for one in step.results} - given - self._own
        self._own |= new
        step.written.update(new)
        self._steps.append(step)
        is_made = any(map(self.made, step.sources))
        if is_made or not given <= self._own:
            self._derived |= step.written & self._own
        for result in step.results:
            memory = memory_of(result)
            is_new = not any(result is source for source in step.sources)
            if is_new and memory not in self._own and (is_made or given != {memory}):
                self._views.add(id(result))

    def made(self, tensor: torch.Tensor) -> bool:
        """Check whether the function derives a tensor from captured tensors."""
        return id(tensor) in self._views or memory_of(tensor) in self._derived

    def table(self, tensor: torch.Tensor, *, is_score: bool) -> Table:
        """Return a tensor that a mask or a score looks up: of a recipe that makes it anew if the
        function made it. Those of scores are differentiable, and keep their dtype."""
        read = table_of(tensor)
        if not self.made(tensor):
            return read
        steps, sources = self._needed(tensor)
        dtype = tensor.dtype if is_score else getattr(torch, read.elements)
        make = partial(_made, steps, tensor, sources, dtype)
        return read.but(recipe=Recipe(make, tuple(sources)))

    def read(self, tables: Sequence[Table]) -> tuple[torch.Tensor, ...]:
        """Return the sources of tables that the function does not make itself."""
        sources = (source for table in tables for source in table.sources)
        return tuple([source for source in sources if memory_of(source) not in self._own])

    def _needed(self, tensor: torch.Tensor) -> tuple[list[_Step], list[torch.Tensor]]:
        """Return the steps that a tensor depends on, and the other tensors that they read."""
        steps: list[_Step] = []
        sources: list[torch.Tensor] = []
        memory, ids = {memory_of(tensor)} & self._derived, {id(tensor)}
        for step in reversed(self._steps):
            is_view = not ids.isdisjoint(map(id, step.results))
            if memory.isdisjoint(step.written) and not is_view:
                continue
            steps.append(step)
            for source in step.sources:
                if self.made(source):
                    ids.add(id(source))
                    memory |= {memory_of(source)} & self._derived
                elif not any(source is one for one in sources):
                    sources.append(source)
        return steps[::-1], sources


def _made(steps: Any, tensor: Any, sources: Any, dtype: Any, *given: Any) -> tuple[torch.Tensor]:
    """Make a tensor of tables in the place of its sources, in a dtype."""
    *tables, _ = given  # the lengths
    known = {id(source): table for source, table in zip(sources, tables, strict=True)}
    return (_run(steps, tensor, known).to(dtype).contiguous(),)


def _run(steps: list[_Step], tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Run steps again, with `known` tensors in the place of those with such ids."""
    for step in steps:
        args, kwargs = _replaced((step.args, step.kwargs), known)
        results = _tensors(step.function(*args, **kwargs))
        known.update(zip(map(id, step.results), results, strict=True))
    return known[id(tensor)]


def _replaced(value: Any, known: dict[int, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            return known.get(id(value), value)
        case tuple() | list():
            return type(value)([_replaced(one, known) for one in value])
        case dict():
            return {name: _replaced(one, known) for name, one in value.items()}
        case slice():
            return slice(*_replaced((value.start, value.stop, value.step), known))
        case _:
            return value


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number of the memory that a tensor shares with its views."""
    storage: Any = tensor.untyped_storage()
    return storage._cdata


def _version(tensor: torch.Tensor) -> int | None:
    """Return PyTorch's count of changes in place; None if it does not count them."""
    return None if tensor.is_inference() else tensor._version


def _changes(function: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Check by its name whether a function changes tensors in place."""
    name = function.__name__
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name in _IN_PLACE or "out" in kwargs or bool(kwargs.get("inplace"))


_IN_PLACE = frozenset(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ "  # noqa: SIM905
    "__imod__ __ipow__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__".split()
)


def _tensors(value: Any) -> list[torch.Tensor]:
    match value:
        case torch.Tensor():
            return [value]
        case tuple() | list():
            return [tensor for one in value for tensor in _tensors(one)]
        case dict():
            return [tensor for one in value.values() for tensor in _tensors(one)]
        case slice():
            return _tensors((value.start, value.stop, value.step))
        case _:
            return []
