"""Origins of masks and scores, which are what crosses into a graph of torch.compile.

Masks and scores that read tensors keep how they were made (`noted`). While torch.compile traces, no
element of a tensor can be looked at and nothing is solved: constructors then note only what is to
be made (`Chain` here, `Pending` among the masks).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from functools import lru_cache, wraps
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


def noted(made: T, how: tuple[Any, ...]) -> T:
    """Record in a new mask or score how it was made: a word, then the inputs. Return the mask."""
    vars(made)["_made"] = _Making(how)
    return made


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the caller, or a transform of torch.func runs
    it: tensors have no elements then. Loads nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None  # PyTorch documents no way


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
