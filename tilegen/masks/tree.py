"""Masks of drafted tokens that form a tree, as speculative decoding verifies them in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilegen.errors import InvalidProblem
from tilegen.masks.form import Condition, Form, Side
from tilegen.masks.mask import Mask
from tilegen.masks.values import Lengths, Pair, Values, as_tensor, is_checked

if TYPE_CHECKING:
    import torch


def _check_rows(
    seqlen_q: int, seqlen_kv: int, table: Values, lengths: Values | None = None
) -> None:
    if table.is_stand_in:
        return
    width = table.sources[0].shape[-1]
    if seqlen_q > width:
        raise InvalidProblem(
            f"a tree of {width} tokens has rows for as many queries, got {seqlen_q}"
        )


def _end(at: Pair, lengths: Values | None) -> Any:
    return at.seqlen_kv if lengths is None else lengths.at(at)


def _keep(at: Pair, _: Side, table: Values, lengths: Values | None = None) -> Condition:
    from tilegen.masks.language.algebra import maximum

    end = _end(at, lengths)
    base = end - at.seqlen_q
    kept = (at.k < base) | table.at(at, at.q, maximum(at.k - base, 0))
    return kept if lengths is None else kept & (at.k < end)


def _enclosing(
    at: Pair, _: Side, table: Values, lengths: Values | None = None
) -> tuple[Condition, Condition]:
    end = _end(at, lengths)
    before = at.k < end - at.seqlen_q
    return (True, before) if lengths is None else (at.k < end, before)


TREE = Form(
    "tree",
    _keep,
    enclosing=_enclosing,
    check_lengths=_check_rows,
    apart=lambda table, *lengths: "keys" if lengths else "",
)
"""`k < base or table[(b,) q, k - base]`, `base` the keys before those of the queries.

The queries are the last `seqlen_q` of `seqlen_kv` keys, or of `lengths[b]` where these are given as
a second argument; keys from there on are dropped. The table is bool, indexed by query and by key
behind `base`; beyond the end of the table nothing is kept.
"""


def trees_of(mask: Mask) -> int:
    """Count the tables of trees that a mask reads."""
    return (mask.form is TREE) + sum(map(trees_of, mask.parts))


def ancestors(parents: Any) -> torch.Tensor:
    """Compute the ancestors of each token of a tree, the token included: bool (..., tokens,
    tokens).

    parents are integers (..., tokens): the index of each token's parent, -1 for a root. Nothing
    waits for a device: each of log2(tokens) steps doubles the depth that a token sees. Raises
    InvalidProblem for parents that form no tree, if values are checked.
    """
    import torch

    parents = as_tensor("parents", parents)
    if parents.ndim == 0 or parents.is_floating_point() or parents.dtype is torch.bool:
        raise InvalidProblem(
            f"parents must be integers (..., tokens), got {parents.dtype} {tuple(parents.shape)}"
        )
    width = parents.shape[-1]
    is_root = (parents < 0) | (parents >= width)
    # One token more, which sees nothing, is the parent of roots and of itself.
    above = torch.nn.functional.pad(parents.long().masked_fill(is_root, width), (0, 1), value=width)
    eye = torch.eye(width + 1, width, dtype=torch.bool, device=parents.device)
    seen = eye.expand(*parents.shape[:-1], width + 1, width)
    for _ in range(max(width - 1, 0).bit_length()):
        seen = seen | seen.gather(-2, above[..., None].expand_as(seen))
        above = above.gather(-1, above)
    if is_checked(parents) and width:
        if int(parents.min()) < -1 or int(parents.max()) >= width:
            raise InvalidProblem(f"parents must be -1..{width - 1}, got {parents.tolist()}")
        if bool((above < width).any()):
            raise InvalidProblem(f"parents must lead to a root, got {parents.tolist()}")
    return seen[..., :width, :].contiguous()


def tables(parents: torch.Tensor, lengths: Lengths) -> tuple[torch.Tensor, ...]:
    """Return the table of a tree by its parents: the recipe of `tilegen.tree`."""
    return (ancestors(parents),)
