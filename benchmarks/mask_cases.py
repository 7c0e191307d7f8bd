"""The masks of mask_creation, as expressions for tilegen and as a function for FlexAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

WINDOW = 4096
DOCUMENT = 2000
"""Length of the longest document; the shortest are single tokens."""
LAYOUT_BLOCK = 64
LIVE_BLOCKS = 16
"""Number of live blocks of a row of the layout, on average."""
STEP = 4
GRID_WIDTH = 128
RADIUS = 6


@dataclass(frozen=True)
class Case:
    """One mask in both languages; both functions take the captured tensor, None without one."""

    name: str
    expression: Callable[[], Any]
    """A predicate; look-ups are of t0."""
    mask_mod: Callable[[Any], Callable[..., Any]]
    captured: Callable[[int], Any] = lambda seqlen: None
    """Return the tensor that a mask of this length captures, on the CPU."""
    is_closed: bool = False
    """True if tilegen needs no lists, only ranges in closed form."""


def cases() -> dict[str, Case]:
    """Return the masks by name."""
    import torch

    from tilegen.masks.language.algebra import equal, load, unequal
    from tilegen.masks.language.expr import K, Q

    def documents(seqlen: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, DOCUMENT, (2 * seqlen // DOCUMENT + 9,), generator=generator)
        lengths = torch.cat([lengths, torch.tensor([seqlen])])
        return torch.repeat_interleave(lengths)[:seqlen].int()

    def interleaved(seqlen: int) -> torch.Tensor:
        documents = max(1, 2 * seqlen // DOCUMENT)
        return torch.randint(documents, (seqlen,), generator=torch.Generator().manual_seed(0)).int()

    def layout(seqlen: int) -> torch.Tensor:
        blocks = seqlen // LAYOUT_BLOCK
        chosen = torch.randint(
            blocks, (blocks, LIVE_BLOCKS), generator=torch.Generator().manual_seed(0)
        )
        return torch.zeros(blocks, blocks, dtype=torch.bool).scatter_(1, chosen, True)

    def same_document(ids: Any) -> Callable[..., Any]:
        return lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])

    ids, blocks = partial(load, 0, "int"), partial(load, 0, "bool")
    q_block, k_block = (index // LAYOUT_BLOCK for index in (Q, K))
    apart = Q // GRID_WIDTH - K // GRID_WIDTH
    aside = Q % GRID_WIDTH - K % GRID_WIDTH
    in_document = (K <= Q) & equal(ids(Q), ids(K))
    listed = [
        Case(
            "causal window",
            lambda: (K <= Q) & (Q - K < WINDOW),
            lambda _: lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
            is_closed=True,
        ),
        Case("documents", lambda: in_document, same_document, documents),
        Case("documents, interleaved", lambda: in_document, same_document, interleaved),
        Case(
            "block sparse",
            lambda: unequal(blocks(q_block, k_block), 0),
            lambda layout: lambda b, h, q, k: layout[q // LAYOUT_BLOCK, k // LAYOUT_BLOCK],
            layout,
        ),
        Case(
            "dilated window",
            lambda: (K <= Q) & (Q - K < WINDOW) & equal((Q - K) % STEP, 0),
            lambda _: lambda b, h, q, k: (q >= k) & (q - k < WINDOW) & ((q - k) % STEP == 0),
        ),
        Case(
            "2-D neighborhood",
            lambda: (abs(apart) <= RADIUS) & (abs(aside) <= RADIUS),
            lambda _: (
                lambda b, h, q, k: (
                    ((q // GRID_WIDTH - k // GRID_WIDTH).abs() <= RADIUS)
                    & ((q % GRID_WIDTH - k % GRID_WIDTH).abs() <= RADIUS)
                )
            ),
        ),
    ]
    return {case.name: case for case in listed}
