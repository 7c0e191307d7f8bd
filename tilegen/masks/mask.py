"""Masks as predicates of a pair: which query row may see which key column.

A mask is a small frozen value. Its one definition, `keep`, is an expression: kernels are compiled
from it, and `kept` evaluates it. Cached calls only hash masks, and load no expressions.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.drawing import check_sides, draw
from tilegen.masks.made import is_traced, noted
from tilegen.masks.shapes import Shape
from tilegen.masks.values import Alignment, Pair, Values, check_alignment, check_number, shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

Side = Literal["rows", "columns"]
"""The axis whose tile stays on chip: query rows, past which KV tiles stream, or KV columns, past
which query tiles stream."""

TYPICAL = 64
"""The number that stands for each run-time value of which nothing is known."""


class Mask(ABC):
    """Predicate over (batch, head, query row, key column), immutable; join by `&`, `|` and `~`."""

    name: ClassVar[str]
    """The first word of the notation."""

    @property
    def notation(self) -> str:
        """Canonical text without spaces; for a mask without tensors
        `parse_mask(mask.notation) == mask`."""
        return f"{self.name}({','.join(shown(getattr(self, one.name)) for one in fields(self))})"  # type: ignore[arg-type]

    @abstractmethod
    def keep(self, at: Pair) -> Any:
        """Return the condition, an expression or a bool, under which a pair is kept."""

    def enclosing(self, at: Pair) -> tuple[Any, Any]:
        """Return conditions that are easier to solve: one that holds wherever a pair is kept, and
        one that holds nowhere else."""
        keep = self.keep(at)
        return keep, keep

    def kept(self, q: Any, k: Any, seqlen_q: int, seqlen_kv: int, b: Any = 0, h: Any = 0) -> Any:
        """Compute which pairs of index tensors are kept: a bool tensor that broadcasts to them."""
        from tilegen.masks.pairs import kept  # loads torch

        return kept(self.predicate(), self.values, Pair(b, h, q, k, seqlen_q, seqlen_kv))

    def predicate(self, side: Side = "rows") -> Any:
        """Return the condition of AT, with look-ups in t0, t1, ... in the order of `values`."""
        from tilegen.masks.pairs import AT, named  # loads torch

        return named(self.values, self.for_side(side).keep(AT))

    def for_side(self, side: Side) -> Mask:
        """Return the same mask, as it is solved best for tiles that keep a side on chip."""
        return self.with_parts(lambda part: part.for_side(side))

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        """Return the mask that combines changed parts in the same way."""
        return self

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks this one combines."""
        return ()

    def shape_of_parts(self, shape: Shape) -> Shape:
        """Return the shape that a mask's parts are given for the shape of a call."""
        return shape

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        """Raise InvalidProblem where the mask has no meaning at these lengths."""
        for part in self.parts:
            part.check_lengths(seqlen_q, seqlen_kv)

    @cached_property
    def values(self) -> tuple[Values, ...]:
        """The tensors that the predicate reads, in the order in which it names them."""
        return tuple(value for value, _ in self.places_of_values)

    @cached_property
    def places_of_values(self) -> tuple[tuple[Values, Mask | None], ...]:
        """The same tensors, each with the mask that says which shape its axes are of, by
        `shape_of_parts`; None for the shape of a call."""
        return tuple(values_of(self))

    @cached_property
    def is_stand_in(self) -> bool:
        """Whether a tensor is missing, so that the mask can be reasoned about but not computed."""
        return any(value.is_stand_in for value in self.values)

    @cached_property
    def stand_in(self) -> Mask:
        """The mask without its tensors, by which records are found and the model chooses."""
        return self.described()

    @cached_property
    def general(self) -> Mask:
        """The stand-in that kernels are specialised on: its numbers are typical of no tensor."""
        return self.described(typical=TYPICAL)

    def described(self, **changes: Any) -> Mask:
        """Return the mask with stand-ins in the place of its values."""
        return with_values(self, lambda v: replace(v, tensor=None, recipe=None, part=0, **changes))

    def show(
        self, seqlen_q: int, seqlen_kv: int | None = None, *, block_m: int = 16, block_n: int = 16
    ) -> str:
        """Return a drawing of the mask at small lengths (128 at most), with each tile's class."""
        seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv
        check_sides(seqlen_q, seqlen_kv)
        return draw(self.pairs(seqlen_q, seqlen_kv), str(self), block_m, block_n)

    def pairs(self, seqlen_q: int, seqlen_kv: int) -> NDArray[np.bool_]:
        """Return which pairs of the first head are kept; typical tensors stand for missing ones."""
        import torch

        real = self.realized(Shape(1, 1, seqlen_q, seqlen_kv))
        q, k = (torch.arange(n, device="cpu") for n in (seqlen_q, seqlen_kv))
        return real.kept(q[:, None], k, seqlen_q, seqlen_kv).expand(len(q), len(k)).numpy()

    def realized(self, shape: Shape, device: torch.device | str = "cpu") -> Mask:
        """Return the mask with typical tensors for stand-ins, as kernels are tuned and checked."""
        if not self.is_stand_in:
            return self
        inside, sizes = self.shape_of_parts(shape), shape.by_axis
        whole = self.with_parts(lambda part: part.realized(inside, device))
        return with_values(whole, lambda one: one.realized(sizes, device))

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that keeps what both keep."""
        return _joined("&", intersect, self, other)

    def __or__(self, other: Mask) -> Mask:
        """Return the mask that keeps what either keeps."""
        return _joined("|", unite, self, other)

    def inverted(self) -> Mask:
        """Return the mask that keeps what this one drops: `~`, which torch.compile cannot trace."""
        return self.part if isinstance(self, Not) else Not(self)

    __invert__ = inverted

    def __bool__(self) -> bool:
        raise InvalidProblem(
            f"a mask is neither true nor false: join masks with `&`, `|` and `~`, not with `and`, "
            f"`or` and `not`, and ask whether there is one by `is None`; the mask was {self}"
        )

    def __str__(self) -> str:
        return self.notation


class Pending(Mask):
    """A mask that torch.compile makes when its function runs, from tensors not seen before."""

    name = "pending"

    def __init__(self, how: tuple[Any, ...]) -> None:
        """`how` is what `noted` keeps of other masks."""
        self._made = how

    @property
    def notation(self) -> str:
        return f"pending({self._made[0]})"

    def keep(self, at: Pair) -> Any:
        raise Unsupported("expected a mask that torch.compile traces to be given to attention")


@dataclass(frozen=True)
class Full(Mask):
    """Every row sees every column: `True`."""

    @property
    def notation(self) -> str:
        return "full"

    def keep(self, at: Pair) -> Any:
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """`k <= q` (top_left), or `k <= q + seqlen_kv - seqlen_q` (bottom_right)."""

    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        check_alignment(self.alignment)

    @property
    def notation(self) -> str:
        return "causal" if self.alignment == "top_left" else "causal(bottom_right)"

    def keep(self, at: Pair) -> Any:
        return at.k <= at.centre(self.alignment)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """`q - left <= k <= q + right`, shifted by `seqlen_kv - seqlen_q` when bottom_right; None is
    unbounded."""

    left: int | Values | None
    right: int | Values | None
    alignment: Alignment = "top_left"

    def __post_init__(self) -> None:
        check_alignment(self.alignment)
        for side in ("left", "right"):
            value = getattr(self, side)
            if isinstance(value, int) and value == -1:  # FlashAttention's spelling of "unbounded"
                object.__setattr__(self, side, None)
            elif value is not None and not isinstance(value, Values):
                check_number(f"window {side}", value, or_else=", or -1 or None for unbounded")

    @property
    def notation(self) -> str:
        left, right = (-1 if side is None else shown(side) for side in (self.left, self.right))
        suffix = "" if self.alignment == "top_left" else ",bottom_right"
        return f"window({left},{right}{suffix})"

    def keep(self, at: Pair) -> Any:
        centre = at.centre(self.alignment)
        keep: Any = True
        if self.left is not None:
            keep = centre - at.number(self.left) <= at.k
        if self.right is not None:
            keep = keep & (at.k <= centre + at.number(self.right))
        return keep


@dataclass(frozen=True)
class _Joined(Mask):
    """Several masks as one: `join` joins their conditions, as the class joins masks."""

    of: tuple[Mask, ...]
    join: ClassVar[Callable[[Any, Any], Any]]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.of

    def keep(self, at: Pair) -> Any:
        return reduce(self.join, (part.keep(at) for part in self.of))

    def enclosing(self, at: Pair) -> tuple[Any, Any]:
        most, sure = zip(*(part.enclosing(at) for part in self.of), strict=True)
        return reduce(self.join, most), reduce(self.join, sure)

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        return replace(self, of=tuple(map(changed, self.of)))  # type: ignore[type-var]


@dataclass(frozen=True)
class And(_Joined):
    """Keeps what all parts keep. Build with `&`, which puts the parts in canonical order."""

    join = staticmethod(operator.and_)

    @property
    def notation(self) -> str:
        return "&".join(
            f"({part.notation})" if isinstance(part, Or) else part.notation for part in self.of
        )


@dataclass(frozen=True)
class Or(_Joined):
    """Keeps what any part keeps. Build with `|`, which puts the parts in canonical order."""

    join = staticmethod(operator.or_)

    @property
    def notation(self) -> str:
        return "|".join(part.notation for part in self.of)


@dataclass(frozen=True)
class Not(Mask):
    """Keeps what its part drops. Build with `~`."""

    part: Mask

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.part,)

    @property
    def notation(self) -> str:
        inner = self.part.notation
        return f"~({inner})" if isinstance(self.part, And | Or) else f"~{inner}"

    def keep(self, at: Pair) -> Any:
        return _inverted(self.part.keep(at))

    def enclosing(self, at: Pair) -> tuple[Any, Any]:
        most, sure = self.part.enclosing(at)
        return _inverted(sure), _inverted(most)

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        return Not(changed(self.part))


def full() -> Mask:
    """Return the mask that keeps everything."""
    return Full()


def causal(alignment: Alignment = "top_left") -> Mask:
    """Return `k <= q`; with "bottom_right" the last row sees the last column at any lengths."""
    return Causal(alignment)


def sliding_window(
    left: int | Values | None, right: int | Values | None = 0, alignment: Alignment = "top_left"
) -> Mask:
    """Return `q - left <= k <= q + right` (inclusive; -1 or None: unbounded). Mistral's window of
    4096 tokens, itself included, is `sliding_window(4095, 0)`."""
    window = SlidingWindow(left, right, alignment)
    return Full() if window.left is None and window.right is None else window


def intersect(*masks: Mask) -> Mask:
    """Return the `&` of masks: flattened, without `full` and repetitions, in a fixed order."""
    parts = [part for part in _flat(masks, And) if not isinstance(part, Full)]
    if not parts:
        return Full()
    return parts[0] if len(parts) == 1 else noted(And(tuple(parts)), ("&", masks))


def unite(*masks: Mask) -> Mask:
    """Return the `|` of masks: flattened, without repetitions, in a fixed order."""
    parts = _flat(masks, Or)
    if any(isinstance(part, Full) for part in parts):
        return Full()
    return parts[0] if len(parts) == 1 else noted(Or(tuple(parts)), ("|", masks))


def _flat(masks: tuple[Mask, ...], kind: type[And | Or]) -> list[Mask]:
    """Return the parts of nested `kind`s, each once, by their notation."""
    parts: list[Mask] = []
    for mask in masks:
        for part in mask.parts if isinstance(mask, kind) else (mask,):
            if part.values or part not in parts:  # equal stand-ins may be of different tensors
                parts.append(part)
    return sorted(parts, key=lambda part: part.notation)


def values_of(mask: Mask, within: Mask | None = None) -> Iterator[tuple[Values, Mask | None]]:
    """Yield what `places_of_values` has of a mask that is a part of `within`."""
    inside = within if type(mask).shape_of_parts is Mask.shape_of_parts else mask
    for field in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, field.name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Values):
                yield item, within
            elif isinstance(item, Mask):
                is_part = any(item is part for part in mask.parts)
                yield from values_of(item, inside if is_part else within)


def with_values(item: Any, changed: Callable[[Values], Values]) -> Any:
    """Return a mask, or a part of one, with its values changed."""
    if isinstance(item, Values):
        return changed(item)
    if isinstance(item, tuple):
        return tuple(with_values(one, changed) for one in item)
    if not isinstance(item, Mask) or not list(values_of(item)):
        return item
    kept = {f.name: with_values(getattr(item, f.name), changed) for f in fields(item)}  # type: ignore[arg-type]
    return replace(item, **kept)  # type: ignore[type-var]


def _joined(sign: str, join: Callable[..., Mask], one: Mask, other: Any) -> Any:
    if not isinstance(other, Mask):
        return NotImplemented
    return Pending((sign, (one, other))) if is_traced() else join(one, other)


def _inverted(keep: Any) -> Any:
    from tilegen.masks.language.algebra import opposite

    return opposite(keep)
