"""The three classes of a back end for vLLM: supported features, the metadata of a batch, and the
call.

Written for vLLM 0.33. Keys and values of a layer are one tensor (blocks, heads, block, 2 * head
dim) in any physical order with a dense last dimension; kernels read both halves in place.
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
from tilegen.environment import BATCH_INVARIANT, reread
from tilegen.errors import Unsupported
from tilegen.integrations import windows
from tilegen.integrations.flash_changes import score_of
from tilegen.masks.score import Score
from tilegen.masks.values import table_of
from tilegen.problem import MAX_HEAD_DIM, MIN_HEAD_DIM
from tilegen.runtime.call import DTYPES
from tilegen.runtime.slots import write_slots

CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""Dtypes of caches by vLLM's names; `auto` is the model's dtype."""


class TilegenBackend(AttentionBackend):
    """Features of the back end. Unsupported, with a reason: caches other than fp16, bf16 and fp32
    (fp8), encoder and cross attention, image prefixes that attend to themselves, R-SWA, ALiBi under
    a square root, and context parallelism. Models with MLA have another back end, in
    vllm_latent.py."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *CACHES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration that `register` overrides."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TilegenImpl]:
        return TilegenImpl

    @staticmethod
    def get_builder_cls() -> type[TilegenMetadataBuilder]:
        return TilegenMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the page sizes of kernels; vLLM divides blocks of other sizes into these."""
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
        """Return False: the host's longest query length bounds a launch, so it must be right."""
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
    """Raise Unsupported for unsupported layers."""
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
    """Apply vLLM's setting of batch invariance to tilegen, and return it."""
    if envs.VLLM_BATCH_INVARIANT:
        os.environ[BATCH_INVARIANT] = "1"  # for this process's threads, and its children
        reread()
    return bool(envs.VLLM_BATCH_INVARIANT)


def refuse_batches(common: Any) -> None:
    """Raise Unsupported for unsupported batches."""
    if not isinstance(common.causal, bool):
        raise Unsupported("expected one `causal` for a batch, got one for each request")
    if common.mm_req_doc_ranges:
        raise Unsupported("tilegen's back end has no prefixes of images that see themselves")
    if common.rswa_prefix_lens is not None:
        raise Unsupported("tilegen's back end has no windows with reference prefixes (R-SWA)")


class Longest:
    """The number of keys to launch a batch for.

    vLLM runs each batch that it captures once before, as a short one. The first batch of a shape is
    launched as long as the captured one, so that kernels are chosen, compiled and loaded then.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.capacity: int = vllm_config.model_config.max_model_len
        drafts = vllm_config.speculative_config
        # Some drafters append as many tokens once more.
        self._most_uniform = 1 + 2 * ((drafts and drafts.num_speculative_tokens) or 0)
        self._built: set[tuple[int, int]] = set()

    def of(self, lengths: torch.Tensor, longest_q: int, longest_kv: int) -> int:
        """Return the number of keys to launch for, if requests have at most `longest_kv`."""
        shape = len(lengths), longest_q
        if longest_q > self._most_uniform or shape in self._built:
            return longest_kv
        self._built.add(shape)
        return self.capacity


@dataclass
class TilegenMetadata:
    """A batch: tensors on the device, which the host does not read, and bounds on them."""

    num_tokens: int
    """Number of tokens in the batch; tensors of a layer may have more."""
    q_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    longest_q: int
    longest_kv: int
    causal: bool


class TilegenMetadataBuilder(AttentionMetadataBuilder[TilegenMetadata]):
    """Makes batches from vLLM's metadata, without computing, copying or reordering.

    A CUDA graph holds a launch for the longest query and sequence that it was captured with. That
    covers batches with equally many queries per request (decoding, drafts to verify), so support
    for such graphs is declared. Graphs that include prompts would launch a program for each tile of
    the longest possible prompt of each request.
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
        """Make a batch. Raises Unsupported."""
        common = common_attn_metadata
        refuse_batches(common)
        return TilegenMetadata(
            num_tokens=common.num_actual_tokens,
            q_starts=common.query_start_loc,
            lengths=common.seq_lens,
            block_table=common.block_table_tensor,
            longest_q=common.max_query_len,
            longest_kv=self._longest.of(common.seq_lens, common.max_query_len, common.max_seq_len),
            causal=common.causal,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> TilegenMetadata:
        """Make a batch whose launch covers the model's longest sequence."""
        return replace(self.build(0, common_attn_metadata), longest_kv=self._longest.capacity)


class TilegenImpl(AttentionImpl[TilegenMetadata]):
    """The attention of a layer: `do_kv_cache_update` writes keys and values, `forward` reads
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
        """`sliding_window` includes the query's own token. ALiBi is flash-attn's: minus slope times
        distance. Raises Unsupported."""
        refuse_layers(attn_type, kv_cache_dtype)
        follow_batch_invariance()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        # A layer that shares another layer's cache receives that cache, and does not write it.
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.masks = [windows.vllm(sliding_window, causal) for causal in (False, True)]
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.score = score_of(logits_soft_cap or 0.0, slopes, "bottom_right")
        if sinks is not None:
            self.score = replace(self.score or Score(), sinks=table_of(sinks, "h"))

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
        """Compute attention of query (tokens, heads, head size) into output (tokens, heads, head
        size of values) and return it. Tokens after the batch's are not written. Without metadata,
        as in vLLM's profiling run, output is 0. Raises Unsupported."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("tilegen's back end does not quantise its output")
        batch: Any = attn_metadata  # may be None in a profiling run, despite vLLM's annotation
        if batch is None:
            return output.fill_(0)
        if not batch.num_tokens:
            return output
        k, v = self._halves(kv_cache)
        attention_paged(
            *(query[: batch.num_tokens], k, v, batch.block_table, batch.lengths),
            q_starts=batch.q_starts,
            max_q_length=batch.longest_q,
            max_kv_length=min(batch.longest_kv, batch.block_table.shape[1] * k.shape[2]),
            mask=self.masks[batch.causal],
            score=self.score,
            scale=self.scale,
            layout="HND",
            out=output[: batch.num_tokens],
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
        """Write key and value (tokens, heads, head size) to the slots of the cache in slot_mapping
        (tokens,), `block * block size + row`; a token with slot -1 is skipped."""
        k, v = self._halves(kv_cache)
        tokens = len(slot_mapping)  # may be fewer than the rows of a padded batch
        write_slots(key[:tokens], value[:tokens], k, v, slot_mapping, layout="HND")

    def _halves(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View the keys and the values of a layer's cache, each (blocks, heads, block, size)."""
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]
