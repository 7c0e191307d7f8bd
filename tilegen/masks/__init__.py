"""Masks: predicates (`mask`), their tile ranges in closed form (`compiler`), and how both are
printed (`printer`)."""

from tilegen.masks.mask import (
    Alignment,
    Mask,
    causal,
    full,
    intersect,
    parse_mask,
    sliding_window,
)

__all__ = ["Alignment", "Mask", "causal", "full", "intersect", "parse_mask", "sliding_window"]
