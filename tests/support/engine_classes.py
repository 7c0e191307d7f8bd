"""sglang's classes and ours that derive from them, with stand-ins or with the package installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_batches import Pool, speculation
from tests.support.engine_latents import LatentPool
from tests.support.engine_stand_ins import forget, install, no_waiting

FORMS = ["stand-in", *["installed"] * bool(find_spec("sglang"))]


def sglang_classes(form: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our class, and sglang's classes that a batch is made of. `Windows` is a pool in which
    some layers have a pool of their own, `Latents` a pool of latent attention."""
    if form == "installed":
        forget(monkeypatch, "sglang")
        _name_operators_of_torchvision()
    else:
        install(monkeypatch, "sglang")
    from sglang.srt.layers.radix_attention import AttentionType  # pyright: ignore
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # pyright: ignore
    from sglang.srt.model_executor.forward_batch_info import ForwardMode  # pyright: ignore

    from tilegen.integrations import sglang_backend as ours

    latents: Any = LatentPool
    if form == "installed":  # and not running
        from sglang.srt.mem_cache import memory_pool  # pyright: ignore[reportMissingImports]

        alone = SimpleNamespace(attn_cp_size=1, attn_dcp_size=1, dcp_enabled=False)
        for module in (ours, memory_pool):
            monkeypatch.setattr(module, "get_parallel", lambda: alone)
        latents = _latents_of(memory_pool.MLATokenToKVPool)
    windows = type("Windows", (Pool, SWAKVPool), {})
    windows.__abstractmethods__ = frozenset()
    return SimpleNamespace(
        Backend=ours.TilegenAttnBackend,
        Type=AttentionType,
        Mode=ForwardMode,
        Windows=windows,
        Latents=latents,
    )


def fill_captured(backend: Any, batch: Any) -> None:
    """Leave a back end with the metadata that a graph was captured with, without trees and of
    requests of one key, filled for a batch without a look at any element."""
    dummy = SimpleNamespace(**vars(batch))
    dummy.req_pool_indices = torch.zeros_like(batch.req_pool_indices)
    dummy.seq_lens = torch.full_like(batch.seq_lens, backend.get_cuda_graph_seq_len_fill_value())
    dummy.out_cache_loc = torch.zeros_like(batch.out_cache_loc)
    if batch.spec_info is not None:
        dummy.spec_info = speculation(batch.spec_info.num_tokens_per_req, None)
    backend.init_forward_metadata_out_graph(dummy, in_capture=True)
    captured = backend.forward_metadata
    with pytest.MonkeyPatch.context() as patch:
        no_waiting(patch)
        backend.init_forward_metadata_out_graph(batch)
    backend.forward_metadata = captured


def _latents_of(theirs: Any) -> Any:
    """Return sglang's pool of latents, to be made and filled as the stand-in."""

    def made(slots: int, page: int, rank: int, rope: int, dtype: torch.dtype) -> Any:
        results = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "layer_num": 2, "device": "cpu"}
        pool = theirs(slots - page, page, dtype, enable_memory_saver=False, **results)
        for buffer in pool.kv_buffer:
            buffer[page:] = float("nan")
        return pool

    return made


@cache
def _name_operators_of_torchvision() -> None:
    """Declare what a torchvision that was built for another PyTorch does not find on import; sglang
    imports it for images, and nothing here calls it."""
    if find_spec("torchvision"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", boxes)
