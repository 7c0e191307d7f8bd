"""The usual masks beyond causal and windows. Each says its predicate, which is its only
definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilegen.errors import InvalidProblem
from tilegen.masks.mask import (
    Mask,
    Side,
    causal,
    check_number,
    full,
    number,
    shown,
    sliding_window,
)
from tilegen.masks.values import Values, as_tensor, is_symbolic, values
from tilegen.sympy_lock import tracing


@dataclass(frozen=True)
class PrefixLM(Mask):
    """`k <= q or k < prefix`: the prefix sees all of itself, what follows is causal."""

    prefix: int | Values

    def __post_init__(self) -> None:
        _check("prefix", self.prefix)

    @property
    def notation(self) -> str:
        return f"prefix_lm({shown(self.prefix)})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        return (k <= q) | (k < number(self.prefix, b, h, q, k))


@dataclass(frozen=True)
class GlobalTokens(Mask):
    """`q < tokens or k < tokens`: the first tokens see everything and are seen by all."""

    tokens: int | Values

    def __post_init__(self) -> None:
        _check("tokens", self.tokens)

    @property
    def notation(self) -> str:
        return f"global({shown(self.tokens)})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        tokens = number(self.tokens, b, h, q, k)
        return (q < tokens) | (k < tokens)


@dataclass(frozen=True)
class KvPrefix(Mask):
    """`k < length`: only the first columns, by batch for padded batches."""

    length: int | Values

    def __post_init__(self) -> None:
        _check("length", self.length)

    @property
    def notation(self) -> str:
        return f"kv_prefix({shown(self.length)})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        return k < number(self.length, b, h, q, k)


@dataclass(frozen=True)
class Dilated(Mask):
    """`(q - k) % step == 0`: every step-th column, counted from the row's own."""

    step: int

    def __post_init__(self) -> None:
        check_number("step", self.step, low=1)

    @property
    def notation(self) -> str:
        return f"dilated({self.step})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        return equal((q - k) % self.step, 0)


@dataclass(frozen=True)
class Intervals(Mask):
    """`first[q] <= k < end[q]`, where neither falls as q rises: documents of a packed sequence.

    The same pairs by column: `first_row[k] <= q < end_row[k]`.
    """

    first: Values
    end: Values
    first_row: Values
    end_row: Values

    @property
    def notation(self) -> str:
        return f"documents({self.first.notation})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        first, end = (one.at(b, h, q, k, (seqlen_q, seqlen_kv)) for one in (self.first, self.end))
        return (first <= k) & (k < end)

    def for_side(self, side: Side) -> Mask:
        return self if side == "rows" else _ByColumn(*self._fields)

    @property
    def _fields(self) -> tuple[Values, Values, Values, Values]:
        return self.first, self.end, self.first_row, self.end_row


class _ByColumn(Intervals):
    """Intervals, written by column."""

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        rows = (self.first_row, self.end_row)
        first, end = (one.at(b, h, q, k, (seqlen_q, seqlen_kv)) for one in rows)
        return (first <= q) & (q < end)


@dataclass(frozen=True)
class SameDocument(Mask):
    """`ids_q[q] == ids_kv[k]`, ids in any order."""

    ids_q: Values
    ids_kv: Values

    @property
    def notation(self) -> str:
        return f"same_id({self.ids_q.notation},{self.ids_kv.notation})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        lengths = (seqlen_q, seqlen_kv)
        return equal(*(one.at(b, h, q, k, lengths) for one in (self.ids_q, self.ids_kv)))


@dataclass(frozen=True)
class BlockSparse(Mask):
    """`layout[(b,) (h,) q // block, k // block]`; pairs beyond the layout are dropped."""

    layout: Values
    block: int

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        if self.layout.is_stand_in:
            return
        found = tuple(self.layout.tensor.shape[-2:])
        needed = tuple(-(-length // self.block) for length in (seqlen_q, seqlen_kv))
        if self.block == 1 and found != needed:
            raise InvalidProblem(
                f"a bool tensor as mask must have the lengths of the call, {needed}, got {found}"
            )
        if found[0] < needed[0] or found[1] < needed[1]:
            raise InvalidProblem(
                f"a layout of blocks of {self.block} must cover lengths {seqlen_q} and {seqlen_kv} "
                f"with {needed[0]} x {needed[1]} blocks, got {found[0]} x {found[1]}"
            )

    @property
    def notation(self) -> str:
        return f"block_sparse({self.layout.notation},{self.block})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        return self.layout.look_up((b, h), q // self.block, k // self.block)


@dataclass(frozen=True)
class Neighborhood(Mask):
    """Every dimension's window around a point, moved inwards at the borders, as NATTEN defines it.

    Points of a grid are numbered row by row; both sequences are the same grid.
    """

    grid: tuple[int, ...]
    window: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.grid) <= 3 or len(self.grid) != len(self.window):
            raise InvalidProblem(
                "neighborhood needs one to three dimensions and a window for each, "
                f"got grid {self.grid} and window {self.window}"
            )
        for size in self.grid:
            check_number("grid", size, low=1)
        for size in self.window:
            check_number("window", size, low=1)
            if size % 2 == 0:
                raise InvalidProblem(f"window must be odd, got {size}")

    def check_lengths(self, seqlen_q: int, seqlen_kv: int) -> None:
        points = math.prod(self.grid)
        if (seqlen_q, seqlen_kv) != (points, points):
            raise InvalidProblem(
                f"{self.notation} needs sequences of {points} points, "
                f"got {seqlen_q} and {seqlen_kv}"
            )

    @property
    def notation(self) -> str:
        grid, window = ("x".join(map(str, sizes)) for sizes in (self.grid, self.window))
        return f"neighborhood({grid},{window})"

    def keep(self, q: Any, k: Any, seqlen_q: Any, seqlen_kv: Any, b: Any = 0, h: Any = 0) -> Any:
        keep: Any = True
        stride = 1
        for axis in reversed(range(len(self.grid))):
            size, window = self.grid[axis], min(self.window[axis], self.grid[axis])
            at, seen = q // stride, k // stride
            if axis:
                at, seen = at % size, seen % size
            first = at - self.window[axis] // 2
            above = (seen >= first) | (seen >= size - window)
            below = (seen < first + self.window[axis]) | (seen < window)
            inside = above & below & (seen < size) if not axis else above & below
            keep = inside & keep
            stride *= size
        return keep


def prefix_lm(prefix: int | Values) -> Mask:
    """Return `k <= q or k < prefix`: bidirectional in the prefix, causal behind it."""
    return PrefixLM(prefix)


def global_tokens(tokens: int | Values) -> Mask:
    """Return `q < tokens or k < tokens`; join with a window by `|`, as Longformer does."""
    return GlobalTokens(tokens)


def kv_lengths(lengths: Any) -> Mask:
    """Return `k < lengths[b]`, `lengths` an integer tensor (batch,): padded batches."""
    return KvPrefix(values(lengths, "b"))


def dilated(step: int) -> Mask:
    """Return `(q - k) % step == 0`.

    Join with causal and windows by `&`; rows and columns are then regrouped by their remainder, so
    that kernels visit kept pairs only. A window of w tokens at this dilation is
    `sliding_window((w - 1) * step) & dilated(step)`.
    """
    return full() if step == 1 else Dilated(step)


def streaming(sinks: int | Values, window: int | Values) -> Mask:
    """Return `k <= q and (q - window <= k or k < sinks)`: StreamingLLM's sinks and window."""
    return causal() & (sliding_window(window, None) | KvPrefix(sinks))


def neighborhood(grid: int | tuple[int, ...], window: int | tuple[int, ...]) -> Mask:
    """Return NATTEN's mask: the `window` (odd) nearest points in each dimension of a `grid`.

    Both sequences are the grid's points, row by row: their length is its product.
    """
    sizes = [(one,) if isinstance(one, int) else tuple(one) for one in (grid, window)]
    return Neighborhood(*sizes)


def documents(ids: Any = None, *, cu_seqlens: Any = None) -> Mask:
    """Return `document(q) == document(k)` for packed sequences.

    Either `ids`, an integer tensor (seqlen,) or (batch, seqlen) with each token's document, or
    `cu_seqlens` (documents + 1,), where they start and where the last one ends. Both may be changed
    in place, and ids may be longer than the sequences; but where all documents were whole when the
    mask was made, they must stay so. Raises InvalidProblem.
    """
    from tilegen.masks import packed

    if (ids is None) == (cu_seqlens is None):
        raise InvalidProblem("documents needs either ids or cu_seqlens")
    return packed.from_ids(ids) if cu_seqlens is None else packed.packed(cu_seqlens)


def block_sparse(layout: Any, block: int) -> Mask:
    """Return `layout[(b,) (h,) q // block, k // block]`: True where a block of pairs is kept.

    `layout` is a bool tensor (rows, columns), (heads, rows, columns) or (batch, heads, rows,
    columns), sizes 1 for all heads or batches, and covers the sequences. Raises InvalidProblem.
    """
    import torch

    check_number("block", block, low=1)
    layout = as_tensor("layout", layout)
    if layout.dtype != torch.bool or layout.ndim not in (2, 3, 4) or not layout.numel():
        raise InvalidProblem(
            "layout must be a bool tensor of 2 to 4 dimensions, got "
            f"{layout.dtype} {tuple(layout.shape)}"
        )
    return BlockSparse(_table(layout, block), block)


def from_bool(keep: Any) -> Mask:
    """Return the mask that a bool tensor spells out: (q, k), (heads, q, k) or (batch, heads, q, k),
    for those lengths only.

    Its N^2 elements are read where tiles are partial. Raises InvalidProblem.
    """
    return block_sparse(keep, 1)


def random_blocks(
    seqlen_q: int, seqlen_kv: int, *, block: int, per_row: int, heads: int = 1, seed: int = 0
) -> Mask:
    """Return a mask that keeps `per_row` random blocks of columns for every block of rows."""
    import torch

    rows, columns = -(-seqlen_q // block), -(-seqlen_kv // block)
    check_number("per_row", per_row, low=1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand((heads, rows, columns), generator=generator).argsort(-1).argsort(-1)
    return block_sparse(order < per_row, block)


def bigbird(
    seqlen: int,
    *,
    block: int = 64,
    window: int = 3,
    tokens: int = 2,
    random: int = 3,
    seed: int = 0,
) -> Mask:
    """Return BigBird's mask for one length, in blocks: a window, global and random blocks each
    row."""
    side = window // 2 * block
    near = sliding_window(side, side)
    far = random_blocks(seqlen, seqlen, block=block, per_row=random, seed=seed)
    return near | global_tokens(tokens * block) | far


def predicate(fn: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """Return the mask of a Python function of (b, h, q_idx, kv_idx), as FlexAttention's `mask_mod`.

    It is traced once with symbols: operators, comparisons, `& | ~`, torch functions and captured
    tensors; `if`, `and` and `or` cannot be. Raises Unsupported, naming what it cannot trace.
    """
    from tilegen.masks.expression_mask import mask_of  # loads SymPy

    with tracing():
        return mask_of(fn)


def _table(tensor: Any, block: int) -> Values:
    """Return a bool layout without the leading dimensions that say nothing."""
    percent = int(tensor.float().mean().mul(100).round().clamp(1, 100).item())
    axes = {2: "", 3: "h", 4: "bh"}[tensor.ndim]
    for axis in axes:
        if tensor.shape[len(axes.partition(axis)[0])] == 1:
            tensor = tensor.squeeze(len(axes.partition(axis)[0]))
            axes = axes.replace(axis, "")
    return Values(
        axes=axes,
        typical=percent,
        tensor=tensor,
        kind="bool",
        pattern="layout",
        block=block,
    )


def equal(left: Any, right: Any) -> Any:
    if is_symbolic(left, right):
        import sympy

        return sympy.Eq(left, right)
    return left == right


def _check(name: str, value: object) -> None:
    if not isinstance(value, Values):
        check_number(name, value)
