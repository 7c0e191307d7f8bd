"""Triton source of a mask, as the templates put it into a kernel: the tiles to visit, the kept
pairs of a tile, and the tensors that both load.

Three forms: `single`, one interval of tiles; `several`, a few merged when the kernel runs; `lists`,
tile numbers read from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tilegen.kernels.arguments import LISTS, Line
from tilegen.masks.language.algebra import conjuncts, less, minimum
from tilegen.masks.language.bounds import limits
from tilegen.masks.language.expr import FIRST, LAST, SEQLEN_KV, TRUE, B, Expr, H, K, Q
from tilegen.masks.language.integers import linear
from tilegen.masks.language.loads import Loads, reading
from tilegen.masks.language.triton_source import NAMES, Writer
from tilegen.masks.mask import Mask, Side
from tilegen.masks.tiles.intervals import Arithmetic, Edges, Range, merge
from tilegen.masks.tiles.spans import Interval, StreamSets, edges, visit
from tilegen.masks.usual import UNLISTED
from tilegen.masks.values import LIMIT


@dataclass(frozen=True)
class TileLoop:
    """A loop over tiles that are not one range: `count` steps, of which `steps` find the tile."""

    setup: tuple[str, ...]
    count: str
    steps: tuple[str, ...]
    holds: tuple[str, ...]
    """Conditions, under any of which `tile_n` is one of the tiles."""
    ahead: str = ""
    """Line before the loop that looks up the first tile, where each step looks up the tile of the
    step `after` it."""


@dataclass(frozen=True)
class Ranges:
    """Source of the streamed tiles that a stationary tile visits."""

    form: Literal["single", "several", "lists"]
    uses_last: bool = False
    per_head: bool = False
    """Whether query heads of one group visit different tiles."""
    is_wide: bool = False
    """Whether bounds of the form `single` have 64 bits; tiles are counted in 32 in every form, as
    tensor descriptors ask for."""
    statements: tuple[str, ...] = ()
    """Statements that come before the loops, or the bounds, and that these use."""
    live_lo: str = ""
    live_hi: str = ""
    nonempty: str | None = None
    full_lo: str | None = None
    full_hi: str = ""
    """Bounds of the form `single`; None for one that the mask does not have."""
    full: TileLoop | None = None
    partial: TileLoop | None = None
    """Loops of the other forms."""

    def name_of(self, bound: str) -> str:
        """Return a bound's name in the kernel: itself where it is a number or has a name."""
        return _name_of(_BOUNDS[bound], getattr(self, bound))

    def definition(self, bound: str) -> str:
        """Return the statement that names a bound; empty if the bound needs no name."""
        source = getattr(self, bound)
        name = self.name_of(bound) if source else source
        return f"{name} = {source}" if name != source else ""


_BOUNDS = {"live_lo": "live_lo", "live_hi": "live_hi", "full_lo": "kept_lo", "full_hi": "kept_hi"}


def _name_of(name: str, source: str) -> str:
    return source if source.isidentifier() or source.isdigit() else name


@dataclass(frozen=True)
class Keep:
    """Source of the pairs of a tile that are kept: those for which all `atoms` hold, none where
    everything is kept. `reads` are the statements that load what the atoms need."""

    reads: tuple[str, ...]
    atoms: tuple[str, ...]
    per_head: bool
    """Whether the pairs depend on the batch or the head."""
    indices: tuple[str, ...]
    """Names of a pair's indices that occur."""


def keep_source(mask: Mask, side: Side, *, softmax: bool = False) -> Keep:
    """Return the conditions on `q_idx` and `k_idx` of a pair; where rows stay, the end of the keys
    is one. `softmax` says that a row's maximum is taken of what they leave."""
    conditions: Sequence[Expr] = conjuncts(mask.predicate(side))
    if side == "rows":
        conditions = _ended(conditions, apart=softmax)
    return _written(mask, conditions)


def columns_source(mask: Mask) -> Keep:
    """Return the conditions on `k_idx` that are the same for all rows and heads."""
    every = conjuncts(mask.predicate("columns"))
    conditions = [one for one in every if K in one.free and not one.free & {H, Q}]
    return _written(mask, conditions)


def _written(mask: Mask, conditions: Sequence[Expr]) -> Keep:
    writer = Writer(NAMES, _loads(mask), stem="m")
    atoms = writer.sources({str(i): one for i, one in enumerate(sorted(conditions, key=str))})
    free = frozenset[Expr]().union(*(one.free for one in conditions))
    return Keep(
        reads=tuple(writer.statements),
        atoms=tuple(sorted(atoms.values())),
        per_head=bool(free & {B, H}),
        indices=tuple(NAMES[index] for index in (Q, K) if index in free),
    )


def _ended(conditions: Sequence[Expr], *, apart: bool) -> list[Expr]:
    """Return conditions to which the end of the keys is added, as one comparison with all that
    bound the column from above by a number of the row.

    If that left a single comparison and the end is to be `apart`, it is: ptxas then selects scores
    by one predicate after the other, for which it otherwise makes room among registers (Triton
    3.7.1, sm_90 and sm_100; templates/README.md).
    """
    ends: list[Expr] = [SEQLEN_KV]
    rest: list[Expr] = []
    for condition in conditions:
        end = _end_of(condition)
        # What is looked up may be the largest integer.
        if end is None or (condition.op == "le" and end.loads()):
            rest.append(condition)
        else:
            ends.append(end)
    if apart and not rest:
        return [*conditions, less(K, SEQLEN_KV)]
    return [*rest, less(K, minimum(*ends))]


def _end_of(condition: Expr) -> Expr | None:
    """Return the first column after those that a condition keeps, a number of the row; None if
    there is none."""
    if condition.op not in ("le", "lt") or not condition.args[0].is_int:
        return None
    low, high = condition.args
    room = high - low + int(condition.op == "le")  # at least 1
    end = room + K
    return end if linear(room)[0].get(K) == -1 and not end.has(K) else None


def _loads(mask: Mask) -> Loads:
    """Return the loads of a mask. Sizes along the axes of values are checked before a launch; rows
    and columns beyond the end of the sequence are beyond that of values too."""
    sized = [(slot, value.axes) for slot, value in enumerate(mask.tables) if value.axes]
    inside = {"b": ("batch",), "h": ("head",)}
    inside |= {axis: (f"{axis}_first", f"{axis}_last") for axis in "qk"}
    return Loads(
        [value.elements for value in mask.tables],
        letter="t",
        inside=[(slot, name) for slot, axes in sized for axis in axes for name in inside[axis]],
        limits={slot: (-LIMIT, LIMIT) for slot, _ in sized},
        narrowed=[slot for slot, axes in sized if axes == "b"],  # lengths of padded batches
    )


def ranges_source(mask: Mask, side: Side, *, in_part: bool = False) -> Ranges:
    """Return the tiles to visit, in the simplest form that can say them; `in_part` leaves out
    those outside of [part_lo, part_hi)."""
    axis = "q" if side == "rows" else "k"
    names = {FIRST: f"{axis}_first", LAST: f"{axis}_last"} | NAMES
    sets = visit(mask, side).sets
    if sets is None:
        return _lists(mask, side, in_part)
    writer = Writer(names, _loads(mask), stem="r")
    if sets.full is not None:
        return _single(sets.live[0], sets.full, writer)
    return _several(sets, writer, side, in_part)


def unlisted(mask: Mask) -> Mask:
    """Return the mask that kernels of keys in pages compute in the place of one: itself where tiles
    of rows come in closed form."""
    return mask if visit(mask.general, "rows").sets else Mask.of(UNLISTED, mask)


def extras(mask: Mask, side: Side) -> tuple[Line, ...]:
    """Return the tensors and sizes that the kernels of a side read for a mask."""
    ranges = visit(mask, side).sets
    expressions = [mask.predicate(side), *(ranges.bounds if ranges else ())]
    elements = [value.elements for value in mask.tables]
    arguments = reading(expressions, "t", elements, "what the mask reads, with its sizes")
    return arguments if ranges else (*arguments, LISTS)


def _single(live: Interval, full: Interval, writer: Writer) -> Ranges:
    bounds = [live.lo, live.hi, full.lo, full.hi, *live.guards]
    emitted = [bound for bound in bounds if bound is not None]
    uses_last = any(expression.has(LAST) for expression in emitted)
    per_head = any(expression.has(H) for expression in emitted)
    live_lo, live_hi = (writer.inline(end) for end in live.ends)
    conditions = [f"{writer.inline(guard)} >= 0" for guard in live.guards]
    if less(*live.ends) is not TRUE:
        first, end = _name_of("live_lo", live_lo), _name_of("live_hi", live_hi)
        conditions.insert(0, f"{first} < {end}")
    if len(conditions) > 1:
        conditions = [f"({one})" for one in conditions]
    return Ranges(
        form="single",
        uses_last=uses_last,
        per_head=per_head,
        is_wide=any(map(writer.is_wide, emitted)),
        live_lo=live_lo,
        live_hi=live_hi,
        nonempty=" & ".join(conditions) or None,
        full_lo=None if full.lo is None else writer.inline(full.lo),
        full_hi="" if full.hi is None else writer.inline(full.hi),
        statements=tuple(writer.statements),
    )


def _several(sets: StreamSets, writer: Writer, side: Side, in_part: bool) -> Ranges:
    do = _AsSource("BLOCK_N" if side == "rows" else "BLOCK_M")

    def numbers(name: str, interval: Interval, end: Any = None) -> Edges:
        sources: list[Any] = []
        for what, edge in zip(("first", "end", "any"), edges(interval, end), strict=True):
            if edge is not None:
                is_natural = what != "any" and limits(edge)[0] >= 0
                edge = do.once(f"{name}_{what}", _Source(writer.inline(edge), is_natural))
            sources.append(edge)
        return Edges(*sources)

    live = [numbers(f"live{i}", one, sets.length) for i, one in enumerate(sets.live)]
    dropped = [numbers(f"dropped{i}", one) for i, one in enumerate(sets.dropped)]
    partial, full = merge(do, live, dropped, _Source(str(sets.length), is_natural=True))
    is_wide = any(map(writer.is_wide, sets.bounds))
    return Ranges(
        form="several",
        uses_last=any(expression.has(LAST) for expression in sets.bounds),
        per_head=any(expression.has(H) for expression in sets.bounds),
        statements=(*writer.statements, *do.statements),
        full=_loop("full", full, side, in_part, is_wide),
        partial=_loop("partial", partial, side, in_part, is_wide),
    )


def _loop(
    name: str, ranges: tuple[Range, ...], side: Side, in_part: bool, is_wide: bool
) -> TileLoop:
    """Return the loop over ranges of tiles, one after the other; `is_wide` says that their ends
    have 64 bits."""
    step, tile = ("i", "tile_n") if side == "rows" else ("step", "tile_m")
    setup: list[str] = []
    if in_part:
        clipped: list[Range] = []
        for i, (lo, hi) in enumerate(ranges):
            setup += [f"{name}{i}_{end} = tl.minimum(tl.maximum({edge}, part_lo), part_hi)"
                      for end, edge in (("lo", lo), ("hi", hi))]  # fmt: skip
            clipped.append((f"{name}{i}_lo", f"{name}{i}_hi"))
        ranges = tuple(clipped)
    reached, steps = "", list[str]()
    for i, (lo, hi) in enumerate(ranges):
        size = hi if lo == 0 else f"{hi} - {lo}"
        start = step if lo == 0 else f"{lo} + {step}"
        if i == 1:
            first = steps.pop().removeprefix(f"{tile} = ")
            steps.append(f"{tile} = tl.where({step} < {reached}, {first}, {start} - {reached})")
        elif reached:
            steps.append(f"{tile} = tl.where({step} < {reached}, {tile}, {start} - {reached})")
        else:
            steps.append(f"{tile} = {start}")
        last = f"num_{name}" if i == len(ranges) - 1 else f"{name}_until{i}"
        if i == 0 and len(ranges) > 1 and size.isidentifier():
            reached = size
            continue
        setup.append(f"{last} = {reached} + {size}" if reached else f"{last} = {size}")
        reached = last
    if is_wide and steps:
        steps.append(f"{tile} = tl.cast({tile}, tl.int32)")
    holds = tuple(f"(tile_n >= {lo}) & (tile_n < {hi})" for lo, hi in ranges)
    if not ranges:  # a loop of no steps is compiled like any other
        return TileLoop((), "0", (f"{tile} = {step}",), ("tile_n < 0",))
    return TileLoop(tuple(setup), reached, tuple(steps), holds)


def _lists(mask: Mask, side: Side, in_part: bool) -> Ranges:
    stays, step, tile = (
        ("q_first // BLOCK_M", "i", "tile_n") if side == "rows" else ("tile_n", "step", "tile_m")
    )
    depends = mask.predicate(side).free
    which = "".join(
        f"{index} * tiles_{stride} + "
        for symbol, index, stride in ((B, "batch", "sb"), (H, "head", "sh"))
        if symbol in depends
    )
    bounds = (
        f"entry = ({which}{stays}) * 2" if which or side == "rows" else f"entry = {stays} * 2",
        "full_at = tl.load(starts_ptr + entry)",
        "partial_at = tl.load(starts_ptr + entry + 1)",
        "end_at = tl.load(starts_ptr + entry + 2)",
    )

    def loop(name: str, first: str, last: str) -> TileLoop:
        setup = [f"num_{name} = ({last} - {first}).to(tl.int32)"]
        if in_part:
            setup = [
                f"{name}_from = _count_below(tiles_ptr, {first}, {last}, part_lo)",
                f"num_{name} = _count_below(tiles_ptr, {first}, {last}, part_hi) - {name}_from",
            ]
        start = f"tiles_ptr + {first} + {name}_from" if in_part else f"tiles_ptr + {first}"
        steps, ahead = (f"{tile} = tl.load({start} + {step})",), ""
        if side == "columns":
            steps = (
                f"{tile} = listed",
                f"listed = tl.load({start} + after, mask=after < num_{name}, other=0)",
            )
            ahead = f"listed = tl.load({start}, mask=0 < num_{name}, other=0)\n"
        holds = (f"_is_listed(tiles_ptr, {first}, {last}, tile_n)",)
        return TileLoop(tuple(setup), f"num_{name}", steps, holds, ahead)

    return Ranges(
        form="lists",
        per_head=H in depends,
        statements=bounds,
        full=loop("full", "full_at", "partial_at"),
        partial=loop("partial", "partial_at", "end_at"),
    )


class _Source(str):
    """Source of a number, which may surely not be negative."""

    is_natural: bool

    def __new__(cls, source: str, is_natural: bool) -> _Source:
        made = super().__new__(cls, source)
        made.is_natural = is_natural
        return made


def _is_natural(value: Any) -> bool:
    return value == 0 or (isinstance(value, _Source) and value.is_natural)


class _AsSource(Arithmetic):
    """The arithmetic of `merge` as Triton source."""

    def __init__(self, block: str) -> None:
        super().__init__(block)
        self.statements: list[str] = []

    def maximum(self, left: Any, right: Any) -> Any:
        if left == right:
            return left
        if left == 0:
            left, right = right, left
        if right == 0 and _is_natural(left):
            return left
        return _Source(f"tl.maximum({left}, {right})", _is_natural(left) or _is_natural(right))

    def minimum(self, left: Any, right: Any) -> Any:
        if left == right:
            return left
        return _Source(f"tl.minimum({left}, {right})", _is_natural(left) and _is_natural(right))

    def where(self, condition: Any, left: Any, right: Any) -> Any:
        is_natural = _is_natural(left) and _is_natural(right)
        return _Source(f"tl.where({condition}, {left}, {right})", is_natural)

    def tile_of(self, index: Any) -> Any:
        return _Source(f"{index} // {self.block}", _is_natural(index))

    def tiles_up_to(self, index: Any) -> Any:
        return _Source(f"tl.cdiv({index}, {self.block})", _is_natural(index))

    def named(self, name: str, value: Any) -> Any:
        if value != name:
            self.statements.append(f"{name} = {value}")
        return _Source(name, _is_natural(value))

    def once(self, name: str, value: Any) -> Any:
        is_short = value == 0 or value.isidentifier() or value.isdigit()
        return value if is_short else self.named(name, value)

    def in_order(self, first: Range, second: Range) -> tuple[Range, Range]:
        names = ", ".join((*first, *second))
        self.statements.append(f"{names} = _in_order({names})")
        natural = all(map(_is_natural, (*first, *second)))
        low, high = ([_Source(str(end), natural) for end in one] for one in (first, second))
        return (low[0], low[1]), (high[0], high[1])
