"""tilegen in models with multi-head latent attention (MLA): DeepSeek V2 and V3, and others alike.

Read with vLLM 0.33, which projects, writes the cache and divides each batch. Tokens to decode and
drafts to verify come here in the absorbed form: all heads attend to one of keys, whose first
columns are the values. Prompts are heads of their own, and go to a back end that vLLM chooses
apart: TilegenPrefillBackend where `mla_prefill_backend` is CUSTOM.
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
"""Masks of a request's drafts, which see all keys, or those up to their own."""


class TilegenLatentBackend(TilegenBackend, MLACommonBackend):
    """Answers to what vLLM asks of a back end for MLA. Refused with a reason are also windows, soft
    caps, ALiBi, sinks, and keys chosen by an indexer (sparse)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    # New keys are written by vLLM's layer, apart from this, too.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[TilegenLatentImpl]:
        return TilegenLatentImpl

    @staticmethod
    def get_builder_cls() -> type[TilegenLatentMetadataBuilder]:
        return TilegenLatentMetadataBuilder

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether vLLM's metadata takes keys of this size, of latent and rotated columns."""
        return head_size in MLACommonBackend.get_supported_head_sizes()

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False


@dataclass
class TilegenDecodeMetadata(MLACommonDecodeMetadata):
    """The requests of a batch that are decoded, and what bounds them."""

    q_starts: torch.Tensor
    longest_q: int
    longest_kv: int


class TilegenLatentMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Batches, divided by vLLM: requests of at most as many new tokens as there are drafts to
    verify are decoded, whether they have as many or not, and others are prompts. CUDA graphs are
    those of TilegenMetadataBuilder."""

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
        """Return a batch. Raises Unsupported."""
        refuse_batches(common_attn_metadata)
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not made.causal:  # all is decoded, however many tokens requests have
            made.decode.longest_q = common_attn_metadata.max_query_len
        return made

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> MLACommonMetadata:
        """Return a batch whose launch serves sequences as long as the model's longest."""
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        return replace(made, decode=replace(made.decode, longest_kv=self._longest.capacity))

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
    """The attention of one layer: `forward_mqa` computes what is decoded."""

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
        """Raises Unsupported."""
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
        """Return attention (tokens, heads, latent columns) of the tokens that are decoded, and no
        lse, which only context parallelism asks for."""
        rows = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        pages, its = kv_c_and_k_pe_cache[:, None], attn_metadata.decode
        out = attention_paged(
            *(rows, pages, pages[..., : self.kv_lora_rank], its.block_table, its.seq_lens),
            q_starts=its.q_starts,
            max_q_length=its.longest_q,
            max_kv_length=min(its.longest_kv, its.block_table.shape[1] * pages.shape[2]),
            mask=MASKS[attn_metadata.causal],
            scale=self.scale,
            layout="HND",
        )
        return out, None


class TilegenPrefillBackend(MLAPrefillBackend):
    """Attention of prompts, whose keys and values vLLM has projected for each head: to themselves,
    and to each chunk of what is cached of them, which vLLM merges by lse."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        follow_batch_invariance()

    @staticmethod
    def get_name() -> str:
        """Return the member of vLLM's enumeration that `register` takes."""
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
        """Return attention (tokens, heads, head size of values), and lse (heads, tokens) if asked.
        Raises Unsupported."""
        if output_scale is not None:
            raise Unsupported("tilegen's back end does not quantise its output")
        starts = self._prefill_metadata.query_start_loc
        found = self._attend(q, k, v, starts, starts, causal=True)
        return found if return_softmax_lse else found[0]

    def run_prefill_context_chunk(
        self,
        chunk: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attention to a chunk of what is cached, and its lse."""
        starts = chunk.query_start_loc, chunk.cu_seq_lens
        return self._attend(q, k, v, *starts, causal=False)

    def _attend(self, *packed: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of packed q, k and v, whose starts follow them."""
        mask = MASKS[causal]
        out, lse = attention_varlen(*packed, mask=mask, scale=self.scale, return_lse=True)
        return out.contiguous(), lse  # as what merges parts takes them to be
