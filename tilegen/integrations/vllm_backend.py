"""The three classes that vLLM asks of a back end: what is supported, what a batch is, and the call.

Read with vLLM 0.33. Keys and values of a layer are one tensor (blocks, heads, block, 2 * head dim)
in any physical order with a dense last dimension: kernels read both halves where they are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm import envs  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from tilegen.calls.paged import attention_paged
from tilegen.errors import Unsupported
from tilegen.integrations import windows
from tilegen.integrations.flash_changes import score_of
from tilegen.masks.score import Score
from tilegen.problem import MAX_HEAD_DIM, MIN_HEAD_DIM
from tilegen.runtime.call import DTYPES
from tilegen.runtime.slots import write_slots
from tilegen.settings import BATCH_INVARIANT

CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes by vLLM's names for caches of a dtype of their own; `auto` is the model's dtype."""


class TilegenBackend(AttentionBackend):
    """Answers to what vLLM asks of a back end. Refused with a reason are other caches than fp16,
    bf16 and fp32 (fp8), attention of encoders and across, prefixes of images that see themselves,
    R-SWA, ALiBi under a square root, and context parallelism. Models with MLA have a back end of
    their own, in vllm_latent.py."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration that `register` takes."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilegenImpl]:
        return TilegenImpl

    @staticmethod
    def get_builder_cls() -> type[TilegenMetadataBuilder]:
        return TilegenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the pages that kernels take; vLLM divides blocks of other sizes into these."""
        return [16, 32, 64, 128, 256]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return MIN_HEAD_DIM <= head_size <= max(MAX_HEAD_DIM.values())

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: VLLM_BATCH_INVARIANT sets TILEGEN_BATCH_INVARIANT."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: the most queries of a request, which bound a launch, are the host's."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        limit = MAX_HEAD_DIM[DTYPES[dtype]] if dtype in DTYPES else head_size
        if cls.supports_head_size(head_size) and head_size > limit:
            return f"tilegen takes head sizes up to {limit} in {dtype}"
        if CACHES.get(kv_cache_dtype, dtype) != dtype:
            return f"tilegen reads caches of the model's dtype {dtype}, not {kv_cache_dtype}"
        return None


def refuse_layers(attn_type: str, kv_cache_dtype: str) -> None:
    """Raise Unsupported for layers that are not computed."""
    if attn_type != AttentionType.DECODER:
        raise Unsupported(
            f"tilegen's back end computes attention over a cache of keys, not {attn_type}; use "
            "another back end for these layers (backend_per_kind)"
        )
    if kv_cache_dtype not in ("auto", *CACHES):
        raise Unsupported(
            f"tilegen reads fp16, bf16 and fp32 caches, not {kv_cache_dtype}; use "
            "--kv-cache-dtype auto"
        )


def follow_batch_invariance() -> bool:
    """Have kernels follow vLLM's setting, which is returned."""
    if envs.VLLM_BATCH_INVARIANT:
        os.environ[BATCH_INVARIANT] = "1"
    return bool(envs.VLLM_BATCH_INVARIANT)


def refuse_batches(its: Any) -> None:
    """Raise Unsupported for batches that are not computed."""
    if not isinstance(its.causal, bool):
        raise Unsupported("expected one `causal` for a batch, got one for each request")
    if its.mm_req_doc_ranges:
        raise Unsupported("tilegen's back end has no prefixes of images that see themselves")
    if its.rswa_prefix_lens is not None:
        raise Unsupported("tilegen's back end has no windows with reference prefixes (R-SWA)")


class Longest:
    """The keys that a batch is launched for. vLLM runs each batch that it captures once before, as
    a short one: the first of its shape is as long as the captured one, so that kernels are chosen,
    compiled and loaded then."""

    def __init__(self, vllm_config: Any) -> None:
        self.capacity: int = vllm_config.model_config.max_model_len
        drafts = vllm_config.speculative_config
        # Some drafters append as many tokens again.
        self._most_uniform = 1 + 2 * ((drafts and drafts.num_speculative_tokens) or 0)
        self._built: set[tuple[int, int]] = set()

    def of(self, lengths: torch.Tensor, longest_q: int, longest_kv: int) -> int:
        """Return the keys to launch for, where requests have at most longest_kv."""
        shape = len(lengths), longest_q
        if longest_q > self._most_uniform or shape in self._built:
            return longest_kv
        self._built.add(shape)
        return self.capacity


@dataclass
class TilegenMetadata:
    """A batch: tensors on the device, which the host does not read, and what bounds them."""

    num_tokens: int
    """Number of tokens of the batch; tensors of a layer may have more."""
    q_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    longest_q: int
    longest_kv: int
    causal: bool


class TilegenMetadataBuilder(AttentionMetadataBuilder[TilegenMetadata]):
    """Batches, taken as vLLM hands them over: nothing is computed, copied or reordered.

    A CUDA graph holds the launch of the longest query and the longest sequence that it was captured
    with. Of batches with one number of queries for each request (decoding, drafts to verify) these
    are all there are, so such graphs are claimed; graphs that mix prompts in would launch a
    program for each tile of the longest possible prompt of each request.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._longest = Longest(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TilegenMetadata:
        """Return a batch. Raises Unsupported."""
        its = common_attn_metadata
        refuse_batches(its)
        return TilegenMetadata(
            num_tokens=its.num_actual_tokens,
            q_starts=its.query_start_loc,
            lengths=its.seq_lens,
            block_table=its.block_table_tensor,
            longest_q=its.max_query_len,
            longest_kv=self._longest.of(its.seq_lens, its.max_query_len, its.max_seq_len),
            causal=its.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TilegenMetadata:
        """Return a batch whose launch serves sequences as long as the model's longest."""
        return replace(self.build(0, common_attn_metadata), longest_kv=self._longest.capacity)


class TilegenImpl(AttentionImpl[TilegenMetadata]):
    """The attention of one layer: `do_kv_cache_update` writes keys and values, `forward` reads
    them."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Raises Unsupported; `sliding_window` counts the query's own token, ALiBi is
        flash-attn's, minus a slope times the distance."""
        refuse_layers(attn_type, kv_cache_dtype)
        follow_batch_invariance()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # A layer that shares another's cache is given that cache, and writes none.
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.masks = [windows.vllm(sliding_window, causal) for causal in (False, True)]
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.score = score_of(logits_soft_cap or 0.0, slopes, "bottom_right")
        if sinks is not None:
            self.score = replace(self.score or Score(), sink_logits=sinks)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TilegenMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write attention of query (tokens, heads, head size) into output (tokens, heads, head
        size of values) and return it; tokens behind the batch's are left as they are. Without
        metadata, as in vLLM's profiling run, output is 0. Raises Unsupported."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("tilegen's back end does not quantise its output")
        its: Any = attn_metadata  # vLLM's None, in a profiling run, is not in its annotation
        if its is None:
            return output.fill_(0)
        if not its.num_tokens:
            return output
        k, v = self._halves(kv_cache)
        attention_paged(
            *(query[: its.num_tokens], k, v, its.block_table, its.lengths),
            q_starts=its.q_starts,
            max_q_length=its.longest_q,
            max_kv_length=min(its.longest_kv, its.block_table.shape[1] * k.shape[2]),
            mask=self.masks[its.causal],
            score=self.score,
            scale=self.scale,
            layout="HND",
            out=output[: its.num_tokens],
        )
        return output

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write key and value (tokens, heads, head size) to the slots of the cache that
        slot_mapping (tokens,) names, `block * block size + row`; -1 leaves a token out."""
        k, v = self._halves(kv_cache)
        tokens = len(slot_mapping)  # those of a padded batch may be fewer
        write_slots(key[:tokens], value[:tokens], k, v, slot_mapping, layout="HND")

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of a layer's cache, views (blocks, heads, block, size)."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
