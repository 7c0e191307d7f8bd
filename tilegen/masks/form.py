"""Forms of masks, such as causal and window: the parts of a mask that its arguments do not
change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tilegen.masks.values import Alignment, Pair, Table, shown

if TYPE_CHECKING:
    import torch


Side = Literal["rows", "columns"]
"""The axis whose tile stays on chip: query rows, past which KV tiles stream, or KV columns, past
which query tiles stream."""
Apart = Literal["", "keys", "pairs"]
"""The dropped pairs whose NaN must not reach the results: all pairs, keys from some key on (of
padded batches), or none (empty)."""
Condition = Any
"""An expression or a bool."""


class Window(NamedTuple):
    """Bounds of the distance from the diagonal: `-left <= k - q <= right`; None is unbounded."""

    left: int | Table | None
    right: int | Table | None
    alignment: Alignment = "top_left"


@dataclass(frozen=True, eq=False)
class Form:
    """A kind of masks: how arguments make a predicate, and the facts that hold for all arguments.

    Each function takes the arguments of the mask last.
    """

    name: str
    """The first word of the notation."""
    keep: Callable[..., Condition]
    """The condition `keep(at, side, *args)` under which a pair `at` is kept, as it is solved best
    for tiles that keep a side on chip."""
    enclosing: Callable[..., tuple[Condition, Condition]] | None = None
    """Conditions `enclosing(at, side, *args)` that are easier to solve: the first holds wherever a
    pair is kept, the second nowhere else. By default both are `keep`."""
    spelt: Callable[..., str] | None = None
    """The notation of `spelt(*args)`; by default `name(ARGUMENTS)`."""
    window: Callable[..., Window] | None = None
    """The bounds `window(*args)`, for forms that are a window."""
    check_lengths: Callable[..., None] | None = None
    """The check `check_lengths(seqlen_q, seqlen_kv, *args)`, which raises InvalidProblem."""
    shape_of_parts: Callable[..., Shape] | None = None
    """The shape `shape_of_parts(shape, *args)` of a call within the masks among the arguments."""
    apart: Callable[..., Apart] | None = None
    """The dropped pairs `apart(*args)` whose NaN must not reach the results."""
    is_solved: bool = False
    """Whether each mask of the form has a closed form: decided without expressions."""
    is_tied: bool = False
    """Whether the arguments fix the lengths of the sequences."""

    def __post_init__(self) -> None:
        _FORMS[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _form_named, (self.name,)

    def __repr__(self) -> str:
        return f"<form {self.name}>"


_FORMS: dict[str, Form] = {}


def _form_named(name: str) -> Form:
    """Return the form of a name, for copies of masks."""
    if name not in _FORMS:
        for module in ("usual", "packed", "comparison"):
            import_module(f"tilegen.masks.{module}")
    return _FORMS[name]


def _in_window(at: Pair, _: Side, left: Any, right: Any, alignment: Alignment) -> Condition:
    centre = at.centre(alignment)
    keep: Any = True
    if left is not None:
        keep = centre - at.number(left) <= at.k
    if right is not None:
        keep = keep & (at.k <= centre + at.number(right))
    return keep


def _window_spelt(left: Any, right: Any, alignment: Alignment) -> str:
    left, right = (-1 if side is None else shown(side) for side in (left, right))
    suffix = "" if alignment == "top_left" else ",bottom_right"
    return f"window({left},{right}{suffix})"


FULL = Form(
    "full",
    lambda at, side: True,
    spelt=lambda: "full",
    window=lambda: Window(None, None),
    is_solved=True,
)
CAUSAL = Form(
    "causal",
    lambda at, side, alignment: at.k <= at.centre(alignment),
    spelt=lambda alignment: "causal" if alignment == "top_left" else "causal(bottom_right)",
    window=lambda alignment: Window(None, 0, alignment),
    is_solved=True,
)
WINDOW = Form("window", _in_window, spelt=_window_spelt, window=Window, is_solved=True)


# --------------------------------------------------------------------------------------------------
# Shapes of calls


@dataclass(frozen=True)
class Shape:
    """Sizes of a call, for which a mask's values and lists are made; heads are query heads."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_kv: int

    @staticmethod
    def of(q: torch.Tensor, k: torch.Tensor) -> Shape:
        """Return the shape of a call."""
        return Shape(q.shape[0], q.shape[1], q.shape[2], k.shape[2])

    @property
    def by_axis(self) -> dict[str, int]:
        """The sizes by the letters of the axes: b, h, q and k."""
        return dict(b=self.batch, h=self.heads, q=self.seqlen_q, k=self.seqlen_kv)

    def tiled(self, block_m: int, block_n: int) -> TiledShape:
        """Return the shape cut into tiles of block_m rows and block_n columns."""
        sizes = (self.batch, self.heads, self.seqlen_q, self.seqlen_kv)
        return TiledShape(*sizes, block_m, block_n)


@dataclass(frozen=True)
class TiledShape(Shape):
    """The sizes of a call and of its tiles, for which tiles are classified and listed."""

    block_m: int
    block_n: int

    @property
    def rows(self) -> int:
        """The number of query tiles."""
        return -(-self.seqlen_q // self.block_m)

    @property
    def columns(self) -> int:
        """The number of KV tiles."""
        return -(-self.seqlen_kv // self.block_n)
