"""Write loops over tiles: tiles that can share a loop are computed in one."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tilegen.cpu.access import Access
from tilegen.cpu.arithmetic import reduced
from tilegen.cpu.ir import BYTES, REGISTER, Code, Index, Lane, typed
from tilegen.cpu.mlir import Op
from tilegen.cpu.tiles import Buffer, Elementwise, Node, TilePlace

UNROLLED = 4
"""Vectors of a row computed by one iteration of a loop."""

_START: dict[str, float | int | str] = {
    **{"arith.addf": -0.0, "arith.maxnumf": float("-inf"), "arith.minnumf": float("inf")},
    **{"arith.maximumf": float("-inf"), "arith.minimumf": float("inf"), "arith.mulf": 1.0},
    **{"arith.addi": 0, "arith.ori": 0, "arith.xori": 0, "arith.muli": 1, "arith.andi": -1},
}


@dataclass(eq=False)
class Root:
    """A result of a loop over a tile: a buffer, a reduction, a store or an addition."""

    kind: Literal["buffer", "reduce", "store", "add"]
    node: Node
    into: Any
    """A Buffer; the address of a variable for a reduction to a scalar; an Address in memory."""
    mask: Node | None = None
    axis: int = 0
    combine: Op | None = None
    """The operation that a reduction repeats."""
    line: int = 0


class Loops:
    """Roots that wait for a loop of their shape, and the loops written for them."""

    def __init__(self, code: Code, access: Access) -> None:
        self.code = code
        self.access = access
        self._roots: list[Root] = []

    # ---- buffers

    def buffer(self, elem: str, shape: tuple[int, ...], *, narrow: bool = False) -> Buffer:
        """Return a new buffer in scratch memory."""
        count = 1
        for size in shape:
            count *= size
        buffer = Buffer(elem, shape, "", narrow)
        size = 2 if buffer.held == "i16" else 4 if buffer.held == "float" else BYTES[elem]
        buffer.pointer = self.code.scratch(count * size)
        return buffer

    def stored(self, node: Node, *, narrow: bool = False) -> Buffer:
        """Return the buffer of a tile; a tile without a buffer is stored by the next loop."""
        if isinstance(node, Buffer) and not (narrow and not node.narrow):
            return node
        buffer = self.buffer(node.elem, node.shape, narrow=narrow)
        if narrow and isinstance(node, Elementwise) and node.op.name == "arith.truncf":
            (value,) = node.args
            buffer.rounds = node.elem == "bf16" and value.elem == "f32"
            node = value if buffer.rounds else node
        self.add(Root("buffer", node, buffer))
        return buffer

    # ---- roots

    def add(self, root: Root) -> None:
        """Compute a root in the next loop. If the waiting roots cannot share that loop, their loop
        is written first."""
        read = [node for node in (root.node, root.mask) if node is not None]
        if root.kind in ("store", "add"):
            read.append(root.into)
        shape = root.node.shape
        if self._roots and (
            self._roots[0].node.shape != shape
            or any(self._waits(tile, True, set()) for tile in read)
        ):
            self.flush()
        self._roots.append(root)

    def _waits(self, node: Node, same: bool, seen: set[tuple[int, bool]]) -> bool:
        """Check whether a node reads the result of a waiting root, but at another place."""
        if (id(node), same) in seen:
            return False
        seen.add((id(node), same))
        for root in self._roots:
            if root.into is node and (root.kind == "reduce" or not same):
                return True
        return any(self._waits(part, same and here, seen) for part, here in node.parts())

    def flush(self) -> None:
        """Write one loop that computes all waiting roots."""
        roots, self._roots = self._roots, []
        if not roots:
            return
        shape = roots[0].node.shape
        width = shape[-1]
        lanes = min(self.code.target.lanes, width)
        lane: Lane = (len(shape) - 1, lanes) if lanes > 1 else None
        with self.code.own_memo(), contextlib.ExitStack() as stack:
            for root in roots:
                if root.kind == "reduce" and root.axis != len(shape) - 1:
                    self._fill(root)
            outer: list[Index] = [
                stack.enter_context(self.code.loop(0, size)) if size > 1 else 0
                for size in shape[:-1]
            ]
            group = min(width // lanes, UNROLLED)
            sums = {
                root: self._sums(root, lane, group) for root in roots if self._along(root, shape)
            }
            for chunk, first in self._chunks(width, lanes, group):
                for root in roots:
                    self._write(root, (*outer, first), lane, sums.get(root, []), chunk)
            for root, slots in sums.items():
                self._finish(root, tuple(outer), lane, slots)

    @staticmethod
    def _along(root: Root, shape: tuple[int, ...]) -> bool:
        """Check whether a root is a reduction along the last axis."""
        return root.kind == "reduce" and root.axis == len(shape) - 1

    def _chunks(self, width: int, lanes: int, group: int) -> Iterator[tuple[int, Index]]:
        if width == lanes * group:
            for chunk in range(group):
                yield chunk, chunk * lanes
            return
        with self.code.loop(0, width, lanes * group) as first:
            for chunk in range(group):
                yield chunk, self.code.plus(first, chunk * lanes)

    def _write(self, root: Root, idx: TilePlace, lane: Lane, slots: list[str], chunk: int) -> None:
        code, elem = self.code, root.node.elem
        value = root.node.at(code, idx, lane)
        if root.kind == "buffer":
            root.into.put(code, idx, lane, value)
        elif root.kind == "store":
            self.access.store(code, root.into, idx, lane, value, elem, root.mask, root.line)
        elif root.kind == "add":
            self.access.add(code, root.into, idx, lane, value, elem, root.mask, root.line)
        else:
            assert root.combine
            vector = typed(REGISTER[elem], lane)
            if slots:
                so_far = code.emit(f"load {vector}, ptr {slots[chunk]}")
                value = reduced(code, root.combine, elem, so_far, value, lane)
                code.do(f"store {vector} {value}, ptr {slots[chunk]}")
                return
            inner = tuple(i for axis, i in enumerate(idx) if axis != root.axis)
            across: Lane = (len(inner) - 1, lane[1]) if lane else None
            so_far = root.into.code(code, inner, across)  # not from the memo: it changes
            value = reduced(code, root.combine, elem, so_far, value, lane)
            root.into.put(code, inner, across, value)

    # ---- reductions

    def _start(self, root: Root, lane: Lane) -> str:
        assert root.combine
        name, elem = root.combine.name, root.node.elem
        if name in _START:
            start = _START[name]
        else:
            size = int(elem[1:])
            start = {
                "arith.maxsi": -(2 ** (size - 1)),
                "arith.minsi": 2 ** (size - 1) - 1,
                "arith.maxui": 0,
                "arith.minui": -1,
            }.get(name, "")
        if start == "":
            raise root.combine.refused("a reduction by this operation is unknown")
        if elem == "i1":
            return self.code.splat("i1", "true" if start == -1 else "false", lane)
        return self.code.number(REGISTER[elem], start, lane)  # type: ignore[arg-type]

    def _sums(self, root: Root, lane: Lane, group: int) -> list[str]:
        """Return variables for a reduction along a row: several, to shorten chains of
        dependencies."""
        vector = typed(REGISTER[root.node.elem], lane)
        slots = [self.code.slot(vector) for _ in range(group)]
        for slot in slots:
            self.code.do(f"store {vector} {self._start(root, lane)}, ptr {slot}")
        return slots

    def _finish(self, root: Root, outer: TilePlace, lane: Lane, slots: list[str]) -> None:
        code, elem = self.code, root.node.elem
        type_ = REGISTER[elem]
        assert root.combine
        values = [code.emit(f"load {typed(type_, lane)}, ptr {slot}") for slot in slots]
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [reduced(code, root.combine, elem, a, b, lane) for a, b in pairs]
        value = values[0]
        width = lane[1] if lane else 1
        while width > 1:
            width //= 2
            vector = typed(type_, (0, 2 * width))
            low, high = (
                code.shuffle(vector, value, "poison", range(first, first + width))
                for first in (0, width)
            )
            value = reduced(code, root.combine, elem, low, high, (0, width))
        if lane:
            value = code.emit(f"extractelement <1 x {type_}> {value}, i32 0")
        if isinstance(root.into, Buffer):
            root.into.put(code, outer, None, value)
        else:
            code.do(f"store {type_} {value}, ptr {root.into}")

    def _fill(self, root: Root) -> None:
        """Write the initial value of a reduction into its buffer."""
        buffer: Buffer = root.into
        count = 1
        for size in buffer.shape:
            count *= size
        flat = Buffer(buffer.elem, (count,), buffer.pointer, buffer.narrow)
        lanes = min(self.code.target.lanes, count)
        lane: Lane = (0, lanes) if lanes > 1 else None
        with self.code.loop(0, count, lanes) as i:
            flat.put(self.code, (i,), lane, self._start(root, lane))

    def counted(self, mask: Node) -> str:
        """Count the places where a mask is true, as an i64."""
        code = self.code
        self.flush()
        slot = code.slot("i64", align=8)
        code.do(f"store i64 0, ptr {slot}")
        lanes = min(code.target.lanes, mask.shape[-1])
        lane: Lane = (len(mask.shape) - 1, lanes) if lanes > 1 else None
        with self._every_row(mask.shape) as outer:
            for _, first in self._chunks(mask.shape[-1], lanes, 1):
                test = mask.at(code, (*outer, first), lane)
                if lane:
                    test = code.emit(f"bitcast {typed('i1', lane)} {test} to i{lanes}")
                    test = code.intrinsic("ctpop", f"i{lanes}", None, test)
                number = code.emit(f"zext i{lanes} {test} to i64")
                so_far = code.emit(f"load i64, ptr {slot}")
                code.do(f"store i64 {code.emit(f'add i64 {so_far}, {number}')}, ptr {slot}")
        return code.emit(f"load i64, ptr {slot}")

    @contextlib.contextmanager
    def _every_row(self, shape: tuple[int, ...]) -> Generator[list[Index]]:
        with self.code.own_memo(), contextlib.ExitStack() as stack:
            yield [
                stack.enter_context(self.code.loop(0, size)) if size > 1 else 0
                for size in shape[:-1]
            ]
