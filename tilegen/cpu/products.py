"""Write matrix products: packed operands, and microkernels that all loops of a kernel share.

The right operand is packed into panels (`panels`), or read in place. The left operand is read by
broadcasts, so transposing it is free. A microkernel keeps rows x vectors accumulators in
registers and sums over the whole depth.

With instructions for pairs of bf16, two rows of depth are interleaved in words of 32 bits, in both
operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilegen.cpu import amx
from tilegen.cpu.edges import Kept, Ranges
from tilegen.cpu.ir import Code, Index, typed
from tilegen.cpu.loops import Loops
from tilegen.cpu.mlir import Value
from tilegen.cpu.pairs import added
from tilegen.cpu.panels import packed, panels
from tilegen.cpu.thin import Left, ThinProduct, fits
from tilegen.cpu.tiles import Address, Buffer, LoadTile, Node, View

Init = Literal["zero", "load", "scale"]


def stripped(node: Node) -> tuple[Node, bool]:
    """Return a tile without its transpositions, and whether their number is odd."""
    swapped = False
    while isinstance(node, View) and node.axes == (1, 0):
        node, swapped = node.of, not swapped
    return node, swapped


class Products:
    """The products of one function."""

    def __init__(self, code: Code, loops: Loops) -> None:
        self.code = code
        self.loops = loops
        self.packed: dict[tuple[str, Value, bool], Left | str] = {}
        """Packed operands that all following code can read."""

    def pairs(self, elem: str, depth: int) -> bool:
        """Check whether a product multiplies pairs of bf16."""
        return bool(self.code.target.pairs) and elem == "bf16" and depth >= 2

    # ---- operands

    def left(self, value: Value, node: Node, pairs: bool) -> Left:
        """Return a left operand (rows, depth), packing it the first time."""
        key = "left", value, pairs
        if key not in self.packed:
            inner, swapped = stripped(node)
            if pairs and swapped:
                width = inner.shape[1]
                self.packed[key] = Left(packed(self.code, inner, False, width, True), 1, width)
            elif pairs:
                buffer = self.loops.stored(inner, narrow=True)
                self.packed[key] = Left(buffer.pointer, inner.shape[1] // 2, 1)
            else:
                buffer = self.loops.stored(inner)
                stride = inner.shape[1]
                strides = (1, stride) if swapped else (stride, 1)
                self.packed[key] = Left(buffer.pointer, *strides)
            self.loops.flush()
        made = self.packed[key]
        assert isinstance(made, Left)
        return made

    def right(self, value: Value, node: Node, pairs: bool) -> str:
        """Return the panels of a right operand (depth, columns), packing it the first time."""
        key = "right", value, pairs
        if key not in self.packed:
            self.loops.flush()
            inner, swapped = stripped(node)
            width = self._panel_width(node.shape[1])
            self.packed[key] = panels(self.code, inner, swapped, width, pairs)
        made = self.packed[key]
        assert isinstance(made, str)
        return made

    def _panel_width(self, columns: int) -> int:
        return min(columns, self.code.target.lanes * self.code.target.vectors)

    # ---- the product

    def product(
        self,
        left: tuple[Value, Node],
        right: tuple[Value, Node],
        into: Buffer,
        init: Init,
        scale: str = "null",
        stride: int = 0,
        ranges: Ranges | None = None,
    ) -> None:
        """Write `into = init + left @ right`.

        `scale` points to a factor for each row of `into`. Rows of `into` are `stride` elements
        apart, or dense if it is 0. Columns or steps outside of `ranges` may be left out.
        """
        (m, depth), n = left[1].shape, right[1].shape[1]
        pairs = self.pairs(left[1].elem, depth)
        node, swapped = stripped(right[1])
        is_packed = ("right", right[0], pairs) in self.packed
        # A row of a transposed left operand is no vector.
        is_row = not (swapped and stripped(left[1])[1])
        is_plain = is_row and not (stride or is_packed)
        if is_plain and fits(self.code, (m, n, depth), node, swapped, pairs):
            assert isinstance(node, LoadTile)
            a = self.left(*left, pairs)
            self.loops.flush()
            ThinProduct(self.code, a, node, swapped, pairs, into).write(init, scale)
            return
        a = self.left(*left, pairs)
        b = self.right(*right, pairs)
        self.loops.flush()
        steps = depth // 2 if pairs else depth
        stride = stride or n
        kept = ranges.kept if ranges else None
        key = ("product", m, n, steps, a.row, a.column, init, pairs, stride, kept)
        name, new = self.code.module.shared(key, "product")
        if new:
            code = Code(self.code.module)
            kernel = _Microkernels(code, m, n, steps, a, init, pairs, stride, kept)
            self.code.module.functions[name] = kernel.text(name, self._panel_width(n))
        ends = [ranges.first, ranges.end] if ranges else ["null", "null"]
        arguments = (a.pointer, b, into.pointer, scale, *ends)
        self.code.do(f"call void {name}({', '.join(f'ptr {place}' for place in arguments)})")

    def add_to_memory(
        self,
        left: tuple[Value, Node],
        right: tuple[Value, Node],
        address: Address,
        ranges: Ranges | None,
    ) -> Buffer:
        """Write `memory += left @ right`, for dense rows; return the tile in memory as a buffer."""
        place = address.place(self.code, (0, 0), None)
        into = Buffer("f32", address.shape, place)
        self.product(left, right, into, "load", stride=address.step(0) or 0, ranges=ranges)
        return into


@dataclass
class _Microkernels:
    """The function that computes products of one shape."""

    code: Code
    rows: int
    columns: int
    steps: int
    left: Left
    init: Init
    pairs: bool
    stride: int
    """Distance between rows of the result [elements]."""
    kept: Kept | None

    def text(self, name: str, width: int) -> str:
        code, target = self.code, self.code.target
        tiles = self.rows, self.columns, self.steps
        dense = self.stride == self.columns
        if target.amx and self.pairs and dense and amx.fits(*tiles, self.left.column):
            amx.product(code, *tiles, self.left.row, width, self.init)
            return self._function(name)
        lanes = min(target.lanes, width)
        vectors = width // lanes
        most = max(target.rows * target.vectors // vectors, 1)
        with code.loop(0, self.columns, width) as column:
            panel = code.gep("float", "%b", code.times(column, self.steps))
            first = 0
            for rows, count in row_blocks(self.rows, most):
                end = first + rows * count
                if count == 1:
                    with code.own_memo():
                        self._blocks(rows, vectors, lanes, first, column, panel)
                else:
                    with code.loop(first, end, rows) as row:
                        self._blocks(rows, vectors, lanes, row, column, panel)
                first = end
        return self._function(name)

    def _function(self, name: str) -> str:
        code = self.code
        code.do("ret void")
        names = ("a", "b", "c", "scale", "first", "end")
        arguments = ", ".join(f"ptr noalias %{name}" for name in names)
        return f"define internal void {name}({arguments}) noinline #0 {{\n{code.body()}\n}}"

    def _blocks(
        self, rows: int, vectors: int, lanes: int, row: Index, column: Index, panel: str
    ) -> None:
        """Compute a block of rows x vectors of the result: its halves if one is not read and half
        the accumulators still keep the multipliers busy."""
        code, width = self.code, vectors * lanes
        if self.kept != "columns" or vectors < 4:
            self._block(rows, vectors, lanes, row, column, panel, width)
            return
        halves = [(code.plus(column, at), code.gep("float", panel, at)) for at in (0, width // 2)]
        ends = [self._range(rows, width // 2, row, half, 1)[1] for half, _ in halves]
        tests = [code.emit(f"icmp ne i64 {end}, 0") for end in ends]
        whole, parts, done = code.labels("whole", "halves", "done")
        both = code.emit(f"and i1 {tests[0]}, {tests[1]}")
        code.do(f"br i1 {both}, label %{whole}, label %{parts}")
        code.label(whole)
        with code.own_memo():
            self._block(rows, vectors, lanes, row, column, panel, width)
        code.do(f"br label %{done}")
        code.label(parts)
        for half, place in halves:
            with code.own_memo():
                self._block(rows, vectors // 2, lanes, row, half, place, width)
        code.do(f"br label %{done}")
        code.label(done)

    def _block(
        self,
        rows: int,
        vectors: int,
        lanes: int,
        row: Index,
        column: Index,
        panel: str,
        width: int,
    ) -> None:
        """Compute a block of rows x vectors of the result. Rows of the panel are `width` elements
        apart."""
        code = self.code
        lane = (0, lanes) if lanes > 1 else None
        vector = typed("float", lane)
        places = {
            (r, v): code.gep(
                "float",
                "%c",
                code.plus(code.times(code.plus(row, r), self.stride), code.plus(column, v * lanes)),
            )
            for r in range(rows)
            for v in range(vectors)
        }
        sums = {place: code.slot(vector) for place in places}
        for (r, v), slot in sums.items():
            start = code.number("float", 0.0, lane)
            if self.init != "zero":
                start = code.emit(f"load {vector}, ptr {places[r, v]}, align 4")
            if self.init == "scale":
                factor = code.gep("float", "%scale", code.plus(row, r))
                factor = code.splat("float", code.emit(f"load float, ptr {factor}, align 4"), lane)
                start = code.emit(f"fmul {vector} {start}, {factor}")
            code.do(f"store {vector} {start}, ptr {slot}")
        left = code.gep("float", "%a", code.times(row, self.left.row))
        unrolled = min(code.target.unroll, self.steps)
        first, end = self._range(rows, vectors * lanes, row, column, unrolled)
        with code.loop(first, end, unrolled) as step:
            at_left = code.gep("float", left, code.times(step, self.left.column))
            at_right = code.gep("float", panel, code.times(step, width))
            for u in range(unrolled):
                rights: list[str] = []
                for v in range(vectors):
                    at = code.gep("float", at_right, u * width + v * lanes)
                    rights.append(code.emit(f"load {vector}, ptr {at}, align 4"))
                for r in range(rows):
                    at = code.gep("float", at_left, r * self.left.row + u * self.left.column)
                    factor = code.emit(f"load float, ptr {at}, align 4")
                    factor = code.splat("float", factor, lane)
                    for v in range(vectors):
                        so_far = code.emit(f"load {vector}, ptr {sums[r, v]}")
                        total = added(code, self.pairs, so_far, factor, rights[v], lanes)
                        code.do(f"store {vector} {total}, ptr {sums[r, v]}")
        for place, slot in sums.items():
            value = code.emit(f"load {vector}, ptr {slot}")
            code.do(f"store {vector} {value}, ptr {places[place]}, align 4")

    def _range(
        self, rows: int, width: int, row: Index, column: Index, unrolled: int
    ) -> tuple[Index, Index]:
        """Return the first step of a block's sums and their end, multiples of `unrolled`."""
        if not self.kept:
            return 0, self.steps
        code = self.code
        first, end = (
            self._extreme(pointer, order, rows, row)
            for pointer, order in (("%first", "smin"), ("%end", "smax"))
        )
        if self.kept == "columns":  # all steps, or none if the block has no column in the range
            before = code.emit(f"icmp slt i64 {column}, {end}")
            after = code.emit(f"icmp sgt i64 {code.plus(column, width)}, {first}")
            both = code.emit(f"and i1 {before}, {after}")
            return 0, code.select(both, str(self.steps), "0", "i64", None)
        size = unrolled * (2 if self.pairs else 1)
        first = code.emit(f"sdiv i64 {first}, {size}")
        end = code.emit(f"sdiv i64 {code.plus(end, size - 1)}, {size}")
        return code.times(first, unrolled), code.times(end, unrolled)

    def _extreme(self, pointer: str, order: str, rows: int, row: Index) -> str:
        """Return the least or the largest end of a block's ranges."""
        code = self.code
        ends = [code.gep("i32", pointer, code.plus(row, r)) for r in range(rows)]
        value, *others = [code.emit(f"load i32, ptr {end}, align 4") for end in ends]
        for other in others:
            value = code.intrinsic(order, "i32", None, value, other)
        return code.emit(f"sext i32 {value} to i64")


def row_blocks(rows: int, most: int) -> list[tuple[int, int]]:
    """Return heights of row blocks with the number of blocks of each.

    As many blocks as possible have the height `most`. Blocks of 4 rows replace a thin rest, which
    would leave the multipliers idle.
    """
    for tall in range(rows // most, -1, -1):
        rest = rows - tall * most
        low = min(4, most)
        if rest % low == 0 or tall == 0:
            blocks = [(most, tall), (low, rest // low), (rest % low, 1)]
            return [(height, count) for height, count in blocks if height and count]
    raise AssertionError(rows)
