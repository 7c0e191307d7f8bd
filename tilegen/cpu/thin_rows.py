"""Read the rows of a product's right operand where they lie, and fetch the rows that come next.

The operand waits for memory. Rows of a tensor follow each other, and are fetched some KiB ahead.
Where keys lie in pages, the tile of the loop's next iteration is fetched if its pages are looked up
already. Otherwise a tile is fetched whole before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilegen.cpu.conversions import from_memory
from tilegen.cpu.ir import BYTES, MEMORY, Code, Index, typed
from tilegen.cpu.tiles import Address, Buffer, Load, Node

AHEAD = 8 << 10
"""Least distance between what is read and what is fetched [bytes]: what arrives in the latency of
memory, and a fraction of the first-level cache. With more rows reading is less even."""
AHEAD_OF_ROW = 2 << 10
"""The same for each row of a product [bytes]."""
INTO_L1, INTO_L2 = 3, 2
"""LLVM's names of the caches to fetch into. Rows in pages that do not follow each other in memory
are fetched into L2: they often lie 2 KiB or 4 KiB apart, and would replace each other in few sets
of L1."""
_LINE = 64


class Rows:
    """The rows of a right operand, read by a product of `height` rows. Creating the object writes
    what reading needs before the first row."""

    def __init__(self, code: Code, right: Load, height: int) -> None:
        self.code = code
        self.right = right
        self.height = height
        self.row_bytes = right.shape[1] * BYTES[right.elem]
        self.ahead = right.next
        self.fetches = right.streams or right.next is not None
        """True: rows are fetched while others are read."""
        self.table, self.table_ahead = self._tables()
        self.are_dense = self._are_dense()
        if not self.fetches:
            self._fetch_tile()

    def _tables(self) -> tuple[str | None, str | None]:
        """Write tables of the addresses of rows that were looked up, and return their addresses:
        of this tile, and of the tile to fetch from. A tile within a page needs none."""
        here = self.right.address
        if not _are_looked_up(here):
            return None, None
        # A masked row may lie outside of its tensor.
        is_masked = self.right.mask is not None
        tables = [
            None if address is None else _row_table(self.code, address)
            for address in (None if is_masked else here, self.ahead)
        ]
        return tables[0], tables[1]

    def _are_dense(self) -> str | None:
        """Write whether the rows to fetch follow each other in memory; None if no tile with a
        single look-up is fetched ahead."""
        code, ahead = self.code, self.ahead
        if ahead is None or self.table_ahead is not None:
            return None
        first, second = (
            code.emit(f"ptrtoint ptr {ahead.place(code, (row, 0), None)} to i64") for row in (0, 1)
        )
        apart = code.emit(f"sub i64 {second}, {first}")
        return code.emit(f"icmp eq i64 {apart}, {self.row_bytes}")

    def elements(self, row: Index, column: Index, lane: tuple[int, int]) -> str:
        """Return elements of a row."""
        code, elem = self.code, self.right.elem
        if self.table is None:
            return self.right.at(code, (row, column), lane)
        place = code.gep(MEMORY[elem], _row_of(code, self.table, row), column)
        value = code.emit(f"load {typed(MEMORY[elem], lane)}, ptr {place}, align {BYTES[elem]}")
        return from_memory(code, value, elem, lane)

    def fetch(self, row: Index, column: Index, count: int) -> None:
        """Fetch some elements of the row that lies AHEAD, or of the same row of the next tile."""
        size, address = BYTES[self.right.elem], self.ahead or self.right.address
        if self.ahead is None:
            ahead = max(AHEAD, AHEAD_OF_ROW * self.height)
            row = self.code.plus(row, max(ahead // self.row_bytes, 1))
        columns = [self.code.plus(column, i) for i in range(0, count, _LINE // size)]
        self._prefetch(address, row, columns)

    def fetch_part(self, part: Index, parts: int) -> None:
        """Fetch a part of the lines of a tile further on, in the order of memory."""
        code, size = self.code, BYTES[self.right.elem]
        depth, columns = self.right.shape
        per_row = max(self.row_bytes // _LINE, 1)
        if depth * per_row % parts:
            return
        lines = depth * per_row // parts
        if lines % per_row == 0:
            rows = lines // per_row
            for i in range(rows):
                self.fetch(code.plus(code.times(part, rows), i), 0, columns)
            return
        for i in range(lines):
            line = code.plus(code.times(part, lines), i)
            row, place = (code.emit(f"{op} i64 {line}, {per_row}") for op in ("udiv", "urem"))
            self.fetch(row, code.times(place, _LINE // size), 1)

    def _fetch_tile(self) -> None:
        """Fetch the whole tile: where the next one lies is not known."""
        rows, columns = self.right.shape
        lines = range(0, columns, _LINE // BYTES[self.right.elem])
        with self.code.own_memo(), self.code.loop(0, rows) as row:
            self._prefetch(self.right.address, row, lines)

    def _prefetch(self, address: Address, row: Index, columns: Sequence[Index]) -> None:
        """Fetch the lines at some columns of a row."""
        code, elem = self.code, MEMORY[self.right.elem]
        if address is not self.ahead:
            self._fetch_lines([address.place(code, (row, at), None) for at in columns], INTO_L1)
        elif self.table_ahead is not None:
            first = _row_of(code, self.table_ahead, row)
            self._fetch_lines([code.gep(elem, first, at) for at in columns], INTO_L2)
        else:
            places = [address.place(code, (row, at), None) for at in columns]
            near, far, done = code.labels("dense", "apart", "fetched")
            code.do(f"br i1 {self.are_dense}, label %{near}, label %{far}")
            for label, cache in ((near, INTO_L1), (far, INTO_L2)):
                code.label(label)
                self._fetch_lines(places, cache)
                code.do(f"br label %{done}")
            code.label(done)

    def _fetch_lines(self, places: Sequence[str], cache: int) -> None:
        self.code.module.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        for place in places:  # to read data; memory need not exist there
            self.code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {cache}, i32 1)")


def _row_table(code: Code, address: Address) -> str:
    """Write the addresses of a tile's rows to a table, and return its address.

    Where rows are looked up, an address takes a dozen instructions. They are computed once for each
    tile, a vector at a time, in place of once for each vector that is read or fetched.
    """
    rows = address.shape[0]
    width = min(max(code.target.lanes // 2, 1), rows)
    table = code.slot("ptr", rows)
    with code.own_memo(), code.loop(0, rows, width) as row:
        places = address.place(code, (row, 0), (0, width))
        code.do(f"store <{width} x ptr> {places}, ptr {code.gep('ptr', table, row)}, align 8")
    return table


def _are_looked_up(address: Address) -> bool:
    """Check whether the places of a tile's rows were loaded, row by row."""

    def is_loaded(node: Node) -> bool:
        return isinstance(node, Load | Buffer) or any(is_loaded(part) for part, _ in node.parts())

    return is_loaded(address)


def _row_of(code: Code, table: str, row: Index) -> str:
    """Return the address of a row by a table."""
    return code.emit(f"load ptr, ptr {code.gep('ptr', table, row)}, align 8")
