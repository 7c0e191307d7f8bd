"""tilegen in models with multi-head latent attention (MLA), such as DeepSeek V2 and V3.

Written for vLLM 0.33, which projects, writes the cache and divides each batch. Tokens to decode and
drafts to verify come in the absorbed form: all heads attend to one head of keys, whose first
columns are the values. Prompts have keys and values per head, and go to a separate back end:
TilegenPrefillBackend if `mla_prefill_backend` is CUSTOM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.attention.mla_attention import (  # pyright: ignore[reportMissingImports]
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionCGSupport,
)
from vllm.v1.attention.backends.mla.prefill.base import (  # pyright: ignore[reportMissingImports]
    MLAPrefillBackend,
)

from tilegen.calls.paged import attention_paged
from tilegen.calls.varlen import attention_varlen
from tilegen.errors import Unsupported
from tilegen.integrations import windows
from tilegen.integrations.vllm_backend import (
    Longest,
    TilegenBackend,
    follow_batch_invariance,
    refuse_batches,
    refuse_layers,
)

MASKS = [windows.vllm(None, causal) for causal in (False, True)]
"""Masks of a request's drafts: not causal and causal."""


class TilegenLatentBackend(TilegenBackend, MLACommonBackend):
    """Features of the back end for MLA. Also unsupported, with a reason: windows, soft caps, ALiBi,
    sinks, and keys chosen by an indexer (sparse)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    # New keys are written by vLLM's layer too, outside of this back end.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[TilegenLatentImpl]:
        return TilegenLatentImpl

    @staticmethod
    def get_builder_cls() -> type[TilegenLatentMetadataBuilder]:
        return TilegenLatentMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Check whether vLLM's metadata takes keys of this size, latent and rotated columns
        together."""
        return head_size in MLACommonBackend.get_supported_head_sizes()

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


@dataclass
class TilegenDecodeMetadata(MLACommonDecodeMetadata):
    """The requests of a batch to decode, and bounds on them."""

    q_starts: torch.Tensor
    longest_q: int
    longest_kv: int


class TilegenLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Batches as vLLM divides them: requests with at most as many new tokens as drafts to verify
    are decoded, the others are prompts. CUDA graphs are those of TilegenMetadataBuilder."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._longest = Longest(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> MLACommonMetadata:
        """Make a batch. Raises Unsupported."""
        refuse_batches(common_attn_metadata)
        batch = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not batch.causal:  # all requests are decoded, with any number of tokens
            batch.decode.longest_q = common_attn_metadata.max_query_len
        return batch

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        """Make a batch whose launch covers the model's longest sequence."""
        batch = super().build_for_cudagraph_capture(common_attn_metadata)
        return replace(batch, decode=replace(batch.decode, longest_kv=self._longest.capacity))

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
    ) -> TilegenDecodeMetadata:
        return TilegenDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            q_starts=query_start_loc_device,
            longest_q=max_query_len,
            longest_kv=self._longest.of(seq_lens_device, max_query_len, max_seq_len),
        )


class TilegenLatentImpl(MLACommonImpl[MLACommonMetadata]):
    """The attention of a layer: `forward_mqa` computes the tokens to decode."""

    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        """Raise Unsupported for unsupported layers."""
        refuse_layers(attn_type, kv_cache_dtype)
        asked = {
            "ALiBi": alibi_slopes,
            "sliding windows": sliding_window,
            "soft caps": logits_soft_cap,
            "keys that an indexer chooses (sparse)": mla_args.get("indexer"),
        }
        if names := ", ".join(name for name, value in asked.items() if value):
            raise Unsupported(f"tilegen's back end for MLA has no {names}")
        cache = get_current_vllm_config().cache_config
        if follow_batch_invariance() and cache.enable_prefix_caching:
            raise Unsupported(
                "vLLM computes the rest of a prompt whose prefix is cached in parts, which gives "
                "other last bits than the whole: batch invariance needs --no-enable-prefix-caching"
            )
        super().__init__(
            *(num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None),
            *(attn_type, kv_sharing_target_layer_name),
            **mla_args,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention (tokens, heads, latent columns) of the tokens to decode, without lse,
        which only context parallelism needs."""
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        pages, decode = kv_c_and_k_pe_cache[:, None], attn_metadata.decode
        out = attention_paged(
            *(rows, pages, pages[..., : self.kv_lora_rank], decode.block_table, decode.seq_lens),
            q_starts=decode.q_starts,
            max_q_length=decode.longest_q,
            max_kv_length=min(decode.longest_kv, decode.block_table.shape[1] * pages.shape[2]),
            mask=MASKS[attn_metadata.causal],
            scale=self.scale,
            layout="HND",
        )
        return out, None


class TilegenPrefillBackend(MLAPrefillBackend):
    """Attention of prompts, for which vLLM has projected keys and values for each head: to
    themselves, and to each chunk of their cached part. vLLM merges the results by lse."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        follow_batch_invariance()

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration that `register` overrides."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is not None and device_capability.major >= 8

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Compute attention (tokens, heads, head size of values), with lse (heads, tokens) if
        requested. Raises Unsupported."""
        if output_scale is not None:
            raise Unsupported("tilegen's back end does not quantise its output")
        starts = self._prefill_metadata.query_start_loc
        results = self._attend(q, k, v, starts, starts, causal=True)
        return results if return_softmax_lse else results[0]

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention to a chunk of the cached part, and its lse."""
        starts = chunk.query_start_loc, chunk.cu_seq_lens
        return self._attend(q, k, v, *starts, causal=False)

    def _attend(self, *packed: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out and lse of packed q, k and v; their starts follow in `packed`."""
        mask = MASKS[causal]
        out, lse = attention_varlen(*packed, mask=mask, scale=self.scale, return_lse=True)
        return out.contiguous(), lse  # vLLM's merge assumes a contiguous out
