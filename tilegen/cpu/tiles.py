"""Tiles as lazy values: a node is evaluated on demand at a row and a vector of columns.

Integers, masks and addresses are never stored: LLVM combines them and moves them out of loops.
`lower` decides which tiles are stored; a stored tile is a `Buffer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tilegen.cpu.arithmetic import compute
from tilegen.cpu.conversions import from_memory, to_factors, to_memory
from tilegen.cpu.ir import BYTES, MEMORY, REGISTER, Code, Index, Lane, typed
from tilegen.cpu.mlir import Op

TilePlace = tuple[Index, ...]


class Node:
    """A tile. `code` of a subclass computes an element, or a vector along an axis."""

    elem: str
    shape: tuple[int, ...]

    def at(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        """Return the element at a place, or the vector that begins there."""
        key = self, idx, lane
        if key not in code.memo:
            if lane and self.step(lane[0]) == 0:  # the same value in all lanes
                idx = tuple(0 if axis == lane[0] else i for axis, i in enumerate(idx))
                value = self.at(code, idx, None)
                code.memo[key] = code.splat(REGISTER[self.elem], value, lane)
            else:
                code.memo[key] = self.code(code, idx, lane)
        return code.memo[key]

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        raise NotImplementedError

    def step(self, axis: int) -> int | None:
        """Return by how much an integer grows from an element to the next along an axis.

        0 for a value of any type that is the same along the axis; None if it is unknown.
        """
        raise NotImplementedError

    def parts(self) -> list[tuple[Node, bool]]:
        """Return the nodes that this node reads, and whether it reads them at the same place
        only."""
        return []


@dataclass(eq=False)
class Constant(Node):
    """The same number everywhere."""

    elem: str
    shape: tuple[int, ...]
    text: str

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        return self.text

    def step(self, axis: int) -> int | None:
        return 0

    @property
    def value(self) -> int | None:
        """The number, if it is an integer."""
        return int(self.text) if self.elem[0] == "i" and self.elem != "i1" else None


@dataclass(eq=False)
class Splat(Node):
    """A scalar of the program, the same everywhere."""

    elem: str
    shape: tuple[int, ...]
    scalar: str

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        return self.scalar

    def step(self, axis: int) -> int | None:
        return 0


@dataclass(eq=False)
class RangeTile(Node):
    """Consecutive integers."""

    elem: str
    shape: tuple[int, ...]
    start: int

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        (index,) = idx
        if isinstance(index, int):
            first = str(index + self.start)
        else:
            first = code.emit(f"trunc nsw i64 {index} to i32")
            if self.start:
                first = code.emit(f"add i32 {first}, {self.start}")
        if not lane:
            return first
        steps = ", ".join(f"i32 {i}" for i in range(lane[1]))
        return code.emit(f"add {typed('i32', lane)} {code.splat('i32', first, lane)}, <{steps}>")

    def step(self, axis: int) -> int | None:
        return 1


@dataclass(eq=False)
class View(Node):
    """The result of expand_dims, broadcast or trans: the elements of a tile at other places."""

    elem: str
    shape: tuple[int, ...]
    of: Node
    axes: tuple[int | None, ...]
    """For each axis of `of` the axis of the view; None if `of` has one element along it."""

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        inner = tuple(0 if axis is None else idx[axis] for axis in self.axes)
        if not lane:
            return self.of.at(code, inner, None)
        return self.of.at(code, inner, (self.axes.index(lane[0]), lane[1]))

    def step(self, axis: int) -> int | None:
        return self.of.step(self.axes.index(axis)) if axis in self.axes else 0

    def parts(self) -> list[tuple[Node, bool]]:
        same = self.axes == tuple(range(len(self.shape))) and self.of.shape == self.shape
        return [(self.of, same)]


@dataclass(eq=False)
class Reshape(Node):
    """The same elements, row by row, in another shape."""

    elem: str
    shape: tuple[int, ...]
    of: Node

    def __post_init__(self) -> None:
        self._here = [axis for axis, size in enumerate(self.shape) if size > 1]
        self._there = [axis for axis, size in enumerate(self.of.shape) if size > 1]
        sizes = [[node.shape[axis] for axis in axes] for node, axes in self._both]
        self._renamed = sizes[0] == sizes[1]
        """True: the shapes differ only in axes of size 1."""

    @property
    def _both(self) -> tuple[tuple[Node, list[int]], tuple[Node, list[int]]]:
        return (self, self._here), (self.of, self._there)

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        if self._renamed:
            inner: list[Index] = [0] * len(self.of.shape)
            for here, there in zip(self._here, self._there, strict=True):
                inner[there] = idx[here]
            if lane:
                lane = self._there[self._here.index(lane[0])], lane[1]
            return self.of.at(code, tuple(inner), lane)
        linear = code.flat(idx, self.shape)
        if not lane:
            return self.of.at(code, code.unflat(linear, self.of.shape), None)
        last = self._there[-1]
        width = min(lane[1], self.of.shape[last]) if lane[0] == self._here[-1] else 1
        stride = 1
        for size in self.shape[lane[0] + 1 :]:
            stride *= size
        pieces = [
            self.of.at(
                code,
                code.unflat(code.plus(linear, piece * width * stride), self.of.shape),
                (last, width) if width > 1 else None,
            )
            for piece in range(lane[1] // width)
        ]
        return code.joined(REGISTER[self.elem], pieces, width)

    def step(self, axis: int) -> int | None:
        if self._renamed:
            return self.of.step(self._there[self._here.index(axis)]) if axis in self._here else 0
        return 0 if all(self.of.step(there) == 0 for there in self._there) else None

    def parts(self) -> list[tuple[Node, bool]]:
        return [(self.of, False)]


@dataclass(eq=False)
class Elementwise(Node):
    """An operation on the elements of tiles at the same place."""

    elem: str
    shape: tuple[int, ...]
    op: Op
    args: list[Node]

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        values = [arg.at(code, idx, lane) for arg in self.args]
        return compute(code, self.op, [arg.elem for arg in self.args], self.elem, values, lane)

    def step(self, axis: int) -> int | None:
        steps = [arg.step(axis) for arg in self.args]
        if None in steps:
            return None
        if not any(steps):
            return 0
        known = [step or 0 for step in steps]
        if self.op.name == "arith.addi":
            return known[0] + known[1]
        if self.op.name == "arith.subi":
            return known[0] - known[1]
        if self.op.name == "arith.extsi":
            return known[0]
        if self.op.name == "arith.muli":
            for constant, other in ((0, 1), (1, 0)):
                factor = _integer(self.args[constant])
                if factor is not None:
                    return factor * known[other]
        return None

    def parts(self) -> list[tuple[Node, bool]]:
        return [(arg, True) for arg in self.args]


def _integer(node: Node) -> int | None:
    while isinstance(node, View):
        node = node.of
    return node.value if isinstance(node, Constant) else None


@dataclass(eq=False)
class Address(Node):
    """A tile of addresses: a pointer plus offsets in elements."""

    shape: tuple[int, ...]
    base: str
    pointee: str
    offsets: list[Node] = field(default_factory=list)
    arg: int | None = None
    """The argument of the kernel from which the pointer derives."""
    elem: str = "ptr"

    def step(self, axis: int) -> int | None:
        steps = [offset.step(axis) for offset in self.offsets]
        return None if None in steps else sum(step or 0 for step in steps)

    def place(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        """Return the address at a place, or a vector of addresses."""
        type_ = typed("i64", lane)
        total = code.number("i64", 0, lane)
        for offset in self.offsets:
            value = offset.at(code, idx, lane)
            if offset.elem != "i64":
                value = code.emit(f"sext {typed(offset.elem, lane)} {value} to {type_}")
            total = code.emit(f"add {type_} {total}, {value}")
        # Not `inbounds`: masked elements may lie outside of their tensor.
        return code.emit(f"getelementptr {MEMORY[self.pointee]}, ptr {self.base}, {type_} {total}")

    def parts(self) -> list[tuple[Node, bool]]:
        return [(offset, True) for offset in self.offsets]


class TileReader(Protocol):
    """Reads tiles from memory: see `access.Access`."""

    vectors: bool
    """True: rows are read as vectors."""

    def load(
        self, code: Code, node: LoadTile, idx: TilePlace, lane: Lane, other: str | None
    ) -> str:
        """Return the element of a load at a place, or the vector that begins there."""
        ...


@dataclass(eq=False)
class LoadTile(Node):
    """A tile read from memory; `other` or 0 where the mask is false."""

    elem: str
    shape: tuple[int, ...]
    address: Address
    mask: Node | None
    other: Node | None
    access: TileReader
    line: int
    streams: bool = True
    """True: the address depends on no value that was loaded, so that tiles of a loop probably
    follow each other in memory."""
    next: Address | None = None
    """The address in the next iteration of the loop, if it was looked up and is known."""

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        other = self.other.at(code, idx, lane) if self.other else None
        return self.access.load(code, self, idx, lane, other)

    def step(self, axis: int) -> int | None:
        read = [node for node in (self.address, self.mask, self.other) if node is not None]
        return 0 if all(node.step(axis) == 0 for node in read) else None

    def parts(self) -> list[tuple[Node, bool]]:
        read = [node for node in (self.address, self.mask, self.other) if node is not None]
        return [(node, True) for node in read]


@dataclass(eq=False)
class Buffer(Node):
    """A tile in scratch memory, row by row. bf16 and fp16 are held as fp32, or with `narrow` in
    their own type."""

    elem: str
    shape: tuple[int, ...]
    pointer: str
    narrow: bool = False
    rounds: bool = False
    """True: what is stored are factors of products of pairs, not rounded to bf16 yet."""

    @property
    def held(self) -> str:
        """LLVM's type of an element in the buffer."""
        return MEMORY[self.elem] if self.narrow or self.elem == "i1" else REGISTER[self.elem]

    def where(self, code: Code, idx: TilePlace) -> str:
        """Return the address of an element."""
        offset = code.flat(idx, self.shape)
        return code.emit(f"getelementptr inbounds {self.held}, ptr {self.pointer}, i64 {offset}")

    def code(self, code: Code, idx: TilePlace, lane: Lane) -> str:
        if lane and any(size > 1 for size in self.shape[lane[0] + 1 :]):  # down a column
            elements = [
                self.at(
                    code, (*idx[: lane[0]], code.plus(idx[lane[0]], i), *idx[lane[0] + 1 :]), None
                )
                for i in range(lane[1])
            ]
            return code.joined(REGISTER[self.elem], elements, 1)
        align = 4 if self.held == "float" else BYTES.get(self.elem, 4)
        vector = typed(self.held, lane)
        align = 2 if self.held == "i16" else align
        value = code.emit(f"load {vector}, ptr {self.where(code, idx)}, align {align}")
        return from_memory(code, value, self.elem, lane) if self._converts else value

    @property
    def _converts(self) -> bool:
        return self.held != REGISTER[self.elem]

    def put(self, code: Code, idx: TilePlace, lane: Lane, value: str) -> None:
        """Store an element or a vector along the last axis, and memoize it."""
        if self.rounds:
            value = to_factors(code, value, lane)
        else:
            code.memo[self, idx, lane] = value
            value = to_memory(code, value, self.elem, lane) if self._converts else value
        align = 4 if self.held == "float" else 2 if self.held == "i16" else BYTES[self.elem]
        vector = typed(self.held, lane)
        code.do(f"store {vector} {value}, ptr {self.where(code, idx)}, align {align}")

    def step(self, axis: int) -> int | None:
        return 0 if self.shape[axis] == 1 else None


def axes_of(op: Op, shape: tuple[int, ...], of: tuple[int, ...]) -> tuple[int | None, ...]:
    """Return the axes of the `View` that expand_dims, broadcast or trans makes."""
    if op.name == "tt.expand_dims":
        axis = int(op.attribute("axis"))
        return tuple(a if a < axis else a + 1 for a in range(len(of)))
    if op.name == "tt.broadcast":
        sizes = enumerate(zip(of, shape, strict=True))
        return tuple(None if a == 1 and b > 1 else i for i, (a, b) in sizes)
    order = op.text[op.text.index("array<i32:") + 10 :].split(">")[0].split(",")
    places = [int(axis) for axis in order]
    return tuple(places.index(axis) for axis in range(len(places)))


def view(node: Node, op: Op, shape: tuple[int, ...]) -> Node:
    """Return a view of a tile; a view of addresses is made of views of their offsets."""
    axes = axes_of(op, shape, node.shape)

    def of(viewed: Node) -> View:
        return View(viewed.elem, shape, viewed, axes)

    if isinstance(node, Address):
        offsets: list[Node] = [of(offset) for offset in node.offsets]
        return Address(shape, node.base, node.pointee, offsets, node.arg)
    return of(node)


def reshaped(node: Node, shape: tuple[int, ...]) -> Node:
    """Return the elements of a tile, row by row, in another shape."""
    if isinstance(node, Address):
        offsets: list[Node] = [Reshape(offset.elem, shape, offset) for offset in node.offsets]
        return Address(shape, node.base, node.pointee, offsets, node.arg)
    return Reshape(node.elem, shape, node)
