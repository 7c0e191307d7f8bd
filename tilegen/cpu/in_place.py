"""Products that are added to memory: the addend is loaded from the place of the result.

The microkernel then reads and writes that memory itself, without a copy in scratch memory.
"""

from __future__ import annotations

from tilegen.cpu.mlir import Op, Value
from tilegen.cpu.tiles import Address

_MEMORY = ("tt.load", "tt.store", "tt.atomic_rmw")


def product_in_memory(load: Op, address: Address) -> Value | None:
    """Return the product that adds to a loaded tile and is stored in its place.

    The load, the product and the store must follow each other in one block, without masks, and rows
    must be dense and not overlap. Returns None otherwise, or if another access to memory could come
    between.
    """
    start = load.result
    if len(load.operands) > 1 or len(start.users) != 1 or start.type.elem != "f32":
        return None
    dot = start.users[0]
    if dot.name != "tt.dot" or start in dot.operands[:2] or len(dot.result.users) != 1:
        return None
    store = dot.result.users[0]
    if store.name != "tt.store" or store.operands != [load.operands[0], dot.result]:
        return None
    ops = load.block.ops
    if not (load.block is dot.block is store.block):
        return None
    between = ops[ops.index(load) + 1 : ops.index(store)]
    after = ops[ops.index(dot) + 1 : ops.index(store)]
    if any(op.regions or op.name in _MEMORY[1:] for op in between):
        return None
    if any(op.name in _MEMORY for op in after):
        return None
    rows = address.step(0)
    if address.step(1) != 1 or rows is None or rows < address.shape[1]:
        return None
    return dot.result
