"""Masks as predicates of a pair: which query row may see which key column.

A mask is a small frozen value: a form such as `causal` or `&`, and the numbers, tables and masks
that the form is applied to. The one definition of a form, `keep`, is an expression: kernels are
compiled from it, and `kept` evaluates it. Cached calls only hash masks, and load no expressions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.form import CAUSAL, FULL, WINDOW, Apart, Condition, Form, Shape, Side, Window
from tilegen.masks.made import follows_of, is_traced, noted
from tilegen.masks.plain import plain_number
from tilegen.masks.tables import OfTables
from tilegen.masks.values import Alignment, Pair, Table, check_alignment, check_number, shown

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

TYPICAL = 64
"""The number that stands for each run-time value of which nothing is known."""


@dataclass(frozen=True)
class Mask(OfTables):
    """Predicate over (batch, head, query row, key column), immutable; join by `&`, `|` and `~`."""

    form: Form
    """The kind of the mask, such as causal, a window, or the `&` of masks."""
    args: tuple[Any, ...] = ()
    """Numbers, texts, alignments, grids, tables and masks."""

    @classmethod
    def of(cls, form: Form, *args: Any) -> Mask:
        """Apply a form to arguments, which the constructors of masks have checked."""
        return cls(form, args)

    @property
    def notation(self) -> str:
        """Canonical text without spaces; for a mask without tensors
        `parse_mask(mask.notation) == mask`."""
        if self.form.spelt is not None:
            return self.form.spelt(*self.args)
        return f"{self.form.name}({','.join([shown(argument) for argument in self.args])})"

    @property
    def window(self) -> Window | None:
        """The bounds of a mask that is causal, a window or full; None for any other."""
        return None if self.form.window is None else self.form.window(*self.args)

    @property
    def is_full(self) -> bool:
        """Whether every row sees every column."""
        return self.form is FULL

    @property
    def is_causal(self) -> bool:
        """Whether the mask is `k <= q`, from either corner."""
        return self.form is CAUSAL

    def keep(self, at: Pair, side: Side = "rows") -> Condition:
        """Return the condition, an expression or a bool, under which a pair is kept."""
        return self.form.keep(at, side, *self.args)

    def enclosing(self, at: Pair, side: Side = "rows") -> tuple[Condition, Condition]:
        """Return conditions that are easier to solve: the first holds wherever a pair is kept, the
        second nowhere else."""
        if self.form.enclosing is not None:
            return self.form.enclosing(at, side, *self.args)
        keep = self.keep(at, side)
        return keep, keep

    def kept(self, q: Any, k: Any, seqlen_q: int, seqlen_kv: int, b: Any = 0, h: Any = 0) -> Any:
        """Compute a bool tensor, True for kept pairs, that broadcasts to index tensors q and k."""
        from tilegen.masks.pairs import kept  # loads torch

        return kept(self.predicate(), self.tables, Pair(b, h, q, k, seqlen_q, seqlen_kv))

    def predicate(self, side: Side = "rows") -> Any:
        """Return the condition of AT, with look-ups in t0, t1, ... in the order of `values`."""
        from tilegen.masks.pairs import AT, named  # loads torch

        return named(self.tables, self.keep(AT, side))

    def with_parts(self, changed: Callable[[Mask], Mask]) -> Mask:
        """Return the mask that combines changed parts in the same way."""
        if not self.parts:
            return self
        args = [changed(item) if isinstance(item, Mask) else item for item in self.args]
        return Mask(self.form, tuple(args))

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that this mask combines."""
        return tuple([one for one in self.args if isinstance(one, Mask)])

    @property
    def conjuncts(self) -> tuple[Mask, ...]:
        """The masks that must all keep a pair: the parts of an `&`, or the mask itself."""
        return self.parts if self.form is AND else (self,)

    @property
    def apart(self) -> Apart:
        """The dropped pairs whose NaN must not reach the results."""
        if self._holds_documents:
            return "pairs"
        return "keys" if any(part._apart == "keys" for part in self.conjuncts) else ""

    @property
    def _apart(self) -> Apart:
        return "" if self.form.apart is None else self.form.apart(*self.args)

    @property
    def _holds_documents(self) -> bool:
        return self._apart == "pairs" or any(part._holds_documents for part in self.parts)

    def shape_of_parts(self, shape: Shape) -> Shape:
        """Return the shape within which the parts are evaluated, for the shape of a call."""
        inside = self.form.shape_of_parts
        return shape if inside is None else inside(shape, *self.args)

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        """Raise InvalidProblem if the mask is undefined at these lengths."""
        if self.form.check_lengths is not None:
            self.form.check_lengths(seqlen_q, seqlen_kv, *self.args)
            return
        for part in self.parts:
            part.check_lengths(seqlen_q, seqlen_kv)

    @property
    def checks_lengths(self) -> bool:
        """Whether some lengths may be invalid for the mask."""
        return self.form.check_lengths is not None or any(p.checks_lengths for p in self.parts)

    @property
    def is_tied(self) -> bool:
        """Whether the tables or the form of the mask fix the lengths of the sequences."""
        return (
            self.form.is_tied
            or any(not value.is_stand_in for value in self.tables)
            or any(part.is_tied for part in self.parts)
        )

    @cached_property
    def tables(self) -> tuple[Table, ...]:
        """The tensors that the predicate reads, in the order in which it names them."""
        return tuple([table for table, _ in self.places_of_tables])

    @cached_property
    def places_of_tables(self) -> tuple[tuple[Table, Mask | None], ...]:
        """The same tensors, each with the enclosing mask whose `shape_of_parts` gives the sizes of
        its axes; None for the shape of the call."""
        return tuple(tables_of(self))

    @cached_property
    def is_stand_in(self) -> bool:
        """Whether a tensor is missing: such a mask can be modelled, but not computed."""
        return any(value.is_stand_in for value in self.tables)

    @cached_property
    def stand_in(self) -> Mask:
        """The mask without its tensors: the key of records, and the input of the model."""
        return self.described()

    @cached_property
    def general(self) -> Mask:
        """The stand-in for which kernels are emitted: every run-time value is TYPICAL."""
        return self.described(typical=TYPICAL)

    def described(self, **changes: Any) -> Mask:
        """Return the mask with stand-ins in the place of its values."""
        return self.with_tables(lambda t: replace(t, tensor=None, recipe=None, part=0, **changes))

    def show(
        self, seqlen_q: int, seqlen_kv: int | None = None, *, block_m: int = 16, block_n: int = 16
    ) -> str:
        """Return a drawing of the mask at small lengths (128 at most), with each tile's class."""
        from tilegen.masks.pairs import check_sides, draw  # loads torch

        seqlen_kv = seqlen_q if seqlen_kv is None else seqlen_kv
        check_sides(seqlen_q, seqlen_kv)
        return draw(self.pairs(seqlen_q, seqlen_kv), str(self), block_m, block_n)

    def pairs(self, seqlen_q: int, seqlen_kv: int) -> NDArray[np.bool_]:
        """Compute the kept pairs of the first head, with typical tensors for missing tensors."""
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
        return whole.with_tables(lambda table: table.realized(sizes, device))

    def with_tables(self, changed: Callable[[Table], Table]) -> Mask:
        if not list(tables_of(self)):
            return self

        def new(argument: Any) -> Any:
            if isinstance(argument, Mask):
                return argument.with_tables(changed)
            return changed(argument) if isinstance(argument, Table) else argument

        return Mask(self.form, tuple([new(argument) for argument in self.args]))

    def __and__(self, other: Mask) -> Mask:
        """Return the intersection of two masks."""
        return _joined("&", intersect, self, other)

    def __or__(self, other: Mask) -> Mask:
        """Return the union of two masks."""
        return _joined("|", unite, self, other)

    def inverted(self) -> Mask:
        """Return the complement. torch.compile traces this method, but not `~`."""
        return self.args[0] if self.form is NOT else _canonical("~", NOT, (self,))

    __invert__ = inverted

    def __bool__(self) -> bool:
        raise InvalidProblem(
            f"a mask is neither true nor false: join masks with `&`, `|` and `~`, not with `and`, "
            f"`or` and `not`, and ask whether there is one by `is None`; the mask was {self}"
        )

    def __str__(self) -> str:
        return self.notation


def _pending(at: Pair, side: Side) -> Condition:
    raise Unsupported("expected a mask that torch.compile traces to be given to attention")


PENDING = Form("pending", _pending)


class Pending(Mask):
    """A mask that is built when a compiled function runs. Equal to itself alone."""

    __setattr__ = object.__setattr__  # torch.compile does not trace how frozen objects are made
    __eq__ = object.__eq__  # pyright: ignore[reportAssignmentType]
    __hash__ = object.__hash__

    def __init__(self, how: tuple[Any, ...]) -> None:
        """`how` is what `noted` keeps of other masks."""
        self.form = PENDING  # pyright: ignore[reportAttributeAccessIssue]
        self.args = ()  # pyright: ignore[reportAttributeAccessIssue]
        self._made = how

    @property
    def notation(self) -> str:
        return f"pending({self._made[0]})"


def _joining(join: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return the functions of a form that joins the conditions of masks."""

    def keep(at: Pair, side: Side, *parts: Mask) -> Condition:
        return reduce(join, (part.keep(at, side) for part in parts))

    def enclosing(at: Pair, side: Side, *parts: Mask) -> tuple[Condition, Condition]:
        most, sure = zip(*(part.enclosing(at, side) for part in parts), strict=True)
        return reduce(join, most), reduce(join, sure)

    return {"keep": keep, "enclosing": enclosing}


def _and_spelt(*parts: Mask) -> str:
    return "&".join([f"({p.notation})" if p.form is OR else p.notation for p in parts])


def _not_spelt(part: Mask) -> str:
    return f"~({part.notation})" if part.form in (AND, OR) else f"~{part.notation}"


def _not_enclosing(at: Pair, side: Side, part: Mask) -> tuple[Condition, Condition]:
    most, sure = part.enclosing(at, side)
    return _inverted(sure), _inverted(most)


AND = Form("&", **_joining(operator.and_), spelt=_and_spelt)
OR = Form("|", **_joining(operator.or_), spelt=lambda *parts: "|".join([p.notation for p in parts]))
NOT = Form(
    "~",
    lambda at, side, part: _inverted(part.keep(at, side)),
    enclosing=_not_enclosing,
    spelt=_not_spelt,
)
"""The joins: build them with `&`, `|` and `~`, which put the parts in canonical order."""


def full() -> Mask:
    """Return the mask that keeps everything."""
    return Mask.of(FULL)


def causal(alignment: Alignment = "top_left") -> Mask:
    """Return `k <= q`; with "bottom_right" the last row sees the last column at any lengths."""
    check_alignment(alignment)
    return Mask.of(CAUSAL, alignment)


def sliding_window(
    left: int | Table | None, right: int | Table | None = 0, alignment: Alignment = "top_left"
) -> Mask:
    """Return `q - left <= k <= q + right` (inclusive; -1 or None: unbounded), shifted by `seqlen_kv
    - seqlen_q` when bottom_right. Mistral's window of 4096 tokens, itself included, is
    `sliding_window(4095, 0)`."""
    check_alignment(alignment)
    left, right = _limit("left", left), _limit("right", right)
    if left is None and (right is None or right == 0):
        return Mask.of(FULL) if right is None else Mask.of(CAUSAL, alignment)
    return Mask.of(WINDOW, left, right, alignment)


def _limit(side: str, value: int | Table | None) -> int | Table | None:
    if value is None or isinstance(value, Table):
        return value
    if plain_number(value) == -1:  # FlashAttention's spelling of "unbounded"
        return None
    return check_number(f"window {side}", value, or_else=", or -1 or None for unbounded")


def intersect(*masks: Mask) -> Mask:
    """Return the `&` of masks, in canonical form."""
    # A part that follows attributes may be full now, and another time not.
    kept = (part for part in masks if not part.is_full or part.follows is not None)
    return _canonical("&", AND, tuple(kept))


def unite(*masks: Mask) -> Mask:
    """Return the `|` of masks, in canonical form."""
    return _canonical("|", OR, masks)


def _canonical(sign: str, join: Form, masks: tuple[Mask, ...]) -> Mask:
    if not masks:
        return Mask.of(FULL)
    if len(masks) == 1 and join is not NOT:
        return masks[0]
    if is_traced():
        return Pending((sign, masks))
    # Names are read from expressions, which cached calls do not load.
    mask: Mask = import_module("tilegen.masks.naming").canonical(Mask.of(join, *masks))
    follows = follows_of(_JOINS[sign], masks)
    return noted(mask, (sign, masks), follows) if mask.tables or follows else mask


_JOINS: dict[str, Callable[..., Mask]] = {"&": intersect, "|": unite, "~": Mask.inverted}


def tables_of(mask: Mask, within: Mask | None = None) -> Iterator[tuple[Table, Mask | None]]:
    """Yield each table of a mask with the enclosing mask that gives the table its shape.

    `within` encloses the whole mask; None is the call itself.
    """
    inside = within if mask.form.shape_of_parts is None else mask
    for argument in mask.args:
        if isinstance(argument, Table):
            yield argument, within
        elif isinstance(argument, Mask):
            yield from tables_of(argument, inside)


def _joined(sign: str, join: Callable[..., Mask], mask: Mask, other: Any) -> Any:
    if not isinstance(other, Mask):
        return NotImplemented
    return join(mask, other)


def _inverted(keep: Condition) -> Condition:
    from tilegen.masks.language.algebra import opposite

    return opposite(keep)
