"""Values that a function reads besides its arguments; they decide whether its trace holds.

A trace is remembered while all that the function reads is the same, if each value is a number, a
text, a tensor, a module of MODULES, a tuple of such values, or a function for which the same holds.
Any other function is traced at each call: its values may change where nobody looks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache
from threading import RLock
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Generic, TypeVar
from weakref import proxy, ref

import torch
from cachetools import LRUCache

from tilegen.masks.snapshots import Snapshot
from tilegen.masks.tracing.derived import memory_of

T = TypeVar("T")
Place = tuple[Callable[[Any, Any], Any], Any, Any, Any]
"""A getter, its two arguments and the value that it gave."""
MAX_TRACES = 512
MAX_LOOKUPS = 2000
"""Most pairs of an object and a name that are looked up. A function with more is traced at each
call."""
MODULES = (torch, torch.nn, torch.nn.functional, torch.special, math)
"""Modules whose functions depend on their arguments alone."""
_FIXED = (
    *(type(None), bool, int, float, complex, str, bytes, CodeType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Kinds of values that never change."""
_BUILTINS = frozenset(
    "abs bool divmod enumerate float int isinstance len list max min pow range "  # noqa: SIM905
    "reversed round sum tuple zip".split()
)
_OTHERWISE = ("_", "get_", "is_", "set_", "grad")
"""Prefixes of names in MODULES, and of tensors' attributes, that read a state."""

_looks = 0


def looked() -> None:
    """Record that a function draws numbers, or reads elements of a tensor, while it is traced.
    The trace, and traces that other threads make meanwhile, are not remembered."""
    global _looks
    _looks += 1


class Traces(Generic[T]):
    """A cache of `make(function)`, one result for each function while what it reads is the same.

    Functions may be any callables: they are compared by identity. The least recently used result is
    dropped first, and a result whose function is gone. May be used from many threads.
    """

    def __init__(
        self,
        make: Callable[[Any], T],
        size: int = MAX_TRACES,
        *,
        attributes: tuple[str, ...] | None = None,
    ) -> None:
        """Set `attributes` for objects that are no functions: what they read is in these, and
        results depend on the elements of tensors in them."""
        self._make, self._attributes = make, attributes
        self._known: LRUCache[Hashable, tuple[ref[Any], Reads, T]] = LRUCache(size)
        # Reentrant: an owner may die, and its trace with it, while this thread holds the lock.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, owner: Any) -> T:
        """Return the result for `owner`, a callable, from the cache where nothing changed."""
        key = id(owner)
        with self._lock:
            known = self._known.get(key)
        if known is not None and known[0]() is owner and known[1].hold():
            return known[2]

        def forget(gone: ref[Any]) -> None:
            with self._lock:
                known = self._known.get(key)
                if known and known[0] is gone:
                    del self._known[key]

        try:
            alive = ref(owner, forget)
        except TypeError:  # no weak references: the end of its life is not seen
            return self._make(owner)
        before, reads = _looks, Reads(owner, self._attributes)
        made = self._make(owner)
        if reads.are_known and _looks == before:
            with self._lock:
                self._known[key] = alive, reads, made
        return made


class Reads:
    """The values that a function reads, and the places where they are found. Keeps the function
    itself not alive."""

    def __init__(self, function: Any, attributes: tuple[str, ...] | None = None) -> None:
        """Look at a function; or at `attributes` of an object, and the elements of tensors."""
        self._elements = attributes is not None
        self._places: list[Place] = [(_default, None, None, torch.get_default_dtype())]
        self._tensors: list[tuple[torch.Tensor, bool, Snapshot]] = []
        self._seen: set[int] = set()
        self._names: set[str] = set()
        self._objects: list[Any] = []
        """Values of other kinds."""
        self._are_named = True
        if attributes is None:
            self._value(function)
            if not isinstance(function, FunctionType | MethodType):
                self._names.add("forward")  # to which PyTorch leads calls of a module
        for name in attributes or ():
            self._at(_attribute, proxy(function), name)

    @property
    def are_known(self) -> bool:
        """Whether a change of any of the values is seen."""
        return self._are_named and not self._objects

    def hold(self) -> bool:
        """Check whether the function would read the same values."""
        return holds(self._places) and all(
            one.requires_grad == trained and state.is_current(one, elements=self._elements)
            for one, trained, state in self._tensors
        )

    def _at(self, get: Callable[[Any, Any], Any], holder: Any, key: Any) -> None:
        value = get(holder, key)
        self._places.append((get, holder, key, value))
        self._value(value)

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _FIXED or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if kind in (torch.Tensor, torch.nn.Parameter):
            state = Snapshot.of(value, elements=self._elements)
            self._tensors.append((value, value.requires_grad, state))
            if vars(value):
                self._objects.append(value)
        elif kind in (tuple, torch.Size):
            for part in value:
                self._value(part)
        elif kind is FunctionType:
            self._function(value)
        elif not _is_fixed(value):
            self._objects.append(value)
            for part in _PARTS.get(kind, ()):
                self._value(getattr(value, part))

    def _function(self, function: FunctionType) -> None:
        itself = proxy(function)
        self._at(getattr, itself, "__code__")
        self._at(getattr, itself, "__defaults__")
        by_name: dict[str, Any] = function.__kwdefaults__ or {}
        self._places.append((getattr, itself, "__kwdefaults__", function.__kwdefaults__))
        for name in by_name:
            self._at(dict[str, Any].get, by_name, name)
        for cell in function.__closure__ or ():
            self._at(_content, cell, None)
        names, there = _names(function.__code__), function.__globals__
        if str(there.get("__name__")).partition(".")[0] in ("torch", "tilegen"):
            self._are_named &= bool(function.__closure__) or function.__name__ in _known_names()
            return
        self._names |= names
        # An attribute of a function, and a name that is neither, may be of anything.
        self._are_named &= not vars(function) and names <= there.keys() | _known_names()
        for name in names:  # one that is missing may be set later
            self._at(dict[str, Any].get, there, name)

    def attributes(self, tensors: Iterable[torch.Tensor]) -> tuple[Place, ...] | None:
        """Return the places of the attributes that the functions name, of objects that they read;
        None where the values of `tensors` are not all found in these, or as they are."""
        places: list[Place] = []
        done: set[tuple[int, str]] = set()
        self._names.add("__call__")
        while todo := {(i, n) for i in range(len(self._objects)) for n in self._names} - done:
            done |= todo
            if len(done) > MAX_LOOKUPS:
                return None
            for i, name in sorted(todo):
                held = next((one for one in _holders(self._objects[i]) if name in one), None)
                if held is not None:
                    places.append((_item, held, name, held[name]))
                    self._value(held[name])
        known = {memory_of(one) for one, *_ in self._tensors}
        return tuple(places) if all(memory_of(one) in known for one in tensors) else None


def holds(places: Any) -> bool:
    """Check whether each place has the value that was found there."""
    try:
        for get, holder, key, value in places:
            if get(holder, key) is not value:
                return False
    except (LookupError, ReferenceError):
        return False
    return True


_PARTS = {
    MethodType: ("__func__", "__self__"),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
}
"""Kinds of objects that lead to functions."""


def _default(*_: Any) -> torch.dtype:
    return torch.get_default_dtype()


def _attribute(value: Any, name: str) -> Any:
    return getattr(value, name, None)


def _item(held: Any, name: str) -> Any:
    return held[name]


def _content(cell: CellType, _: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty: not assigned yet
        return None


def _is_fixed(value: Any) -> bool:
    """Check whether a value is one of MODULES, or a function of theirs."""
    if isinstance(value, ModuleType):
        return value in MODULES
    if not isinstance(value, BuiltinFunctionType) or value.__name__ not in _known_names():
        return False
    return any(vars(module).get(value.__name__) is value for module in MODULES)


@lru_cache(1)
def _known_names() -> frozenset[str]:
    """Return names of builtins, of tensors' attributes and of functions of MODULES that read
    nothing but their arguments."""
    of_modules = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if not isinstance(value, ModuleType)
    }
    names = {
        name
        for name in of_modules.union(dir(torch.Tensor))
        if not name.startswith(_OTHERWISE) and "seed" not in name
    }
    return frozenset(names | _BUILTINS | {"nn", "functional", "special"})


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that code and the functions defined in it name."""
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(code.co_names).union(*inner)


def _holders(value: Any) -> Iterator[Any]:
    """Yield the dicts in which Python looks up an attribute of an object."""
    own: dict[str, Any] = getattr(value, "__dict__", {})
    kind: type = type(value)
    yield own
    if isinstance(value, torch.nn.Module):
        yield from (own[name] for name in ("_parameters", "_buffers", "_modules"))
    bases: tuple[type, ...] = value.__mro__ if isinstance(value, type) else ()
    for base in (*bases, *kind.__mro__):
        if base.__module__.partition(".")[0] not in ("builtins", "torch"):
            yield vars(base)
