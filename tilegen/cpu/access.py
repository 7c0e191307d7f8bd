"""Load, store and add tiles in memory: rows, broadcasts and gathers, with or without a mask."""

from __future__ import annotations

from collections.abc import Callable

from tilegen.cpu.conversions import from_memory, to_memory
from tilegen.cpu.ir import BYTES, FLOATS, MEMORY, REGISTER, Code, Lane, bits, typed
from tilegen.cpu.tiles import Address, Constant, LoadTile, Node, TilePlace, View

ZEROS = "@zeros"
"""A block of zeros, read instead of memory if a mask is false for a whole vector."""
ZEROS_TEXT = "@zeros = internal constant [256 x i8] zeroinitializer, align 64"


class Access:
    """Reads and writes tiles in memory. `checks.CheckedAccess` checks each address."""

    vectors = True
    """True: rows are read and written as vectors; False: element by element."""
    private: frozenset[int] = frozenset()
    """Arguments that only one thread adds to at a time."""

    def __init__(self, dummy: str) -> None:
        """`dummy` is scratch memory of 256 bytes, written instead if a mask is false."""
        self._dummy = dummy

    def executed(
        self,
        code: Code,
        counted: Callable[[Node], str],
        kind: str,
        arg: int | None,
        elem: str,
        shape: tuple[int, ...],
        mask: Node | str | None,
    ) -> None:
        """Count a load or store of the kernel, in builds that count; otherwise do nothing.

        Called where the operation stands in the kernel. `counted` writes the number of places where
        a mask is true.
        """

    def allowed(
        self, code: Code, pointer: str, mask: str | None, elem: str, arg: int | None, line: int
    ) -> str | None:
        """Return the condition under which an element may be accessed; None: always."""
        return mask

    # ---- loads

    def load(
        self, code: Code, node: LoadTile, idx: TilePlace, lane: Lane, other: str | None
    ) -> str:
        """Return the element at a place, or the vector that begins there."""
        elem, address = node.elem, node.address
        if not lane:
            mask = node.mask.at(code, idx, None) if node.mask else None
            pointer = address.place(code, idx, None)
            return self.scalar(code, pointer, elem, mask, other, address.arg, node.line)
        step = address.step(lane[0])
        uniform = node.mask is None or node.mask.step(lane[0]) == 0
        if step == 1 and uniform and self.vectors:
            return self._row(code, node, idx, lane, other)
        mask = node.mask.at(code, idx, lane) if node.mask else None
        wide = BYTES[elem] >= 4 or code.target.masked16
        if step == 1 and self.vectors and wide and elem != "i1" and mask is not None:
            memory = typed(MEMORY[elem], lane)
            pointer = address.place(code, idx, None)
            name = f"llvm.masked.load.v{lane[1]}{_short(elem)}.p0"
            bools = typed("i1", lane)
            code.module.declare(f"declare {memory} @{name}(ptr, i32, {bools}, {memory})")
            value = code.emit(
                f"call {memory} @{name}(ptr {pointer}, i32 {BYTES[elem]}, {bools} {mask}, "
                f"{memory} zeroinitializer)"
            )
            return self._chosen(code, node, from_memory(code, value, elem, lane), mask, other, lane)
        return self._each(code, node, idx, lane, mask, other, step)

    def scalar(
        self,
        code: Code,
        pointer: str,
        elem: str,
        mask: str | None,
        other: str | None,
        arg: int | None,
        line: int,
    ) -> str:
        """Return one element; 0 or `other` where the mask is false."""
        mask = self.allowed(code, pointer, mask, elem, arg, line)
        if mask is not None:
            pointer = code.emit(f"select i1 {mask}, ptr {pointer}, ptr {ZEROS}")
        value = code.emit(f"load {MEMORY[elem]}, ptr {pointer}, align {BYTES[elem]}")
        value = from_memory(code, value, elem, None)
        if mask is None or other is None:
            return value
        return code.select(mask, value, other, REGISTER[elem], None)

    def _row(
        self, code: Code, node: LoadTile, idx: TilePlace, lane: tuple[int, int], other: str | None
    ) -> str:
        """Load a vector without a mask, or with the same mask for all lanes."""
        elem = node.elem
        pointer, mask = node.address.place(code, idx, None), None
        if node.mask is not None:
            first = tuple(0 if axis == lane[0] else i for axis, i in enumerate(idx))
            mask = node.mask.at(code, first, None)
            pointer = code.emit(f"select i1 {mask}, ptr {pointer}, ptr {ZEROS}")
        memory = typed(MEMORY[elem], lane)
        value = code.emit(f"load {memory}, ptr {pointer}, align {BYTES[elem]}")
        value = from_memory(code, value, elem, lane)
        if mask is None or other is None or _is_zero(node.other):
            return value
        vector = typed(REGISTER[elem], lane)
        return code.emit(f"select i1 {mask}, {vector} {value}, {vector} {other}")

    def _each(
        self,
        code: Code,
        node: LoadTile,
        idx: TilePlace,
        lane: tuple[int, int],
        mask: str | None,
        other: str | None,
        step: int | None,
    ) -> str:
        """Load the elements of a vector one by one."""
        elem, address = node.elem, node.address
        memory = MEMORY[elem]
        pointers = "" if step in (0, 1) else address.place(code, idx, lane)
        first = address.place(code, idx, None) if step in (0, 1) else ""
        if not self.vectors:  # each lane's address is checked
            pointers = address.place(code, idx, lane)
        vector, result = typed(memory, lane), "poison"
        for i in range(lane[1]):
            if pointers:
                pointer = code.element("ptr", pointers, lane, i)
            else:
                pointer = code.gep(memory, first, i * (step or 0))
            allowed = code.element("i1", mask, lane, i) if mask is not None else None
            allowed = self.allowed(code, pointer, allowed, elem, address.arg, node.line)
            if allowed is not None:
                pointer = code.emit(f"select i1 {allowed}, ptr {pointer}, ptr {ZEROS}")
            value = code.emit(f"load {memory}, ptr {pointer}, align {BYTES[elem]}")
            result = code.emit(f"insertelement {vector} {result}, {memory} {value}, i32 {i}")
        value = from_memory(code, result, elem, lane)
        return self._chosen(code, node, value, mask, other, lane)

    def _chosen(
        self,
        code: Code,
        node: LoadTile,
        value: str,
        mask: str | None,
        other: str | None,
        lane: Lane,
    ) -> str:
        if mask is None or other is None or _is_zero(node.other):
            return value
        return code.select(mask, value, other, REGISTER[node.elem], lane)

    # ---- stores

    def store(
        self,
        code: Code,
        address: Address,
        idx: TilePlace,
        lane: Lane,
        value: str,
        elem: str,
        mask: Node | None,
        line: int,
    ) -> None:
        """Store an element, or the vector that begins at a place."""
        if not lane:
            allowed = mask.at(code, idx, None) if mask else None
            pointer = address.place(code, idx, None)
            self.scalar_store(code, pointer, elem, value, allowed, address.arg, line)
            return
        step = address.step(lane[0])
        value = to_memory(code, value, elem, lane)
        memory = typed(MEMORY[elem], lane)
        if step == 1 and self.vectors and (mask is None or mask.step(lane[0]) == 0):
            pointer = address.place(code, idx, None)
            if mask is not None:
                first = tuple(0 if axis == lane[0] else i for axis, i in enumerate(idx))
                test = mask.at(code, first, None)
                pointer = code.emit(f"select i1 {test}, ptr {pointer}, ptr {self._dummy}")
            code.do(f"store {memory} {value}, ptr {pointer}, align {BYTES[elem]}")
            return
        tests = mask.at(code, idx, lane) if mask else None
        wide = (BYTES[elem] >= 4 or code.target.masked16) and elem != "i1"
        if step == 1 and self.vectors and wide and tests is not None:
            name, bools = f"llvm.masked.store.v{lane[1]}{_short(elem)}.p0", typed("i1", lane)
            code.module.declare(f"declare void @{name}({memory}, ptr, i32, {bools})")
            pointer = address.place(code, idx, None)
            code.do(
                f"call void @{name}({memory} {value}, ptr {pointer}, i32 {BYTES[elem]}, "
                f"{bools} {tests})"
            )
            return
        pointers = address.place(code, idx, lane)
        for i in range(lane[1]):
            pointer = code.element("ptr", pointers, lane, i)
            allowed = code.element("i1", tests, lane, i) if tests is not None else None
            allowed = self.allowed(code, pointer, allowed, elem, address.arg, line)
            if allowed is not None:
                pointer = code.emit(f"select i1 {allowed}, ptr {pointer}, ptr {self._dummy}")
            element = code.element(MEMORY[elem], value, lane, i)
            code.do(f"store {MEMORY[elem]} {element}, ptr {pointer}, align {BYTES[elem]}")

    def scalar_store(
        self,
        code: Code,
        pointer: str,
        elem: str,
        value: str,
        mask: str | None,
        arg: int | None,
        line: int,
    ) -> None:
        """Store one element."""
        mask = self.allowed(code, pointer, mask, elem, arg, line)
        if mask is not None:
            pointer = code.emit(f"select i1 {mask}, ptr {pointer}, ptr {self._dummy}")
        value = to_memory(code, value, elem, None)
        code.do(f"store {MEMORY[elem]} {value}, ptr {pointer}, align {BYTES[elem]}")

    # ---- additions, atomic if other threads may add to the same tensor

    def add(
        self,
        code: Code,
        address: Address,
        idx: TilePlace,
        lane: Lane,
        value: str,
        elem: str,
        mask: Node | None,
        line: int,
    ) -> None:
        """Add a value to an element in memory, or a vector to consecutive elements or a scatter."""
        if lane and address.arg in self.private and address.step(lane[0]) == 1 and self.vectors:
            node = LoadTile(elem, address.shape, address, mask, None, self, line)
            old = self.load(code, node, idx, lane, None)
            total = code.emit(f"{_addition(elem)} {typed(REGISTER[elem], lane)} {old}, {value}")
            self.store(code, address, idx, lane, total, elem, mask, line)
            return
        tests = mask.at(code, idx, lane) if mask else None
        pointers = address.place(code, idx, lane)
        type_ = REGISTER[elem]
        for i in range(lane[1] if lane else 1):
            pointer = code.element("ptr", pointers, lane, i) if lane else pointers
            term = code.element(type_, value, lane, i) if lane else value
            test = code.element("i1", tests, lane, i) if lane and tests else tests
            self.scalar_add(code, pointer, elem, term, test, address.arg, line)

    def scalar_add(
        self,
        code: Code,
        pointer: str,
        elem: str,
        value: str,
        mask: str | None,
        arg: int | None,
        line: int,
    ) -> None:
        """Add to one element in memory where the mask is true."""
        mask = self.allowed(code, pointer, mask, elem, arg, line)
        if arg in self.private:
            if mask is not None:
                pointer = code.emit(f"select i1 {mask}, ptr {pointer}, ptr {self._dummy}")
            old = code.emit(f"load {MEMORY[elem]}, ptr {pointer}, align {BYTES[elem]}")
            total = code.emit(f"{_addition(elem)} {REGISTER[elem]} {old}, {value}")
            code.do(f"store {MEMORY[elem]} {total}, ptr {pointer}, align {BYTES[elem]}")
            return
        yes, done = code.labels("add", "added")
        if mask is not None:
            code.do(f"br i1 {mask}, label %{yes}, label %{done}")
            code.label(yes)
        given = f"ptr {pointer}, {REGISTER[elem]} {value}"
        code.emit(f"atomicrmw {_addition(elem)} {given} monotonic, align {BYTES[elem]}")
        if mask is not None:
            code.do(f"br label %{done}")
            code.label(done)


def _addition(elem: str) -> str:
    return "fadd" if elem in FLOATS else "add"


def _short(elem: str) -> str:
    return {"float": "f32", "double": "f64"}.get(MEMORY[elem], MEMORY[elem])


def _is_zero(node: Node | None) -> bool:
    while isinstance(node, View):
        node = node.of
    return node is None or (isinstance(node, Constant) and node.text in ("0", "false", bits(0.0)))
