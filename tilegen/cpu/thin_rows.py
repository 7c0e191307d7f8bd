"""Read the rows of a product's right operand where they lie, and fetch the rows that come next.

The operand waits for memory. Rows of a tensor follow each other, and are fetched some KiB ahead.
Where keys lie in pages, the tile of the loop's next iteration is fetched if its pages are looked up
already. Otherwise a tile is fetched whole before it is read.
"""

from __future__ import annotations

from tilegen.cpu.conversions import from_memory
from tilegen.cpu.ir import BYTES, MEMORY, Code, Index, typed
from tilegen.cpu.tiles import Address, LoadTile

AHEAD = 8 << 10
"""Least distance between what is read and what is fetched [bytes]: what arrives in the latency of
memory, and a fraction of the first-level cache. With more rows reading is less even."""
AHEAD_OF_ROW = 2 << 10
"""The same for each row of a product [bytes]."""
INTO_L1, INTO_L2 = 3, 2
"""LLVM's names of the caches to fetch into. Rows that were looked up are fetched into L2: rows of a
head in pages often lie 2 KiB or 4 KiB apart, and would replace each other in few sets of L1."""
_LINE = 64


class Rows:
    """The rows of a right operand, read by a product of `height` rows. Creating the object writes
    what reading needs before the first row."""

    def __init__(self, code: Code, right: LoadTile, height: int) -> None:
        self.code = code
        self.right = right
        self.height = height
        self.row_bytes = right.shape[1] * BYTES[right.elem]
        self.ahead = right.next
        self.fetches = right.streams or right.next is not None
        """True: rows are fetched while others are read."""
        self.table, self.table_ahead = self._tables()
        if not self.fetches:
            self._fetch_tile()

    def _tables(self) -> tuple[str | None, str | None]:
        """Write tables of the addresses of rows that were looked up, and return their addresses:
        of this tile, and of the tile to fetch from."""
        if self.right.streams:
            return None, None
        ahead = None if self.ahead is None else _row_table(self.code, self.ahead)
        # A masked row may lie outside of its tensor.
        is_masked = self.right.mask is not None
        return None if is_masked else _row_table(self.code, self.right.address), ahead

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
        for i in range(0, count, _LINE // size):
            self._prefetch(address, row, self.code.plus(column, i))

    def fetch_part(self, part: Index, parts: int) -> None:
        """Fetch a part of the lines of a tile further on, in the order of memory."""
        code, size = self.code, BYTES[self.right.elem]
        per_row = max(self.row_bytes // _LINE, 1)
        lines, rest = divmod(self.right.shape[0] * per_row, parts)
        if rest:
            return
        for i in range(lines):
            if lines % per_row == 0:  # whole rows
                row: Index = code.plus(code.times(part, lines // per_row), i // per_row)
                place: Index = i % per_row
            else:
                line = code.plus(code.times(part, lines), i)
                row, place = (code.emit(f"{op} i64 {line}, {per_row}") for op in ("udiv", "urem"))
            self.fetch(row, code.times(place, _LINE // size), 1)

    def _fetch_tile(self) -> None:
        """Fetch the whole tile: where the next one lies is not known."""
        rows, columns = self.right.shape
        with self.code.own_memo(), self.code.loop(0, rows) as row:
            for column in range(0, columns, _LINE // BYTES[self.right.elem]):
                self._prefetch(self.right.address, row, column)

    def _prefetch(self, address: Address, row: Index, column: Index) -> None:
        code, cache = self.code, INTO_L1
        code.module.declare("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        if address is self.ahead and self.table_ahead is not None:
            first = _row_of(code, self.table_ahead, row)
            place, cache = code.gep(MEMORY[self.right.elem], first, column), INTO_L2
        else:
            place = address.place(code, (row, column), None)
        # To read data. Memory need not exist there.
        code.do(f"call void @llvm.prefetch.p0(ptr {place}, i32 0, i32 {cache}, i32 1)")


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


def _row_of(code: Code, table: str, row: Index) -> str:
    """Return the address of a row by a table."""
    return code.emit(f"load ptr, ptr {code.gep('ptr', table, row)}, align 8")
