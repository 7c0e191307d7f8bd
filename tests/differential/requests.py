"""Calls of requests that have queries and keys of their own: packed one after the other, or with
keys in pages. The rest of the net sees padded tensors (batch, heads, longest, dim)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import tilegen
from tests.differential.problems import Problem

NO_PAGE = 10**6
"""Entries of the block table beyond a request's pages, which are never read."""


def inside(problem: Problem) -> torch.Tensor:
    """Return which pairs are queries and keys of a request, (batch, 1, rows, columns)."""
    rows, columns = _rows(problem), torch.arange(problem.columns)
    keys = torch.tensor([keys for _, keys in problem.requests])[:, None, None, None]
    return rows[..., None] & (columns < keys)


def _rows(problem: Problem) -> torch.Tensor:
    queries = torch.tensor([queries for queries, _ in problem.requests])[:, None, None]
    return torch.arange(problem.rows) < queries


def only(problem: Problem, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return results with 0 beyond a request's queries and keys."""
    if not problem.requests:
        return results
    rows, columns = _rows(problem), inside(problem).any(2)
    where = {"out": rows[..., None], "lse": rows, "dq": rows[..., None]}
    where |= dict.fromkeys(("dk", "dv"), columns[..., None])
    return {
        name: torch.where(where[name], one, 0.0) if name in where else one
        for name, one in results.items()
    }


def packed(padded: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return (all tokens, heads, ...) of (batch, heads, longest, ...)."""
    each = (one[:, :n].transpose(0, 1) for one, n in zip(padded, lengths, strict=True))
    return torch.cat(list(each))


def unpacked(tokens: torch.Tensor, lengths: Sequence[int], longest: int) -> torch.Tensor:
    """Return (batch, heads, longest, ...) of (all tokens, heads, ...), 0 beyond lengths."""
    made = tokens.new_zeros((len(lengths), tokens.shape[1], longest, *tokens.shape[2:]))
    for item, part in zip(made, tokens.split(list(lengths)), strict=True):
        item[:, : len(part)] = part.transpose(0, 1)
    return made


@dataclass(frozen=True)
class Packing:
    """The arguments and results of a problem's call instead of padded tensors."""

    problem: Problem

    def given(self, name: str, padded: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces q, k, v, dout or dlse in the call."""
        lengths = self._lengths(name)
        return padded if lengths is None else packed(padded, lengths)

    def padded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result as the net compares it."""
        lengths = self._lengths(name)
        if lengths is None:
            return tensor
        longest = self.problem.columns if name in ("dk", "dv") else self.problem.rows
        return unpacked(tensor, lengths, longest)

    def _lengths(self, name: str) -> list[int] | None:
        """Return the lengths by which a tensor is packed; None for one that is not."""
        of_queries = name in ("q", "dout", "dlse", "out", "lse", "dq")
        of_keys = name in ("k", "v", "dk", "dv")
        packs_keys = self.problem.call == "varlen"
        if (of_queries and self.problem.call == "packed pages") or (
            packs_keys and (of_queries or of_keys)
        ):
            return [one[of_keys] for one in self.problem.requests]
        return None


def starts(lengths: Sequence[int]) -> torch.Tensor:
    """Return where requests start, and where the last one ends."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def attend_varlen(problem: Problem, options: dict[str, Any]) -> Any:
    """Return how packed queries, keys and values are attended to, as (out, lse)."""
    queries, keys = map(list, zip(*problem.requests, strict=True))
    cu_q = starts(queries)
    cu_kv = None if queries == keys else starts(keys)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: Any) -> Any:
        out, lse = tilegen.attention_varlen(q, k, v, cu_q, cu_kv, **options, **changes)
        return out, lse.mT

    return call


def attend_pages(problem: Problem, options: dict[str, Any]) -> Any:
    """Return how queries attend to padded keys and values that are in pages, as (out, lse).

    Elements outside of requests are NaN, which shows if they are read.
    """
    keys = [keys for _, keys in problem.requests]
    page, counts = problem.page, [-(-n // problem.page) for n in keys]
    order = torch.randperm(sum(counts) + 2, generator=_generator(problem))
    table = torch.full((problem.batch, max(counts) + 1), NO_PAGE)
    for row, mine in zip(table, order.split([*counts, 2]), strict=False):
        row[: len(mine)] = mine
    options = {"layout": problem.page_layout, **options}
    if problem.call == "packed pages":
        queries = [queries for queries, _ in problem.requests]
        options |= {"q_starts": starts(queries), "max_q_length": problem.rows}
    if problem.tables or problem.seed % 2:  # tables need not reach to the end of the last page
        options["max_kv_length"] = problem.columns

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: Any) -> Any:
        widest = max(k.shape[-1], v.shape[-1])
        both = k.new_full((2, len(order), page, problem.heads_kv, widest), float("nan"))
        for pages, padded in zip(both, (k, v), strict=True):
            for row, n, item in zip(table, keys, padded, strict=True):
                for at in range(n):
                    pages[row[at // page], at % page, :, : item.shape[-1]] = item[:, at]
        k_pages, v_pages = both[0][..., : k.shape[-1]], both[1][..., : v.shape[-1]]
        if problem.latent:
            v_pages = k_pages[..., : v.shape[-1]]
        if problem.page_layout == "HND":
            k_pages, v_pages = (x.transpose(1, 2) for x in (k_pages, v_pages))
            if problem.seed % 3 and not problem.latent:
                k_pages, v_pages = k_pages.contiguous(), v_pages.contiguous()
        lengths = torch.tensor(keys)
        given = q, k_pages, v_pages, table, lengths
        out, lse = tilegen.attention_paged(*given, **options, **changes)
        return out, lse.mT if problem.call == "packed pages" else lse

    return call


def _generator(problem: Problem) -> torch.Generator:
    return torch.Generator().manual_seed(problem.seed)
