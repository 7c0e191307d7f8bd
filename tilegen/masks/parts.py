"""Parts of masks that are no masks: numbers and alignments, how they are checked and spelt."""

from __future__ import annotations

from typing import Any, Literal, get_args

from tilegen.errors import InvalidProblem
from tilegen.masks.values import Values

Alignment = Literal["top_left", "bottom_right"]
"""The diagonal where seqlen_q != seqlen_kv: it starts at (0, 0), as that of SDPA's `is_causal`, or
ends at the last query and the last key."""
MAX_WINDOW = 2**28
"""Largest number in a mask: q + window + seqlen stays within 32-bit index arithmetic."""


def number(value: int | Values, b: Any, h: Any, q: Any, k: Any) -> Any:
    """Return a number of a mask as its predicate needs it for a pair."""
    return value.at(b, h, q, k) if isinstance(value, Values) else value


def shown(value: int | tuple[int, ...] | Values) -> str:
    """Return a part of a mask as its notation spells it."""
    if isinstance(value, tuple):
        return "x".join([shown(one) for one in value])
    # torch.compile may have made a variable of an integer, and makes a constant of it for `int`.
    return value.notation if isinstance(value, Values) else f"{int(value)}"


def check_number(name: str, value: object, *, low: int = 0, or_else: str = "") -> None:
    """Raise InvalidProblem unless `value` is an int in low..MAX_WINDOW."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_WINDOW:
        raise InvalidProblem(
            f"{name} must be an int in {low}..{MAX_WINDOW}{or_else}; got {value!r}"
        )


def check_alignment(alignment: str) -> None:
    """Raise InvalidProblem unless `alignment` is one."""
    if alignment not in get_args(Alignment):
        raise InvalidProblem(f"alignment must be top_left or bottom_right, got {alignment!r}")
