"""The class that sglang asks of a back end: batches, CUDA graphs of decoding, and the calls.

Read with sglang 0.5.23. A layer's keys are one tensor (slots, heads, head dim) and its values
another, seen here as pages; `req_to_token` has the slot of each token of each request, and with it
the page of each first token of a page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

from tilegen.errors import Unsupported
from tilegen.integrations import windows
from tilegen.integrations.flash_changes import score_of
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.problem import PAGES
from tilegen.runtime.paged import attention_paged


@dataclass
class Batch:
    """A forward as its layers share it: tensors on the device, and numbers that bound them."""

    block_table: torch.Tensor
    lengths: torch.Tensor
    q_starts: torch.Tensor
    longest_q: int
    longest_kv: int
    window_table: torch.Tensor | None = None
    """The pages of layers whose keys lie in a pool of their own, for windows."""
    window_slots: torch.Tensor | None = None
    """Slots in the pool for windows that new tokens go to."""


class TilegenAttnBackend(AttentionBackend):
    """Prompts, chunks of prompts, batches that mix them with decoding, and decoding, the latter in
    CUDA graphs too. Speculative decoding, MLA and encoders are refused."""

    def __init__(self, model_runner: Any) -> None:
        """Raises Unsupported for models whose keys and values tilegen's back end does not read."""
        super().__init__()
        parallel = get_parallel()
        refused = {
            "multi-head latent attention (MLA)": model_runner.use_mla_backend,
            "models of encoder and decoder": model_runner.model_config.is_encoder_decoder,
            "windows that see whole prompts": model_runner.prefill_aware_swa,
            "unified pools of keys": model_runner.kv_index_translator.is_translating,
            "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        }
        _refuse(refused, "; serve this model with another --attention-backend")
        self.req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self.pool: Any = model_runner.token_to_kv_pool
        self.has_windows = isinstance(self.pool, SWAKVPool) and self.pool.swa_layer_nums > 0
        # Pages of kernels are powers of two: those of sglang, or parts of them.
        self.page = max(one for one in PAGES if model_runner.page_size % one == 0)
        self.capacity: int = model_runner.model_config.context_len
        self.forward_metadata: Batch | None = None
        self._captured: Batch | None = None
        self._changes: dict[int, tuple[Mask, Score | None]] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the layers of a forward outside of CUDA graphs. Raises Unsupported."""
        its = forward_batch
        mode = its.forward_mode
        self.forward_metadata = None
        if mode.is_idle():
            return
        if its.spec_info is not None or not (mode.is_decode() or _is_prompt(mode)):
            raise Unsupported("tilegen's back end for sglang has no speculative decoding")
        # Without lengths on the host, a launch is as long as the context.
        known = its.seq_lens_cpu
        longest = self.capacity if known is None else max(1, int(known.max()))
        if mode.is_decode():
            starts = torch.arange(len(its.seq_lens) + 1, device=its.seq_lens.device)
            longest_q = 1
        else:
            starts = torch.nn.functional.pad(its.extend_seq_lens.cumsum(0), (1, 0))
            longest_q = max(its.extend_seq_lens_cpu)
        self.forward_metadata = self._batch(its, starts.int(), longest_q, longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs of decoding read, for `max_bs` requests of the longest context."""
        device = self.req_to_token.device
        table = torch.zeros(max_bs, -(-self.capacity // self.page), dtype=torch.int32).to(device)
        self._captured = Batch(
            block_table=table,
            lengths=torch.ones(max_bs, dtype=torch.int32, device=device),
            q_starts=torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            longest_q=1,
            longest_kv=self.capacity,
        )
        if self.has_windows:
            self._captured.window_table = torch.zeros_like(table)
            self._captured.window_slots = torch.zeros(
                max_num_tokens, dtype=torch.int64, device=device
            )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill what a graph of decoding reads, before it is captured or replayed. Raises
        Unsupported."""
        its, whole = forward_batch, self._captured
        if whole is None or its.spec_info is not None or not its.forward_mode.is_decode_or_idle():
            raise Unsupported("tilegen's back end for sglang has CUDA graphs of decoding only")
        requests = its.batch_size
        now = self._batch(its, whole.q_starts, 1, self.capacity)
        whole.block_table[:requests].copy_(now.block_table)
        whole.lengths[:requests].copy_(now.lengths)
        self.forward_metadata = replace(
            whole,
            block_table=whole.block_table[:requests],
            lengths=whole.lengths[:requests],
            q_starts=whole.q_starts[: requests + 1],
        )
        for name in ("window_table", "window_slots") if self.has_windows else ():
            filled = getattr(whole, name)[: len(getattr(now, name))]
            setattr(self.forward_metadata, name, filled.copy_(getattr(now, name)))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of requests that fill up a graph's batch."""
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
        """Return attention (tokens, heads * v_head_dim) of one query of each request. Raises
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
        """Return attention (tokens, heads * v_head_dim) of the new tokens of each request. Raises
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
        its = self.forward_metadata
        if its is None:
            raise Unsupported("expected init_forward_metadata before the first layer of a forward")
        if layer.layer_id not in self._changes:
            self._changes[layer.layer_id] = _changes_of(layer)
        mask, score = self._changes[layer.layer_id]
        if sinks is not None:
            score = replace(score or Score(), sink_logits=sinks)
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_batch(forward_batch, swa_loc=its.window_slots)
            self.pool.set_kv_buffer(layer, where, k, v)
        of_window = self.has_windows and self.pool.layers_mapping[layer.layer_id][1]
        k_pages, v_pages = map(self._pages, self.pool.get_kv_buffer(layer.layer_id))
        table = its.window_table if of_window and its.window_table is not None else its.block_table
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(len(rows), layer.tp_q_head_num, layer.v_head_dim)
        attention_paged(
            *(rows, k_pages, v_pages, table, its.lengths),
            q_starts=its.q_starts,
            max_q_length=its.longest_q,
            max_kv_length=its.longest_kv,
            mask=mask,
            score=score,
            scale=layer.scaling,
            out=out,
        )
        return out.flatten(1)

    def _batch(self, its: Any, starts: torch.Tensor, longest_q: int, longest_kv: int) -> Batch:
        """Return a batch of sglang's; its tables cover `longest_kv` keys."""
        firsts = self.req_to_token[:, : longest_kv : self.page][its.req_pool_indices]
        batch = Batch(
            (firsts // self.page).int(), its.seq_lens.int(), starts, longest_q, longest_kv
        )
        if self.has_windows:
            # Tokens that left their window have no slot there: any page stands for theirs.
            slots = self.pool.translate_loc_from_full_to_swa(firsts)
            batch.window_table = (slots.clamp(min=0) // self.page).int()
            batch.window_slots = self.pool.translate_loc_from_full_to_swa(its.out_cache_loc)
        return batch

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        """Return keys or values of a layer (slots, heads, dim) as pages, a view. Raises
        Unsupported."""
        if slots.ndim != 3:
            raise Unsupported(
                "tilegen's back end for sglang reads keys and values laid out (slots, heads, dim), "
                f"got {tuple(slots.shape)}"
            )
        whole = len(slots) // self.page * self.page
        return slots[:whole].unflatten(0, (-1, self.page))


def _is_prompt(mode: Any) -> bool:
    """True for a batch that computes new tokens of prompts, alone or beside decoding."""
    return mode.is_extend() and not (mode.is_target_verify() or mode.is_dllm_extend())


def _changes_of(layer: Any) -> tuple[Mask, Score | None]:
    """Return what a layer keeps and does to its scores. Raises Unsupported."""
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
    """Raise Unsupported for the first of the things that is asked."""
    for what, is_asked in asked.items():
        if is_asked:
            raise Unsupported(f"tilegen's back end for sglang has no {what}{advice}")
