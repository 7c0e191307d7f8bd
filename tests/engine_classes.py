"""sglang's classes and ours that derive from them, with stand-ins or with the package installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine_batches import Pool
from tests.engine_stand_ins import forget, install

FORMS = ["stand-in", *["installed"] * bool(find_spec("sglang"))]


def sglang_classes(form: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return our class, and what of sglang's a batch is made of; `Windows` is a pool of which some
    layers have one of their own."""
    if form == "installed":
        forget(monkeypatch, "sglang")
        _name_operators_of_torchvision()
    else:
        install(monkeypatch, "sglang")
    from sglang.srt.layers.radix_attention import AttentionType  # pyright: ignore
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # pyright: ignore
    from sglang.srt.model_executor.forward_batch_info import ForwardMode  # pyright: ignore

    from tilegen.integrations import sglang_backend as ours

    if form == "installed":  # and not running
        alone = SimpleNamespace(attn_cp_size=1, attn_dcp_size=1)
        monkeypatch.setattr(ours, "get_parallel", lambda: alone)
    windows = type("Windows", (Pool, SWAKVPool), {})
    windows.__abstractmethods__ = frozenset()
    return SimpleNamespace(
        Backend=ours.TilegenAttnBackend, Type=AttentionType, Mode=ForwardMode, Windows=windows
    )


@cache
def _name_operators_of_torchvision() -> None:
    """Declare what a torchvision that was built for another PyTorch does not find on import; sglang
    imports it for images, and nothing here calls it."""
    if find_spec("torchvision"):
        boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", boxes)
