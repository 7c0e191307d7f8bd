"""Masks: predicates (`mask`, `constructors`), their tile ranges (`compiler`, `tile_lists`), and how
both are printed (`triton_source`)."""

from tilegen.masks.constructors import (
    bigbird,
    block_sparse,
    dilated,
    documents,
    from_bool,
    global_tokens,
    kv_lengths,
    neighborhood,
    predicate,
    prefix_lm,
    random_blocks,
    streaming,
)
from tilegen.masks.mask import (
    Alignment,
    Mask,
    causal,
    full,
    intersect,
    sliding_window,
    unite,
)
from tilegen.masks.notation import parse_mask
from tilegen.masks.values import Values, values

__all__ = [
    "Alignment",
    "Mask",
    "Values",
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
    "unite",
    "values",
]
