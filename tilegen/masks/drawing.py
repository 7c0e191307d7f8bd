"""A small mask drawn as text: which pairs it keeps, and what class its tiles are of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.errors import InvalidProblem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tilegen.masks.mask import Mask

MAX_SIDE = 128
"""Most rows and columns that are drawn."""
LEGEND = "# in a full tile, + kept in a partial tile, . dropped in one, blank: tiles not visited"


def draw(
    mask: Mask, seqlen_q: int, seqlen_kv: int, *, block_m: int, block_n: int, b: int = 0, h: int = 0
) -> str:
    """Return a picture of the pairs of one head, a character each, tiles ruled off; then counts.

    Raises InvalidProblem for more than MAX_SIDE rows or columns.
    """
    if not (0 < seqlen_q <= MAX_SIDE and 0 < seqlen_kv <= MAX_SIDE):
        raise InvalidProblem(
            f"a drawn mask has 1 to {MAX_SIDE} rows and columns, got {seqlen_q} x {seqlen_kv}"
        )
    keep = kept(mask, seqlen_q, seqlen_kv, b, h)
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
    return "\n".join([*lines, rule, f"{mask}: {told} tiles; {LEGEND}"])


def kept(mask: Mask, seqlen_q: int, seqlen_kv: int, b: int = 0, h: int = 0) -> NDArray[np.bool_]:
    """Return which pairs of a head are kept; typical tensors stand for missing ones."""
    import torch

    from tilegen.masks.shapes import Shape
    from tilegen.masks.tensors import realized

    real = realized(mask, Shape(b + 1, h + 1, seqlen_q, seqlen_kv))
    q, k = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_kv)[None]
    one = torch.as_tensor(real.keep(q, k, seqlen_q, seqlen_kv, torch.tensor(b), torch.tensor(h)))
    return one.expand(seqlen_q, seqlen_kv).numpy()
