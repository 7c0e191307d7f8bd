"""Dropout of attention weights: the dropped pairs, as a function of their place.

A weight is dropped with probability p, and otherwise multiplied by 1 / (1 - p). Each pair draws a
word of Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a
function of a call's seed and offset and of the pair's batch entry, head, row and column, whatever
the tiles of a kernel. A backward draws the same words again, so that nothing is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

ROUNDS = 7
"""The fewest rounds of Philox4x32 that pass all tests of BigCrush (Salmon et al., table 2): 10, as
PyTorch has, are a margin beyond. Rounds are what dropout costs, and kernels draw twice."""
SIDE = 16
"""Rows and columns of a square of pairs whose words are drawn together: a side of every tile."""
TYPICAL = 0.2
"""Probability with which problems that drop weights are checked and timed."""
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Dropout:
    """Weights that a call drops."""

    p: float
    """Probability that a weight is dropped, 0..1."""
    state: torch.Tensor
    """Seed and offset, (2,), int64, on the device of the call: the host never reads them, so that
    replays of a CUDA graph, which draw them anew, drop other pairs each time."""

    @classmethod
    def drawn(cls, p: float, device: torch.device) -> Dropout:
        """Draw the dropout of a call, by a seed from PyTorch's default generator of a device."""
        return cls(p, torch.randint(2**63 - 1, (2,), device=device))

    @classmethod
    def typical(cls, is_on: bool, device: torch.device, *, seed: int = 0) -> Dropout | None:
        """Return the dropout that problems are checked and timed with; None for problems
        without."""
        return cls(TYPICAL, torch.tensor([seed, 1], device=device)) if is_on else None

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of launches of kernels that drop weights, by name."""
        return {"dropout": self.state, "dropout_p": self.p}

    def factors(self, batch: int, heads: int, rows: int, columns: int) -> torch.Tensor:
        """Compute the factor of each pair's weight, 0 or 1 / (1 - p): fp64, (batch, heads, rows,
        columns)."""
        as_given = torch.tensor(self.p, dtype=torch.float32, device="cpu")  # to kernels
        p = as_given.item()
        kept = drawn_words(self.state, batch, heads, rows, columns) >= min(int(p * 2**32), _WORD)
        return kept.double() * (1 / (1 - p) if p < 1 else 0.0)


def drawn_words(
    state: torch.Tensor, batch: int, heads: int, rows: int, columns: int
) -> torch.Tensor:
    """Compute the word of each pair: int64, (batch, heads, rows, columns).

    The four words of one Philox belong to rows and columns that differ by 8, in a square of SIDE:
    matrix instructions leave such scores to one thread, whether rows are queries or keys.
    """
    half, squares = SIDE // 2, [-(-size // SIDE) for size in (rows, columns)]
    i, j = (torch.arange(half * count, device=state.device) for count in squares)
    head = torch.arange(batch * heads, device=state.device)[:, None, None]
    seed, offset = state.unbind()
    counter = i[:, None], j, head, offset & _WORD
    words = philox(counter, (seed & _WORD, (seed >> 32) & _WORD))
    tile = torch.stack(torch.broadcast_tensors(*words), -1)
    tile = tile.reshape(-1, squares[0], half, squares[1], half, 2, 2).permute(0, 1, 5, 2, 3, 6, 4)
    tile = tile.reshape(batch, heads, squares[0] * SIDE, squares[1] * SIDE)
    return tile[..., :rows, :columns]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor], rounds: int = ROUNDS) -> Words:
    """Compute the four words of Philox4x32; words are int64 tensors of 0..2**32 - 1."""
    a, b, c, d = counter
    key_0, key_1 = key
    for _ in range(rounds):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64 bits, wrapped around
        a, c = (second >> 32 & _WORD) ^ b ^ key_0, (first >> 32 & _WORD) ^ d ^ key_1
        b, d = second & _WORD, first & _WORD
        key_0, key_1 = (
            (word + step) & _WORD for word, step in zip((key_0, key_1), _KEY_STEPS, strict=True)
        )
    return a, b, c, d
