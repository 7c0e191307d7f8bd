"""Fingerprints of functions: the values that a function reads besides its arguments. A trace is
used while the fingerprint of its function is the same.

A function is remembered if every value that it reads is understood: numbers and texts by value,
lists and dicts by their content, tensors by identity and place, functions by their closure,
defaults and the globals they name, objects of Python classes by the attributes that the functions
name. A function that reads anything else (arrays, caches, queues, attributes by computed names), or
the elements of a tensor while it is traced, is traced at each call.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from threading import RLock
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Generic, TypeVar
from weakref import ref

import numpy as np
import torch
from cachetools import LRUCache

from tilegen.masks.snapshots import Snapshot

T = TypeVar("T")
MAX_TRACES = 512
MAX_FACTS = 5000
"""Largest fingerprint. A function that reads more, such as `sys.modules`, is traced at each call.
"""
_FOREIGN = frozenset(
    {"_thread", "builtins", "functools", "math", "numpy", "operator", "sympy", "torch"}
)
"""Packages whose globals no user changes."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
_HOLDERS = (tuple, list, dict, set, frozenset)
_PARTS: dict[type, tuple[str, ...]] = {
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.partialmethod: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    slice: ("start", "stop", "step"),
}
"""Kinds of objects that are compared by their parts."""
_FIXED = (
    *(CodeType, range, type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Kinds of objects that never change."""
_DYNAMIC = frozenset(
    "getattr hasattr dir vars globals locals eval exec attrgetter methodcaller "  # noqa: SIM905
    "import_module __import__ __dict__ __getattribute__ __closure__ __globals__ type".split()
)
"""Names of functions that read values that the names in code do not show."""
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""CPython's flags of types: both for those of C, the first alone for classes in Python."""
_MAKING = ("__init__", "__new__", "__post_init__", "__del__")
"""Methods that no code reaches through an object, but through the class."""


_looks = 0


def looked() -> None:
    """Record that a function draws numbers, or reads elements of a tensor, while it is traced.
    The trace, and traces that other threads make meanwhile, are not remembered."""
    global _looks
    _looks += 1


class Traces(Generic[T]):
    """A cache of `make(function)`, one result for each function while its fingerprint is the same.

    Functions may be any callables: they are compared by identity. The least recently used result is
    dropped first, and a result whose function, or the object it is a method of, is gone. May be
    used from many threads.
    """

    def __init__(
        self, make: Callable[[Any], T], size: int = MAX_TRACES, *, by_elements: bool = False
    ) -> None:
        """Set `by_elements` for results that depend on the elements of tensors."""
        self._make, self._by_elements = make, by_elements
        self._known: LRUCache[Hashable, tuple[ref[Any], list[Any], T]] = LRUCache(size)
        # Reentrant: an owner may die, and its trace with it, while this thread holds the lock.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, owner: Any, reads: tuple[Any, ...] = ()) -> T:
        """Return the result for `owner`, a callable, from the cache where nothing changed; `reads`
        are further functions and tensors that the result depends on."""
        facts = fingerprint((owner, *reads), by_elements=self._by_elements)
        # Methods are objects that live for one access only.
        bound = isinstance(owner, MethodType)
        anchor = owner.__self__ if bound else owner
        key = (id(anchor), id(owner.__func__) if bound else None)
        with self._lock:
            if (known := self._known.get(key)) and known[0]() is anchor and known[1] == facts:
                return known[2]
        before = _looks
        settle(facts)
        made = self._make(owner)

        def forget(gone: ref[Any]) -> None:
            with self._lock:
                known = self._known.get(key)
                if known and known[0] is gone:
                    del self._known[key]

        try:
            alive = ref(anchor, forget)
        except TypeError:  # no weak references: the end of its life is not seen
            return made
        if _looks == before:
            with self._lock:
                self._known[key] = alive, facts, made
        return made


@dataclass(frozen=True, eq=False)
class _Same:
    """An object by identity; equal to nothing once it is gone."""

    get: Callable[[], Any]

    @staticmethod
    def as_(value: Any) -> _Same:
        try:
            return _Same(ref(value))
        except TypeError:
            return _Same(lambda: value)

    def __eq__(self, other: object) -> bool:
        mine = self.get()
        return isinstance(other, _Same) and mine is not None and mine is other.get()

    __hash__ = None  # type: ignore[assignment]


class _State:
    """The state of a tensor, compared with the state of the same tensor at another time."""

    def __init__(self, tensor: torch.Tensor, elements: bool) -> None:
        self._elements = elements
        self._tensor: torch.Tensor | None = tensor
        self._snapshot: Snapshot | None = None

    def settle(self) -> None:
        """Record the state, and hold the tensor no longer."""
        if self._tensor is not None:
            self._snapshot = Snapshot.of(self._tensor, elements=self._elements)
            self._tensor = None

    def __eq__(self, other: object) -> bool:
        """Compare a recorded state with the tensor as it is now."""
        return (
            isinstance(other, _State)
            and self._snapshot is not None
            and other._tensor is not None
            and self._snapshot.is_current(other._tensor, elements=self._elements)
        )

    __hash__ = None  # type: ignore[assignment]


def fingerprint(roots: tuple[Any, ...], *, by_elements: bool = False) -> list[Any]:
    """List the values that callables read, and the elements of tensors with `by_elements`.

    A fingerprint that is settled equals a later fingerprint while all values are the same.
    """
    reader = _Reader(by_elements)
    try:
        for root in roots:
            reader.value(root)
            if isinstance(root, torch.nn.Module):  # whose call PyTorch leads to `forward`
                reader.value(type(root).forward)
        reader.attributes()
    except _TooManyError:
        return [object()]  # which equals no other fingerprint
    return reader.facts


class _TooManyError(Exception):
    """A function reads more than MAX_FACTS values."""


def settle(facts: list[Any]) -> None:
    """Record the state of the tensors in a fingerprint, which then keeps no object alive."""
    for fact in facts:
        if isinstance(fact, _State):
            fact.settle()


class _Reader:
    def __init__(self, by_elements: bool) -> None:
        self.facts: list[Any] = []
        self._by_elements = by_elements
        self._seen: set[int] = set()
        self._names: set[str] = set()
        """The names of globals and attributes in the functions met so far."""
        self._objects: list[Any] = []
        """The objects met so far, whose attributes are looked at when all names are known."""

    def value(self, value: Any) -> None:
        """Record the value of a cell, a global, a default or an attribute."""
        if len(self.facts) > MAX_FACTS:
            raise _TooManyError
        kind = type(value)
        plain = _base(value, _PLAIN)
        if plain is not None:
            # Whose texts tell -0.0 and nan apart. A class of the user's own may spell it otherwise.
            self.facts.append((kind, plain.__repr__(value)))
            if kind is plain or plain is np.generic:
                return
        if isinstance(value, torch.Tensor):
            self._tensor(value)
            return
        # A list or a bound method is what it holds, and may be another object with the same in it.
        if isinstance(value, _HOLDERS):
            self.facts.append((kind, len(value)))
        elif plain is None:
            self.facts.append(kind if kind is MethodType else _Same.as_(value))
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        for part in self._parts(value):
            self.value(part)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.facts += [_Same.as_(tensor), tensor.requires_grad, _State(tensor, self._by_elements)]
        if vars(tensor) and id(tensor) not in self._seen:
            self._seen.add(id(tensor))
            self._objects.append(tensor)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yield the values that a value reads or holds; note an unknown fact for other kinds."""
        kind = type(value)
        if (base := _base(value, _PLAIN + _HOLDERS)) is not None:
            if base in _HOLDERS:
                yield from base.__iter__(value)
            if base is dict:
                yield from base.values(value)
            if kind is not base:  # a class of the user's own
                yield from _operators(kind)
                self._objects.append(value)
        elif kind in _PARTS:
            yield from (getattr(value, name) for name in _PARTS[kind])
            self._objects.append(value)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
            self._objects.append(value)
        elif isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
            yield value.__self__  # whose method it is
        elif isinstance(value, BuiltinFunctionType):
            # Such as time.time, and getattr by another name.
            if _root(value.__module__) not in _FOREIGN or value.__name__ in _DYNAMIC:
                self._unknown()
        elif isinstance(value, ModuleType | type):
            if _root(value.__name__ if kind is ModuleType else value.__module__) not in _FOREIGN:
                self._objects.append(value)
                if isinstance(value, type):  # which may make an object, and compute with it
                    yield from (*_operators(kind), *_operators(value), *_methods(value, _MAKING))
        elif not isinstance(value, _FIXED):
            if not _is_open(kind):
                self._unknown()
            yield from _operators(kind)
            self._objects.append(value)

    def _unknown(self) -> None:
        """Record a fact that equals no fact of another fingerprint."""
        self.facts.append(object())

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty: not assigned yet
                yield None
        if _root(function.__module__) in _FOREIGN:
            return
        names = _names(function.__code__)
        self._names.update(names)
        if not _DYNAMIC.isdisjoint(names):
            self._unknown()
        for name in names:
            if name in function.__globals__:
                yield name
                yield function.__globals__[name]

    def attributes(self) -> None:
        """Record the attributes of the objects met that the functions name; both sets may grow."""
        done: list[tuple[int, int]] = []
        while done != (done := [(len(self._objects), len(self._names))]):
            for value in tuple(self._objects):
                for name in sorted(self._names):
                    for part in _attribute(value, name):
                        self.facts.append(name)
                        self.value(part)


def _base(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return the first of some classes that a value is an instance of, or None."""
    return next((kind for kind in kinds if isinstance(value, kind)), None)


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the globals and attributes that code and the functions defined in it name; with
    `__import__` where it imports anything."""
    imports = ["__import__"] if dis.opmap["IMPORT_NAME"] in code.co_code[::2] else []
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(
        sorted({*code.co_names, *imports, *(name for one in inner for name in _names(one))})
    )


def _is_open(kind: type) -> bool:
    """Check whether all parts of an object can be read: its classes are written in Python."""
    classes = (one for one in kind.__mro__ if one not in (object, SimpleNamespace))
    return all(one.__flags__ & _HEAP and not one.__flags__ & _IMMUTABLE for one in classes)


@lru_cache(maxsize=1024)
def _operators(kind: type) -> tuple[FunctionType, ...]:
    """Return the methods that calls and operators reach without naming them."""
    names = {name for one in _classes(kind) for name in vars(one) if name.startswith("__")}
    return _methods(kind, tuple(sorted(names.difference(_MAKING))))


def _methods(kind: type, names: tuple[str, ...]) -> tuple[FunctionType, ...]:
    """Return the functions of such names in a class and in those it derives from."""
    held = (vars(one).get(name) for one in _classes(kind) for name in names)
    functions = (getattr(one, "__func__", one) for one in held)  # __new__ is a static method
    return tuple(one for one in functions if isinstance(one, FunctionType))


def _attribute(value: Any, name: str) -> tuple[Any, ...]:
    """Look up an attribute without running code of the object: a tuple of the value, empty if there
    is none. The class follows a class method, which may make an object of it."""
    own = getattr(value, "__dict__", {})
    places = [own] if isinstance(own, dict | MappingProxyType) else []
    if isinstance(value, torch.nn.Module):
        places += [own[kind] for kind in ("_parameters", "_buffers", "_modules")]
    for place in places:
        if name in place:
            return (place[name],)
    owners = [*_classes(value), *_classes(type(value))] if isinstance(value, type) else None
    for owner in owners or _classes(type(value)):
        if name in vars(owner):
            held = vars(owner)[name]
            if isinstance(held, MemberDescriptorType) and isinstance(value, owner):  # a slot
                held = getattr(value, name, None)
            made = value if isinstance(value, type) else type(value)
            return (held, made) if isinstance(held, classmethod) else (held,)
    return (type(value),) if name == "__class__" else ()


@lru_cache(maxsize=1024)
def _classes(kind: type) -> tuple[type, ...]:
    """Return the classes in which attributes of a class's objects are looked up, except those of
    FOREIGN packages."""
    return tuple(one for one in kind.__mro__ if _root(one.__module__) not in _FOREIGN)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]
