"""Traces functions of masks and scores while torch.compile traces their caller.

torch.compile runs the function with the values of this module, as it runs all other Python: it
guards what the function reads, and the tensors that the function captures or makes are those of its
graph. What is done to the values is told, by number, to a tracer outside of the graph, the one that
traces functions at other times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from operator import index
from typing import Any

import torch
from cachetools import LRUCache
from torch.compiler import assume_constant_result
from torch.overrides import TorchFunctionMode

from tilegen.errors import TilegenError, Unsupported
from tilegen.masks.language.texts import to_text
from tilegen.masks.tracing.derived import Derived
from tilegen.masks.tracing.terms import MAX_ELEMENTS
from tilegen.masks.tracing.trace import traced
from tilegen.masks.tracing.tracer import Tracer
from tilegen.sympy_lock import lock

MAX_SESSIONS = 64
"""Traces under way at once, in all threads."""
LARGE = 2 * MAX_ELEMENTS
"""Size of a stand-in's dimensions where a tensor has more elements than functions compute with."""


@dataclass(frozen=True)
class CompiledTrace:
    """Expression that a function computes, and the tensors of the graph that it reads."""

    text: str
    captured: list[torch.Tensor]
    unused: list[torch.Tensor]


def trace(fn: Callable[..., Any], *, is_score: bool) -> CompiledTrace:
    """Trace a function of a score or a mask. Raises Unsupported."""
    number = _started(is_score)
    teller = _Teller(number)
    arguments = [teller.value(i) for i in range(4 + is_score)]
    with teller:
        found = fn(*arguments)
    answer = _finished(number, teller.told(found), is_score)
    if isinstance(answer, str):
        raise Unsupported(answer)
    text, slots, unused = answer
    captured = teller.captured
    return CompiledTrace(text, [captured[i] for i in slots], [captured[i] for i in unused])


class _Teller(TorchFunctionMode):
    """The graph's side of a trace. Values are tensors without elements, known by identity; the mode
    is told of all that is done with them, inside of an index too: `bias[h, q_idx]`. What it is not
    told of gives another tensor without elements."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.values: list[torch.Tensor] = []
        self.captured: list[torch.Tensor] = []

    def value(self, number: int | str) -> torch.Tensor:
        """Return a stand-in for the next value of the other side. Raises Unsupported where the
        other side sends a reason instead."""
        if isinstance(number, str):
            raise Unsupported(number)
        dtype, shape = _described(self.number, number)
        value = torch.empty((), dtype=dtype, device="meta").expand(shape)
        self.values.append(value)
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not self._has_value(args) and not self._has_value(tuple(named.values())):
            return func(*args, **named)
        if func.__name__ in ("__get__", "__set__", "dim", "size"):
            return func(*args, **named)  # of what stands for the value: its dtype, its shape
        if func is torch.Tensor.where:  # `x.where(condition, y)` is torch.where(condition, x, y)
            args = (args[1], args[0], *args[2:])
        told = tuple([self.told(one) for one in args])
        if func.__name__ == "__getitem__" and told[0][0] == "tensor":
            given = len(args[1]) if isinstance(args[1], tuple) else 1
            told = (self.told(args[0], given), told[1])
        answer = _applied(
            *(self.number, func.__name__),
            told,
            tuple([(key, self.told(one)) for key, one in named.items()]),
        )
        return self.value(answer)

    def told(self, value: Any, indices: int = 0) -> Any:
        """Return a value as the other side reads it; of a tensor with so many indices given, also
        the sizes of those left, where few elements are: the function may compute with them."""
        if isinstance(value, torch.Tensor):
            number = _place(self.values, value)
            if number is not None:
                return ("value", number)
            if value.is_meta:  # made of values by what the mode was not told of
                raise Unsupported(
                    "expected operations that torch.compile shows the tracer, which it does not "
                    "the builtin abs, or attributes such as .T and .data: write torch.abs(x), or "
                    "make the mask or the score outside of the compiled function"
                )
            slot = _place(self.captured, value)
            if slot is None:
                slot = len(self.captured)
                self.captured.append(value)
            sizes = value.shape[indices:]
            few = None  # guarded as they are
            if len(sizes) and sizes.numel() <= MAX_ELEMENTS:
                few = tuple([int(size) for size in sizes])
            return ("tensor", slot, value.ndim, str(value.dtype), few)
        if isinstance(value, tuple):
            return ("tuple", tuple([self.told(one) for one in value]))
        if isinstance(value, list):
            return ("list", tuple([self.told(one) for one in value]))
        # torch.compile may have made variables of numbers, and makes constants of them here.
        if isinstance(value, int) and not isinstance(value, bool):
            value = index(value)
        elif isinstance(value, float):
            value = value.__float__()
        return ("constant", value)

    def _has_value(self, given: Any) -> bool:
        for one in given:
            if isinstance(one, torch.Tensor):
                if _place(self.values, one) is not None:
                    return True
            elif isinstance(one, (tuple, list)) and self._has_value(one):
                return True
        return False


def _place(tensors: list[torch.Tensor], tensor: torch.Tensor) -> int | None:
    for i, one in enumerate(tensors):
        if one is tensor:
            return i
    return None


# --------------------------------------------------------------------------------------------------
# The other side, which torch.compile calls while it traces. Arguments and results are constants.


@dataclass
class _Session:
    tracer: Tracer
    values: list[Any]
    tensors: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    """Stand-ins without elements for the captured tensors, by slot."""

    def actual(self, told: Any) -> Any:
        """Return a value as the tracer takes it."""
        match told:
            case "value", number:
                return self.values[number]
            case "tensor", slot, ndim, dtype, few:
                return self._tensor(slot, ndim, getattr(torch, dtype.removeprefix("torch.")), few)
            case ("tuple" | "list") as kind, parts:
                return {"tuple": tuple, "list": list}[kind](map(self.actual, parts))
            case _:
                return told[1]

    def _tensor(
        self, slot: int, ndim: int, dtype: torch.dtype, few: tuple[int, ...] | None
    ) -> torch.Tensor:
        known = self.tensors.get(slot)
        sizes = [LARGE] * (ndim - len(few or ())) + list(few or ())
        if known is not None and (few is None or list(known.shape) == sizes):
            return known
        made = self.tensors[slot] = torch.empty(sizes, dtype=dtype, device="meta")
        captured = self.tracer.captured
        captured[:] = [made if one is known else one for one in captured]
        return made


_sessions: LRUCache[int, _Session] = LRUCache(MAX_SESSIONS)
_numbers = count()


@assume_constant_result
def _started(is_score: bool) -> int:
    """Return the number of a new trace, whose first values are the function's arguments."""
    tracer = Tracer()
    number = next(_numbers)
    _sessions[number] = _Session(tracer, list(tracer.arguments(is_score=is_score)))
    return number


@assume_constant_result
def _applied(number: int, name: str, args: Any, kwargs: Any) -> int | str:
    """Return the number of the value that an operation gives, or why there is none."""
    session = _sessions[number]
    try:
        with lock:
            named = {key: session.actual(value) for key, value in kwargs}
            found = session.tracer.apply(name, [session.actual(one) for one in args], named)
    except TilegenError as error:
        return str(error)
    session.values.append(found)
    return len(session.values) - 1


@assume_constant_result
def _described(number: int, value: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the shape of what stands for a value."""
    found = _sessions[number].values[value]
    return found.dtype, tuple(found.shape)


@assume_constant_result
def _finished(number: int, told: Any, is_score: bool) -> Any:
    """Return the text of a trace, the slots that it reads, and those it reads in vain; or why there
    is none."""
    session = _sessions.pop(number)
    try:
        with lock:
            value = session.actual(told)
            found = traced(session.tracer, value, Derived(), is_score=is_score)
            text = to_text(found.expr)
    except TilegenError as error:
        return str(error)
    slots = {id(tensor): slot for slot, tensor in session.tensors.items()}
    return (
        text,
        *(tuple(slots[id(one)] for one in some) for some in (found.captured, found.unused)),
    )
