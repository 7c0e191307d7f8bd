"""Predicates of masks, and their values for tensors of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tilegen.masks.language.algebra import as_expr
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import PAIR, Expr
from tilegen.masks.language.rewriting import renamed
from tilegen.masks.values import Made, Pair, Values

AT = Pair(*PAIR)
"""The pair of compiled predicates."""


def named(values: Sequence[Values], condition: Any) -> Expr:
    """Replace look-ups of values by t0, t1, ..., in the order of the values."""
    slots = {value.slot: (place, value.elements_kind) for place, value in enumerate(values)}
    return renamed(as_expr(condition), slots)


def kept(keep: Expr, values: Sequence[Values], at: Pair) -> torch.Tensor:
    """Compute where a predicate over named values holds, for tensors of indices `at` and the
    lengths of a call."""
    made: Made = {}
    tables = [value.on(at.q.device, (at.seqlen_q, at.seqlen_kv), made) for value in values]
    return evaluate(keep, tables, **at._asdict())
