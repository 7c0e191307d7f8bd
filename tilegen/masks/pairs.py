"""Predicates of masks in SymPy, and their values for tensors of indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean

from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.symbols import PAIR, captured_name
from tilegen.masks.values import Made, Pair, Values
from tilegen.sympy_lock import one_at_a_time

AT = Pair(*PAIR)
"""The pair of which compiled predicates are."""


def named(values: Sequence[Values], condition: Any) -> Boolean:
    """Return a condition in which look-ups name their values by their places: t0, t1, ..."""
    names = {
        value.symbol: captured_name(slot, "bool" if value.rising else value.kind)
        for slot, value in enumerate(values)
    }
    return sympy.sympify(condition).xreplace(names)


@one_at_a_time
def kept(keep: Boolean, values: Sequence[Values], at: Pair) -> torch.Tensor:
    """Compute where a predicate over named values holds, for tensors of indices `at` and the
    lengths of a call."""
    made: Made = {}
    tables = [value.on(at.q.device, (at.seqlen_q, at.seqlen_kv), made) for value in values]
    return evaluate(keep, tables, **at._asdict())
