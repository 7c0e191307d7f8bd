"""Products of bf16 with AMX, whose tile registers hold 16 rows of 64 bytes.

Tests compile them and check the code, but they are off: no machine has run them yet. `target.host`
never chooses AMX; a process would first have to request the registers from Linux (arch_prctl,
ARCH_REQ_XCOMP_PERM).

AMX reads the panels of `products` as they are: pairs of rows interleaved in words of 32 bits.
"""

from __future__ import annotations

from tilegen.cpu.ir import Code, Index, typed

ROWS = 16
"""Rows of a tile; a row has 16 words of 32 bits."""
BLOCK = 2
"""Tiles of the result computed together along each side: 4 results, 2 + 2 operands."""


def fits(rows: int, columns: int, steps: int, left_column: int) -> bool:
    """Check whether a product divides into whole tiles and rows of its left operand are dense."""
    whole = rows % ROWS == columns % ROWS == 0 and (steps % ROWS == 0 or steps < ROWS)
    return whole and left_column == 1


def product(
    code: Code, rows: int, columns: int, steps: int, left_row: int, width: int, init: str
) -> None:
    """Write the body of a product function: %c = init + %a @ %b.

    `steps` counts pairs, `left_row` the words in a row of the left operand, `width` the columns of
    a panel.
    """
    _configure(code, min(steps, ROWS))
    if init == "scale":
        _scale(code, rows, columns)
    down, across = (min(BLOCK, size // ROWS) for size in (rows, columns))
    across = min(across, width // ROWS)
    with code.loop(0, rows, ROWS * down) as row, code.loop(0, columns, ROWS * across) as column:
        inside = code.emit(f"urem i64 {column}, {width}")
        before = code.emit(f"sub i64 {column}, {inside}")
        panel = code.gep("float", "%b", code.plus(code.times(before, steps), inside))
        left = code.gep("float", "%a", code.times(row, left_row))
        place = code.plus(code.times(row, columns), column)
        results = {(i, j): i * BLOCK + j for i in range(down) for j in range(across)}
        for (i, j), tile in results.items():
            if init == "zero":
                _call(code, "tilezero", f"i8 {tile}")
            else:
                _move(code, "tileloadd64", tile, "%c", _at(code, place, i, j, columns), columns)
        with code.loop(0, steps, ROWS) as step:
            for i in range(down):
                _move(
                    code, "tileloadd64", 4 + i, left, code.plus(step, i * ROWS * left_row), left_row
                )
            for j in range(across):
                at = code.plus(code.times(step, width), j * ROWS)
                _move(code, "tileloadd64", 6 + j, panel, at, width)
            for (i, j), tile in results.items():
                _call(code, "tdpbf16ps", f"i8 {tile}, i8 {4 + i}, i8 {6 + j}")
        for (i, j), tile in results.items():
            _move(code, "tilestored64", tile, "%c", _at(code, place, i, j, columns), columns)
    _call(code, "tilerelease", "")


def _configure(code: Code, words: int) -> None:
    """Set the sizes of all tiles: results 16 x 16 words, operands `words` deep."""
    shape = [1, 0, *[0] * 14]
    columns = [64] * 4 + [4 * words] * 2 + [64] * 2  # bytes of a row
    rows = [ROWS] * 6 + [words] * 2
    for size in [*columns, *[0] * 8]:
        shape += [size % 256, size // 256]
    shape += [*rows, *[0] * 8]
    name = f"@tiles{words}"
    bytes_ = ", ".join(f"i8 {byte}" for byte in shape)
    code.module.functions[name] = f"{name} = internal constant [64 x i8] [{bytes_}], align 64"
    code.module.declare("declare void @llvm.x86.ldtilecfg(ptr)")
    code.do(f"call void @llvm.x86.ldtilecfg(ptr {name})")


def _scale(code: Code, rows: int, columns: int) -> None:
    """Multiply the rows of the result by their factors, in memory."""
    lanes = min(code.target.lanes, columns)
    lane = 0, lanes
    with code.loop(0, rows) as row:
        factor = code.emit(f"load float, ptr {code.gep('float', '%scale', row)}, align 4")
        factor = code.splat("float", factor, lane)
        with code.loop(0, columns, lanes) as column:
            at = code.gep("float", "%c", code.plus(code.times(row, columns), column))
            value = code.emit(f"load {typed('float', lane)}, ptr {at}, align 4")
            value = code.emit(f"fmul {typed('float', lane)} {value}, {factor}")
            code.do(f"store {typed('float', lane)} {value}, ptr {at}, align 4")


def _at(code: Code, place: Index, i: int, j: int, columns: int) -> Index:
    return code.plus(place, i * ROWS * columns + j * ROWS)


def _move(code: Code, name: str, tile: int, base: str, offset: Index, row: int) -> None:
    """Load or store a tile whose rows lie `row` words apart."""
    pointer = code.gep("float", base, offset)
    _call(code, name, f"i8 {tile}, ptr {pointer}, i64 {4 * row}")


_TYPES = {
    **{"tilezero": "i8 immarg", "tilerelease": "", "tdpbf16ps": "i8 immarg, i8 immarg, i8 immarg"},
    **dict.fromkeys(("tileloadd64", "tilestored64"), "i8 immarg, ptr, i64"),
}


def _call(code: Code, name: str, given: str) -> None:
    code.module.declare(f"declare void @llvm.x86.{name}({_TYPES[name]})")
    code.do(f"call void @llvm.x86.{name}({given})")
