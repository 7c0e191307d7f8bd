"""Latent attention (MLA) as sglang and vLLM hand it to a back end, and what its definition makes of
it by dense attention."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_batches import (
    HEADS,
    Kept,
    Tokens,
    dense,
    drawn,
    sglang_batch,
    sglang_drafts,
    sglang_layer,
    sglang_runner,
    slots_of,
    tables,
    vllm_cache,
)
from tests.support.engine_stand_ins import forget, install

NOPE, V = 24, 20
"""Columns of a head's keys without positions, and of its values."""


class LatentPool:
    """A pool of latents as sglang's, (slots, 1, rank + rope) for each layer, filled as `Pool`."""

    use_dsa = False

    def __init__(self, slots: int, page: int, rank: int, rope: int, dtype: torch.dtype) -> None:
        self.rank = rank
        self.kv_buffer = torch.full((2, slots, 1, rank + rope), float("nan"), dtype=dtype)
        self.kv_buffer[:, :page] = 0.0

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_buffer[layer_id], self.kv_buffer[layer_id][..., : self.rank]

    def set_kv_buffer(self, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any) -> None:
        self.kv_buffer[layer.layer_id][loc_info.loc] = cache_k


@dataclass
class Latents:
    """Requests, by their definition and in absorbed form."""

    heads: Tokens
    """Queries, keys and values of each head, in fp64."""
    absorbed: Tokens
    """Queries of each head, latents with positions as keys, latents as values."""
    up_v: torch.Tensor
    """The matrices that make values of latents, (heads, value, rank)."""

    @classmethod
    def of(
        cls,
        queries: list[int],
        lengths: list[int],
        *,
        heads: int = 4,
        rank: int = 64,
        rope: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> Latents:
        up_k, up_v = (drawn(heads, n, rank, seed).double() / 8 for n, seed in ((NOPE, 1), (V, 2)))
        whole, absorbed = Tokens([], [], []), Tokens([], [], [])
        for i, (new, length) in enumerate(zip(queries, lengths, strict=True)):
            q = drawn(new, heads, NOPE + rope, 10 + i).double()
            cached = drawn(length, 1, rank + rope, 20 + i).to(dtype)
            latent, position = cached.double().split([rank, rope], -1)
            whole.q.append(q)
            keys = torch.einsum("tr,hnr->thn", latent[:, 0], up_k)
            whole.k.append(torch.cat([keys, position.expand(-1, heads, -1)], -1))
            whole.v.append(torch.einsum("tr,hvr->thv", latent[:, 0], up_v))
            q = torch.cat([torch.einsum("thn,hnr->thr", q[..., :NOPE], up_k), q[..., NOPE:]], -1)
            absorbed.q.append(q.to(dtype))
            absorbed.k.append(cached)
            absorbed.v.append(cached[..., :rank])
        return cls(whole, absorbed, up_v)

    def runner(self, page: int, pool: Any) -> Any:
        """Return sglang's runner with all old tokens in a pool."""
        latent = self.absorbed.k[0]
        rope = latent.shape[2] - self.up_v.shape[2]
        runner = sglang_runner(self.absorbed, page, partial(pool, rope=rope, dtype=latent.dtype))
        runner.use_mla_backend = True
        return runner

    def batch(self, runner: Any, mode: Any, trees: list[torch.Tensor] | None = None) -> Any:
        """Return the batch of all requests, which verifies drafts where that is the mode."""
        if mode.is_target_verify():
            return sglang_drafts(runner, self.absorbed, mode, trees)
        return sglang_batch(runner, self.absorbed, mode)

    def layer(self, decoder: Any, *, absorbed: bool, **changed: Any) -> Any:
        """Return the layer of a form; sglang gives both one number."""
        options = self.absorbed if absorbed else self.heads
        heads = {"tp_q_head_num": options.q[0].shape[1], "tp_k_head_num": options.k[0].shape[1]}
        dims = {"qk_head_dim": options.k[0].shape[2], "dim_v": options.v[0].shape[2]}
        return sglang_layer(0, decoder, **dims, **heads, **changed)

    def of_heads(self, out: torch.Tensor) -> torch.Tensor:
        """Compute the model's output from the result of absorbed attention."""
        latents = out.double().unflatten(1, (-1, self.up_v.shape[2]))
        return torch.einsum("thr,hvr->thv", latents, self.up_v).flatten(1)

    def expected(self, kept: Kept) -> torch.Tensor:
        """Return attention by the definition, (new tokens, heads * value)."""
        return self.heads.expected(kept).flatten(1)


NOPE_VLLM, ROPE, DIM_V = 24, 64, 16
"""Columns of a prompt's head that are not rotated, that are, and of its values."""
SCALE = 0.1


@dataclass
class Latent:
    """Requests to decode, (new tokens, all tokens) of each, keys of `rank` and ROPE columns."""

    requests: list[tuple[int, int]]
    rank: int = 256
    drafts: int = 0
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        new, lengths = zip(*self.requests, strict=True)
        width = self.rank + ROPE
        self.lengths, self.most = list(lengths), max(new)
        self.starts = torch.tensor([0, *new]).cumsum(0).int()
        self.q = [drawn(n, HEADS, width, 10 + i).to(self.dtype) for i, n in enumerate(new)]
        self.keys = [drawn(n, 1, width, 20 + i)[:, 0].to(self.dtype) for i, n in enumerate(lengths)]

    def expected(self, *, causal: bool = True) -> torch.Tensor:
        """Return dense attention (new tokens, heads, rank), computed in fp64."""
        pairs = zip(self.q, self.keys, strict=True)
        kept = Kept(right=0 if causal else float("inf"))
        shared = ((q, k[:, None], k[:, None, : self.rank], kept) for q, k in pairs)
        return torch.cat([dense(*one, scale=SCALE) for one in shared])

    def config(self) -> Any:
        """Return vLLM's configuration, as far as it is read."""
        layer = SimpleNamespace(
            q_lora_rank=None,
            kv_lora_rank=self.rank,
            qk_nope_head_dim=NOPE_VLLM,
            qk_rope_head_dim=ROPE,
            v_head_dim=DIM_V,
            prefill_backend=SimpleNamespace(clone=lambda: None),
        )
        drafts = SimpleNamespace(
            num_speculative_tokens=self.drafts, parallel_drafting=False, method="mtp"
        )
        results = {"prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
        return SimpleNamespace(
            model_config=SimpleNamespace(
                max_model_len=64,
                dtype=self.dtype,
                use_mla=True,
                get_head_size=lambda: None,
                get_num_attention_heads=lambda parallel: HEADS,
            ),
            speculative_config=drafts if self.drafts else None,
            parallel_config=SimpleNamespace(**results, cp_kv_cache_interleave_size=1),
            compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            cache_config=SimpleNamespace(
                block_size=16, cache_dtype="auto", enable_prefix_caching=False
            ),
            attention_config=SimpleNamespace(use_prefill_query_quantization=False),
            use_v2_model_runner=True,
        )

    def builder(self, classes: Any) -> Any:
        spec = SimpleNamespace(block_size=16)
        device = torch.device("cpu")
        return classes.TilegenLatentMetadataBuilder(spec, ["layer"], self.config(), device)

    def impl(self, classes: Any, **changed: Any) -> Any:
        plain = {
            "num_heads": HEADS,
            "head_size": self.rank + ROPE,
            "scale": SCALE,
            "num_kv_heads": 1,
            "alibi_slopes": None,
            "sliding_window": None,
            "kv_cache_dtype": "auto",
            "logits_soft_cap": None,
            "attn_type": "decoder",
            "kv_sharing_target_layer_name": None,
            "q_lora_rank": None,
            "kv_lora_rank": self.rank,
            "qk_nope_head_dim": NOPE_VLLM,
            "qk_rope_head_dim": ROPE,
            "qk_head_dim": NOPE_VLLM + ROPE,
            "v_head_dim": DIM_V,
            "kv_b_proj": None,
            "indexer": None,
        }
        with classes.set_current_vllm_config(self.config()):
            return classes.TilegenLatentImpl(**plain | changed)

    def batch(self, classes: Any, page: int = 16, **changed: Any) -> Any:
        """Return a batch as vLLM hands it over."""
        tokens = int(self.starts[-1])
        plain = {
            "query_start_loc": self.starts,
            "query_start_loc_cpu": self.starts,
            "seq_lens": torch.tensor(self.lengths, dtype=torch.int32),
            "num_reqs": len(self.requests),
            "num_actual_tokens": tokens,
            "max_query_len": self.most,
            "max_seq_len": max(self.lengths) + 5,  # an upper bound
            "block_table_tensor": tables(self.lengths, page)[0],
            "slot_mapping": torch.zeros(tokens, dtype=torch.int64),
        }
        return classes.CommonAttentionMetadata(**plain | changed)

    def cache(self, order: str = "LBNHC", page: int = 16) -> torch.Tensor:
        """Return a layer's cache (blocks, keys, columns) in which only keys of requests are
        numbers."""
        table, blocks = tables(self.lengths, page)
        cache = vllm_cache(order, blocks, page, self.rank + ROPE, heads=1).squeeze(1).to(self.dtype)
        for row, keys in zip(table, self.keys, strict=True):
            at = slots_of(row, page, 0, len(keys))
            cache[at // page, at % page] = keys
        return cache

    def decode(
        self,
        classes: Any,
        *,
        causal: bool = True,
        capture: bool = False,
        order: str = "LBNHC",
        page: int = 16,
        padding: int = 0,
    ) -> torch.Tensor:
        """Return (tokens, heads, rank) of all requests, and of rows of none behind them."""
        builder, impl = self.builder(classes), self.impl(classes)
        builder.non_causal_multi_token_decode = not causal
        build = builder.build_for_cudagraph_capture if capture else lambda x: builder.build(0, x)
        made = build(self.batch(classes, page, causal=causal))
        none = self.q[0].new_full((padding, *self.q[0].shape[1:]), float("nan"))
        rows = torch.cat([*self.q, none])
        parts = rows[..., : self.rank], rows[..., self.rank :]
        out, lse = impl.forward_mqa(parts, self.cache(order, page), made, None)
        assert lse is None
        assert out.is_contiguous(), "vLLM takes a view of it"
        return out


class Prompts:
    """The new tokens of two prompts, and what is cached of each, projected as vLLM does."""

    new, cached = ([5, 9], [7, 20])

    def __init__(self) -> None:
        self.starts, self.chunk = (
            torch.tensor([0, *counts]).cumsum(0).int() for counts in (self.new, self.cached)
        )
        self.q = drawn(sum(self.new), HEADS, NOPE_VLLM + ROPE, 0)
        self.own, self.old = self._keys(sum(self.new), 1), self._keys(sum(self.cached), 3)

    @staticmethod
    def _keys(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, and values as a view of the projected tensor."""
        projected = drawn(tokens, HEADS, NOPE_VLLM + DIM_V, seed)
        rotated = drawn(tokens, 1, ROPE, seed + 1).expand(-1, HEADS, -1)
        return torch.cat([projected[..., :NOPE_VLLM], rotated], -1), projected[..., NOPE_VLLM:]

    def backend(self, classes: Any) -> Any:
        made = classes.TilegenPrefillBackend(
            num_heads=HEADS,
            scale=SCALE,
            kv_lora_rank=256,
            qk_nope_head_dim=NOPE_VLLM,
            qk_rope_head_dim=ROPE,
            v_head_dim=DIM_V,
            vllm_config=None,
        )
        made.prepare_metadata(SimpleNamespace(query_start_loc=self.starts))
        return made

    def parts(self, backend: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return attention and lse of new tokens to themselves, and to cached keys."""
        chunk = SimpleNamespace(query_start_loc=self.starts, cu_seq_lens=self.chunk)
        return [
            backend.run_prefill_new_tokens(self.q, *self.own, return_softmax_lse=True),
            backend.run_prefill_context_chunk(chunk, self.q, *self.old),
        ]

    def expected(self, *, cached: bool = True) -> torch.Tensor:
        """Return dense attention to all keys, or to new ones only, computed in fp64."""
        results: list[torch.Tensor] = []
        for i in range(len(self.new)):
            rows, columns = slice(*self.starts[i : i + 2]), slice(*self.chunk[i : i + 2])
            pairs = zip(self.old, self.own, strict=True)
            k, v = (torch.cat([a[columns][: None if cached else 0], b[rows]]) for a, b in pairs)
            results.append(dense(self.q[rows], k, v, Kept(), scale=SCALE))
        return torch.cat(results)


def merged(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return attention to the keys of all parts, from that to each and its lse."""
    outs, lses = (torch.stack(each).double() for each in zip(*parts, strict=True))
    return (outs * lses.softmax(0).transpose(1, 2)[..., None]).sum(0)


# --------------------------------------------------------------------------------------------------
# Classes

INSTALLED = bool(find_spec("vllm") and find_spec("llguidance"))
"""True if vllm is here with what the import of its MLA layer needs."""
needs_vllm = pytest.mark.skipif(
    not INSTALLED, reason="needs the package vllm and what its MLA layer imports; see .ci/run"
)
FORMS = ["stand-in", *["installed"] * INSTALLED]


def latent_classes(form: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our classes, and those of vLLM's that a batch is made of."""
    if form == "installed":
        forget(monkeypatch, "vllm")
    else:
        install(monkeypatch, "vllm")
    from vllm import config  # pyright: ignore
    from vllm.v1.attention import backend  # pyright: ignore

    from tilegen.integrations import vllm_backend, vllm_latent

    if form == "installed":  # which has no GPU here
        layers = sys.modules["vllm.model_executor.layers.attention.mla_attention"]
        monkeypatch.setattr(layers, "PIN_MEMORY", False)
    return SimpleNamespace(
        **{name: one for name, one in vars(vllm_latent).items() if name.startswith("Tilegen")},
        CommonAttentionMetadata=backend.CommonAttentionMetadata,
        Levels=vllm_latent.QueryLenSupport,
        Graphs=backend.AttentionCGSupport,
        set_current_vllm_config=config.set_current_vllm_config,
        envs=vllm_backend.envs,
    )
