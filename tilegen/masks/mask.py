"""Masks as predicates `keep(q, k)`: which query row may see which key column.

A mask is a small frozen value. Its one definition, `keep`, is written with ordinary operators, so
the same function accepts Python integers, torch tensors (the dense reference) and SymPy symbols
(the mask compiler).
Nothing here imports SymPy: a cached call only hashes masks.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from tilegen.errors import InvalidProblem

Alignment = Literal["top_left", "bottom_right"]
"""Where the diagonal starts when seqlen_q != seqlen_kv: at (0, 0) as SDPA's `is_causal`, or ending
at the last key."""

MAX_WINDOW = 2**28
"""Largest window side; q + window + seqlen stays within 32-bit index arithmetic."""


class Mask(ABC):
    """Predicate over (query row, key column). Immutable and hashable; combine with `&`."""

    @property
    @abstractmethod
    def notation(self) -> str:
        """Canonical text without spaces; `parse_mask(mask.notation) == mask`."""

    @abstractmethod
    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        """Whether row `q` sees column `k`: bool, tensor or SymPy Boolean, as the arguments are."""

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that keeps what both keep."""
        if not isinstance(other, Mask):
            return NotImplemented
        return intersect(self, other)

    def __str__(self) -> str:
        return self.notation


@dataclass(frozen=True)
class Full(Mask):
    """Every row sees every column: `True`."""

    @property
    def notation(self) -> str:
        return "full"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """`k <= q` (top_left), or `k <= q + seqlen_kv - seqlen_q` (bottom_right)."""

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)

    @property
    def notation(self) -> str:
        return "causal" if self.alignment == "top_left" else "causal(bottom_right)"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        return k <= q + _offset(self.alignment, seqlen_q, seqlen_kv)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """`q - left <= k <= q + right`, shifted by `seqlen_kv - seqlen_q` when bottom_right; None is
    unbounded."""

    left: int | None
    right: int | None
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        _check_alignment(self.alignment)
        for side in ("left", "right"):
            value = getattr(self, side)
            if value == -1:  # FlashAttention's spelling of "unbounded"
                object.__setattr__(self, side, None)
            elif value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int)
                or not 0 <= value <= MAX_WINDOW
            ):
                raise InvalidProblem(
                    f"window {side} must be an int in 0..{MAX_WINDOW}, "
                    f"or -1 or None for unbounded; got {value!r}"
                )

    @property
    def notation(self) -> str:
        left, right = (-1 if side is None else side for side in (self.left, self.right))
        suffix = "" if self.alignment == "top_left" else ",bottom_right"
        return f"window({left},{right}{suffix})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        centre = q + _offset(self.alignment, seqlen_q, seqlen_kv)
        keep: Any = True
        if self.left is not None:
            keep = centre - self.left <= k
        if self.right is not None:
            keep = keep & (k <= centre + self.right)
        return keep


@dataclass(frozen=True)
class And(Mask):
    """Keeps what all parts keep. Build with `&`, which puts the parts in canonical order."""

    parts: tuple[Mask, ...]

    @property
    def notation(self) -> str:
        return "&".join(part.notation for part in self.parts)

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any) -> Any:
        keep: Any = True
        for part in self.parts:
            keep = part.keep(q, k, seqlen_q, seqlen_kv) & keep
        return keep


def full() -> Mask:
    """Return the mask that keeps everything."""
    return Full()


def causal(alignment: Alignment = "top_left") -> Mask:
    """Return `k <= q`; `alignment="bottom_right"` lets the last row see the last column at any
    lengths."""
    return Causal(alignment)


def sliding_window(
    left: int | None, right: int | None = 0, alignment: Alignment = "top_left"
) -> Mask:
    """Return `q - left <= k <= q + right` (both inclusive; -1 or None: unbounded).

    Mistral's window of 4096 tokens, itself included, is `sliding_window(4095, 0)`.
    """
    window = SlidingWindow(left, right, alignment)
    return Full() if window.left is None and window.right is None else window


def intersect(*masks: Mask) -> Mask:
    """Return the `&` of masks: flattened, without `full` and repetitions, in a fixed order."""
    parts: dict[str, Mask] = {}
    for mask in masks:
        for part in mask.parts if isinstance(mask, And) else (mask,):
            if not isinstance(part, Full):
                parts[part.notation] = part
    ordered = tuple(parts[name] for name in sorted(parts))
    if not ordered:
        return Full()
    return ordered[0] if len(ordered) == 1 else And(ordered)


def parse_mask(text: str) -> Mask:
    """Return the mask a notation such as `causal&window(4095,0)` describes. Raises
    InvalidProblem."""
    return intersect(*(_parse_one(part.strip()) for part in text.split("&")))


_CALL = re.compile(r"(?P<name>[a-z_]+)(?:\((?P<arguments>[^()]*)\))?")
_FORMS = (
    "full, causal, causal(bottom_right), window(LEFT,RIGHT), window(LEFT,RIGHT,bottom_right), "
    "joined by &"
)


def _parse_one(text: str) -> Mask:
    match = _CALL.fullmatch(text)
    if not match:
        raise InvalidProblem(f"expected a mask ({_FORMS}), got {text!r}")
    arguments = (
        [a.strip() for a in (match["arguments"] or "").split(",")] if match["arguments"] else []
    )
    match match["name"], arguments:  # pyright: ignore[reportMatchNotExhaustive]
        case "full", []:
            return Full()
        case "causal", []:
            return Causal()
        case "causal", [alignment] if alignment in get_args(Alignment):
            return Causal(cast("Alignment", alignment))
        case "window", [left, right, *rest] if len(rest) <= 1 and all(map(_is_int, (left, right))):
            alignment = rest[0] if rest else "top_left"
            if alignment in get_args(Alignment):
                return sliding_window(int(left), int(right), cast("Alignment", alignment))
    raise InvalidProblem(f"expected a mask ({_FORMS}), got {text!r}")


def _is_int(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,12}", text) is not None


def _offset(alignment: Alignment, seqlen_q: Any, seqlen_kv: Any) -> Any:
    return 0 if alignment == "top_left" else seqlen_kv - seqlen_q


def _check_alignment(alignment: str) -> None:
    if alignment not in get_args(Alignment):
        raise InvalidProblem(f"alignment must be top_left or bottom_right, got {alignment!r}")
