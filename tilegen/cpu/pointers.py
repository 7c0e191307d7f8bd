"""Trace the addresses of a kernel to its arguments: which it writes, and which it only adds to."""

from __future__ import annotations

from tilegen.cpu.mlir import Block, MlirFunction, Op, Value

VIEWS = ("tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape")
_ADDRESSES = ("tt.splat", "tt.addptr", "tt.bitcast", *VIEWS)
ADDITIONS = ("fadd", "add")
"""Atomic operations that the CPU compiler knows."""


class Pointers:
    """The arguments of a function from which its addresses derive."""

    def __init__(self, function: MlirFunction) -> None:
        self._places = {arg: i for i, arg in enumerate(function.args)}
        self.stored: set[int | None] = set()
        """Arguments through which the kernel writes; None for an address of unknown origin."""
        for block in function.blocks:
            self._find_stores(block)

    def argument(self, pointer: Value) -> int | None:
        """Return the argument from which an address derives; None if it is unknown."""
        while pointer not in self._places:
            if pointer.op is None or pointer.op.name not in _ADDRESSES:
                return None
            pointer = pointer.op.operands[0]
        return self._places[pointer]

    def is_read_only(self, op: Op) -> bool:
        """Check whether an operation is a load from an argument that the kernel never writes."""
        arg = self.argument(op.operands[0]) if op.name == "tt.load" else None
        return arg is not None and not {arg, None} & self.stored

    def is_looked_up(self, value: Value) -> bool:
        """Check whether a value depends on one that was loaded, or that a loop carries."""
        seen: set[Value] = set()
        waiting = [value]
        while waiting:
            value = waiting.pop()
            if value in seen or value in self._places:
                continue
            seen.add(value)
            if value.op is None:
                if value is not value.block.args[0]:  # the counter of a loop
                    return True
            elif value.op.name == "tt.load" or value.op.regions:
                return True
            else:
                waiting += value.op.operands
        return False

    def only_added_to(self) -> frozenset[int]:
        """Return the arguments that the kernel accesses by atomic additions only."""
        return frozenset(
            i
            for arg, i in self._places.items()
            if arg.type.elem == "ptr" and i in self.stored and _is_added_to(arg, arg.type.pointee)
        )

    def _find_stores(self, block: Block) -> None:
        for op in block.ops:
            if op.name in ("tt.store", "tt.atomic_rmw"):
                self.stored.add(self.argument(op.operands[0]))
            for region in op.regions:
                self._find_stores(region)


def kind_of(op: Op) -> str:
    """Return the kind of an atomic operation: `fadd`, `max`, and so on."""
    return op.text.split(",")[0].strip()


def _is_added_to(address: Value, elem: str) -> bool:
    """Check whether all addresses that derive from an address are used only for atomic additions,
    of elements of type `elem`."""
    for user in address.users:
        if user.operands.count(address) != 1 or user.operands[0] is not address:
            return False
        if user.name == "tt.atomic_rmw":
            if kind_of(user) not in ADDITIONS or user.result.users:
                return False
            if user.operands[1].type.elem != elem:
                return False
            continue
        if user.name not in _ADDRESSES or user.name == "tt.bitcast":
            return False
        if not _is_added_to(user.result, elem):
            return False
    return True
