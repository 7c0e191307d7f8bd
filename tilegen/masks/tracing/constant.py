"""Mark functions that torch.compile calls while it traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def assume_constant_result(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function as `torch.compiler.assume_constant_result` does, without importing
    torch._dynamo: that takes more than a second, which the first call of attention would wait."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
