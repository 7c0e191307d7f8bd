"""A small mask drawn as text: which pairs it keeps, and what class its tiles are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.errors import InvalidProblem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_SIDE = 128
"""Most rows and columns that are drawn."""
LEGEND = "# in a full tile, + kept in a partial tile, . dropped in one, blank: tiles not visited"


def check_sides(seqlen_q: int, seqlen_kv: int) -> None:
    """Raise InvalidProblem for more rows or columns than are drawn."""
    if not (0 < seqlen_q <= MAX_SIDE and 0 < seqlen_kv <= MAX_SIDE):
        raise InvalidProblem(
            f"a drawn mask has 1 to {MAX_SIDE} rows and columns, got {seqlen_q} x {seqlen_kv}"
        )


def draw(keep: NDArray[np.bool_], name: str, block_m: int, block_n: int) -> str:
    """Return a picture of pairs, a character each, tiles ruled off; then counts, with the name of
    the mask."""
    seqlen_q, seqlen_kv = keep.shape
    rule = "+".join(
        ["", *("-" * min(block_n, seqlen_kv - k) for k in range(0, seqlen_kv, block_n)), ""]
    )
    lines: list[str] = []
    counts = {"full": 0, "partial": 0, "empty": 0}
    for first in range(0, seqlen_q, block_m):
        rows = keep[first : first + block_m]
        lines.append(rule)
        pieces: list[list[str]] = []
        for k in range(0, seqlen_kv, block_n):
            tile = rows[:, k : k + block_n]
            whole = tile.shape == (block_m, block_n) and bool(tile.all())
            kind = "full" if whole else "partial" if tile.any() else "empty"
            counts[kind] += 1
            marks = {"full": "##", "partial": ".+", "empty": "  "}[kind]
            pieces.append(["".join(marks[int(pair)] for pair in row) for row in tile])
        lines += ["|".join(["", *row, ""]) for row in zip(*pieces, strict=True)]
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return "\n".join([*lines, rule, f"{name}: {told} tiles; {LEGEND}"])
