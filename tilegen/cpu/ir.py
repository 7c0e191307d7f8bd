"""Write the text of LLVM IR: a module, and a function under construction.

Values are texts such as `%t12` or `0`. A lane is None for a scalar, or (axis, width) for a vector
of `width` elements along an axis of a tile.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Generator
from typing import Any

from tilegen.cpu.target import Target

Lane = tuple[int, int] | None
Index = int | str

REGISTER = {
    **{name: name for name in ("i1", "i8", "i16", "i32", "i64", "ptr")},
    **{"f32": "float", "bf16": "float", "f16": "float", "f64": "double", "index": "i64"},
}
"""Types in registers: bf16 and fp16 are held as fp32, and rounded after each operation."""
MEMORY = REGISTER | {"bf16": "i16", "f16": "i16", "i1": "i8"}
BYTES = {
    **{"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "index": 8, "ptr": 8},
    **{"f32": 4, "bf16": 2, "f16": 2, "f64": 8},
}
FLOATS = ("f32", "bf16", "f16", "f64")


def bits(value: float, elem: str = "f32") -> str:
    """Return a float constant as LLVM writes it: the bits of the value as a double."""
    if elem != "f64":  # as an fp32 constant LLVM accepts only doubles that fp32 holds exactly
        value = ctypes.c_float(value).value
    return "0x" + struct.pack(">d", value).hex().upper()


def typed(type_: str, lane: Lane) -> str:
    """Return an LLVM type, or a vector type of it."""
    return f"<{lane[1]} x {type_}>" if lane else type_


class Module:
    """An LLVM module: declarations, and functions that are shared by key."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.functions: dict[str, str] = {}
        self._declared: dict[str, None] = {}
        self._names: dict[Any, str] = {}

    def declare(self, text: str) -> None:
        """Declare an external function; repeated declarations are dropped."""
        self._declared[text] = None

    def shared(self, key: tuple[Any, ...], name: str) -> tuple[str, bool]:
        """Return the name of the function with a key, and whether the key is new."""
        new = key not in self._names
        if new:
            self._names[key] = f"@{name}_{len(self._names)}"
        return self._names[key], new

    def text(self) -> str:
        """Return the text of the module."""
        width = 32 * self.target.lanes
        attributes = [f'"target-cpu"="{self.target.cpu}"', "nounwind"]
        if self.target.features:
            attributes.append(f'"target-features"="{self.target.features}"')
        if self.target.triple.startswith("x86"):
            attributes.append(f'"prefer-vector-width"="{width}" "min-legal-vector-width"="{width}"')
        return "\n".join(
            [
                f'target triple = "{self.target.triple}"',
                *self._declared,
                *self.functions.values(),
                f"attributes #0 = {{ {' '.join(attributes)} }}",
                "",
            ]
        )


class Code:
    """The body of a function, written line by line."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.target = module.target
        self.lines: list[str] = []
        self.memo: dict[Any, str] = {}
        """Values of tiles, by place, in the loop nest that is being written."""
        self._entry: list[str] = []
        self._count = 0
        self._scratch = 0
        self._most_scratch = 0

    # ---- lines

    def _name(self) -> str:
        self._count += 1
        return f"%t{self._count}"

    def emit(self, code: str) -> str:
        """Write an instruction and return the name of its result."""
        name = self._name()
        self.lines.append(f"  {name} = {code}")
        return name

    def do(self, code: str) -> None:
        """Write an instruction without a result."""
        self.lines.append(f"  {code}")

    def label(self, name: str) -> None:
        """Begin a basic block."""
        self.lines.append(f"{name}:")

    def labels(self, *names: str) -> tuple[str, ...]:
        """Return new labels that begin with the given names."""
        self._count += 1
        return tuple(f"{name}{self._count}" for name in names)

    def slot(self, type_: str, count: int = 1, align: int = 64) -> str:
        """Return the address of a new variable on the stack, which LLVM turns into registers."""
        name = self._name()
        self._entry.append(f"  {name} = alloca {type_}, i64 {count}, align {align}")
        return name

    def body(self) -> str:
        """Return the text of the function's body."""
        return "\n".join(["entry:", *self._entry, *self.lines])

    # ---- scratch memory of a thread, allocated like a stack

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that the function needs."""
        return self._most_scratch

    def scratch(self, size: int) -> str:
        """Allocate scratch memory and return its address, aligned to 64 bytes."""
        name = self._name()
        self._entry.append(f"  {name} = getelementptr i8, ptr %scratch, i64 {self._scratch}")
        self._scratch += (size + 63) // 64 * 64
        self._most_scratch = max(self._most_scratch, self._scratch)
        return name

    @contextlib.contextmanager
    def released_scratch(self) -> Generator[None]:
        """Release, at the end, the scratch memory allocated inside."""
        top = self._scratch
        yield
        self._scratch = top

    # ---- loops

    @contextlib.contextmanager
    def loop(
        self, first: Index, last: Index, step: Index = 1, type_: str = "i64"
    ) -> Generator[str]:
        """Write a loop and yield its counter."""
        counter = self.slot(type_, align=8)
        head, body, done = self.labels("head", "body", "done")
        self.do(f"store {type_} {first}, ptr {counter}")
        self.do(f"br label %{head}")
        self.label(head)
        i = self.emit(f"load {type_}, ptr {counter}")
        more = self.emit(f"icmp slt {type_} {i}, {last}")
        self.do(f"br i1 {more}, label %{body}, label %{done}")
        self.label(body)
        with self.own_memo():
            yield i
        self.do(f"store {type_} {self.emit(f'add nsw {type_} {i}, {step}')}, ptr {counter}")
        self.do(f"br label %{head}")
        self.label(done)

    @contextlib.contextmanager
    def own_memo(self) -> Generator[None]:
        """Start with an empty memo inside, and restore the old memo at the end."""
        memo, self.memo = self.memo, {}
        yield
        self.memo = memo

    # ---- small helpers

    def splat(self, type_: str, value: str, lane: Lane) -> str:
        """Return a scalar in all lanes."""
        if not lane:
            return value
        if not value.startswith("%"):
            return f"splat ({type_} {value})"
        vector = typed(type_, lane)
        first = self.emit(f"insertelement {vector} poison, {type_} {value}, i32 0")
        zeros = f"<{lane[1]} x i32> zeroinitializer"
        return self.emit(f"shufflevector {vector} {first}, {vector} poison, {zeros}")

    def number(self, type_: str, value: int | float, lane: Lane) -> str:
        """Return a constant in all lanes."""
        if isinstance(value, float):
            return self.splat(type_, bits(value, "f64" if type_ == "double" else "f32"), lane)
        return self.splat(type_, str(value), lane)

    def plus(self, index: Index, more: Index) -> Index:
        """Return the sum of indices, folded if both are constant."""
        if isinstance(index, int) and isinstance(more, int):
            return index + more
        if more == 0:
            return index
        if index == 0:
            return more
        return self.emit(f"add nsw i64 {index}, {more}")

    def times(self, index: Index, by: int) -> Index:
        """Return the product of an index and a constant."""
        if isinstance(index, int):
            return index * by
        return index if by == 1 else self.emit(f"mul nsw i64 {index}, {by}")

    def flat(self, idx: tuple[Index, ...], sizes: tuple[int, ...]) -> Index:
        """Return the row-major offset of an element; `sizes` are the sizes of the axes."""
        linear: Index = 0
        for i, size in zip(idx, sizes, strict=True):
            linear = self.plus(self.times(linear, size), i)
        return linear

    def unflat(self, linear: Index, shape: tuple[int, ...]) -> tuple[Index, ...]:
        """Return the index of the element at a row-major offset."""
        index: list[Index] = []
        for size in reversed(shape):
            if size == 1:
                index.append(0)
            elif isinstance(linear, int):
                index.append(linear % size)
                linear //= size
            else:
                index.append(self.emit(f"urem i64 {linear}, {size}"))
                linear = self.emit(f"udiv i64 {linear}, {size}")
        return tuple(reversed(index))

    def joined(self, type_: str, pieces: list[str], width: int) -> str:
        """Concatenate pieces of `width` elements into a vector."""
        if width == 1 and len(pieces) > 1:
            vector, value = typed(type_, (0, len(pieces))), "poison"
            for i, piece in enumerate(pieces):
                value = self.emit(f"insertelement {vector} {value}, {type_} {piece}, i32 {i}")
            return value
        while len(pieces) > 1:
            vector = typed(type_, (0, width))
            pieces = [
                self.shuffle(vector, a, b, range(2 * width))
                for a, b in zip(pieces[::2], pieces[1::2], strict=True)
            ]
            width *= 2
        return pieces[0]

    def shuffle(self, vector: str, a: str, b: str, order: Any) -> str:
        """Return elements of two vectors, selected by their positions in the concatenation."""
        places = ", ".join(f"i32 {i}" for i in order)
        count = places.count("i32")
        return self.emit(f"shufflevector {vector} {a}, {vector} {b}, <{count} x i32> <{places}>")

    def element(self, type_: str, vector: str, lane: Lane, i: int) -> str:
        """Return an element of a vector."""
        return self.emit(f"extractelement {typed(type_, lane)} {vector}, i32 {i}")

    def gep(self, type_: str, pointer: str, offset: Index) -> str:
        """Return the address `offset` elements after a pointer."""
        if offset == 0:
            return pointer
        return self.emit(f"getelementptr {type_}, ptr {pointer}, i64 {offset}")

    def intrinsic(self, name: str, type_: str, lane: Lane, *values: str) -> str:
        """Call an intrinsic whose operands have the type of the result."""
        vector = typed(type_, lane)
        short = {"float": "f32", "double": "f64"}.get(type_, type_)
        full = f"llvm.{name}.{f'v{lane[1]}' if lane else ''}{short}"
        self.module.declare(f"declare {vector} @{full}({', '.join([vector] * len(values))})")
        given = ", ".join(f"{vector} {value}" for value in values)
        return self.emit(f"call {vector} @{full}({given})")

    def select(self, test: str, yes: str, no: str, type_: str, lane: Lane) -> str:
        """Return `yes` where a test is true, else `no`."""
        vector = typed(type_, lane)
        return self.emit(f"select {typed('i1', lane)} {test}, {vector} {yes}, {vector} {no}")
