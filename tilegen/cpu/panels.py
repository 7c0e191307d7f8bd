"""Panels: the right operand of a product as microkernels read it, panel by panel of columns, row by
row."""

from __future__ import annotations

from tilegen.cpu.conversions import to_memory
from tilegen.cpu.ir import Code, Index, typed
from tilegen.cpu.tiles import Elementwise, LoadTile, Node, View


def panels(code: Code, node: Node, swapped: bool, width: int, pairs: bool) -> str:
    """Return the address of the panels of a tile: of the tile itself where its rows turn out to be
    those of a single panel, or else of panels that are written."""
    if pairs or swapped or not _may_be_panel(node, width):
        return packed(code, node, swapped, width, pairs)
    assert isinstance(node, LoadTile)
    place, second = (node.address.place(code, (row, 0), None) for row in (0, 1))
    addresses = [code.emit(f"ptrtoint ptr {at} to i64") for at in (place, second)]
    apart = code.emit(f"sub i64 {addresses[1]}, {addresses[0]}")
    is_panel = code.emit(f"icmp eq i64 {apart}, {4 * width}")
    if node.mask is not None:
        is_panel = code.emit(f"and i1 {is_panel}, {_is_whole(code, node.mask)}")
    panel = code.slot("ptr")
    code.do(f"store ptr {place}, ptr {panel}")
    other, done = code.labels("other", "done")
    code.do(f"br i1 {is_panel}, label %{done}, label %{other}")
    code.label(other)
    with code.own_memo():
        code.do(f"store ptr {packed(code, node, swapped, width, pairs)}, ptr {panel}")
    code.do(f"br label %{done}")
    code.label(done)
    return code.emit(f"load ptr, ptr {panel}")


def _may_be_panel(node: Node, width: int) -> bool:
    """Check whether a tile of fp32 may lie in memory as a panel of `width` columns does."""
    return (
        isinstance(node, LoadTile)
        and node.shape[0] > 1
        and node.shape[1] == width
        and node.elem == "f32"
        and (node.mask is None or node.mask.step(1) == 0)
        and node.access.vectors
        and node.address.step(1) == 1
        and all(_is_even(offset, 0) for offset in node.address.offsets)
    )


def _is_whole(code: Code, mask: Node) -> str:
    """Return whether a mask of rows is true everywhere."""
    rows = mask.shape[0]
    lanes = min(code.target.lanes, rows)
    lane = (0, lanes) if lanes > 1 else None
    whole = code.slot("i1")
    code.do(f"store i1 true, ptr {whole}")
    with code.own_memo(), code.loop(0, rows, lanes) as row:
        kept = mask.at(code, (row, 0), lane)
        if lane:
            name = f"@llvm.vector.reduce.and.v{lanes}i1"
            code.module.declare(f"declare i1 {name}({typed('i1', lane)})")
            kept = code.emit(f"call i1 {name}({typed('i1', lane)} {kept})")
        so_far = code.emit(f"load i1, ptr {whole}")
        code.do(f"store i1 {code.emit(f'and i1 {so_far}, {kept}')}, ptr {whole}")
    return code.emit(f"load i1, ptr {whole}")


def _is_even(node: Node, axis: int) -> bool:
    """Check whether integers grow along an axis by the same number from each place to the next."""
    if node.step(axis) is not None:
        return True
    if isinstance(node, View):
        return _is_even(node.of, node.axes.index(axis))
    if not isinstance(node, Elementwise):
        return False
    if node.op.name == "arith.muli":
        return any(
            factor.step(axis) == 0 and _is_even(other, axis)
            for factor, other in (node.args, node.args[::-1])
        )
    sums = ("arith.addi", "arith.subi", "arith.extsi")
    return node.op.name in sums and all(_is_even(arg, axis) for arg in node.args)


def packed(code: Code, node: Node, swapped: bool, width: int, pairs: bool) -> str:
    """Write a tile (depth, columns) in panels of `width` columns, and return their address; a
    `swapped` tile is transposed."""
    depth, columns = node.shape[::-1] if swapped else node.shape
    out = code.scratch(2 * depth * columns if pairs else 4 * depth * columns)
    words = depth // 2 if pairs else depth
    lanes = min(code.target.lanes, columns, words) if swapped else min(code.target.lanes, columns)
    with code.own_memo(), code.loop(0, columns, lanes) as column:
        panel = code.emit(f"udiv i64 {column}, {width}")
        inside = code.emit(f"urem i64 {column}, {width}")
        first = code.plus(code.times(panel, words * width), inside)
        if swapped:
            with code.loop(0, words, lanes) as word:
                rows = [
                    _words(code, node, code.plus(column, r), word, lanes, pairs)
                    for r in range(lanes)
                ]
                for r, row in enumerate(transposed(code, rows)):
                    at = code.plus(first, code.times(code.plus(word, r), width))
                    _put(code, out, at, row, lanes)
        else:
            with code.loop(0, words) as word:
                row = _interleaved(code, node, word, column, lanes, pairs)
                _put(code, out, code.plus(first, code.times(word, width)), row, lanes)
    return out


def _put(code: Code, out: str, at: Index, row: str, lanes: int) -> None:
    place = code.gep("float", out, at)
    vector = typed("float", (0, lanes) if lanes > 1 else None)
    code.do(f"store {vector} {row}, ptr {place}, align 4")


def _words(code: Code, node: Node, row: Index, word: Index, lanes: int, pairs: bool) -> str:
    """Return words along a row: fp32 elements or pairs of bf16."""
    if not pairs:
        return node.at(code, (row, word), (1, lanes) if lanes > 1 else None)
    wide = 1, 2 * lanes
    value = node.at(code, (row, code.times(word, 2)), wide)
    halves = to_memory(code, value, "bf16", wide)
    return code.emit(f"bitcast <{2 * lanes} x i16> {halves} to {typed('float', (0, lanes))}")


def _interleaved(
    code: Code, node: Node, word: Index, column: Index, lanes: int, pairs: bool
) -> str:
    """Return words of adjacent columns: fp32 elements, or pairs of two rows."""
    lane = (1, lanes) if lanes > 1 else None
    if not pairs:
        return node.at(code, (word, column), lane)
    halves = [
        to_memory(
            code, node.at(code, (code.plus(code.times(word, 2), i), column), lane), "bf16", lane
        )
        for i in (0, 1)
    ]
    if not lane:
        both = code.joined("i16", halves, 1)
        return code.emit(f"bitcast <2 x i16> {both} to float")
    order = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
    both = code.shuffle(typed("i16", lane), halves[0], halves[1], order)
    return code.emit(f"bitcast <{2 * lanes} x i16> {both} to {typed('float', lane)}")


def transposed(code: Code, rows: list[str]) -> list[str]:
    """Transpose a square of fp32 by interleaving rows half a square apart, log2(size) times."""
    size = len(rows)
    vector = typed("float", (0, size))
    halves = range(size // 2), range(size // 2, size)
    orders = [[place for i in half for place in (i, i + size)] for half in halves]
    for _ in range(size.bit_length() - 1):
        rows = [
            code.shuffle(vector, rows[i], rows[i + size // 2], order)
            for i in range(size // 2)
            for order in orders
        ]
    return rows
