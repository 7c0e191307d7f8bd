"""Lists of tiles are built once for each mask and shape, and die with their tensors."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiles import SAME_DOCUMENT, shape_of
from tilegen.errors import Unsupported
from tilegen.masks import snapshots
from tilegen.masks.form import TiledShape
from tilegen.masks.language.algebra import equal
from tilegen.masks.language.expr import K, Q
from tilegen.masks.mask import Side
from tilegen.masks.tiles import tile_lists
from tilegen.masks.tiles.tile_lists import ListCache, TileLists, build

SHAPE = shape_of(64, 16, batch=2, heads=4)


def rows(cache: ListCache, keep: Any, ids: torch.Tensor, shape: TiledShape = SHAPE) -> TileLists:
    return cache.get(keep, [ids], shape, device="cpu", side="rows")


def test_lists_are_built_once_for_each_mask_and_shape() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    first = rows(cache, SAME_DOCUMENT, ids)
    assert rows(cache, SAME_DOCUMENT, ids) is first
    # The mask is the same for all batches and heads.
    assert rows(cache, SAME_DOCUMENT, ids, replace(SHAPE, batch=7)) is first
    others = [
        cache.get(SAME_DOCUMENT, [ids], SHAPE, device="cpu", side="columns"),
        rows(cache, SAME_DOCUMENT, ids.clone()),
        rows(cache, SAME_DOCUMENT, ids, replace(SHAPE, block_m=32)),
        rows(cache, SAME_DOCUMENT, ids, replace(SHAPE, seqlen_q=60)),
        rows(cache, ~SAME_DOCUMENT, ids),
    ]
    assert first not in others


def test_a_modified_tensor_gives_new_lists() -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    before = rows(cache, SAME_DOCUMENT, ids)
    ids.zero_()
    after = rows(cache, SAME_DOCUMENT, ids)
    assert before.visited_tiles < after.visited_tiles == 16


def test_other_elements_give_new_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where elements are not looked at, as on a GPU."""
    monkeypatch.setattr(snapshots, "is_checked", lambda _: False)
    cache, ids = ListCache(), torch.arange(64) // 10
    before = rows(cache, SAME_DOCUMENT, ids)
    assert rows(cache, SAME_DOCUMENT, ids) is before
    ids.data = torch.zeros_like(ids)
    assert before.visited_tiles < rows(cache, SAME_DOCUMENT, ids).visited_tiles == 16


class Pool(TorchDispatchMode):
    """Note the memory that this thread allocates, as the pool of a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []  # held, so that no address is used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else (result,)
        self.tensors += [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        return result


@pytest.mark.parametrize("in_pools", [False, True])
def test_lists_stay_out_of_the_pool_of_a_graph(
    in_pools: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool must be empty once the call that warms up for a capture has returned."""
    monkeypatch.setattr(tile_lists, "allocates_from_pools", lambda _: in_pools)
    cache, ids = ListCache(), torch.arange(64) // 10
    with Pool() as pool:
        lists = rows(cache, SAME_DOCUMENT, ids)
    expected = build(SAME_DOCUMENT, [ids], SHAPE, device="cpu", side="rows")
    assert torch.equal(lists.tiles, expected.tiles)
    assert torch.equal(lists.starts, expected.starts)
    kept = {lists.tiles.data_ptr(), lists.starts.data_ptr()}
    assert kept.isdisjoint(tensor.data_ptr() for tensor in pool.tensors) == in_pools


def test_a_captured_graph_is_right_for_values_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lists are those of no call: a replay reads what is in the tensors by then."""
    cache, ids = ListCache(), torch.arange(64) // 10
    before = rows(cache, SAME_DOCUMENT, ids)
    monkeypatch.setattr(tile_lists, "is_captured", lambda device: device.type == "cpu")
    shape = replace(SHAPE, seqlen_kv=100)
    sides: tuple[Side, ...] = ("rows", "columns")
    for side, (stationary, streamed) in zip(sides, ((4, 7), (7, 4)), strict=True):
        actual = cache.get(SAME_DOCUMENT, [ids], shape, device="cpu", side=side)
        live, full = actual.flags(streamed)
        assert live.shape == (1, 1, stationary, streamed)
        assert live.all()
        assert not full.any()
    monkeypatch.undo()
    assert rows(cache, SAME_DOCUMENT, ids) is before


def test_lists_without_tensors_are_not_made_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = ListCache()

    def lists(step: int) -> TileLists:
        keep: Any = equal((Q - K) % step, 0)
        return cache.get(keep, [], SHAPE, device="cpu", side="rows")

    before = lists(16)
    monkeypatch.setattr(tile_lists, "is_captured", lambda device: device.type == "cpu")
    assert lists(16) is before
    with pytest.raises(Unsupported, match="make the call once before"):
        lists(32)


def test_lists_die_with_their_tensors_and_are_few() -> None:
    cache, ids = ListCache(capacity=3), torch.arange(64) // 10
    for seqlen in range(40, 50):
        rows(cache, SAME_DOCUMENT, ids, replace(SHAPE, seqlen_q=seqlen))
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

    monkeypatch.setattr(tile_lists, "build", slow_build)
    cache, ids = ListCache(), torch.arange(64) // 10
    results: list[TileLists] = []

    def ask() -> None:
        entered.wait()
        results.append(rows(cache, SAME_DOCUMENT, ids))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert len(results) == 4
    assert len(set(map(id, results))) == 1


def test_stale_lists_are_rebuilt_after_a_failed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = ListCache(), torch.arange(64) // 10
    stale = rows(cache, SAME_DOCUMENT, ids)
    ids.zero_()
    monkeypatch.setattr(tile_lists, "build", _out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        rows(cache, SAME_DOCUMENT, ids)
    monkeypatch.undo()
    assert stale.visited_tiles < 16 == rows(cache, SAME_DOCUMENT, ids).visited_tiles


def _out_of_memory(*_: Any, **__: Any) -> TileLists:
    raise torch.OutOfMemoryError
