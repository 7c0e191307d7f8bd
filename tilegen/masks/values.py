"""Numbers and alignments in masks, and numbers that a kernel reads at run time: one scalar, or one
per batch, head, row or column."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from tilegen.environment import current
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.elements import kind_of
from tilegen.masks.made import is_traced
from tilegen.masks.plain import plain_number

if TYPE_CHECKING:
    import numpy as np
    import torch

Kind = Literal["bool", "int", "int64", "float", "float64"]
Pattern = Literal["constant", "firsts", "ends", "ids", "layout", "tree", "table", "rising"]
AXES = ("", "b", "h", "bh", "q", "k", "bq", "bk", "bhq", "bhk")
LIMIT = 2**30
"""Values of masks stay below LIMIT in size, so that sums with positions fit into 32 bits."""
UNKNOWN = 1024
"""The typical integer of a tensor on a GPU: looking at its elements would wait for the GPU."""
UNJUDGED = -100
"""The density of the tables of a mask until it is judged."""
Alignment = Literal["top_left", "bottom_right"]
"""The diagonal where seqlen_q != seqlen_kv: it starts at (0, 0), as that of SDPA's `is_causal`, or
ends at the last query and the last key."""
MAX_WINDOW = 2**28
"""Largest number in a mask: q + window + seqlen stays within 32-bit index arithmetic."""
Lengths = tuple[int, int]
"""seqlen_q and seqlen_kv of a call."""
Made = dict[Any, tuple[Any, ...]]
"""Tables that one call has made already, by the recipe and its sources."""


class Pair(NamedTuple):
    """A row and a column that a predicate is of: expressions, or tensors."""

    b: Any
    h: Any
    q: Any
    k: Any
    seqlen_q: Any
    seqlen_kv: Any

    def centre(self, alignment: Alignment) -> Any:
        """Return the column on the diagonal of the row."""
        return self.q if alignment == "top_left" else self.q + self.seqlen_kv - self.seqlen_q

    def number(self, value: int | Table) -> Any:
        """Return a number of a mask, looked up where it is of the pair."""
        return value.at(self) if isinstance(value, Table) else value


@dataclass(frozen=True, eq=False)
class Recipe:
    """Tables that are made of a user's tensors anew at each call, on the device of the call: what
    is changed in place is seen, and nothing waits for a device."""

    make: Callable[..., tuple[Any, ...]]
    """Tables from the tensors on a device, the lengths of a call, and `given`."""
    sources: tuple[Any, ...]
    """The user's tensors."""
    given: tuple[Hashable, ...] = ()
    check: Callable[..., None] | None = None
    """The check of the tensors, lengths and `given`: raises InvalidProblem for values that a mask
    cannot have."""

    def tables(self, device: Any, lengths: Lengths, made: Made | None = None) -> tuple[Any, ...]:
        """Return the tables; those in `made` are not made again. Raises InvalidProblem."""
        made = {} if made is None else made
        key = (self.make, self.given, *map(id, self.sources))
        if key not in made:
            if self.check is not None and all(map(is_checked, self.sources)):
                self.check(*self.sources, lengths, *self.given)
            sources = (one.detach().to(device) for one in self.sources)
            made[key] = self.make(*sources, lengths, *self.given)
        return made[key]


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor that a mask or a score reads, or a stand-in that knows only what is typical of such
    a tensor.

    Stand-ins are equal when all they know is equal; tables with a tensor equal only themselves.
    """

    axes: str | None = None
    """The letters of b, h, q and k that index the tensor, in this order, and `.` for a dimension
    of any size; None where an expression says how, which reads 0 beyond the end."""
    typical: int = UNKNOWN
    """The number that stands for an element where only the kind of mask is known: in records, and
    in the model's choice."""
    tensor: Any = None
    """The user's tensor, on any device, with any strides and integers of any size; kernels read the
    table that `on` makes of it at each call."""
    kind: Kind = "int"
    pattern: Pattern = "constant"
    """The elements of a stand-in: `typical` everywhere; the first index of each token's document,
    or one past its last, or its id, for documents of `typical` tokens; a layout of blocks of which
    `typical` percent are kept; a tree of at
    least `typical` tokens; or a table of which nothing is known, or only that it rises, in a
    mask that keeps `typical` percent of pairs."""
    block: int = 1
    """Rows and columns that an element of a layout stands for."""
    recipe: Recipe | None = None
    """The recipe that computes the table; None if the table is the user's tensor. `tensor` may then
    be what it gave once."""
    part: int = 0
    """The number of the table among those of the recipe."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Table) or not self.is_stand_in or not other.is_stand_in:
            return self is other
        return self.facts == other.facts

    def __hash__(self) -> int:
        return hash(self.facts) if self.is_stand_in else id(self)

    @property
    def facts(self) -> tuple[Any, ...]:
        """All that a stand-in knows."""
        return (self.axes, self.typical, self.kind, self.pattern, self.block)

    @property
    def rising(self) -> bool:
        """Whether elements never fall along the last axis."""
        return self.pattern in ("firsts", "ends", "rising")

    @property
    def is_unknown(self) -> bool:
        """Whether the elements of a stand-in are unknown."""
        return self.is_stand_in and self.pattern in ("table", "rising")

    @property
    def is_stand_in(self) -> bool:
        """Whether the tensor is missing."""
        return self.tensor is None and self.recipe is None

    @property
    def sources(self) -> tuple[Any, ...]:
        """The user's tensors; tables with the same `origin` are made of them alike."""
        return self.recipe.sources if self.recipe else (self.tensor,)

    @property
    def origin(self) -> Hashable:
        """The way from the sources to the table: with the values of the sources it determines the
        table."""
        return (self.recipe.make, self.recipe.given, self.part) if self.recipe else self.kind

    @property
    def identity(self) -> Hashable:
        """The sources and the way from them, which tables with the same elements share."""
        return (self.origin, *map(id, self.sources))

    @property
    def elements(self) -> str:
        """PyTorch's name for the elements that the kernels of a mask read."""
        return {"int": "int32", "float": "float32"}.get(self.kind, self.kind)

    @property
    def notation(self) -> str:
        """`@h:128`: one value per head, typically 128."""
        return f"@{self.axes or ''}:{int(self.typical)}"

    @property
    def slot(self) -> int:
        """The number that names the table in look-ups of `Mask.keep`: that of no other values."""
        return -id(self)

    @property
    def elements_kind(self) -> str:
        """The kind of the elements in look-ups."""
        return "natural" if self.rising else self.kind

    def but(self, **changed: Any) -> Table:
        """Return the table with other fields, in a fifth of the time that `replace` takes."""
        table = object.__new__(Table)
        vars(table).update(vars(self), **changed)
        return table

    def anew(self) -> Table:
        """Return the table over a tensor that the recipe makes now, differentiably."""
        if self.recipe is None:
            return self
        tables = self.recipe.make(*self.recipe.sources, (0, 0))
        return self.but(tensor=tables[self.part], recipe=None)

    def beside(self, part: int, pattern: Pattern, axes: str) -> Table:
        """Return another table of the same recipe, or a stand-in for such a table."""
        return replace(self, axes=axes, pattern=pattern, part=part if self.recipe else 0)

    def on(self, device: Any, lengths: Lengths | None = None, made: Made | None = None) -> Any:
        """Compute the table on a device, as kernels read it: contiguous, of dtype `elements`.

        Values are checked on a CPU, and on a GPU with TILEGEN_CHECK=1. Recipes need the `lengths`
        of the call. Raises InvalidProblem.
        """
        import torch

        if self.recipe is not None:
            if lengths is None:
                raise InvalidProblem(f"expected the lengths of the call for {self.notation}")
            return self.recipe.tables(device, lengths, made)[self.part]
        if self.tensor is None:
            raise InvalidProblem(
                f"expected a mask with its tensors, got {self.notation}, which only describes one"
            )
        if self.kind == "int":
            check_range(self.tensor, None if self.axes is None else LIMIT)
        return self.tensor.detach().to(device, getattr(torch, self.elements)).contiguous()

    def at(self, pair: Pair, *indices: Any) -> Any:
        """Return the element for a pair: a number, or of bools the condition that it holds.
        `indices` follow those that `axes` names; 0 is read beyond the end."""
        from tilegen.masks.language.algebra import cast, load

        of_axes = (getattr(pair, axis) for axis in self.axes or "")
        element = load(self.slot, self.elements_kind, *of_axes, *indices)
        return cast(element, "bool") if self.kind == "bool" else element

    def sample(self, shape: dict[str, int]) -> np.ndarray[Any, Any]:
        """Return the elements on the host, or typical ones for a `shape` in b, h, q and k."""
        import numpy as np

        if not self.is_stand_in:
            return np.asarray(self.on("cpu", (shape["q"], shape["k"])).numpy())
        axes = self.axes or ""
        if self.is_unknown:
            raise Unsupported(
                f"expected a mask with its tensors, got {self.notation}, which can be anything"
            )
        if self.pattern == "layout":
            blocks = (-(-shape["q"] // self.block), -(-shape["k"] // self.block))
            size = (*(shape[axis] for axis in axes), *blocks)
            return np.random.default_rng(0).random(size) * 100 < self.typical
        size = tuple(shape[axis] for axis in axes)
        if self.pattern == "tree":
            tree = np.eye(max(self.typical, shape["q"]), dtype=bool)
            for i in range(1, len(tree)):  # two children each
                tree[i] |= tree[(i - 1) // 2]
            return np.broadcast_to(tree, (*size, *tree.shape))
        if self.pattern == "constant":
            return np.full(size, self.typical)
        length, width = shape[axes[-1]], max(1, self.typical)
        number = np.arange(length) // width
        first = number if self.pattern == "ids" else number * width
        return np.broadcast_to(first + width if self.pattern == "ends" else first, size)

    def realized(self, shape: dict[str, int], device: torch.device | str) -> Table:
        """Return a stand-in with a typical tensor, and other values unchanged."""
        import torch

        if not self.is_stand_in:
            return self
        tensor = torch.from_numpy(self.sample(shape).copy())
        tensor = tensor.to(torch.int32) if self.kind == "int" else tensor
        return replace(self, tensor=tensor.to(device))


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """Return a tensor, or one that is made of numbers in lists. Raises InvalidProblem."""
    import torch

    try:
        # Where PyTorch has a default device, as_tensor takes tensors there.
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except Unsupported:  # of traced values: the message says what to write
        raise
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(
            f"{name} must be a tensor, or lists of numbers of one length, got "
            f"{type(value).__name__}"
        ) from None


def values(tensor: Any, axes: str) -> Table:
    """Return run-time values of a mask: an integer tensor with one dimension for each of `axes`.

    `axes` is "" for one scalar, or of b, h, q and k in this order: `values(lengths, "b")`.
    Raises InvalidProblem for other shapes and dtypes.
    """
    import torch

    tensor = as_tensor("values", tensor)
    if axes not in AXES:
        raise InvalidProblem(f"axes must be one of {', '.join(map(repr, AXES))}; got {axes!r}")
    if tensor.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        raise InvalidProblem(f"values of a mask must be integers, got {tensor.dtype}")
    if tensor.ndim != len(axes):
        raise InvalidProblem(
            f"values must have one dimension for each of {axes!r}, got shape {tuple(tensor.shape)}"
        )
    if not tensor.numel():
        raise InvalidProblem("values must not be empty")
    check_range(tensor, LIMIT)
    return Table(axes=axes, typical=typical_of(tensor), tensor=tensor)


def shown(argument: Any) -> str:
    """Return an argument of a mask as the notation of the mask spells it."""
    if isinstance(argument, tuple):
        return "x".join([shown(size) for size in argument])
    if isinstance(argument, int):
        # torch.compile may have made a variable of an integer; `int` makes a constant of it.
        return f"{int(argument)}"
    return argument.notation


def check_number(name: str, value: object, *, low: int = 0, or_else: str = "") -> int:
    """Return an int in low..MAX_WINDOW. Raises InvalidProblem for other values."""
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_WINDOW:
        raise InvalidProblem(
            f"{name} must be an int in {low}..{MAX_WINDOW}{or_else}; got {value!r}"
        )
    return value


def check_alignment(alignment: str) -> None:
    """Raise InvalidProblem unless `alignment` is one."""
    if alignment not in get_args(Alignment):
        raise InvalidProblem(f"alignment must be top_left or bottom_right, got {alignment!r}")


def typical_of(tensor: torch.Tensor) -> int:
    """Return the number that stands for the elements of a tensor: of integers a power of two near
    their mean, of a layout of blocks the percent that are kept."""
    import torch

    if tensor.dtype == torch.bool:
        if is_traced() or not tensor.numel():
            return 50
        return int(tensor.float().mean().mul(100).round().clamp(1, 100).item())
    if tensor.device.type != "cpu" or is_traced() or not tensor.numel():
        return UNKNOWN
    return power_of_two_near(int(tensor.float().mean().round().clamp(0, 2**28).item()))


def table_of(tensor: Any, axes: str | None = None) -> Table:
    """Return a tensor that an expression looks up. Its density in a mask is not judged yet."""
    name = str(tensor.dtype).removeprefix("torch.")
    kind = cast("Kind", kind_of(name))
    return Table(axes=axes, typical=UNJUDGED, tensor=tensor, kind=kind, pattern="table")


def is_checked(tensor: Any) -> bool:
    """Whether values may be looked at: on a CPU they may, elsewhere that waits for the device, and
    torch.compile has none."""
    if is_traced():
        return False
    return has_values(tensor)


def is_captured(device: Any) -> bool:
    """Whether a CUDA graph is captured on a device: it replays only what is made meanwhile, and
    nothing may wait."""
    import torch

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def has_values(tensor: Any) -> bool:
    """Whether values may be looked at where nobody traces."""
    return tensor.is_cpu or (current().check and not tensor.is_meta)


def check_range(tensor: Any, limit: int | None) -> None:
    """Raise InvalidProblem for integers that do not fit into 32 bits, or are not below `limit` in
    size; nothing is looked at on a GPU, but for TILEGEN_CHECK=1."""
    wide = str(tensor.dtype) in ("torch.int64", "torch.uint64", "torch.uint32")
    may_exceed = wide or (limit is not None and str(tensor.dtype) == "torch.int32")
    if not may_exceed or not tensor.numel() or not is_checked(tensor):
        return
    low, high = int(tensor.min()), int(tensor.max())
    if limit is not None and not -limit < low <= high < limit:
        raise InvalidProblem("values of a mask must be below 2**30 in size")
    if not -(2**31) <= low <= high < 2**31:
        raise InvalidProblem("captured integers must fit into 32 bits")


def power_of_two_near(value: int) -> int:
    """Return the power of two that stands for a value in records, so that few kinds exist."""
    return 1 << (value - 1).bit_length() if value > 1 else value
