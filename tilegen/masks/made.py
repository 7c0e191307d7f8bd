"""Origins of masks and scores, which are what crosses into a graph of torch.compile.

Masks and scores that read tensors keep how they were made (`noted`). While torch.compile traces, no
element of a tensor can be looked at and nothing is solved: constructors then note only what is to
be made (`Chain` here, `Pending` among the masks).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import cache, lru_cache, wraps
from types import CellType, FunctionType, MethodType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
MAX_KNOWN = 1024


class _Making(tuple[Any, ...]):
    """Origin of a mask or score: a word and what it was made of. Functions stay in their
    process, since no other may know them by name."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        has_functions = self[0] in ("function", "chain")
        return (type(None), ()) if has_functions else (_Making, (tuple(self),))

    def __deepcopy__(self, known: dict[int, Any]) -> _Making:
        return _Making(deepcopy(tuple(self), known))


def noted(made: T, how: tuple[Any, ...], follows: Any = None) -> T:
    """Record in a new mask or score how it was made: a word, then the inputs; and what it follows.
    Return the mask."""
    vars(made)["_made"] = _Making(how)
    if follows is not None:
        vars(made)["follows"] = follows
    return made


class OfFunction:
    """The function of a mask or a score, with the attributes of objects that it reads: they are
    looked up again at each call. Stays in its process."""

    def __init__(self, function: Any, make: Callable[[Any], Any], hold: Callable[[], bool]) -> None:
        """`hold` tells whether the attributes are what they were."""
        self.function, self._make, self._hold = function, make, hold
        self._latest: Any = None

    def now(self, made: Any) -> Any:
        """Return the mask or score that was made of the function, or a new one."""
        latest = made if self._latest is None else self._latest
        # The function of the new one may read no object any more.
        if isinstance(latest.follows, OfFunction) and not latest.follows._hold():
            latest = self._latest = self._make(self.function)
        return latest

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())

    def __deepcopy__(self, known: dict[int, Any]) -> OfFunction:
        """Follow the copies of objects that are copied too."""
        function = _moved(self.function, known)
        return self if function is self.function else OfFunction(function, self._make, never)


def never() -> bool:
    """Return False: no trace of a function is used again."""
    return False


class OfParts:
    """The masks or scores that another one joins, some of which follow attributes."""

    def __init__(self, join: Callable[..., Any], parts: tuple[Any, ...]) -> None:
        """`join` makes a mask of the masks."""
        self._join, self._parts = join, parts
        self._latest: Any = None

    def now(self, made: Any) -> Any:
        """Return the joined mask, or a new one."""
        parts, latest = (self._parts, made) if self._latest is None else self._latest
        current = [one if one.follows is None else one.follows.now(one) for one in self._parts]
        if any(one is not part for one, part in zip(current, parts, strict=True)):
            latest = self._join(*current)
            self._latest = tuple(current), latest
        elif latest is made and all(
            one.follows is None for one in current
        ):  # constants, from now on
            vars(made).pop("follows", None)
        return latest


def follows_of(join: Callable[..., Any], parts: tuple[Any, ...]) -> OfParts | None:
    """Return the parts that a join of masks or scores follows; None if they follow nothing."""
    return OfParts(join, parts) if any(one.follows is not None for one in parts) else None


def _moved(value: Any, known: dict[int, Any]) -> Any:
    """Return a function whose closure holds the copies that `known` has of its objects."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _moved(value.__self__, known))
    if not isinstance(value, FunctionType):
        return value
    known[id(value)] = value  # which its own closure may hold
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    moved = [_moved(one, known) for one in cells]
    if any(one is not cell for one, cell in zip(moved, cells, strict=True)):
        closure = tuple(map(CellType, moved))
        parts = value.__code__, value.__globals__, value.__name__, value.__defaults__, closure
        known[id(value)] = FunctionType(*parts)
        known[id(value)].__kwdefaults__ = value.__kwdefaults__
    return known[id(value)]


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the caller, or a transform of torch.func runs
    it: tensors have no elements then. Loads nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    return _transform()() is not None


@cache
def _transform() -> Callable[[], Any]:
    """Return `transform` of private_torch.py: an import at each call takes longer."""
    from tilegen.private_torch import transform

    return transform


def made_once(make: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of a function by its arguments. torch.compile, which warns of such caches,
    traces the function itself."""
    known: Any = lru_cache(MAX_KNOWN, typed=True)(make)

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> T:
        return make(*args, **kwargs) if is_traced() else known(*args, **kwargs)

    return found


class InDocuments:
    """A score, or a function of scores, within each document of packed sequences."""

    def __init__(self, score: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any) -> None:
        self.score = score
        self.cu_seqlens = (cu_seqlens_q, cu_seqlens_kv)


class Chain:
    """Scores, or functions of scores, one applied after the other."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def then(self, other: Any) -> Chain:
        """Append a score."""
        return Chain((*self.parts, other))


# --------------------------------------------------------------------------------------------------
# Functions that torch.compile calls while it traces


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function as `torch.compiler.assume_constant_result` does, without importing
    torch._dynamo: that takes more than a second, which the first call of attention would wait."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
