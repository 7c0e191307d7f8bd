"""The model at two levels: SMs and L2, exactly; L2 and DRAM, by waves and the order of launch.

The fast memory of the second level is L2. Its contents depend on the programs that run together.
Programs start in the order of their ids, n_w at a time (a wave). They stream the rows of their
key-value head in near lock-step, so a wave reads each of its heads once. A head that the next wave
reads too comes from L2 unless it was evicted in between. The formulas are those of an LRU cache
under lock-step, averaged over the positions of waves relative to heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any, Literal

import sympy as sp

from tilegen.errors import Unsupported
from tilegen.kernels.launch_order import heads_together, heavy_end
from tilegen.kernels.loops import Loop, OverRows, Sliced, Whole
from tilegen.kernels.panels import panels_at_once
from tilegen.masks.tiles.tile_ranges import FINE, is_solved, tile_ranges
from tilegen.model.bounds import bytes_of_inputs, lower_bound_bytes
from tilegen.model.footprint import footprint
from tilegen.model.mask_size import size_of
from tilegen.model.on_chip import residents
from tilegen.model.symbols import C, F, Gcd, H_kv, T_h, h_t, n_w
from tilegen.model.traffic import Traffic, traffic
from tilegen.model.visits import visits
from tilegen.task import KernelTask, Tiled

Order = Literal["head_major", "interleaved", "heavy_first"]
"""Orders in which programs start. Consecutive programs work on the same key-value head, on
different heads of all, or on different heads of those that start together
(kernels/launch_order.py)."""


def touches(order: Order) -> sp.Expr:
    """Return the number of (wave, head) pairs: reads of a head's rows if L2 keeps nothing.

    Head-major: one per head, and one more for each wave that ends inside a head. Interleaved: every
    wave reads n_w heads, or all; heavy first: n_w of the h_t heads that start together, or all.
    """
    return _touches(_SYMBOLIC, order, _started(order), T_h, n_w)


def live_heads(order: Order) -> sp.Expr:
    """Return h_w, the largest number of heads that programs of one wave read."""
    return _live_heads(_SYMBOLIC, order, _started(order), T_h, n_w)


def sweeps(order: Order) -> sp.Expr:
    """Return rho, how often DRAM delivers the rows of a head: between 1 and touches / H_kv.

    Between two reads of a tile, a wave has read the rest of its heads, and the next wave the
    beginning of its own. Head-major waves read q + 1 or q + 2 heads, q = floor(n_w / T_h), and
    share one head with the next wave. That head stays in L2 if these heads are at most C. In units
    of gcd(T_h, n_w) a head has S programs, and a wave ends R behind a head's end. Of S - 1 waves
    that end inside a head, S - 2R + 1 read few heads on both sides, 2R - S - 1 read many, and the
    others some of each. Interleaved: a head returns after H_kv heads, or after whole waves if
    these are shorter. Under a mask a wave reads a part F of a head's rows, so that L2 holds C / F
    such parts. Heavy first is interleaved over h_t heads at a time.
    """
    return _sweeps(_SYMBOLIC, order, _started(order), T_h, n_w, C, F)


def _started(order: Order) -> sp.Symbol:
    return h_t if order == "heavy_first" else H_kv


@dataclass(frozen=True, kw_only=True)
class _Arithmetic:
    """The operations of the formulas, for symbols or for numbers.

    Numbers are for the first problem of `propose`: SymPy takes longer to compile the formulas.
    """

    ceil: Callable[[Any], Any]
    floor: Callable[[Any], Any]
    most: Callable[..., Any]
    least: Callable[..., Any]
    divisor: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]


_SYMBOLIC = _Arithmetic(
    ceil=sp.ceiling,
    floor=sp.floor,
    most=sp.Max,
    least=sp.Min,
    divisor=lambda a, b: Gcd(a, b),
    where=lambda condition, a, b: sp.Piecewise((a, condition), (b, True)),
)
_NUMERIC = _Arithmetic(
    ceil=math.ceil,
    floor=math.floor,
    most=max,
    least=min,
    divisor=math.gcd,
    where=lambda condition, a, b: a if condition else b,
)


def _touches(on: _Arithmetic, order: Order, heads: Any, per_head: Any, wave: Any) -> Any:
    programs = heads * per_head
    if order == "head_major":
        common = per_head * wave / on.divisor(per_head, wave)
        return on.ceil(programs / wave) + heads - on.ceil(programs / common)
    full = on.floor(programs / wave)
    return full * on.least(wave, heads) + on.least(programs - full * wave, heads)


def _live_heads(on: _Arithmetic, order: Order, heads: Any, per_head: Any, wave: Any) -> Any:
    if order != "head_major":
        return on.least(wave, heads)
    return on.least(heads, 1 + on.ceil((wave - on.divisor(per_head, wave)) / per_head))


def _sweeps(
    on: _Arithmetic, order: Order, heads: Any, per_head: Any, wave: Any, capacity: Any, part: Any
) -> Any:
    room = capacity / part

    def too_small(live: Any) -> Any:
        return on.where(live > room, 1, 0)

    if order != "head_major":
        whole = on.floor(heads / wave)
        late = (heads - whole * wave) / wave
        waves = (1 - late) * too_small(whole * wave) + late * too_small(heads)
        missed = on.where(wave >= heads, too_small(heads), waves)
    else:
        common = on.divisor(per_head, wave)
        whole = on.floor(wave / per_head)
        S, R = per_head / common, (wave - whole * per_head) / common
        few, many = on.most(0, S - 2 * R + 1), on.most(0, 2 * R - S - 1)
        some = S - 1 - few - many
        less, more = whole + 1, on.least(whole + 2, heads)
        between = on.where(more <= room, 0, on.where(less > room, 1, more - room))
        missed = few * too_small(less) + some * between + many * too_small(more)
        missed = missed / on.most(1, S - 1)
    again = part * _touches(on, order, heads, per_head, wave) / heads - 1
    return 1 + on.most(0, again) * missed


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Bytes that one launch moves at both levels, and the quantities that determine them."""

    l2_bytes: int
    """Bytes between SMs and L2, both directions. Exact."""
    dram_bytes: int
    """Bytes between L2 and DRAM, both directions."""
    dram_bound_bytes: int
    """Bytes that any algorithm must move, with L2 and all SMs as fast memory."""
    in_flight: int
    """Programs of a wave."""
    started: int
    """Key-value heads whose programs start together; all heads if programs run head after head."""
    live_heads: int
    """Largest number of key-value heads that a wave reads."""
    heads_in_l2: float
    """Key-value heads whose streamed rows fit into L2."""
    part_of_head: float
    """Part of a head's streamed rows that a wave reads: 1, or less under a mask."""
    sweeps: float
    """Number of times that DRAM delivers streamed rows."""


def levels(tiled: Tiled, *, order: Order | None = None) -> Levels:
    """Compute the bytes that one launch moves at both levels.

    `order` replaces the order of the emitted kernel, to compute the cost of another. Raises
    Unsupported for kernels that take head dims in slices.
    """
    task, device = tiled.task, tiled.gpu
    if task.spec.sliced:
        raise Unsupported(
            f"{task.kernel} takes head dims in slices, expected a kernel that holds them whole"
        )
    moved = traffic(tiled)
    in_flight = device.num_sms * residents(footprint(tiled), device, tiled.config)
    streams = _streams(tiled, in_flight, order)
    return Levels(
        l2_bytes=moved.read_bytes + moved.write_bytes,
        dram_bytes=dram_bytes(tiled, in_flight=in_flight, order=order),
        dram_bound_bytes=dram_bound_bytes(task),
        in_flight=in_flight,
        started=streams.started,
        live_heads=_live_heads(
            _NUMERIC, streams.order, streams.started, streams.programs, in_flight
        ),
        heads_in_l2=streams.capacity,
        part_of_head=streams.part,
        sweeps=streams.sweeps,
    )


def order_of(task: KernelTask) -> Order:
    """Return the order in which the programs of an emitted kernel start."""
    return "heavy_first" if heavy_end(task.problem.mask, task.spec) else "head_major"


def dram_bytes(tiled: Tiled, *, in_flight: int, order: Order | None = None) -> int:
    """Compute the bytes between L2 and DRAM.

    Stationary rows move once. Streamed rows move `sweeps` times, but never more often than from L2
    to the SMs. That is less often if a mask leaves each program a part of the rows.
    """
    return _between(tiled.spec.loop, tiled, traffic(tiled), in_flight, order)


@singledispatch
def _between(loop: Loop, tiled: Tiled, moved: Traffic, in_flight: int, order: Order | None) -> int:
    """Compute the bytes between L2 and DRAM for a kind of loop."""
    raise NotImplementedError(loop)


@_between.register
def _(loop: OverRows, tiled: Tiled, moved: Traffic, *_: Any) -> int:
    # A kernel that joins splits reads results that the kernel before it has just written to L2.
    held = tiled.gpu.l2_bytes if loop.joins else 0
    return max(0, moved.read_bytes - held) + moved.write_bytes


@_between.register
def _(loop: Whole, tiled: Tiled, moved: Traffic, in_flight: int, order: Order | None) -> int:
    task = tiled.task
    if loop.splits:
        # Inputs move once: programs that stream a split are adjacent, and L2 holds the split.
        return moved.write_bytes + min(moved.read_bytes, bytes_of_inputs(task))
    streams = _streams(tiled, in_flight, order)
    rows = streams.heads * task.problem.group_size * visits(tiled).rows
    streamed = int(task.spec.streamed_bytes(task.problem) * rows)
    delivered = int(streams.sweeps * streams.once * streams.heads)
    return moved.read_bytes + moved.write_bytes - streamed + min(streamed, delivered)


@_between.register
def _(loop: Sliced, tiled: Tiled, moved: Traffic, *_: Any) -> int:
    """Compute the bytes of a kernel that takes head dims in slices.

    Inputs and outputs move once. Streamed inputs move again with every panel unless L2 holds them
    besides the panel. A panel that L2 does not hold is written and read back once. A kernel of
    panels that does not add to memory moves at most its bytes between SMs and L2.
    """
    task = tiled.task
    key = "slices in DRAM", task.kernel, task.gpu
    most = task.memo.once(key, lambda: _most_of_slices(task, loop))
    if not loop.panel or loop.stationary == "columns":
        return most
    return min(most, moved.read_bytes + moved.write_bytes)


def _most_of_slices(task: KernelTask, loop: Sliced) -> int:
    problem, l2_bytes, mask = task.problem, task.gpu.l2_bytes, size_of(task)
    size, width = problem.element_bytes, sum(problem.head_dims[dim] for dim in task.spec.products)
    rows, columns = task.heads_q * mask.rows * width, task.heads_kv * mask.columns * width
    if not loop.panel:
        return (rows + columns) * size + 4 * task.heads_q * problem.seqlen_q
    of_panel = task.panel_rows
    held = of_panel * problem.seqlen_kv * size * panels_at_once(task.direction)
    moved = sum(term.tensor.is_panel for term in task.spec.traffic)
    panels = 0 if held <= l2_bytes else moved * task.heads_q * mask.entries
    sweeps = 1
    if loop.stationary == "rows" and held + problem.seqlen_kv * width * size > l2_bytes:
        sweeps = max(1, -(-problem.group_size * problem.seqlen_q // of_panel))
    return (panels + rows + sweeps * columns) * size


def dram_bound_bytes(task: KernelTask) -> int:
    """Compute the lower bound in bytes with L2 and all memory on SMs as one fast memory."""
    device = task.gpu
    one_memory = replace(
        device,
        num_sms=1,
        smem_per_block=device.l2_bytes + device.num_sms * device.on_chip_bytes,
        registers_per_sm=0,
        tensor_memory_per_sm=0,
    )
    return lower_bound_bytes(replace(task, device=one_memory))


@dataclass(frozen=True, kw_only=True)
class _Streams:
    """Rows that the programs of a launch stream."""

    heads: int
    started: int
    """Key-value heads whose programs start together; all heads if programs run head after head."""
    order: Order
    programs: int
    """Programs of each key-value head."""
    once: int
    """Bytes of the rows that the programs of a head stream."""
    capacity: float
    part: float
    sweeps: float


def _streams(tiled: Tiled, in_flight: int, order: Order | None) -> _Streams:
    task, problem, counts, size = tiled.task, tiled.problem, visits(tiled), size_of(tiled.task)
    heads = task.heads_kv
    order = order or order_of(task)
    started = heads_together(problem, task.spec) if order == "heavy_first" else heads
    side, loop, of_group = task.spec.stationary, task.spec.loop, task.heads_of_group
    programs = of_group * counts.programs
    _, rows = loop.sides(size.rows, size.columns)
    once = task.spec.streamed_bytes(problem) * rows * (problem.group_size // of_group)
    capacity, part = tiled.gpu.l2_bytes / once if once else math.inf, 1.0
    together = in_flight
    if order != "head_major":
        of_head = of_group if order == "heavy_first" else 1
        together = max(1, in_flight // (started * of_head))
    if together < counts.programs and once:
        key = "part of a head", side, counts.programs, together
        seen = task.memo.once(key, lambda: _rows_seen(task, counts.programs, together))
        part = seen / rows
    return _Streams(
        heads=heads,
        started=started,
        order=order,
        programs=programs,
        once=once,
        capacity=capacity,
        part=part,
        sweeps=_sweeps(_NUMERIC, order, started, programs, in_flight, capacity, part),
    )


def _rows_seen(task: KernelTask, programs: int, together: int) -> float:
    """Compute the mean number of rows that `together` adjacent programs of a head stream, treating
    them as one tile."""
    problem, mask, side = task.problem, task.problem.mask, task.spec.stationary
    block = together * -(-task.lengths[0] // programs)
    fine = 1
    if not is_solved(mask, side):  # counted from lists, which are made of smaller tiles
        fine = FINE[0]
        block = fine * max(1, round(block / fine))
    block_m, block_n = task.spec.loop.sides(block, fine)
    ranges = tile_ranges(
        mask,
        side,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        block_m=block_m,
        block_n=block_n,
    )
    return ranges.visited_rows / ranges.visited.size
