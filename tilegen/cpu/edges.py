"""Find where the products of a tile on a mask's edge can stop.

Elements of a product that a mask drops are not read, and weights that it drops are 0. So a block of
rows needs the columns, or the steps of its sums, between the first and the last that the mask keeps
in any of its rows. Comparisons of positions give these ranges in closed form, a row at a time; of
any other part of a mask nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Literal

from tilegen.cpu.constants import float_of
from tilegen.cpu.ir import Code, Lane, typed
from tilegen.cpu.mlir import Block, Op, Value
from tilegen.cpu.tiles import Elementwise, Node, TilePlace, View

_PURE = ("tt.addptr", "tt.broadcast", "tt.expand_dims", "tt.make_range", "tt.splat")
_POINTWISE = ("arith.", "math.")
_EXPONENTIALS = ("math.exp", "math.exp2")
_AFFINE = ("arith.mulf", "arith.subf", "arith.addf")
_ORDERS = {"slt": (True, True), "sle": (True, False), "sgt": (False, True), "sge": (False, False)}
"""Comparisons: whether they are of less with more, and whether they are strict."""


Kept = Literal["columns", "steps"]
"""The part of a product that counts: columns that are read, or steps of sums that are not 0."""


@dataclass(frozen=True)
class Ranges:
    """For each row of a product the range of indices that count [i32]."""

    kept: Kept
    first: str
    """Address of the first indices."""
    end: str
    """Address of one past the last; it may be less than the first, where no index counts."""


# ---- which mask


def _mask_of_result(result: Value) -> Value | None:
    """Return a mask outside of which a product is not read, or is only multiplied by 0."""
    known: dict[Value, list[Value]] = {}

    def masks(value: Value) -> list[Value]:
        if value not in known:
            by_user = [_masks_by(user, value, masks) for user in value.users]
            first, *others = by_user or [[]]
            known[value] = [mask for mask in first if all(mask in other for other in others)]
        return known[value]

    return next(iter(masks(result)), None)


def _masks_by(user: Op, value: Value, masks: Callable[[Value], list[Value]]) -> list[Value]:
    if user.block is not value.block or not user.name.startswith(_POINTWISE):
        return []
    further = masks(user.result)
    if user.operands.count(value) > 1:
        return further
    if user.name == "arith.select" and user.operands[1] is value and _tile(user.operands[0]):
        return [user.operands[0], *further]
    if user.name == "arith.mulf":
        (factor,) = (other for other in user.operands if other is not value)
        mask, swapped = _mask_of_weights(factor)
        return [mask, *further] if mask and not swapped else further
    return further


def _mask_of_weights(weights: Value) -> tuple[Value | None, bool]:
    """Return a mask outside of which weights are 0, and whether the weights are its transpose.

    An exponential of scores that are -inf outside of a mask is 0 there: kernels multiply scores by
    positive factors alone, and subtract finite numbers or +inf.
    """
    seen: set[Value] = set()

    def zero(value: Value) -> Value | None:
        op = value.op
        if op is None or value in seen or len(value.type.shape) != 2:
            return None
        seen.add(value)
        if op.name in ("arith.truncf", "arith.extf"):
            return zero(op.operands[0])
        if op.name == "arith.mulf":
            return zero(op.operands[0]) or zero(op.operands[1])
        if op.name in _EXPONENTIALS:
            return _infinite(op.operands[0])
        if op.name == "arith.select" and _constant(op.operands[2]) == 0:
            return zero(op.operands[1]) or _tile(op.operands[0])
        return None

    if weights.op is not None and weights.op.name == "tt.trans":
        return zero(weights.op.operands[0]), True
    return zero(weights), False


def _infinite(value: Value) -> Value | None:
    """Return a mask outside of which a value is -inf."""
    while value.op is not None and value.op.name in _AFFINE:
        value = value.op.operands[0]
    op = value.op
    if op is not None and op.name == "arith.select" and _constant(op.operands[2]) == -float("inf"):
        return _tile(op.operands[0])
    return None


def _tile(mask: Value) -> Value | None:
    return mask if len(mask.type.shape) == 2 else None


def _constant(value: Value) -> float | None:
    op = value.op
    if op is None or op.name != "arith.constant" or not op.text.strip().startswith("dense<"):
        return None
    return float_of(op.text.strip()[6:-1], value.type.elem)


def _making(
    mask: Value, at: Block, known: Container[Value], may_load: Callable[[Op], bool]
) -> list[Op] | None:
    """Return the operations of a block that make a mask, in order, without those whose results are
    `known`; None if one of them is neither arithmetic nor a load that may come earlier."""
    ops: list[Op] = []

    def visit(value: Value) -> bool:
        op = value.op
        if value in known or op in ops:
            return True
        if op is None or op.block is not at:
            return False
        if not (op.name in _PURE or op.name.startswith(_POINTWISE) or may_load(op)):
            return False
        if not all(visit(part) for part in op.operands):
            return False
        ops.append(op)
        return True

    return ops if visit(mask) else None


# ---- its ranges


def ranges_of(
    product: Op,
    env: dict[Value, Any],
    code: Code,
    write: Callable[[Op], None],
    may_load: Callable[[Op], bool],
) -> Ranges | None:
    """Write the ranges of a product, where a mask limits it, and a mask that is not in `env` yet;
    None if no mask limits it, or the mask cannot be written yet."""
    mask, swapped = _mask_of_weights(product.operands[0])
    kept: Kept = "steps"
    if mask is None:
        mask, kept = _mask_of_result(product.result), "columns"
    ops = _making(mask, product.block, env, may_load) if mask else None
    if mask is None or ops is None:
        return None
    for op in ops:
        write(op)
    return _written(code, kept, env[mask], 0 if swapped else 1)


def _written(code: Code, kept: Kept, mask: Node, axis: int) -> Ranges:
    rows = mask.shape[1 - axis]
    first, end = code.scratch(4 * rows), code.scratch(4 * rows)
    lanes = min(code.target.lanes, rows)
    lane: Lane = (1 - axis, lanes) if lanes > 1 else None
    with code.own_memo(), code.loop(0, rows, lanes) as row:
        idx: TilePlace = (0, row) if axis == 0 else (row, 0)
        ends = _range(code, mask, idx, lane, axis)
        for place, value in zip((first, end), ends, strict=True):
            at = code.gep("i32", place, row)
            code.do(f"store {typed('i32', lane)} {value}, ptr {at}, align 4")
    return Ranges(kept, first, end)


def _range(code: Code, node: Node, idx: TilePlace, lane: Lane, axis: int) -> tuple[str, str]:
    """Return the first index along an axis at which a mask may be true, and the end, as i32."""
    size = node.shape[axis]
    zero, all_ = (code.number("i32", end, lane) for end in (0, size))
    if node.step(axis) == 0:
        test = node.at(code, idx, lane)
        first, end = (
            code.select(test, yes, no, "i32", lane) for yes, no in ((zero, all_), (all_, zero))
        )
        return first, end
    if isinstance(node, View) and axis in node.axes:
        inner = tuple(0 if place is None else idx[place] for place in node.axes)
        across = (node.axes.index(lane[0]), lane[1]) if lane and lane[0] in node.axes else None
        first, end = _range(code, node.of, inner, across, node.axes.index(axis))
        if across is None:  # every row has the range of one
            first, end = code.splat("i32", first, lane), code.splat("i32", end, lane)
        return first, end
    if isinstance(node, Elementwise) and node.op.name in ("arith.andi", "arith.ori"):
        (first, end), (other_first, other_end) = (
            _range(code, arg, idx, lane, axis) for arg in node.args
        )
        both = ("smax", "smin") if node.op.name == "arith.andi" else ("smin", "smax")
        return (
            code.intrinsic(both[0], "i32", lane, first, other_first),
            code.intrinsic(both[1], "i32", lane, end, other_end),
        )
    if isinstance(node, Elementwise) and node.op.name == "arith.cmpi":
        return _solved(code, node, idx, lane, axis) or (zero, all_)
    return zero, all_


def _solved(
    code: Code, node: Elementwise, idx: TilePlace, lane: Lane, axis: int
) -> tuple[str, str] | None:
    """Solve a comparison `d + s * index < 0`, or <=, > or >=, where s is 1 or -1."""
    left, right = node.args
    steps = left.step(axis), right.step(axis)
    order = node.op.text.partition(",")[0].strip()
    if (
        None in steps
        or abs(slope := (steps[0] or 0) - (steps[1] or 0)) != 1
        or order not in _ORDERS
    ):
        return None
    wide = typed("i64", lane)
    a, b = (
        arg.at(code, idx, lane)
        if arg.elem == "i64"
        else code.emit(f"sext {typed(arg.elem, lane)} {arg.at(code, idx, lane)} to {wide}")
        for arg in (left, right)
    )
    is_less, is_strict = _ORDERS[order]
    # With slope 1, `d + index < 0` ends at -d; with -1, `d - index < 0` begins at d + 1.
    root = code.emit(f"sub {wide} {b}, {a}" if slope == 1 else f"sub {wide} {a}, {b}")
    is_end = is_less == (slope == 1)
    shift = int(is_end != is_strict)
    root = code.emit(f"add {wide} {root}, {code.number('i64', shift, lane)}")
    zero, size = (code.number("i64", end, lane) for end in (0, node.shape[axis]))
    root = code.intrinsic("smax", "i64", lane, root, zero)
    root = code.intrinsic("smin", "i64", lane, root, size)
    root = code.emit(f"trunc {wide} {root} to {typed('i32', lane)}")
    none, all_ = (code.number("i32", end, lane) for end in (0, node.shape[axis]))
    return (none, root) if is_end else (root, all_)
