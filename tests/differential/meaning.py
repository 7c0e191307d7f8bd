"""The meaning of masks and scores in plain PyTorch, independent of tilegen: the names that a
problem's texts may use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Pairs:
    """Index tensors of all pairs, and both lengths: of all entries, or (batch, 1, 1, 1)."""

    b: torch.Tensor
    h: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    rows: Any
    columns: Any

    @classmethod
    def of(
        cls,
        batch: int,
        heads: int,
        rows: int,
        columns: int,
        requests: tuple[tuple[int, int], ...] = (),
    ) -> Pairs:
        """Return the pairs of a problem; its indices broadcast to (batch, heads, rows, columns).
        `requests` have the queries and keys of each entry, where these differ."""
        sizes = (batch, heads, rows, columns)
        b, h, q, k = (
            torch.arange(n).view([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(sizes)
        )
        if not requests:
            return cls(b, h, q, k, rows, columns)
        return cls(b, h, q, k, *torch.tensor(requests).view(-1, 2, 1, 1, 1).unbind(1))

    def shift(self, alignment: str) -> Any:
        """Return the number of columns by which the diagonal is shifted."""
        return self.columns - self.rows if alignment == "bottom_right" else 0


@dataclass(frozen=True)
class Kept:
    """A mask: `keep` of pairs."""

    keep: Callable[[Pairs], Any]

    def __and__(self, other: Kept) -> Kept:
        return Kept(lambda at: self.keep(at) & other.keep(at))

    def __or__(self, other: Kept) -> Kept:
        return Kept(lambda at: self.keep(at) | other.keep(at))

    def __invert__(self) -> Kept:
        return Kept(lambda at: ~self.keep(at))


@dataclass(frozen=True)
class Changed:
    """A score: the changed s at pairs, and the logits of sinks (heads,)."""

    change: Callable[[Any, Pairs], Any] = lambda s, at: s
    sink: torch.Tensor | None = None

    def then(self, other: Changed) -> Changed:
        """Apply `other` to this score's result."""
        sink = self.sink if other.sink is None else other.sink
        return Changed(lambda s, at: other.change(self.change(s, at), at), sink)


# --------------------------------------------------------------------------------------------------
# Masks


def predicate(fn: Callable[..., Any]) -> Kept:
    return Kept(lambda at: torch.as_tensor(fn(at.b, at.h, at.q, at.k)))


def full() -> Kept:
    return Kept(lambda at: at.q >= 0)


def causal(alignment: str = "top_left") -> Kept:
    return Kept(lambda at: at.k <= at.q + at.shift(alignment))


def sliding_window(left: Any, right: Any = None, alignment: str = "top_left") -> Kept:
    def keep(at: Pairs) -> torch.Tensor:
        q = at.q + at.shift(alignment)
        inside = at.k >= -1
        if left is not None:
            inside = inside & (at.k >= q - _number(left, at))
        return inside if right is None else inside & (at.k <= q + _number(right, at))

    return Kept(keep)


def prefix_lm(prefix: Any) -> Kept:
    return Kept(lambda at: (at.k <= at.q) | (at.k < _number(prefix, at)))


def global_tokens(tokens: int) -> Kept:
    return Kept(lambda at: (at.q < tokens) | (at.k < tokens))


def streaming(sinks: int, window: int) -> Kept:
    return Kept(lambda at: (at.k <= at.q) & ((at.k >= at.q - window) | (at.k < sinks)))


def kv_lengths(lengths: torch.Tensor) -> Kept:
    return Kept(lambda at: at.k < lengths[at.b])


def dilated(step: int) -> Kept:
    return Kept(lambda at: (at.q - at.k) % step == 0)


def documents(ids: torch.Tensor | None = None, *, cu_seqlens: torch.Tensor | None = None) -> Kept:
    def keep(at: Pairs) -> torch.Tensor:
        if ids is None:
            assert cu_seqlens is not None
            ends = cu_seqlens[1:]
            return (at.q[..., None] >= ends).sum(-1) == (at.k[..., None] >= ends).sum(-1)
        if ids.ndim == 2:
            return ids[at.b, at.q] == ids[at.b, at.k]
        return ids[at.q] == ids[at.k]

    return Kept(keep)


def tree(of: torch.Tensor, lengths: torch.Tensor | None = None) -> Kept:
    def sees(b: int, row: int, at: int) -> bool:
        if of.dtype == torch.bool:
            return bool(of[row, at])
        up: list[int] = (of if of.ndim == 1 else of[b]).tolist()
        while row > at:  # parents come before their children
            row = up[row]
        return row == at

    def keep(at: Pairs) -> torch.Tensor:
        rows, columns = at.q.numel(), at.k.numel()
        ends = at.columns if lengths is None else lengths.view(-1, 1, 1, 1)
        bases = torch.as_tensor(ends - at.rows).expand(len(at.b), 1, 1, 1)
        known = max(rows, columns - int(bases.min()))
        table = torch.tensor(
            [
                [[j < rows and sees(b, i, j) for j in range(known)] for i in range(rows)]
                for b in range(len(at.b))
            ]
        )
        behind = (at.k - bases).clamp(min=0)
        return (at.k < bases) | table[at.b, at.q, behind]

    return Kept(keep)


def neighborhood(size: int, window: int) -> Kept:
    def keep(at: Pairs) -> torch.Tensor:
        first = (at.q - window // 2).clamp(0, max(size - window, 0))
        return (at.k >= first) & (at.k < first + window)

    return Kept(keep)


def block_sparse(layout: torch.Tensor, block: int) -> Kept:
    def keep(at: Pairs) -> torch.Tensor:
        index = (at.b, at.h, at.q // block, at.k // block)
        sizes = (1,) * (4 - layout.ndim) + tuple(layout.shape)
        whole = layout.view(sizes)
        return whole[tuple(i * 0 if n == 1 else i for i, n in zip(index, sizes, strict=True))]

    return Kept(keep)


def from_bool(keep: torch.Tensor) -> Kept:
    return block_sparse(keep, 1)


def values(tensor: torch.Tensor, axes: str) -> tuple[torch.Tensor, str]:
    return tensor, axes


def _number(given: Any, at: Pairs) -> Any:
    if isinstance(given, tuple):
        tensor, axes = given
        return tensor[tuple(getattr(at, axis) for axis in axes)]
    return given


# --------------------------------------------------------------------------------------------------
# Scores


def score(fn: Callable[..., Any]) -> Changed:
    return Changed(lambda s, at: fn(s, at.b, at.h, at.q, at.k))


def softcap(cap: float) -> Changed:
    return Changed(lambda s, at: cap * torch.tanh(s / cap))


def alibi(slopes: torch.Tensor) -> Changed:
    return Changed(lambda s, at: s + slopes[at.h] * (at.k - at.q))


def temperature(divisors: torch.Tensor) -> Changed:
    return Changed(lambda s, at: s / divisors[at.h])


def relative_bias(table: torch.Tensor) -> Changed:
    def change(s: Any, at: Pairs) -> Any:
        reach = table.shape[-1] // 2
        distance = (at.k - at.q).clamp(-reach, reach) + reach
        return s + (table[at.h, distance] if table.ndim == 2 else table[distance])

    return Changed(change)


def bias(table: torch.Tensor) -> Changed:
    return Changed(lambda s, at: s + table)


def sinks(logits: torch.Tensor) -> Changed:
    return Changed(sink=logits)


NAMES: dict[str, Any] = {"Changed": Changed} | {
    function.__name__: function
    for function in (
        *(predicate, full, causal, sliding_window, prefix_lm, global_tokens, streaming),
        *(kv_lengths, dilated, documents, tree, neighborhood, block_sparse, from_bool, values),
        *(score, softcap, alibi, temperature, relative_bias, bias, sinks),
    )
}
