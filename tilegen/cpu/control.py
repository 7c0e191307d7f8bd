"""Lower the control flow of a kernel: loops that carry values, branches, early returns."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from tilegen.cpu.access import Access
from tilegen.cpu.following import FollowedLoop
from tilegen.cpu.ir import REGISTER, Code, Module
from tilegen.cpu.loops import Loops, Root
from tilegen.cpu.mlir import Block, Op, Value
from tilegen.cpu.products import Products
from tilegen.cpu.target import Target
from tilegen.cpu.tiles import Buffer, Node, view


class ControlFlow:
    """State of a function during lowering, and its control flow. The subclass in `lower` adds the
    other operations."""

    def __init__(self, target: Target, access: type[Access]) -> None:
        self.module = Module(target)
        self.code = Code(self.module)
        self.access = access(self.code.scratch(256))
        self.loops = Loops(self.code, self.access)
        self.products = Products(self.code, self.loops)
        self.env: dict[Value, Any] = {}
        """Scalars (LLVM text) and tiles (Node), by value."""
        self.loop: FollowedLoop | None = None
        """The innermost loop around what is written."""

    def ops(self, block: Block) -> None:
        """Write the operations of a block."""
        raise NotImplementedError

    def _op_scf_for(self, op: Op) -> None:
        (body,) = op.regions
        first, last, step = (self.env[value] for value in op.operands[:3])
        self._pack_before(body)
        slots = [self._slot(op, start) for start in op.operands[3:]]
        self.loops.flush()
        counter, *carried = body.args
        around, self.loop = self.loop, FollowedLoop(body, step)
        with self._region(), self.code.loop(first, last, step, REGISTER[counter.type.elem]) as i:
            self.env[counter] = i
            for value, slot in zip(carried, slots, strict=True):
                self.env[value] = self._read(value, slot)
            self.ops(body)
            self._hand_over(body.ends, slots)
        self.loop = around
        for value, slot in zip(op.results, slots, strict=True):
            self.env[value] = self._read(value, slot)

    @contextlib.contextmanager
    def _region(self) -> Generator[None]:
        """Release scratch memory and packed operands of a region at its end."""
        packed = dict(self.products.packed)
        with self.code.released_scratch():
            yield
        self.products.packed = packed

    def _slot(self, op: Op, start: Value) -> Any:
        """Return storage for a value that a loop carries: a variable or a buffer."""
        value, type_ = self.env[start], start.type
        if not type_.shape:
            slot = self.code.slot(REGISTER[type_.elem], align=8)
            self.code.do(f"store {REGISTER[type_.elem]} {value}, ptr {slot}")
            return slot
        if type_.elem == "ptr":
            raise op.refused("a loop that carries a tile of addresses")
        if isinstance(value, Buffer) and start.users == [op] and start.block is op.block:
            return value  # the loop alone reads this buffer
        buffer = self.loops.buffer(type_.elem, type_.shape)
        self.loops.add(Root("buffer", value, buffer))
        return buffer

    def _read(self, value: Value, slot: Any) -> Any:
        if value.type.shape:
            return slot
        return self.code.emit(f"load {REGISTER[value.type.elem]}, ptr {slot}")

    def _hand_over(self, ends: list[Value], slots: list[Any]) -> None:
        """Write the values that a region yields to their slots, after reading all of them."""
        values = [self.env[end] for end in ends]
        for i, (value, slot) in enumerate(zip(values, slots, strict=True)):
            if not isinstance(value, Node) or value is slot:
                continue
            if not isinstance(value, Buffer) or value in slots:
                values[i] = self.loops.buffer(value.elem, value.shape)
                self.loops.add(Root("buffer", value, values[i]))
        self.loops.flush()
        for end, value, slot in zip(ends, values, slots, strict=True):
            if not isinstance(value, Node):
                self.code.do(f"store {REGISTER[end.type.elem]} {value}, ptr {slot}")
            elif value is not slot:
                self.loops.add(Root("buffer", value, slot))
        self.loops.flush()

    def _pack_before(self, body: Block) -> None:
        """Pack operands of products that do not change in a loop, before the loop."""
        for op in body.ops:
            if op.name == "scf.for":
                self._pack_before(op.regions[0])
            if op.name != "tt.dot":
                continue
            left, right = op.operands[:2]
            for value in (left, right):
                source = value
                while source not in self.env and source.op and source.op.name == "tt.trans":
                    source = source.op.operands[0]
                if source not in self.env:
                    continue
                self._transposed_here(value)
                pairs = self.products.pairs(left.type.elem, left.type.shape[1])
                if value is left:
                    self.products.left(value, self.env[value], pairs)
                else:
                    self.products.right(value, self.env[value], pairs)

    def _transposed_here(self, value: Value) -> None:
        """Register the transpositions of a tile before the loop that contains them."""
        if value not in self.env:
            assert value.op
            self._transposed_here(value.op.operands[0])
            before, shape = self.env[value.op.operands[0]], value.type.shape
            self.env[value] = view(before, value.op, shape)

    def _op_scf_if(self, op: Op) -> None:
        slots = [
            self.loops.buffer(value.type.elem, value.type.shape)
            if value.type.shape
            else self.code.slot(REGISTER[value.type.elem], align=8)
            for value in op.results
        ]
        self.loops.flush()
        yes, no, done = self.code.labels("then", "else", "fi")
        self.code.do(f"br i1 {self.env[op.operands[0]]}, label %{yes}, label %{no}")
        for i, label in enumerate((yes, no)):
            self.code.label(label)
            if i < len(op.regions):
                with self._region():
                    self.ops(op.regions[i])
                    self._hand_over(op.regions[i].ends, slots)
            self.code.do(f"br label %{done}")
        self.code.label(done)
        for value, slot in zip(op.results, slots, strict=True):
            self.env[value] = self._read(value, slot)

    def _op_scf_yield(self, op: Op) -> None:
        pass  # the loop or branch that this ends writes its operands to slots

    def _op_cf_cond_br(self, op: Op) -> None:
        self.loops.flush()
        yes, no = (name.strip("^,") for name in op.text.split() if name.startswith("^"))
        test = self.env[op.operands[0]]
        self.code.do(f"br i1 {test}, label %{yes}, label %{no}")

    def _op_cf_br(self, op: Op) -> None:
        if op.operands:
            raise op.refused("a branch that hands values over")
        self.loops.flush()
        self.code.do(f"br label %{op.text.strip().strip('^,')}")

    def _op_tt_return(self, op: Op) -> None:
        self.loops.flush()
        self.code.do("ret void")
