"""Greedy generation by a transformers model over a paged cache: prompts in chunks, beside other
requests that decode, and drafts that a step verifies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import tilegen

NAME = "tilegen_paged"
PAGE = 64
"""Tokens of a page."""
NGRAM = 2
"""Last tokens that are looked up in what came before, to draft what followed them there."""


@dataclass(kw_only=True)
class Request:
    """A prompt, and what follows it."""

    prompt: list[int]
    waiting: list[int]
    """Tokens of the prompt that are not yet in the cache."""
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    """Time to the first token [s]."""

    def draft(self, number: int) -> list[int]:
        """Return the tokens after an earlier occurrence of the last tokens, at most `number`."""
        seen = self.prompt + self.tokens
        last = seen[-NGRAM:]
        for at in range(len(seen) - NGRAM - 1, -1, -1):
            if seen[at : at + NGRAM] == last:
                return seen[at + NGRAM : at + NGRAM + number]
        return []


@dataclass(kw_only=True)
class Step:
    """New tokens of all requests in one forward: what layers need to know."""

    pages: torch.Tensor
    """(layers, 2, pages, PAGE, heads_kv, dim)."""
    table: torch.Tensor
    lengths: torch.Tensor
    """Tokens of each request, with the new ones."""
    starts: torch.Tensor
    longest: int


@dataclass(kw_only=True)
class Served:
    """Results of a run."""

    requests: list[Request]
    seconds: float
    steps: int
    accepted: int
    """Drafts that were right."""
    drafted: int


def register() -> None:
    """Register attention over pages, which takes its step from the model's arguments."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Make no mask: attention over pages is causal by itself."""


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    step: Step,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Append new keys and values to the pages of a layer, and read all of them."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    k_pages, v_pages = step.pages[module.layer_idx]
    tilegen.append_paged(k, v, k_pages, v_pages, step.table, step.lengths, q_starts=step.starts)
    out = tilegen.attention_paged(
        *(q, k_pages, v_pages, step.table, step.lengths),
        q_starts=step.starts,
        max_q_length=step.longest,
        mask=tilegen.causal("bottom_right"),
        scale=scaling,
    )
    return out[None], None


@torch.no_grad()
def serve(
    model: Any, prompts: Sequence[Sequence[int]], new: int, *, chunk: int, drafts: int
) -> Served:
    """Generate `new` tokens after each prompt with a model whose attention is NAME."""
    config = model.config
    device = model.device
    requests = [Request(prompt=list(one), waiting=list(one)) for one in prompts]
    each = max(-(-(len(one) + new + drafts + 1) // PAGE) for one in prompts)
    order = torch.randperm(each * len(requests), generator=torch.Generator().manual_seed(6))
    table = order.view(len(requests), each).to(device, torch.int32)
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    sizes = config.num_hidden_layers, 2, each * len(requests), PAGE, heads, dim
    pages = torch.zeros(sizes, device=device, dtype=model.dtype)
    lengths = torch.zeros(len(requests), dtype=torch.int32)
    begun = time.perf_counter()
    steps = accepted = drafted = 0
    while any(len(one.tokens) < new for one in requests):
        given = [_new_tokens(one, new, chunk, drafts) for one in requests]
        counts = torch.tensor([len(one) for one in given], dtype=torch.int32)
        places = [n + torch.arange(count) for n, count in zip(lengths, counts, strict=True)]
        lengths = lengths + counts
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        step = Step(
            pages=pages, table=table, lengths=lengths.to(device), starts=starts.to(device),
            longest=int(counts.max()),
        )  # fmt: skip
        ids = torch.tensor([[token for one in given for token in one]], device=device)
        position_ids = torch.cat(places)[None].to(device)
        logits = model(ids, position_ids=position_ids, use_cache=False, step=step).logits[0]
        best = logits.argmax(-1).split(counts.tolist())
        now = time.perf_counter() - begun
        for i, (request, tokens) in enumerate(zip(requests, given, strict=True)):
            right = _accept(request, tokens, best[i].tolist(), now)
            if right is not None:
                lengths[i] -= len(tokens) - right
                accepted, drafted = accepted + right - 1, drafted + len(tokens) - 1
        steps += 1
    for request in requests:
        del request.tokens[new:]
    took = time.perf_counter() - begun
    return Served(requests=requests, seconds=took, steps=steps, accepted=accepted, drafted=drafted)


def _new_tokens(request: Request, new: int, chunk: int, drafts: int) -> list[int]:
    """Return the input of a step: a chunk of the prompt, or the last token and drafts."""
    if request.waiting:
        return request.waiting[:chunk]
    if len(request.tokens) >= new:  # done; each request has a token in each step
        return request.tokens[-1:]
    return request.tokens[-1:] + request.draft(drafts)


def _accept(request: Request, given: list[int], best: list[int], now: float) -> int | None:
    """Take over what a step found; return how many of the given tokens stay in the cache, None
    for a chunk of a prompt."""
    if request.waiting:
        request.waiting = request.waiting[len(given) :]
        if not request.waiting:
            request.tokens.append(best[-1])
            request.first_s = now
        return None
    right = 1
    while right < len(given) and given[right] == best[right - 1]:
        right += 1
    request.tokens += best[:right]
    return right
