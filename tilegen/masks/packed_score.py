"""Scores of packed sequences: b, q and k in a score are the document and the places in it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from tilegen.masks import packed
from tilegen.masks.language.algebra import load
from tilegen.masks.language.derivatives import in_single, text_of
from tilegen.masks.language.expr import SEQLEN_KV, SEQLEN_Q, B, Expr, K, Q
from tilegen.masks.language.rewriting import free_parts, replaced
from tilegen.masks.language.texts import from_text
from tilegen.masks.score import Score
from tilegen.masks.tensors import DOCUMENT_AXES, check_axes
from tilegen.masks.values import Lengths, is_checked, table_of


def within_documents(
    score: Score, cu_seqlens_q: torch.Tensor, cu_seqlens_kv: torch.Tensor, lengths: Lengths
) -> Score:
    """Return the score with b, q, k and lengths replaced by those of the document, for sequences of
    such lengths."""
    text, wanted = _rewritten(score.text, score.form.kinds)
    if not wanted:
        return score
    _check_sizes(score, cu_seqlens_q, cu_seqlens_kv)
    document, _, *others = packed.places(cu_seqlens_q.detach(), cu_seqlens_kv.detach(), lengths)
    names = ("b", "q", "k", "seqlen_q", "seqlen_kv")
    places: dict[str, torch.Tensor] = dict(zip(names, (document, *others), strict=True))
    own = (one.but(axes=one.axes and one.axes.translate(_ANY_SIZE)) for one in score.tables)
    return replace(score, text=text, tables=(*own, *(table_of(places[name]) for name in wanted)))


def _check_sizes(score: Score, cu_q: torch.Tensor, cu_kv: torch.Tensor) -> None:
    """Raise InvalidProblem for a tensor whose sizes are not those of the documents: their
    number, and the length of the longest if that may be read."""
    needed = {"b": len(cu_q) - 1}
    if is_checked(cu_q) and is_checked(cu_kv):
        needed |= {"q": packed.longest_of(cu_q), "k": packed.longest_of(cu_kv)}
    check_axes(score, needed, DOCUMENT_AXES)


_ANY_SIZE = str.maketrans("bqk", "...")


@lru_cache(maxsize=256)
def _rewritten(text: str, kinds: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the text of a score within documents, and the names of the tables that follow its
    own tensors."""
    expr = from_text(text, kinds)
    if not free_parts(expr) & {"b", "q", "k"} and not expr.has(SEQLEN_Q, SEQLEN_KV):
        return text, ()
    places: dict[Expr, Expr] = {}
    wanted: list[str] = []
    for symbol, index in ((B, Q), (Q, Q), (K, K), (SEQLEN_Q, Q), (SEQLEN_KV, Q)):
        if expr.has(symbol):
            place = load(len(kinds) + len(wanted), "int", index)
            wanted.append(symbol.value)
            places[symbol] = symbol - place if symbol in (Q, K) else place
    return text_of(in_single(replaced(expr, places))), tuple(wanted)
