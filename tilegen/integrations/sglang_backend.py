"""The class of a back end for sglang: batches, CUDA graphs of decoding, and calls.

Written for sglang 0.5.23. A layer has one tensor of keys (slots, heads, head dim) and another of
values, viewed here as pages. `req_to_token` has the slot of each token of each request; the slot of
the first token in a page gives the page.

Latent attention (MLA) has one tensor, (slots, 1, kv_lora_rank + qk_rope_head_dim), whose first
columns are the values. For a back end that it does not know, sglang joins the parts of queries and
keys in this absorbed form, which reads the cache. Whole prompts come with keys and values per head
instead, after sglang has written their latents to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
)
from sglang.srt.layers.radix_attention import (  # pyright: ignore[reportMissingImports]
    AttentionType,
)
from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # pyright: ignore[reportMissingImports]
from sglang.srt.mem_cache.swa_memory_pool import (  # pyright: ignore[reportMissingImports]
    SWAKVPool,
)
from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

from tilegen.calls.paged import attention_paged
from tilegen.calls.varlen import attention_varlen
from tilegen.environment import BATCH_INVARIANT, current
from tilegen.errors import Unsupported
from tilegen.integrations import windows
from tilegen.integrations.flash_changes import score_of
from tilegen.masks.constructors import tree
from tilegen.masks.mask import Mask, sliding_window
from tilegen.masks.score import Score
from tilegen.masks.values import table_of
from tilegen.problem import PAGES

_NO_DRAFTING = (
    "tilegen's back end for sglang verifies drafts, and makes none: "
    "name another --speculative-draft-attention-backend"
)


@dataclass
class Batch:
    """A forward, shared by its layers: tensors on the device, and numbers that bound them."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    q_starts: torch.Tensor
    longest_q: int
    longest_kv: int
    window_table: torch.Tensor | None = None
    """The pages of layers with a pool of their own for windows."""
    window_slots: torch.Tensor | None = None
    """Slots of new tokens in the pool for windows."""
    seen: torch.Tensor | None = None
    """The drafts that each draft of a request sees, including itself, for drafts that form trees:
    (requests, drafts, drafts)."""
    trees: dict[int, Mask] = field(default_factory=dict)
    """Masks of the trees by window; -1 for none."""


class TilegenAttnBackend(AttentionBackend):
    """Computes prompts, chunks of prompts, batches that mix them with decoding, decoding, and
    verification of drafts. The last two work in CUDA graphs, and all of them with latent attention
    (MLA). Drafting, encoders, and keys chosen by an indexer are unsupported."""

    def __init__(self, model_runner: Any) -> None:
        """Raise Unsupported for models whose keys and values the back end cannot read."""
        super().__init__()
        parallel = get_parallel()
        # Models look up both pools here, by these names.
        self.req_to_token_pool: Any = model_runner.req_to_token_pool
        self.token_to_kv_pool: Any = model_runner.token_to_kv_pool
        self.req_to_token: torch.Tensor = self.req_to_token_pool.req_to_token
        pool = self.token_to_kv_pool
        self.has_windows = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self.is_latent: bool = model_runner.use_mla_backend
        refused = {
            "caches of another dtype than the model's, such as fp8": model_runner.kv_cache_dtype
            != model_runner.dtype,
            "pools for windows of latent attention (MLA)": self.is_latent and self.has_windows,
            "latent attention (MLA) to keys that an indexer chooses": self.is_latent
            and getattr(pool, "use_dsa", True),
            "models of encoder and decoder": model_runner.model_config.is_encoder_decoder,
            "windows that see whole prompts": model_runner.prefill_aware_swa,
            "unified pools of keys": model_runner.kv_index_translator.is_translating,
            "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        }
        _refuse(refused, "; serve this model with another --attention-backend")
        # Pages of kernels are powers of two: sglang's pages, or parts of them.
        self.page = max(size for size in PAGES if model_runner.page_size % size == 0)
        self.capacity: int = model_runner.model_config.context_len
        self.forward_metadata: Batch | None = None
        self._captured: Batch | None = None
        self._changes: dict[int, tuple[Mask, Score | None, Any]] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the layers of a forward outside of CUDA graphs. Raises Unsupported."""
        forward = forward_batch
        mode = forward.forward_mode
        self.forward_metadata = None
        if mode.is_idle():
            return
        drafts = _drafts_of(forward)
        if not (drafts or mode.is_decode() or _is_prompt(mode)):
            raise Unsupported(_NO_DRAFTING)
        # Without lengths on the host, the launch must cover the whole context.
        known, most = forward.seq_lens_cpu, self._longest(drafts)
        longest = most if known is None else min(most, max(1, int(known.max())) + drafts)
        if drafts or mode.is_decode():
            longest_q = drafts or 1
            starts = longest_q * torch.arange(
                len(forward.seq_lens) + 1, device=forward.seq_lens.device
            )
        else:
            starts = torch.nn.functional.pad(forward.extend_seq_lens.cumsum(0), (1, 0))
            longest_q = max(forward.extend_seq_lens_cpu)
        self.forward_metadata = self._batch(forward, starts.int(), longest_q, longest, drafts)
        if drafts and forward.spec_info.custom_mask is not None:
            self.forward_metadata.seen = _seen(forward, drafts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the tensors that graphs of decoding or verification read, for `max_bs` requests
        of the longest context with equally many tokens."""
        device, tokens = self.req_to_token.device, max(1, max_num_tokens // max_bs)
        longest = self._longest(tokens if tokens > 1 else 0)
        table = torch.zeros(max_bs, -(-longest // self.page), dtype=torch.int32).to(device)
        self._captured = Batch(
            block_table=table,
            lengths=torch.ones(max_bs, dtype=torch.int32, device=device),
            q_starts=tokens * torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            longest_q=tokens,
            longest_kv=longest,
            seen=torch.ones(max_bs, tokens, tokens, dtype=torch.bool, device=device).tril(),
        )
        if self.has_windows:
            self._captured.window_table = torch.zeros_like(table)
            self._captured.window_slots = torch.zeros(
                max_num_tokens, dtype=torch.int64, device=device
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors that a graph of decoding or verification reads, before its capture or
        replay. Raises Unsupported."""
        forward, whole = forward_batch, self._captured
        drafts = _drafts_of(forward)
        if whole is None or not (drafts or forward.forward_mode.is_decode_or_idle()):
            raise Unsupported(
                "tilegen's back end for sglang has CUDA graphs of decoding, and of verifying drafts"
            )
        if not forward.forward_mode.is_idle() and (drafts or 1) != whole.longest_q:
            raise Unsupported(
                f"expected {whole.longest_q} tokens of each request, as init_cuda_graph_state was "
                f"told, got {drafts or 1}"
            )
        requests = forward.batch_size
        now = self._batch(forward, whole.q_starts, whole.longest_q, whole.longest_kv, drafts)
        whole.block_table[:requests].copy_(now.block_table)
        whole.lengths[:requests].copy_(now.lengths)
        self.forward_metadata = replace(
            whole,
            block_table=whole.block_table[:requests],
            lengths=whole.lengths[:requests],
            q_starts=whole.q_starts[: requests + 1],
            seen=None,
            trees={},
        )
        if drafts and whole.seen is not None:  # a graph has one mask: a chain is stored as a tree
            self.forward_metadata.seen = whole.seen[:requests].copy_(_seen(forward, drafts))
        for name in ("window_table", "window_slots") if self.has_windows else ():
            filled = getattr(whole, name)[: len(getattr(now, name))]
            setattr(self.forward_metadata, name, filled.copy_(getattr(now, name)))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that pad a graph's batch."""
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention (tokens, heads * v_head_dim) of one query per request. Raises
        Unsupported."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute attention (tokens, heads * v_head_dim) of the new tokens of each request. Raises
        Unsupported."""
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        unknown = [name for name, x in others.items() if x is not None and x is not False]
        if unknown:
            raise Unsupported(f"tilegen's back end for sglang does not take {', '.join(unknown)}")
        batch, pool = self.forward_metadata, self.token_to_kv_pool
        if batch is None:
            raise Unsupported("expected init_forward_metadata before the first layer of a forward")
        if id(layer) not in self._changes:  # two layers with one cache may share a layer_id
            self._changes[id(layer)] = *_changes_of(layer), layer
        mask, score, _ = self._changes[id(layer)]
        if batch.seen is not None:
            left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
            if left not in batch.trees:  # windows count places, as in sglang's own kernels
                batch.trees[left] = tree(batch.seen)
                if left >= 0:
                    batch.trees[left] &= sliding_window(left, None, "bottom_right")
            mask = batch.trees[left]
        if sinks is not None:
            score = replace(score or Score(), sinks=table_of(sinks, "h"))
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if k is not None and v is not None:
            if save_kv_cache:
                where = KVWriteLoc.for_batch(forward_batch, swa_loc=batch.window_slots)
                pool.set_kv_buffer(layer, where, k, v)
            elif self.is_latent:
                refused = {
                    "keys of each head beside the latent cache": not _are_whole(forward_batch),
                    # sglang uses keys per head if no prompt of a batch has a cached part.
                    f"keys of each head under {BATCH_INVARIANT}=1": current().batch_invariant,
                }
                _refuse(refused)
                new = rows, k, v, batch.q_starts
                out = attention_varlen(*new, mask=mask, score=score, scale=layer.scaling)
                return out.flatten(1)
        of_window = self.has_windows and pool.layers_mapping[layer.layer_id][1]
        k_pages, v_pages = map(self._pages, pool.get_kv_buffer(layer.layer_id))
        table = (
            batch.window_table
            if of_window and batch.window_table is not None
            else batch.block_table
        )
        out = q.new_empty(len(rows), layer.tp_q_head_num, layer.v_head_dim)
        attention_paged(
            *(rows, k_pages, v_pages, table, batch.lengths),
            q_starts=batch.q_starts,
            max_q_length=batch.longest_q,
            max_kv_length=batch.longest_kv,
            mask=mask,
            score=score,
            scale=layer.scaling,
            out=out,
        )
        return out.flatten(1)

    def _batch(
        self, forward: Any, starts: torch.Tensor, longest_q: int, longest_kv: int, drafts: int
    ) -> Batch:
        """Make a batch from sglang's; its tables cover `longest_kv` keys."""
        firsts = self.req_to_token[:, : longest_kv : self.page][forward.req_pool_indices]
        lengths = (forward.seq_lens + drafts).int()
        batch = Batch((firsts // self.page).int(), lengths, starts, longest_q, longest_kv)
        if self.has_windows:
            # Tokens that left their window have no slot there: any page may stand for theirs.
            moved = self.token_to_kv_pool.translate_loc_from_full_to_swa
            batch.window_table = (moved(firsts).clamp(min=0) // self.page).int()
            batch.window_slots = moved(forward.out_cache_loc)
        return batch

    def _longest(self, drafts: int) -> int:
        """Return the most keys of a request with `drafts` drafts after its text."""
        return min(self.capacity + drafts, self.req_to_token.shape[1])

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """View keys or values of a layer (slots, heads, dim) as pages. Raises Unsupported."""
        if slots.ndim != 3:
            raise Unsupported(
                "tilegen's back end for sglang reads keys and values laid out (slots, heads, dim), "
                f"got {tuple(slots.shape)}"
            )
        # Strides of the slots are kept, so that kernels see values that are columns of keys.
        shape = len(slots) // self.page, self.page, *slots.shape[1:]
        return slots.as_strided(shape, (self.page * slots.stride(0), *slots.stride()))


def _drafts_of(forward: Any) -> int:
    """Return the number of drafts of each request that a batch verifies, or 0. Raises Unsupported
    for other steps of speculative decoding."""
    if forward.forward_mode.is_idle():
        return 0
    if forward.forward_mode.is_target_verify() and forward.spec_info is not None:
        mask = forward.spec_info.custom_mask
        _refuse(
            {
                "numbers of drafts that differ by request": forward.spec_info.ragged_verify_layout
                is not None,
                "masks of drafts that are no bools": mask is not None and mask.dtype != torch.bool,
            }
        )
        if (drafts := int(forward.spec_info.num_tokens_per_req)) > 0:
            return drafts
    elif forward.spec_info is None and not forward.forward_mode.is_target_verify():
        return 0
    raise Unsupported(_NO_DRAFTING)


def _seen(forward: Any, drafts: int) -> torch.Tensor:
    """Return the drafts that each draft sees, (requests, drafts, drafts).

    sglang's mask has a row for each draft of each request: all keys before the drafts, then the
    drafts. Without a mask drafts are chains, with one table for all requests.
    """
    flat, before = forward.spec_info.custom_mask, forward.seq_lens.long()
    if flat is None:
        return torch.ones(drafts, drafts, dtype=torch.bool, device=before.device).tril()
    row = before + drafts
    first = (drafts * row).cumsum(0) - drafts * row
    index = torch.arange(drafts, device=flat.device)
    at = (first + before)[:, None, None] + index[:, None] * row[:, None, None] + index
    return flat[at.clamp(max=len(flat) - 1)]  # idle requests of a graph have no rows in `flat`


def _is_prompt(mode: Any) -> bool:
    """Check whether a batch computes new tokens of prompts, alone or mixed with decoding."""
    return mode.is_extend() and not (mode.is_target_verify() or mode.is_dllm_extend())


def _are_whole(forward: Any) -> bool:
    """Check whether no prompt of a batch has a cached part."""
    before = forward.extend_prefix_lens_cpu
    return _is_prompt(forward.forward_mode) and before is not None and not any(before)


def _changes_of(layer: Any) -> tuple[Mask, Score | None]:
    """Return the mask and the score of a layer. Raises Unsupported."""
    refused = {
        "attention across": layer.is_cross_attention,
        f"attention of type {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
        "temperatures by length (xai_temperature_len)": (layer.xai_temperature_len or -1) > 0,
        "chunks that attend to themselves (use_irope)": layer.use_irope,
        f"positions {layer.pos_encoding_mode}": layer.pos_encoding_mode != "NONE",
        f"caps by {layer.logit_capping_method}": layer.logit_cap > 0
        and layer.logit_capping_method != "tanh",
    }
    _refuse(refused)
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    return windows.sglang(window), score_of(layer.logit_cap, None, "bottom_right")


def _refuse(asked: dict[str, bool], advice: str = "") -> None:
    """Raise Unsupported for the first feature that is requested."""
    for what, is_asked in asked.items():
        if is_asked:
            raise Unsupported(f"tilegen's back end for sglang has no {what}{advice}")
