"""Masks and scores: what they are (`mask`, `constructors`, `score`), the language that they are
written in (`language`), how functions become expressions (`tracing`), and which tiles a mask leaves
(`tiles`)."""

from tilegen.masks.constructors import (
    bigbird,
    block_sparse,
    documents,
    from_bool,
    kv_lengths,
    predicate,
    random_blocks,
    streaming,
    tree,
)
from tilegen.masks.mask import Mask, causal, full, intersect, sliding_window
from tilegen.masks.notation import parse_mask
from tilegen.masks.usual import ancestors, dilated, global_tokens, neighborhood, prefix_lm
from tilegen.masks.values import Table, values

__all__ = [
    "Mask",
    "Table",
    "ancestors",
    "bigbird",
    "block_sparse",
    "causal",
    "dilated",
    "documents",
    "from_bool",
    "full",
    "global_tokens",
    "intersect",
    "kv_lengths",
    "neighborhood",
    "parse_mask",
    "predicate",
    "prefix_lm",
    "random_blocks",
    "sliding_window",
    "streaming",
    "tree",
    "values",
]
