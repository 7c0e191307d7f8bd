"""Lists of tiles are built once for each mask and shape, and die with their tensors."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from tests.listed_masks import SAME_DOCUMENT
from tilegen.masks import list_cache
from tilegen.masks.list_cache import ListCache
from tilegen.masks.tile_lists import TileLists, build

SIZES: dict[str, Any] = {
    "batch": 2,
    "heads": 4,
    "seqlen_q": 64,
    "seqlen_kv": 64,
    "block_m": 16,
    "block_n": 16,
    "device": "cpu",
}


def test_lists_are_built_once_for_each_mask_and_shape() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    first = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    assert cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES) is first
    # The mask is the same for all batches and heads.
    assert cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"batch": 7})) is first
    others = [
        cache.get(SAME_DOCUMENT, [ids], side="columns", **SIZES),
        cache.get(SAME_DOCUMENT, [ids.clone()], side="rows", **SIZES),
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"block_m": 32})),
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"seqlen_q": 60})),
        cache.get(~SAME_DOCUMENT, [ids], side="rows", **SIZES),
    ]
    assert first not in others


def test_a_modified_tensor_gives_new_lists() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    before = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    ids.zero_()
    after = cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES)
    assert before.visited_tiles < after.visited_tiles == 16


def test_lists_die_with_their_tensors_and_are_few() -> None:
    cache, ids = ListCache(capacity=3), torch.arange(64) // 10
    for seqlen in range(40, 50):
        cache.get(SAME_DOCUMENT, [ids], side="rows", **(SIZES | {"seqlen_q": seqlen}))
    assert len(cache) == 3
    del ids
    gc.collect()
    assert len(cache) == 0


def test_threads_build_lists_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    entered = threading.Barrier(4, timeout=10)

    def slow_build(*arguments: Any, **options: Any) -> TileLists:
        builds.append(1)
        return build(*arguments, **options)

    monkeypatch.setattr(list_cache, "build", slow_build)
    cache, ids = ListCache(), torch.arange(64) // 10
    found: list[TileLists] = []

    def ask() -> None:
        entered.wait()
        found.append(cache.get(SAME_DOCUMENT, [ids], side="rows", **SIZES))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
