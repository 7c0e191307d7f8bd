"""Lower TTIR to LLVM IR: the function that computes one program of a kernel's grid.

Scalars are computed where they occur. Tiles become lazy nodes (`tiles`); a float that several
operations read is stored in scratch memory. `loops` writes the loops that store tiles, `products`
the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.cpu.access import ZEROS_TEXT, Access
from tilegen.cpu.arithmetic import compute
from tilegen.cpu.constants import float_of
from tilegen.cpu.control import ControlFlow
from tilegen.cpu.edges import ranges_of
from tilegen.cpu.following import following
from tilegen.cpu.in_place import product_in_memory
from tilegen.cpu.ir import FLOATS, MEMORY, REGISTER, bits
from tilegen.cpu.loops import Root
from tilegen.cpu.mlir import Block, MlirFunction, Op, Value
from tilegen.cpu.pointers import ADDITIONS, VIEWS, Pointers, kind_of
from tilegen.cpu.products import Init
from tilegen.cpu.target import Target
from tilegen.cpu.tiles import (
    Address,
    Buffer,
    Constant,
    Elementwise,
    LoadTile,
    Node,
    RangeTile,
    Splat,
    View,
    reshaped,
    view,
)

_SCALARS = ("arith.", "math.", "tt.mulhiui", "tt.bitcast", "tt.precise_")


@dataclass(frozen=True)
class Lowered:
    """A kernel as LLVM IR."""

    name: str
    ir: str
    """The module. Its function `program` computes one program of the grid."""
    arguments: tuple[str, ...]
    """LLVM types of the kernel's arguments."""
    scratch_bytes: int
    """Scratch memory of one thread [bytes]."""
    stored: tuple[int, ...]
    """Arguments through which the kernel writes."""
    private: tuple[int, ...]
    """Arguments in `stored` that the kernel only adds to: programs may be given copies of them."""


def lower(
    function: MlirFunction, target: Target, access: type[Access] = Access, *, aliases: bool = False
) -> Lowered:
    """Lower a kernel to LLVM IR. Raises Unsupported, naming the operation and the kernel's line.

    With `aliases`, arguments may share memory that the kernel writes.
    """
    return _Lowering(function, target, access, aliases).lowered()


class _Lowering(ControlFlow):
    def __init__(
        self, function: MlirFunction, target: Target, access: type[Access], aliases: bool
    ) -> None:
        super().__init__(target, access)
        self.function = function
        self.aliases = aliases
        self.module.functions["@zeros"] = ZEROS_TEXT
        self.types = tuple(REGISTER[arg.type.elem] for arg in function.args)
        self.args = {arg: i for i, arg in enumerate(function.args)}
        pointers = Pointers(function)
        self._pointers = pointers
        self._argument = pointers.argument
        self.stored_args = pointers.stored
        self.in_memory: set[Value] = set()
        """Products that are added to memory, so that the following store does nothing."""
        self.written: set[Op] = set()
        """Operations of masks, written before their turn."""
        if aliases:
            self.stored_args.add(None)
        else:
            self.access.private = pointers.only_added_to()

    def lowered(self) -> Lowered:
        for arg, i in self.args.items():
            self.env[arg] = f"%a{i}"
        for i, block in enumerate(self.function.blocks):
            if i:
                self.code.label(block.label.strip("^"))
                self.products.packed.clear()  # the block before may not have run
            self.ops(block)
        given = ", ".join(
            f"ptr noalias %a{i}" if type_ == "ptr" and not self.aliases else f"{type_} %a{i}"
            for i, type_ in enumerate(self.types)
        )
        ids = ", ".join(f"i32 %pid_{axis}, i32 %num_{axis}" for axis in "xyz")
        self.module.functions["@program"] = (
            f"define hidden void @program({given}, {ids}, ptr noalias %scratch, ptr %extra) "
            f"noinline #0 {{\n{self.code.body()}\n}}"
        )
        return Lowered(
            name=self.function.name,
            ir=self.module.text(),
            arguments=self.types,
            scratch_bytes=self.code.scratch_bytes,
            stored=()
            if self.aliases
            else tuple(sorted(arg for arg in self.stored_args if arg is not None)),
            private=tuple(sorted(self.access.private)),
        )

    # ---- operations

    def ops(self, block: Block) -> None:
        for op in block.ops:
            if op not in self.written:
                self.op(op)

    def _early(self, op: Op) -> None:
        """Write an operation before its turn."""
        self.op(op)
        self.written.add(op)

    def op(self, op: Op) -> None:
        handler = getattr(self, "_op_" + op.name.replace(".", "_"), None)
        if op.name.endswith("barrier"):  # a program runs on one thread
            return
        if handler is not None:
            handler(op)
        elif op.name.startswith(_SCALARS):
            self._elementwise(op)
        else:
            raise op.refused("unknown to the CPU compiler; use a GPU, or TILEGEN_CPU=torch")

    def _op_arith_constant(self, op: Op) -> None:
        type_ = op.result.type
        text = op.text.strip()
        text = text.split("}")[-1].strip() if text.startswith("{") else text
        text = text[6:-1] if text.startswith("dense<") else text
        if type_.elem in FLOATS:
            text = bits(float_of(text, type_.elem), type_.elem)
        self.env[op.result] = Constant(type_.elem, type_.shape, text) if type_.shape else text

    def _op_tt_splat(self, op: Op) -> None:
        value, type_ = self.env[op.operands[0]], op.result.type
        if type_.elem == "ptr":
            arg = self._argument(op.operands[0])
            self.env[op.result] = Address(type_.shape, value, type_.pointee, [], arg)
        elif value.startswith("%"):
            self.env[op.result] = Splat(type_.elem, type_.shape, value)
        else:
            self.env[op.result] = Constant(type_.elem, type_.shape, value)

    def _op_tt_make_range(self, op: Op) -> None:
        self.env[op.result] = RangeTile("i32", op.result.type.shape, int(op.attribute("start")))

    def _op_tt_get_program_id(self, op: Op) -> None:
        self.env[op.result] = f"%pid_{op.text.split()[0]}"

    def _op_tt_get_num_programs(self, op: Op) -> None:
        self.env[op.result] = f"%num_{op.text.split()[0]}"

    def _view(self, op: Op) -> None:
        self.env[op.result] = view(self.env[op.operands[0]], op, op.result.type.shape)

    _op_tt_expand_dims = _op_tt_broadcast = _op_tt_trans = _view

    def _op_tt_reshape(self, op: Op) -> None:
        self.env[op.result] = reshaped(self.env[op.operands[0]], op.result.type.shape)

    def _op_tt_addptr(self, op: Op) -> None:
        base, offset = (self.env[value] for value in op.operands)
        if isinstance(base, Address):
            offsets = [*base.offsets, offset]
            self.env[op.result] = Address(base.shape, base.base, base.pointee, offsets, base.arg)
            return
        memory, type_ = MEMORY[op.result.type.pointee], op.operands[1].type.elem
        self.env[op.result] = self.code.emit(
            f"getelementptr {memory}, ptr {base}, {type_} {offset}"
        )

    def _op_tt_bitcast(self, op: Op) -> None:
        value, type_ = self.env[op.operands[0]], op.result.type
        if type_.elem != "ptr":
            self._elementwise(op)
        elif not isinstance(value, Address):
            self.env[op.result] = value
        elif MEMORY[value.pointee] == MEMORY[type_.pointee] or not value.offsets:
            self.env[op.result] = Address(
                value.shape, value.base, type_.pointee, value.offsets, value.arg
            )
        else:
            raise op.refused(f"addresses of {value.pointee} as those of {type_.pointee}")

    def _elementwise(self, op: Op) -> None:
        args = [self.env[value] for value in op.operands]
        type_ = op.result.type
        if not type_.shape:
            elems = [value.type.elem for value in op.operands]
            self.env[op.result] = compute(self.code, op, elems, type_.elem, args, None)
            return
        nodes = [
            arg if isinstance(arg, Node) else Splat(value.type.elem, type_.shape, arg)
            for arg, value in zip(args, op.operands, strict=True)
        ]
        self._settle(op.result, Elementwise(type_.elem, type_.shape, op, nodes))

    # ---- memory

    def _op_tt_load(self, op: Op) -> None:
        pointer, *rest = (self.env[value] for value in op.operands)
        mask, other = (*rest, None, None)[:2]
        type_, arg = op.result.type, self._argument(op.operands[0])
        if not isinstance(pointer, Address):
            self.access.executed(self.code, self.loops.counted, "load", arg, type_.elem, (), mask)
            self.env[op.result] = self.access.scalar(
                self.code, pointer, type_.elem, mask, other, arg, op.line
            )
            return
        mask, other = self._tile(op, 1), self._tile(op, 2)
        self.access.executed(
            self.code, self.loops.counted, "load", arg, type_.elem, type_.shape, mask
        )
        node = LoadTile(type_.elem, type_.shape, pointer, mask, other, self.access, op.line)
        if len(type_.shape) == 1 and type_.elem not in FLOATS and pointer.step(0) is None:
            # A look-up, such as of pages: addresses of this and of the next iteration read it.
            self.env[op.result] = self.loops.stored(node)
            self.loops.flush()
            return
        if len(type_.shape) == 2 and self._pointers.is_looked_up(op.operands[0]):
            node.streams = False
            node.next = following(self.loop, op.operands[0], self.env, self.code, self.op)
        product = product_in_memory(op, pointer) if self.access.vectors else None
        if product and not self.aliases:
            self.in_memory.add(product)
            self.env[op.result] = node
            return
        if self.stored_args and (arg is None or {arg, None} & self.stored_args):
            # A store to the same tensor may come before the operation that reads this tile.
            self.env[op.result] = self.loops.stored(node)
            self.loops.flush()
            return
        self._settle(op.result, node)

    def _tile(self, op: Op, operand: int) -> Node | None:
        """Return an operand of a load or store as a tile; None if it is absent."""
        if operand >= len(op.operands):
            return None
        value = op.operands[operand]
        node = self.env[value]
        shape = op.operands[0].type.shape
        return node if isinstance(node, Node) else Splat(value.type.elem, shape, node)

    def _op_tt_store(self, op: Op) -> None:
        pointer, arg = self.env[op.operands[0]], self._argument(op.operands[0])
        elem = op.operands[1].type.elem
        if not isinstance(pointer, Address):
            value = self.env[op.operands[1]]
            mask = self.env[op.operands[2]] if len(op.operands) > 2 else None
            self.access.executed(self.code, self.loops.counted, "store", arg, elem, (), mask)
            self.access.scalar_store(self.code, pointer, elem, value, mask, arg, op.line)
            return
        value, mask = self._tile(op, 1), self._tile(op, 2)
        assert value is not None
        self.access.executed(self.code, self.loops.counted, "store", arg, elem, value.shape, mask)
        if op.operands[1] in self.in_memory:
            return
        self.loops.add(Root("store", value, pointer, mask, line=op.line))
        self.loops.flush()

    def _op_tt_atomic_rmw(self, op: Op) -> None:
        kind = kind_of(op)
        if kind not in ADDITIONS or op.result.users:
            raise op.refused(f"{kind}, expected an addition whose old value is not used")
        pointer, arg = self.env[op.operands[0]], self._argument(op.operands[0])
        elem = op.operands[1].type.elem
        if elem in ("bf16", "f16"):
            raise op.refused(f"an atomic addition of {elem}")
        if not isinstance(pointer, Address):
            value, *mask = (self.env[operand] for operand in op.operands[1:])
            self.access.scalar_add(
                self.code, pointer, elem, value, mask[0] if mask else None, arg, op.line
            )
            return
        value, mask = self._tile(op, 1), self._tile(op, 2)
        assert value is not None
        self.loops.add(Root("add", value, pointer, mask, line=op.line))
        self.loops.flush()

    # ---- choice of the tiles to store

    def _settle(self, value: Value, node: Node) -> None:
        """Leave a tile to the operation that reads it, or store it in a buffer.

        Integers and masks are never stored. A float is stored if it is read more than once, or in a
        block that may run often.
        """
        self.env[value] = node
        users = _readers(value)
        if not users or (node.elem not in FLOATS and not isinstance(node, LoadTile)):
            return
        near = all(user.block is value.block for user in users)
        if near and len(users) == 1:
            return
        only_products = all(user.name == "tt.dot" for user in users)
        if only_products and isinstance(node, LoadTile):  # packed from memory, once for each form
            return
        narrow = only_products and node.elem == "bf16" and bool(self.code.target.pairs)
        self.env[value] = self.loops.stored(node, narrow=narrow)

    def _op_tt_reduce(self, op: Op) -> None:
        body = op.regions[0].ops
        if len(op.operands) != 1 or len(body) != 2:
            raise op.refused("a reduction by more than one operation")
        node, axis = self.env[op.operands[0]], int(op.attribute("axis"))
        if len(node.shape) == 1:
            type_ = REGISTER[node.elem]
            slot = self.code.slot(type_, align=8)
            self.loops.add(Root("reduce", node, slot, axis=0, combine=body[0]))
            self.loops.flush()
            self.env[op.result] = self.code.emit(f"load {type_}, ptr {slot}")
            return
        shape = tuple(size for i, size in enumerate(node.shape) if i != axis)
        buffer = self.loops.buffer(node.elem, shape)
        self.loops.add(Root("reduce", node, buffer, axis=axis, combine=body[0]))
        self.env[op.result] = buffer

    def _op_tt_dot(self, op: Op) -> None:
        left, right, start = op.operands
        if len(op.result.type.shape) != 2 or op.result.type.elem != "f32":
            raise op.refused(f"a product of type {op.result.type}")
        operands = (left, self.env[left]), (right, self.env[right])
        reads = self._pointers.is_read_only
        ranges = ranges_of(op, self.env, self.code, self._early, reads)
        if op.result in self.in_memory:
            address: Address = self.env[start].address
            self.env[op.result] = self.products.add_to_memory(*operands, address, ranges)
            return
        into, init, scale = self._start(op, start)
        self.products.product(*operands, into, init, scale, ranges=ranges)
        self.env[op.result] = into

    def _start(self, op: Op, value: Value) -> tuple[Buffer, Init, str]:
        """Return the buffer of a product, how it starts, and the factors of its rows."""
        node = self.env[value]
        if isinstance(node, Constant) and node.text == bits(0.0):
            return self.loops.buffer("f32", node.shape), "zero", "null"
        if isinstance(node, Elementwise) and node.op.name == "arith.mulf":
            for i, factor in enumerate(node.args):
                before = node.op.operands[1 - i]
                held = self.env[before]
                if isinstance(held, Buffer) and held.shape == node.shape and factor.step(1) == 0:
                    # Store the factors first: they may depend on roots that wait.
                    scale = self.loops.stored(_column(factor))
                    alone = before.users == [node.op] and value.users == [op]
                    into = self._reused(held, alone and before.block is op.block)
                    return into, "scale", scale.pointer
        if isinstance(node, Buffer):
            alone = value.users == [op] and value.block is op.block
            return self._reused(node, alone), "load", "null"
        return self.loops.stored(node), "load", "null"

    def _reused(self, buffer: Buffer, alone: bool) -> Buffer:
        """Return the buffer that a product adds to: the buffer of its start if no one else reads
        it in this iteration, else a copy."""
        if alone:
            return buffer
        copy = self.loops.buffer(buffer.elem, buffer.shape)
        self.loops.add(Root("buffer", buffer, copy))
        return copy


def _readers(value: Value) -> list[Op]:
    """Return the operations that read a value, directly or through views."""
    readers: list[Op] = []
    for user in value.users:
        readers += _readers(user.result) if user.name in VIEWS else [user]
    return readers


def _column(node: Node) -> Node:
    """Return a tile that is constant along each row as a tile of one axis."""
    while isinstance(node, View) and node.axes.count(0) == 1:
        if len(node.of.shape) == 1 and node.axes == (0,):
            return node.of
        if len(node.of.shape) != 2 or node.axes[0] != 0:
            break
        node = node.of
    return View(node.elem, node.shape[:1], node, (0, None))
