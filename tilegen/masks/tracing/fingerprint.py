"""Fingerprints of functions: what each reads besides its arguments. A trace is used while the
fingerprint of its function is the same.

A trace says what a function computed when it was called with symbols. It holds as long as the
function is the same object and finds the same in its closure, its defaults, the globals it names
and the attributes of the objects it reaches: numbers and texts by value, tensors by identity and
metadata, functions and objects of Python classes by identity and by what they read in turn. A
function that reaches anything else (arrays, caches, queues, attributes by computed names) has a
fingerprint that equals no other, so that it is traced at each call.
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
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any, Generic, TypeVar, cast
from weakref import ref

import numpy as np
import torch
from cachetools import LRUCache

T = TypeVar("T")
MAX_TRACES = 512
_FOREIGN = frozenset({"builtins", "functools", "math", "numpy", "operator", "sympy", "torch"})
"""Packages whose globals no user changes."""

_PLAIN = (bool, int, float, complex, str, bytes)
_FIXED = (
    *(CodeType, torch.dtype, torch.device, range, type(...), type(NotImplemented)),
    *(MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType),
    *(WrapperDescriptorType, ClassMethodDescriptorType),
)
"""Kinds of objects that never change."""
_DYNAMIC = frozenset(
    "getattr vars globals locals eval exec attrgetter methodcaller import_module "  # noqa: SIM905
    "__import__ __dict__ __getattribute__ __closure__ __globals__".split()
)
"""Names by which code reads what its names do not tell."""
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8
"""CPython's flags of types: both for those of C, the first alone for classes in Python."""
_HOLDERS = (tuple, list, dict, set, frozenset)


class Traces(Generic[T]):
    """A memory of `make(function)`: made once for each function while its fingerprint is the same.

    Functions may be any callables: they are known by identity. The least recently used are
    forgotten, and those whose function, or the object it is a method of, is gone. May be used from
    many threads.
    """

    def __init__(self, make: Callable[[Any], T], size: int = MAX_TRACES) -> None:
        self._make = make
        self._known: LRUCache[Hashable, tuple[ref[Any], list[Any], T]] = LRUCache(size)
        # Reentrant: an owner may die, and its trace with it, while this thread holds the lock.
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._known)

    def __call__(self, owner: Any, reads: tuple[Any, ...] = ()) -> T:
        """Return the result for `owner`, a callable, from the cache where nothing changed; `reads`
        are further functions and tensors that the result depends on."""
        found = fingerprint((owner, *reads))
        # Methods are objects that live for one access only.
        bound = isinstance(owner, MethodType)
        anchor = owner.__self__ if bound else owner
        key = (id(anchor), id(owner.__func__) if bound else None)
        with self._lock:
            if (known := self._known.get(key)) and known[0]() is anchor and known[1] == found:
                return known[2]
        made = self._make(owner)

        def forget(gone: ref[Any]) -> None:
            with self._lock:
                known = self._known.get(key)
                if known and known[0] is gone:
                    del self._known[key]

        try:
            alive = ref(anchor, forget)
        except TypeError:  # no weak references: nobody would say when it is gone
            return made
        with self._lock:
            self._known[key] = alive, found, made
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


def fingerprint(roots: tuple[Any, ...]) -> list[Any]:
    """List the values that callables read. Fingerprints are equal while all values are the same,
    and keep nothing alive."""
    reader = _Reader()
    for root in roots:
        reader.root(root)
    reader.attributes()
    return reader.facts


class _Reader:
    def __init__(self) -> None:
        self.facts: list[Any] = []
        self._seen: set[int] = set()
        self._names: set[str] = set()
        """The names of globals and attributes in the functions met so far."""
        self._objects: list[Any] = []
        """The objects met so far, whose attributes are looked at when all names are known."""

    def root(self, value: Any) -> None:
        """Note a callable, or something else that is read."""
        self._value(value)
        for name in ("__call__", "forward"):  # of an object; functions have no such code
            code = getattr(type(value), name, None)
            if isinstance(code, FunctionType):
                self._value(code)

    def _value(self, value: Any) -> None:
        """Note what is found in a cell, a global, a default or an attribute."""
        if value is None or isinstance(value, (*_PLAIN, np.generic)):
            self.facts.append((type(value), repr(value)))  # which tells -0.0 and nan apart
            return
        if isinstance(value, torch.Tensor):
            metadata = (value.dtype, value.shape, value.device, value.requires_grad)
            self.facts.append((_Same.as_(value), metadata))
            return
        # A list or a bound method is what it holds, and may be another object with the same in it.
        if isinstance(value, _HOLDERS):
            self.facts.append((type(value), len(cast("tuple[Any, ...]", value))))
        elif isinstance(value, MethodType):
            self.facts.append(MethodType)
        else:
            self.facts.append(_Same.as_(value))
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        for part in self._parts(value):
            self._value(part)

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yield what a value reads or holds."""
        match value:
            case tuple() | list() | set() | frozenset():
                yield from cast("tuple[Any, ...]", value)
            case dict():
                for key, held in cast("dict[Any, Any]", value).items():
                    yield key
                    yield held
            case FunctionType():
                yield from self._of_function(value)
            case MethodType():
                yield value.__func__
                yield value.__self__
            case functools.partial():
                part = cast("functools.partial[Any]", value)
                yield from (part.func, part.args, part.keywords)
            case property():
                yield value.fget
            case staticmethod() | classmethod():
                yield value.__func__
            case slice():
                yield from (value.start, value.stop, value.step)
            case BuiltinFunctionType():
                if not isinstance(value.__self__, ModuleType):  # a method of an object
                    yield value.__self__
            case _ if isinstance(value, _FIXED):
                return
            case ModuleType() if _root(value.__name__) in _FOREIGN:
                return
            case type() if _root(value.__module__) in _FOREIGN:
                return
            case ModuleType() | type():
                self._objects.append(value)
            case _:
                if not _is_open(value):
                    self._unknown()
                yield from _operators(type(value))
                self._objects.append(value)

    def _unknown(self) -> None:
        """Note what equals nothing noted at another time."""
        self.facts.append(object())

    def _of_function(self, function: FunctionType) -> Iterator[Any]:
        yield function.__code__
        yield function.__defaults__
        yield function.__kwdefaults__
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # empty: not assigned yet
                yield None
        if _root(function.__module__) in _FOREIGN:
            return
        names = _names(function.__code__)
        self._names.update(names)
        if not _DYNAMIC.isdisjoint(names) or _imports(function.__code__):
            self._unknown()
        for name in names:
            if name in function.__globals__:
                yield name
                yield function.__globals__[name]

    def attributes(self) -> None:
        """Note the attributes, of the objects met, that the functions name; both may grow."""
        done: list[tuple[int, int]] = []
        while done != (done := [(len(self._objects), len(self._names))]):
            for value in tuple(self._objects):
                for name in sorted(self._names):
                    if found := _attribute(value, name):
                        self.facts.append(name)
                        self._value(found[0])


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the globals and attributes that code and the functions defined in it name."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return tuple(sorted({*code.co_names, *(name for one in inner for name in _names(one))}))


@lru_cache(maxsize=1024)
def _imports(code: CodeType) -> bool:
    """Return whether code, or a function defined in it, imports anything."""
    return any(one.opname == "IMPORT_NAME" for one in dis.get_instructions(code)) or any(
        _imports(one) for one in code.co_consts if isinstance(one, CodeType)
    )


def _is_open(value: Any) -> bool:
    """Return whether all that an object holds can be looked at: its classes are written in Python,
    or in torch or SymPy, which change none of theirs."""
    if type(value) is object or _root(type(value).__module__) in ("torch", "sympy"):
        return True
    classes = (one for one in type(value).__mro__ if one not in (object, SimpleNamespace))
    return all(one.__flags__ & _HEAP and not one.__flags__ & _IMMUTABLE for one in classes)


@lru_cache(maxsize=1024)
def _operators(kind: type) -> tuple[FunctionType, ...]:
    """Return the methods that operators call, which no code names."""
    return tuple(
        found
        for one in _classes(kind)
        for name, found in vars(one).items()
        if name.startswith("__") and isinstance(found, FunctionType) and name not in _MAKING
    )


_MAKING = ("__init__", "__new__", "__post_init__", "__repr__", "__reduce__", "__del__")


def _attribute(value: Any, name: str) -> tuple[Any, ...]:
    """Look up an attribute without running code of the object: a tuple of the value, empty if there
    is none."""
    own = getattr(value, "__dict__", {})
    places = [own]
    if isinstance(value, torch.nn.Module):
        places += [own[kind] for kind in ("_parameters", "_buffers", "_modules")]
    for place in places:
        if name in place:
            return (place[name],)
    for one in _classes(value if isinstance(value, type) else type(value)):
        if name in vars(one):
            found = vars(one)[name]
            if isinstance(found, MemberDescriptorType) and isinstance(value, one):  # a slot
                found = getattr(value, name, None)
            return (found,)
    return ()


@lru_cache(maxsize=1024)
def _classes(kind: type) -> tuple[type, ...]:
    """Return where attributes of a class's objects are looked up, but for other packages'."""
    return tuple(one for one in kind.__mro__ if _root(one.__module__) not in _FOREIGN)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]
