"""Write products of few rows, such as those of a query and many keys.

Packing the right operand would take longer than the product itself, so it is read where it lies, a
vector for all rows at once, in the order of memory. Such a product waits for memory: it also
fetches what comes next (`thin_rows`).

There are two forms. Of a transposed right operand, as in `q @ trans(k)`, vectors along the rows are
multiplied and their lanes summed by a tree, for as many results as there are lanes. Rows of any
other, as in `p @ v`, are multiplied by a weight each.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.cpu.choice import MOST_OF_THIN
from tilegen.cpu.conversions import to_memory
from tilegen.cpu.ir import Code, Index, Lane, typed
from tilegen.cpu.pairs import added
from tilegen.cpu.thin_rows import Rows
from tilegen.cpu.tiles import Buffer, LoadTile, Node

AT_ONCE = 8
"""Rows whose sums stay in registers: more rows read the right operand again, from a cache."""
DEEP = 4
"""Least vectors of a row whose lanes are summed in a product of more than AT_ONCE rows."""
_UNROLL = 8


@dataclass(frozen=True)
class Left:
    """A left operand in scratch memory; strides count words of 32 bits."""

    pointer: str
    row: int
    column: int


def fits(code: Code, shape: tuple[int, int, int], node: Node, swapped: bool, pairs: bool) -> bool:
    """Check whether a product of shape (rows, columns, depth) can be written here. `node` is the
    right operand without its transpositions; `swapped` tells that their number is odd."""
    rows, columns, depth = shape
    if not isinstance(node, LoadTile) or node.address.step(1) != 1 or not node.access.vectors:
        return False
    if rows > MOST_OF_THIN or rows & (rows - 1):
        return False
    lanes = code.target.lanes
    wide = 2 * lanes if pairs else lanes
    if swapped:
        # A sum of lanes takes as long as a few vectors: of short rows it costs more than packing.
        if rows > AT_ONCE and depth < DEEP * wide:
            return False
        return depth % wide == 0 and columns % max(lanes // min(rows, AT_ONCE), 1) == 0
    return columns % wide == 0 and depth % 2 == 0


class ThinProduct:
    """A product of few rows that is written to a buffer."""

    def __init__(
        self, code: Code, left: Left, right: LoadTile, swapped: bool, pairs: bool, into: Buffer
    ) -> None:
        self.code = code
        self.left = left
        self.right = right
        self.swapped = swapped
        self.pairs = pairs
        self.into = into
        self.height, self.columns = into.shape
        self.lanes = code.target.lanes
        self.lane = (1, self.lanes)
        self.vector = typed("float", self.lane)

    def write(self, init: str, scale: str) -> None:
        """Write the product plus what `into` holds: nothing, or as it is, or times the factor of
        each row that `scale` points to."""
        self.init, self.scale = init, scale
        self.rows = Rows(self.code, self.right, self.height)
        if self.swapped:
            self._by_lanes()
        else:
            self._by_weights()

    # ---- the right operand is transposed: its rows are columns of the result

    def _by_lanes(self) -> None:
        code, lanes = self.code, self.lanes
        depth = self.right.shape[1]
        words = depth // 2 if self.pairs else depth
        unroll = next(n for n in (_UNROLL, 4, 2, 1) if words % (n * lanes) == 0)
        tall = min(self.height, lanes, AT_ONCE)
        width = lanes // tall
        # Two rows of memory at a time share the loads of the left operand.
        once = 1 if tall == 1 else min(2, width)
        with code.own_memo(), code.loop(0, self.columns, width) as column:
            for first in range(0, self.height, tall):
                sums = self._zeros(lanes)
                for i in range(0, width, once):
                    with code.loop(0, words, unroll * lanes) as start:
                        for u in range(unroll):
                            word = code.plus(start, u * lanes)
                            rights = [
                                self._words(code.plus(column, i + j), word, first == 0)
                                for j in range(once)
                            ]
                            for r in range(tall):
                                left = self._left_words(first + r, word)
                                for j, right in enumerate(rights):
                                    self._add(sums[r * width + i + j], left, right)
                totals = [code.emit(f"load {self.vector}, ptr {slot}") for slot in sums]
                self._put_lanes(summed_lanes(code, totals), first, tall, column, width)

    def _left_words(self, row: int, word: Index) -> str:
        offset = self.code.plus(word, row * self.left.row)
        at = self.code.gep("float", self.left.pointer, offset)
        return self.code.emit(f"load {self.vector}, ptr {at}, align 4")

    def _words(self, row: Index, word: Index, fetches: bool) -> str:
        """Return words along a row of the right operand."""
        code = self.code
        column = code.times(word, 2) if self.pairs else word
        if fetches and self.rows.fetches:
            self.rows.fetch(row, column, self.lanes * (2 if self.pairs else 1))
        if not self.pairs:
            return self.rows.elements(row, column, self.lane)
        wide = 1, 2 * self.lanes
        halves = to_memory(code, self.rows.elements(row, column, wide), "bf16", wide)
        return code.emit(f"bitcast {typed('i16', wide)} {halves} to {self.vector}")

    def _put_lanes(self, total: str, first: int, tall: int, column: Index, width: int) -> None:
        """Store a vector of results: rows of `width` columns."""
        lane = (1, width) if width > 1 else None
        for r in range(tall):
            if lane:
                places = range(r * width, (r + 1) * width)
                value = self.code.shuffle(self.vector, total, total, places)
            else:
                value = self.code.element("float", total, self.lane, r)
            self._put(value, first + r, column, lane)

    # ---- the right operand as it is: each of its rows is multiplied by a weight

    def _by_weights(self) -> None:
        code, lanes = self.code, self.lanes
        step = 2 if self.pairs else 1
        depth = self.right.shape[0]
        tall = min(self.height, AT_ONCE)
        vectors = self._vectors(tall)
        unroll = next(n for n in (4, 2, 1) if depth % (n * step) == 0)
        # The tile is read in passes over blocks of columns, and fetched in the order of memory.
        turns = depth // (unroll * step)
        passes = self.columns // (vectors * lanes)
        for first in range(0, self.height, tall):
            with code.own_memo(), code.loop(0, passes) as block:
                column = code.times(block, vectors * lanes)
                sums = [self._zeros(vectors) for _ in range(tall)]
                with code.loop(0, turns) as turn:
                    if self.rows.fetches and first == 0:
                        part = code.plus(code.times(block, turns), turn)
                        self.rows.fetch_part(part, passes * turns)
                    for u in range(unroll):
                        place = code.plus(code.times(turn, unroll), u)
                        rights = self._rights(code.times(place, step), column, vectors)
                        for r, slots in enumerate(sums):
                            weight = self._weight(first + r, place)
                            for slot, right in zip(slots, rights, strict=True):
                                self._add(slot, weight, right)
                for r, slots in enumerate(sums):
                    values = [code.emit(f"load {self.vector}, ptr {slot}") for slot in slots]
                    for v, value in enumerate(self._in_order(values)):
                        self._put(value, first + r, code.plus(column, v * lanes), self.lane)

    def _vectors(self, tall: int) -> int:
        """Return the vectors of columns whose sums, for `tall` rows, stay in registers."""
        target = self.code.target
        most = max(target.rows * target.vectors // tall, 2 if self.pairs else 1)
        count = 1
        while 2 * count <= most and self.columns % (2 * count * self.lanes) == 0:
            count *= 2
        return count

    def _rights(self, row: Index, column: Index, vectors: int) -> list[str]:
        """Return vectors of a row, or words of it and the next row, whose order is that of
        instructions: see `_in_order`."""
        code, lanes = self.code, self.lanes
        if not self.pairs:
            columns = [code.plus(column, v * lanes) for v in range(vectors)]
            return [self.rows.elements(row, column, self.lane) for column in columns]
        wide = 1, 2 * lanes
        words: list[str] = []
        for first in range(0, vectors * lanes, 2 * lanes):
            places = ((code.plus(row, i), code.plus(column, first)) for i in (0, 1))
            x, y = (
                to_memory(code, self.rows.elements(*place, wide), "bf16", wide) for place in places
            )
            for half in (0, 4):  # of every 128 bits, in which instructions interleave
                order = [
                    source + block + half + i
                    for block in range(0, 2 * lanes, 8)
                    for i in range(4)
                    for source in (0, 2 * lanes)
                ]
                both = code.shuffle(typed("i16", wide), x, y, order)
                words.append(code.emit(f"bitcast <{4 * lanes // 2} x i16> {both} to {self.vector}"))
        return words

    def _in_order(self, sums: list[str]) -> list[str]:
        """Return sums of `_rights` with their columns in order."""
        if not self.pairs:
            return sums
        ordered: list[str] = []
        blocks = range(0, self.lanes, 4)
        order = [s + b + i for b in blocks for s in (0, self.lanes) for i in range(4)]
        for low, high in zip(sums[::2], sums[1::2], strict=True):
            for half in (order[: self.lanes], order[self.lanes :]):
                ordered.append(self.code.shuffle(self.vector, low, high, half))
        return ordered

    def _weight(self, row: int, place: Index) -> str:
        """Return a weight, or a pair of them, in all lanes."""
        code, left = self.code, self.left
        offset = code.plus(code.times(place, left.column), row * left.row)
        at = code.gep("float", left.pointer, offset)
        return code.splat("float", code.emit(f"load float, ptr {at}, align 4"), self.lane)

    # ---- both

    def _zeros(self, count: int) -> list[str]:
        """Return the addresses of variables that start at 0."""
        slots = [self.code.slot(self.vector) for _ in range(count)]
        for slot in slots:
            self.code.do(f"store {self.vector} zeroinitializer, ptr {slot}")
        return slots

    def _add(self, slot: str, left: str, right: str) -> None:
        so_far = self.code.emit(f"load {self.vector}, ptr {slot}")
        total = added(self.code, self.pairs, so_far, left, right, self.lanes)
        self.code.do(f"store {self.vector} {total}, ptr {slot}")

    def _put(self, value: str, row: int, column: Index, lane: Lane) -> None:
        """Store results of a row, plus what was there."""
        code, vector = self.code, typed("float", lane)
        place = code.gep("float", self.into.pointer, code.plus(column, row * self.columns))
        if self.init != "zero":
            start = code.emit(f"load {vector}, ptr {place}, align 4")
            if self.init == "scale":
                factor = code.gep("float", self.scale, row)
                factor = code.emit(f"load float, ptr {factor}, align 4")
                start = code.emit(f"fmul {vector} {start}, {code.splat('float', factor, lane)}")
            value = code.emit(f"fadd {vector} {start}, {value}")
        code.do(f"store {vector} {value}, ptr {place}, align 4")


def summed_lanes(code: Code, vectors: list[str]) -> str:
    """Return a vector with the sum over lanes of each of as many vectors as there are lanes."""
    lanes, size = len(vectors), 1
    vector = typed("float", (0, lanes))
    while len(vectors) > 1:
        orders = _orders(lanes, size)
        vectors = [
            code.emit(
                f"fadd {vector} {code.shuffle(vector, a, b, orders[0])}, "
                f"{code.shuffle(vector, a, b, orders[1])}"
            )
            for a, b in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        size *= 2
    return vectors[0]


def _orders(lanes: int, size: int) -> tuple[list[int], list[int]]:
    """Return the places in two vectors, each of `size` results, whose sums hold the results of
    both.

    Each list is one instruction: results are brought together within 128 bits first, and then 128
    bits are moved whole.
    """
    if size == 1:
        low = [s + b + i for b in range(0, lanes, 4) for i in (0, 1) for s in (0, lanes)]
    elif size == 2:
        low = [s + b + i for b in range(0, lanes, 4) for s in (0, lanes) for i in (0, 1)]
    else:
        low = [b + i for b in range(0, 2 * lanes, 8) for i in range(4)]
    return low, [place + (2 if size < 4 else 4) for place in low]
