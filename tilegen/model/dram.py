"""The model at two levels: SMs and L2, exactly; L2 and DRAM, by waves and the order of launch.

The fast memory of the second level is L2. Its contents depend on the programs that run together.
Programs start in the order of their ids, n_w at a time (a wave). They stream the rows of their
key-value head in near lock-step, so a wave reads each of its heads once. A head that the next wave
reads too comes from L2 unless it was evicted in between. The formulas are those of an LRU cache
under lock-step, averaged over the positions of waves relative to heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tilegen.errors import Unsupported
from tilegen.kernels.launch_order import heads_together, heavy_end
from tilegen.kernels.loops import Loop, OverRows, Sliced, Whole
from tilegen.kernels.panels import panels_at_once
from tilegen.masks.mask import Mask, Side
from tilegen.masks.remembered import by_mask
from tilegen.masks.tiles.tile_ranges import FINE, is_solved, tile_ranges
from tilegen.model.bounds import bytes_of_inputs, lower_bound_bytes
from tilegen.model.columns import Number, floats, in_columns
from tilegen.model.footprint import footprint
from tilegen.model.formulas import computed, expression
from tilegen.model.mask_size import size_of
from tilegen.model.on_chip import residents
from tilegen.model.traffic import Traffic, traffic
from tilegen.model.visits import visits
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    import sympy as sp

Order = Literal["head_major", "interleaved", "heavy_first"]
"""Orders in which programs start. Consecutive programs work on the same key-value head, on
different heads of all, or on different heads of those that start together
(kernels/launch_order.py)."""


HEAD_MAJOR = {
    "common": "Gcd(T_h, n_w)",
    "touches": "ceiling(H*T_h/n_w) + H - ceiling(H*common/n_w)",
    "live_heads": "Min(H, 1 + ceiling((n_w - common)/T_h))",
    "room": "C/F",
    "whole": "floor(n_w/T_h)",
    "S": "T_h/common",
    "R": "(n_w - whole*T_h)/common",
    "few": "Max(0, S - 2*R + 1)",
    "many": "Max(0, 2*R - S - 1)",
    "some": "S - 1 - few - many",
    "less": "whole + 1",
    "more": "Min(whole + 2, H)",
    "between": "where(more <= room, 0, where(less > room, 1, more - room))",
    "all_ends": "few*where(less > room, 1, 0) + some*between + many*where(more > room, 1, 0)",
    "missed": "all_ends/Max(1, S - 1)",
    "sweeps": "1 + Max(0, F*touches/H - 1)*missed",
}
INTERLEAVED = {
    "full": "floor(H*T_h/n_w)",
    "touches": "full*Min(n_w, H) + Min(H*T_h - full*n_w, H)",
    "live_heads": "Min(n_w, H)",
    "room": "C/F",
    "whole": "floor(H/n_w)",
    "late": "(H - whole*n_w)/n_w",
    "all_heads": "where(H > room, 1, 0)",
    "waves": "(1 - late)*where(whole*n_w > room, 1, 0) + late*all_heads",
    "missed": "where(n_w >= H, all_heads, waves)",
    "sweeps": "1 + Max(0, F*touches/H - 1)*missed",
}
FORMULAS: dict[Order, dict[str, str]] = {
    "head_major": HEAD_MAJOR,
    "interleaved": INTERLEAVED,
    "heavy_first": INTERLEAVED,
}
"""By the order of programs: `touches`, `live_heads` and `sweeps`, with H heads that start
together."""


def touches(order: Order) -> sp.Expr:
    """Return the number of (wave, head) pairs: reads of a head's rows if L2 keeps nothing.

    Head-major: one per head, and one more for each wave that ends inside a head. Interleaved: every
    wave reads n_w heads, or all; heavy first: n_w of the h_t heads that start together, or all.
    """
    return _read("touches", order)


def live_heads(order: Order) -> sp.Expr:
    """Return h_w, the largest number of heads that programs of one wave read."""
    return _read("live_heads", order)


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
    return _read("sweeps", order)


def _read(name: str, order: Order) -> sp.Expr:
    formulas = FORMULAS[order]
    names = list(formulas)
    before = {one: formulas[one] for one in names[: names.index(name)]}
    return expression(formulas[name], before, H=expression(STARTED[order]))


STARTED: dict[Order, str] = {"head_major": "H_kv", "interleaved": "H_kv", "heavy_first": "h_t"}
"""The symbol of the heads that start together, H in the formulas."""


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
        dram_bytes=int(dram_bytes(tiled, in_flight=in_flight, order=order)),
        dram_bound_bytes=dram_bound_bytes(task),
        in_flight=in_flight,
        started=streams.started,
        live_heads=int(streams.live_heads),
        heads_in_l2=streams.capacity,
        part_of_head=streams.part,
        sweeps=streams.sweeps,
    )


def order_of(task: KernelTask) -> Order:
    """Return the order in which the programs of an emitted kernel start."""
    return "heavy_first" if heavy_end(task.problem.mask, task.spec) else "head_major"


@in_columns
def dram_bytes(tiled: Tiled, *, in_flight: Number, order: Order | None = None) -> Number:
    """Compute the bytes between L2 and DRAM.

    Stationary rows move once. Streamed rows move `sweeps` times, but never more often than from L2
    to the SMs. That is less often if a mask leaves each program a part of the rows.
    """
    moved = traffic(tiled)
    in_floats = Traffic(read_bytes=floats(moved.read_bytes), write_bytes=floats(moved.write_bytes))
    return _between(tiled.spec.loop, tiled, in_floats, in_flight, order)


@singledispatch
def _between(
    loop: Loop, tiled: Tiled, moved: Traffic, in_flight: Number, order: Order | None
) -> Number:
    """Compute the bytes between L2 and DRAM for a kind of loop."""
    raise NotImplementedError(loop)


@_between.register
def _(loop: OverRows, tiled: Tiled, moved: Traffic, *_: Any) -> Number:
    # A kernel that joins splits reads results that the kernel before it has just written to L2.
    held = tiled.gpu.l2_bytes if loop.joins else 0
    return np.maximum(0, moved.read_bytes - held) + moved.write_bytes


@_between.register
def _(loop: Whole, tiled: Tiled, moved: Traffic, in_flight: Number, order: Order | None) -> Number:
    task = tiled.task
    if loop.splits:
        # Inputs move once: programs that stream a split are adjacent, and L2 holds the split.
        return moved.write_bytes + np.minimum(moved.read_bytes, bytes_of_inputs(task))
    streams = _streams(tiled, in_flight, order)
    rows = streams.heads * task.problem.group_size * visits(tiled).rows
    streamed = floats(task.spec.streamed_bytes(task.problem) * rows // 1)
    delivered = np.floor(streams.sweeps * streams.once * streams.heads)
    return moved.read_bytes + moved.write_bytes - streamed + np.minimum(streamed, delivered)


@_between.register
def _(loop: Sliced, tiled: Tiled, moved: Traffic, *_: Any) -> Number:
    """Compute the bytes of a kernel that takes head dims in slices.

    Inputs and outputs move once. Streamed inputs move again with every panel unless L2 holds them
    besides the panel. A panel that L2 does not hold is written and read back once. A kernel of
    panels that does not add to memory moves at most its bytes between SMs and L2.
    """
    task = tiled.task
    most = _most_of_slices(task, loop) + 0 * moved.read_bytes
    if not loop.panel or loop.stationary == "columns":
        return most
    return np.minimum(most, moved.read_bytes + moved.write_bytes)


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
    programs: Number
    """Programs of each key-value head."""
    once: int
    """Bytes of the rows that the programs of a head stream."""
    capacity: float
    part: Number
    sweeps: Number
    live_heads: Number


@in_columns
def _streams(tiled: Tiled, in_flight: Number, order: Order | None) -> _Streams:
    task, problem, counts, size = tiled.task, tiled.problem, visits(tiled), size_of(tiled.task)
    heads = task.heads_kv
    order = order or order_of(task)
    started = heads_together(problem, task.spec) if order == "heavy_first" else heads
    side, loop, of_group = task.spec.stationary, task.spec.loop, task.heads_of_group
    programs = floats(of_group * counts.programs).astype(np.int64)
    _, rows = loop.sides(size.rows, size.columns)
    once = task.spec.streamed_bytes(problem) * rows * (problem.group_size // of_group)
    capacity = tiled.gpu.l2_bytes / once if once else math.inf
    together = np.broadcast_to(in_flight, programs.shape)
    if order != "head_major":
        of_head = of_group if order == "heavy_first" else 1
        together = np.maximum(1, together // (started * of_head))
    each = list(zip((programs // of_group).tolist(), together.tolist(), strict=True))
    lengths = problem.seqlen_q, problem.seqlen_kv
    seen = {
        one: _rows_seen(problem.mask, side, *lengths, *one) / rows
        if one[1] < one[0] and once
        else 1.0
        for one in set(each)
    }
    part = np.array([seen[one] for one in each])
    values = {"H": started, "T_h": programs, "n_w": in_flight, "C": capacity, "F": part}
    of_waves = computed(FORMULAS[order], values, ceiling=np.ceil, floor=np.floor)
    return _Streams(
        heads=heads,
        started=started,
        order=order,
        programs=programs,
        once=once,
        capacity=capacity,
        part=values["F"],
        sweeps=of_waves["sweeps"],
        live_heads=of_waves["live_heads"],
    )


@by_mask(4096)
def _rows_seen(
    mask: Mask, side: Side, seqlen_q: int, seqlen_kv: int, programs: int, together: int
) -> float:
    """Compute the mean number of rows that `together` adjacent programs of a head stream, treating
    them as one tile."""
    stationary = seqlen_q if side == "rows" else seqlen_kv
    block = together * -(-stationary // programs)
    fine = 1
    if not is_solved(mask, side):  # counted from lists, which are made of smaller tiles
        fine = FINE[0]
        block = fine * max(1, round(block / fine))
    block_m, block_n = (block, fine) if side == "rows" else (fine, block)
    ranges = tile_ranges(
        mask, side, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, block_m=block_m, block_n=block_n
    )
    return ranges.visited_rows / ranges.visited.size
