"""Latent attention (MLA) as sglang hands it to a back end: absorbed, or with keys and values of
each head, and what its definition makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tests.engine_batches import (
    Kept,
    Tokens,
    drawn,
    sglang_batch,
    sglang_drafts,
    sglang_layer,
    sglang_runner,
)

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
