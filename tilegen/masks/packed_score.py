"""Scores of packed sequences: what they see as b, q and k is the document and places in it."""

# SymPy is typed only in part:
# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from tilegen.masks.expression import free_parts, to_text
from tilegen.masks.packed import Documents
from tilegen.masks.score import Score
from tilegen.masks.symbols import SEQLEN_KV, SEQLEN_Q, B, K, Lookup, Q, captured_name


def within_documents(
    score: Score, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor
) -> Score:
    """Return the score with b, q, k and lengths replaced by those of the document."""
    expr: Any = score.expression()
    if not free_parts(expr) & {"b", "q", "k"} and not expr.has(SEQLEN_Q, SEQLEN_KV):
        return score
    rows, columns = Documents.of(cu_seqlens_q.long()), Documents.of(cu_seqlens_kv.long())
    wanted: dict[Any, tuple[torch.Tensor, Any]] = {
        B: (rows.document, Q),
        Q: (rows.start[rows.document], Q),
        K: (columns.start[columns.document], K),
        SEQLEN_Q: (rows.length[rows.document], Q),
        SEQLEN_KV: (columns.length[rows.document], Q),
    }
    captured = list(score.captured)
    replaced: dict[Any, Any] = {}
    for symbol, (tensor, index) in wanted.items():
        if expr.has(symbol):
            found = Lookup(captured_name(len(captured), "int"), index)
            captured.append(tensor.to(torch.int32))
            replaced[symbol] = symbol - found if symbol in (Q, K) else found
    return Score(to_text(expr.xreplace(replaced)), tuple(captured), score.sink_logits)
