"""A batch as vLLM and sglang hand it to a back end, a prompt, a chunk of one, a decoding step and
drafts to verify, and what dense attention makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

QUERIES = [37, 9, 1, 4]
LENGTHS = [37, 50, 23, 30]
"""New tokens, and all, of each request."""
HEADS, HEADS_KV, DIM = 4, 2, 16
SLOPES = [1.0, 0.5, 0.25, 0.125]
SCALE = 0.3


@dataclass
class Kept:
    """The mask and score of a layer, in the terms of this reference."""

    left: float = float("inf")
    right: float = 0
    cap: float = 0.0
    slopes: list[float] = field(default_factory=list)
    sinks: torch.Tensor | None = None
    trees: list[torch.Tensor] = field(default_factory=list)
    """Which drafts each draft sees, of each request: bool (drafts, drafts)."""


def drawn(tokens: int, heads: int, dim: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, heads, dim, generator=torch.Generator().manual_seed(seed))


@dataclass
class Tokens:
    """All tokens of each request, q of the new ones and k and v of all, (tokens, heads, dim)."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]

    @classmethod
    def drafts(cls, lengths: list[int], drafts: int) -> Tokens:
        """Return requests of these lengths, each with as many drafts at its end."""
        return cls(
            [drawn(drafts, HEADS, DIM, 40 + i) for i in range(len(lengths))],
            [drawn(length, HEADS_KV, DIM, 50 + i) for i, length in enumerate(lengths)],
            [drawn(length, HEADS_KV, DIM, 60 + i) for i, length in enumerate(lengths)],
        )

    @classmethod
    def of(cls, queries: list[int], dim_v: int = DIM) -> Tokens:
        lengths = [length for length, new in zip(LENGTHS, QUERIES, strict=True) if new in queries]
        return cls(
            [drawn(new, HEADS, DIM, 10 + i) for i, new in enumerate(queries)],
            [drawn(length, HEADS_KV, DIM, 20 + i) for i, length in enumerate(lengths)],
            [drawn(length, HEADS_KV, dim_v, 30 + i) for i, length in enumerate(lengths)],
        )

    @property
    def queries(self) -> list[int]:
        return list(map(len, self.q))

    @property
    def lengths(self) -> list[int]:
        return list(map(len, self.k))

    def starts(self) -> torch.Tensor:
        return torch.tensor([0, *self.queries]).cumsum(0).int()

    def expected(self, kept: Kept) -> torch.Tensor:
        """Return dense attention (all new tokens, heads, dim), computed in fp64."""
        trees = kept.trees or [None] * len(self.q)
        every = zip(self.q, self.k, self.v, trees, strict=True)
        return torch.cat([dense(q, k, v, kept, tree) for q, k, v, tree in every])


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: Kept,
    tree: torch.Tensor | None = None,
    scale: float = SCALE,
) -> torch.Tensor:
    """Return attention (queries, heads, columns) in fp64; the last query is at the last key."""
    q, k, v = (x.transpose(0, 1).double() for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if kept.cap:
        scores = kept.cap * (scores / kept.cap).tanh()
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    behind = at - torch.arange(k.shape[1])
    if kept.slopes:
        scores -= torch.tensor(kept.slopes).double()[:, None, None] * behind.abs()
    dropped = (behind > kept.left) | (-behind > kept.right)
    if tree is not None:
        dropped[:, -len(tree) :] |= ~tree
    scores.masked_fill_(dropped, float("-inf"))
    if kept.sinks is not None:
        scores = torch.cat([scores, kept.sinks.double()[:, None, None].expand(-1, len(at), 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1)


def tables(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """Return the pages of each request, in no order and from page 1 on, and how many pages the
    cache has; entries behind a request's are no pages, as in vLLM's tables."""
    counts = [-(-length // page) for length in lengths]
    order = 1 + torch.randperm(sum(counts), generator=torch.Generator().manual_seed(2))
    table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
    for row, part in zip(table, order.split(counts), strict=True):
        row[: len(part)] = part
    return table, sum(counts) + 1


def slots_of(table: torch.Tensor, page: int, first: int, end: int) -> torch.Tensor:
    """Return where a request's tokens lie whose table this is, `page * keys of a page + row`."""
    at = torch.arange(first, end)
    return table[at // page].long() * page + at % page


# --------------------------------------------------------------------------------------------------
# vLLM

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Physical orders of vLLM's caches (layers, blocks, heads, keys of a block, content)."""


def vllm_cache(
    order: str, blocks: int, page: int, content: int = 2 * DIM, heads: int = HEADS_KV
) -> torch.Tensor:
    """Return a layer's view (blocks, heads, keys, content) of the cache of three, all of it no
    numbers."""
    sizes = (3, blocks, heads, page, content)
    physical = torch.full([sizes[i] for i in ORDERS[order]], float("nan"))
    return physical.permute(*[ORDERS[order].index(i) for i in range(5)])[1]


def vllm_forward(
    classes: Any,
    tokens: Tokens,
    layer: dict[str, Any],
    *,
    causal: bool = True,
    order: str = "LBNHC",
    page: int = 16,
    capture: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output (new tokens and padding) and the layer's cache after an update and a forward;
    the padding of output was -7."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=64), speculative_config=None
    )
    builder = classes.TilegenMetadataBuilder(None, ["layer"], config, torch.device("cpu"))
    impl = classes.TilegenImpl(HEADS, DIM, SCALE, HEADS_KV, **layer)
    table, blocks = tables(tokens.lengths, page)
    content = DIM + tokens.v[0].shape[2]
    cache = vllm_cache(order, blocks, page, content)
    update = impl.do_kv_cache_update
    every = range(len(tokens.q))
    olds = [length - new for length, new in zip(tokens.lengths, tokens.queries, strict=True)]
    for i in every:  # what earlier forwards wrote
        where = slots_of(table[i], page, 0, olds[i])
        update(None, tokens.k[i][: olds[i]], tokens.v[i][: olds[i]], cache, where)
    padding = 3
    new = [slots_of(table[i], page, olds[i], tokens.lengths[i]) for i in every]
    slots = torch.cat([*new, torch.full((padding,), -1)])
    q, k, v = (
        torch.cat([*parts, torch.full((padding, *parts[0].shape[1:]), float("nan"))])
        for parts in (
            tokens.q,
            [x[old:] for x, old in zip(tokens.k, olds, strict=True)],
            [x[old:] for x, old in zip(tokens.v, olds, strict=True)],
        )
    )
    common = classes.CommonAttentionMetadata(
        query_start_loc=tokens.starts(),
        query_start_loc_cpu=tokens.starts(),
        seq_lens=torch.tensor(tokens.lengths, dtype=torch.int32),
        num_reqs=len(tokens.q),
        num_actual_tokens=sum(tokens.queries),
        max_query_len=max(tokens.queries),
        max_seq_len=max(tokens.lengths) + 5,  # an upper bound
        block_table_tensor=table,
        slot_mapping=slots,
        causal=causal,
    )
    made = (
        builder.build_for_cudagraph_capture(common) if capture else builder.build(0, common, False)
    )
    output = torch.full((len(q), HEADS, tokens.v[0].shape[2]), -7.0)
    update(None, k, v, cache, slots)
    assert impl.forward(None, q, k, v, cache, made, output=output) is output
    return output, cache


# --------------------------------------------------------------------------------------------------
# sglang


class Pool:
    """A pool of keys and values as sglang's, (slots, heads, dim) for each layer. Slots of the first
    page, which are of no token, hold zeros; others that nothing was written to, no numbers."""

    layers_mapping: ClassVar[dict[int, tuple[int, bool]]] = {0: (0, False), 1: (0, True)}
    swa_layer_nums: ClassVar[int] = 1

    def __init__(self, slots: int, page: int, dim_v: int = DIM) -> None:
        whole = torch.full((len(self.layers_mapping), slots, HEADS_KV, DIM + dim_v), float("nan"))
        whole[:, :page] = 0.0
        self.buffers = [(x[..., :DIM], x[..., DIM:]) for x in whole]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.buffers[layer_id]

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        where = loc_info.swa_loc if self.layers_mapping[layer.layer_id][1] else loc_info.loc
        for x, new in zip(self.buffers[layer.layer_id], (cache_k, cache_v), strict=True):
            x[where] = new

    def translate_loc_from_full_to_swa(self, kv_indices: torch.Tensor) -> torch.Tensor:
        """Return the slots of a window's pool: those of another page, -1 for none."""
        return self.moved[kv_indices.long()]


def sglang_runner(tokens: Tokens, page: int, pool: Any = Pool) -> Any:
    """Return a stand-in for sglang's runner, with the fields that a back end reads and all old
    tokens in its pools."""
    table, pages = tables(tokens.lengths, page)
    made = pool((pages + 1) * page, page, tokens.v[0].shape[2])
    made.moved = torch.roll(torch.arange((pages + 1) * page), -page)
    made.moved[:page] = -1
    to_token = torch.zeros(8, 64, dtype=torch.int32)
    for i, length in enumerate(tokens.lengths):
        to_token[2 * i + 1, :length] = slots_of(table[i], page, 0, length)
    for i, (length, new) in enumerate(zip(tokens.lengths, tokens.queries, strict=True)):
        old = to_token[2 * i + 1, : length - new].long()
        for layer, where in ((0, old), (1, made.moved[old])):
            k, v = made.get_kv_buffer(layer)
            k[where], v[where] = tokens.k[i][: len(old)], tokens.v[i][: len(old)]
        made.moved[old[:-24]] = -1  # tokens that left their window
    return SimpleNamespace(
        use_mla_backend=False,
        dtype=tokens.q[0].dtype,
        kv_cache_dtype=tokens.q[0].dtype,
        prefill_aware_swa=False,
        kv_index_translator=SimpleNamespace(is_translating=False),
        req_to_token_pool=SimpleNamespace(req_to_token=to_token),
        token_to_kv_pool=made,
        page_size=page,
        model_config=SimpleNamespace(context_len=64, is_encoder_decoder=False),
    )


def sglang_batch(runner: Any, tokens: Tokens, mode: Any) -> Any:
    """Return the batch of all requests, as far as a back end reads it."""
    requests = torch.arange(len(tokens.q)) * 2 + 1
    to_token = runner.req_to_token_pool.req_to_token
    new = [
        to_token[row, length - count : length].long()
        for row, length, count in zip(requests, tokens.lengths, tokens.queries, strict=True)
    ]
    return SimpleNamespace(
        forward_mode=mode,
        batch_size=len(tokens.q),
        req_pool_indices=requests,
        seq_lens=torch.tensor(tokens.lengths),
        seq_lens_cpu=torch.tensor(tokens.lengths),
        extend_seq_lens=torch.tensor(tokens.queries),
        extend_seq_lens_cpu=tokens.queries,
        extend_prefix_lens_cpu=[
            length - new for length, new in zip(tokens.lengths, tokens.queries, strict=True)
        ],
        out_cache_loc=torch.cat(new),
        out_cache_loc_is_physical=False,
        spec_info=None,
    )


def sglang_drafts(runner: Any, tokens: Tokens, mode: Any, trees: list[torch.Tensor] | None) -> Any:
    """Return the batch that verifies all new tokens as drafts: lengths are without them, and the
    mask has for each draft a row of all keys, then those of the next request."""
    batch = sglang_batch(runner, tokens, mode)
    (drafts,) = set(tokens.queries)
    batch.seq_lens = batch.seq_lens - drafts
    batch.seq_lens_cpu = batch.seq_lens.clone()
    mask = None
    if trees is not None:
        before = [torch.ones(drafts, int(n), dtype=torch.bool) for n in batch.seq_lens]
        pairs = zip(before, trees, strict=True)
        mask = torch.cat([torch.cat(pair, 1).flatten() for pair in pairs])
    batch.spec_info = speculation(drafts, mask)
    return batch


def speculation(drafts: int, mask: torch.Tensor | None) -> Any:
    """Return a stand-in for sglang's `spec_info`, with the fields that a back end reads."""
    return SimpleNamespace(num_tokens_per_req=drafts, custom_mask=mask, ragged_verify_layout=None)


def sglang_layer(layer_id: int, decoder: Any, dim_v: int = DIM, **changed: Any) -> Any:
    """Return a layer as far as a back end reads it; `decoder` is sglang's type of attention."""
    out = {
        "layer_id": layer_id,
        "tp_q_head_num": HEADS,
        "tp_k_head_num": HEADS_KV,
        "qk_head_dim": DIM,
        "v_head_dim": dim_v,
        "scaling": SCALE,
        "logit_cap": 0.0,
        "sliding_window_size": -1,
        "is_cross_attention": False,
        "use_irope": False,
        "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh",
        "attn_type": decoder,
        "xai_temperature_len": -1,
    }
    assert set(changed) <= set(out)
    return SimpleNamespace(**out | changed)


def sglang_new(tokens: Tokens) -> list[torch.Tensor]:
    """Return q (tokens, heads * dim), k and v (tokens, heads, dim) of the new tokens."""
    pairs = zip(tokens.lengths, tokens.queries, strict=True)
    olds = [length - new for length, new in pairs]
    k, v = (
        torch.cat([x[old:] for x, old in zip(parts, olds, strict=True)])
        for parts in (tokens.k, tokens.v)
    )
    return [torch.cat(tokens.q).flatten(1), k, v]
