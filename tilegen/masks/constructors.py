"""Constructors of masks that read tensors, and of masks from a Python function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilegen.errors import InvalidProblem
from tilegen.masks.kinds import lengths_of
from tilegen.masks.made import is_traced, noted
from tilegen.masks.mask import Mask, Pending, causal, sliding_window
from tilegen.masks.usual import BLOCK_SPARSE, TREE, global_tokens, kv_prefix, tables
from tilegen.masks.values import (
    Recipe,
    Table,
    as_tensor,
    check_number,
    power_of_two_near,
    typical_of,
    values,
)


def kv_lengths(lengths: Any) -> Mask:
    """Return `k < lengths[b]`, `lengths` an integer tensor (batch,): padded batches."""
    return kv_prefix(values(lengths, "b"))


def streaming(sinks: int | Table, window: int | Table) -> Mask:
    """Return `k <= q and (q - window <= k or k < sinks)`: StreamingLLM's sinks and window."""
    return causal() & (sliding_window(window, None) | kv_prefix(sinks))


def documents(ids: Any = None, *, cu_seqlens: Any = None) -> Mask:
    """Return `document(q) == document(k)` for packed sequences.

    Either `ids`, an integer tensor (seqlen,) or (batch, seqlen) with each token's document, or
    `cu_seqlens` (documents + 1,), where they start and where the last one ends. Both may be changed
    in place, and ids may be longer than the sequences; but where all documents were whole when the
    mask was made, they must stay so. Raises InvalidProblem.
    """
    from tilegen.masks import packed

    if (ids is None) == (cu_seqlens is None):
        raise InvalidProblem("documents needs either ids or cu_seqlens")
    return packed.from_ids(ids) if cu_seqlens is None else packed.packed(cu_seqlens)


def tree(of: Any, kv_lengths: Any = None) -> Mask:
    """Return the mask of drafted tokens that form a tree, as speculative decoding verifies them.

    The queries are the last keys, in the order of the tree's tokens: each sees all keys before
    those of the queries, and of the queries' keys its ancestors and itself. `of` is either integers
    (tokens,) or (batch, tokens), the index of each token's parent, -1 for a root; or a bool table
    (tokens, tokens) or (batch, tokens, tokens), True where a row sees a column, such as
    `tilegen.ancestors(parents)` gives for all layers at once. A call may have fewer queries than
    the tree has tokens: the first ones. In `attention` the queries are the last of `kv_lengths`
    (batch,), where these are given, and keys from there on are dropped; by default, and always in
    `attention_paged`, of all keys of a request. Raises InvalidProblem.
    """
    import torch

    from tilegen.masks.tensors import check_kv_lengths

    if is_traced():
        return Pending(("tree", of, kv_lengths))
    of = as_tensor("a tree", of)
    is_table = of.dtype == torch.bool
    dims = (2, 3) if is_table else (1, 2)
    square = not is_table or of.ndim < 2 or of.shape[-1] == of.shape[-2]
    if of.ndim not in dims or not of.numel() or not square or of.is_floating_point():
        raise InvalidProblem(
            "a tree must be integers (tokens,) or (batch, tokens), or bools (tokens, tokens) or "
            f"(batch, tokens, tokens), got {of.dtype} {tuple(of.shape)}"
        )
    table = Table(
        axes="b" if of.ndim == dims[1] else "",
        typical=power_of_two_near(of.shape[-1]),
        tensor=of if is_table else None,
        recipe=None if is_table else Recipe(tables, (of,)),
        kind="bool",
        pattern="tree",
    )
    if not is_table:
        table.on(of.device, (1, 1))  # which refuses what is no tree, where values are checked
    lengths: list[Table] = []
    if kv_lengths is not None:
        tensor = as_tensor("kv_lengths", kv_lengths)
        check_kv_lengths(tensor)
        lengths.append(lengths_of(tensor))
    return noted(Mask.of(TREE, table, *lengths), ("tree", of, kv_lengths))


def block_sparse(layout: Any, block: int) -> Mask:
    """Return `layout[(b,) (h,) q // block, k // block]`: True where a block of pairs is kept.

    `layout` is a bool tensor (rows, columns), (heads, rows, columns) or (batch, heads, rows,
    columns), sizes 1 for all heads or batches, and covers the sequences. Raises InvalidProblem.
    """
    import torch

    block = check_number("block", block, low=1)
    layout = as_tensor("layout", layout)
    if layout.dtype != torch.bool or layout.ndim not in (2, 3, 4) or not layout.numel():
        raise InvalidProblem(
            "layout must be a bool tensor of 2 to 4 dimensions, got "
            f"{layout.dtype} {tuple(layout.shape)}"
        )
    leading = range(layout.ndim - 2)  # without those dimensions that say nothing
    kept = Table(
        axes="".join("bh"[i - len(leading)] for i in leading if layout.shape[i] != 1),
        typical=typical_of(layout),
        tensor=layout.squeeze(tuple(leading)),
        kind="bool",
        pattern="layout",
        block=block,
    )
    return Mask.of(BLOCK_SPARSE, kept, block)


def from_bool(keep: Any) -> Mask:
    """Return the mask that a bool tensor spells out: (q, k), (heads, q, k) or (batch, heads, q, k),
    for those lengths only.

    Its N^2 elements are read where tiles are partial. Raises InvalidProblem.
    """
    return block_sparse(keep, 1)


def random_blocks(
    seqlen_q: int, seqlen_kv: int, *, block: int, per_row: int, heads: int = 1, seed: int = 0
) -> Mask:
    """Return a mask that keeps `per_row` random blocks of columns for every block of rows."""
    import torch

    rows, columns = -(-seqlen_q // block), -(-seqlen_kv // block)
    check_number("per_row", per_row, low=1)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand((heads, rows, columns), generator=generator).argsort(-1).argsort(-1)
    return block_sparse(order < per_row, block)


def bigbird(
    seqlen: int,
    *,
    block: int = 64,
    window: int = 3,
    tokens: int = 2,
    random: int = 3,
    seed: int = 0,
) -> Mask:
    """Return BigBird's mask for one length, in blocks: a window, global and random blocks each
    row."""
    side = window // 2 * block
    near = sliding_window(side, side)
    far = random_blocks(seqlen, seqlen, block=block, per_row=random, seed=seed)
    return near | global_tokens(tokens * block) | far


def predicate(fn: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """Return the mask of a Python function of (b, h, q_idx, kv_idx), as FlexAttention's `mask_mod`.

    It is traced once with symbols: operators, comparisons, `& | ~`, torch functions and captured
    tensors; `if`, `and` and `or` cannot be. Attributes of objects that the function names are
    looked up at each call. Raises Unsupported, naming what it cannot trace.
    """
    if is_traced():
        return Pending(("function", fn, "", ()))
    return _traced(fn, predicate)


def traced(fn: Callable[[Any, Any, Any, Any], Any]) -> Mask:
    """Return the mask of a function for a call, which looks nothing up again."""
    return Pending(("function", fn, "", ())) if is_traced() else _traced(fn, None)


def _traced(fn: Callable[[Any, Any, Any, Any], Any], again: Callable[[Any], Mask] | None) -> Mask:
    from tilegen.masks.language.texts import to_text
    from tilegen.masks.traced import general_mask, known_mask  # loads torch
    from tilegen.masks.tracing.trace import at_call, followed, followed_numbers, trace_mask

    trace = trace_mask(fn)
    text = "" if trace.makes_tensors else to_text(trace.expr)
    how = ("function", fn, text, trace.captured)
    if again is None:
        # The function of a text stays alive by no mask.
        how = ("function", None if text else fn, *how[2:])
        general = at_call(fn, trace)
        return noted(known_mask(trace) if general is trace else general_mask(general), how)
    follows = followed(fn, trace, again) or followed_numbers(fn, trace, general_mask)
    return noted(known_mask(trace), how, follows)
