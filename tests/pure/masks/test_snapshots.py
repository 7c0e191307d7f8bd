"""A tensor's changes are seen in whatever way it is changed, and caches keep no tensor alive."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import ref

import pytest
import torch

from tests.support.inputs import WAYS, given
from tilegen.calls.varlen import packed_mask
from tilegen.integrations import given as given_masks
from tilegen.masks import predicate, snapshots
from tilegen.masks.kinds import kind_of_mask
from tilegen.masks.snapshots import Snapshot, TensorCache
from tilegen.operators.rebuilding import rebuilt


@pytest.mark.parametrize("way", WAYS)
def test_a_changed_tensor_is_not_current(way: str) -> None:
    tensor = given(way, torch.arange(8))
    state = Snapshot.of(tensor)
    assert state.is_current(tensor)
    WAYS[way](tensor, torch.zeros(8, dtype=torch.int64))
    assert not state.is_current(tensor)


@pytest.mark.parametrize("elements", [False, True])
def test_memory_that_is_freed_and_allocated_again_is_other_memory(elements: bool) -> None:
    """`.data = other` leaves the version as it is, and `other` may lie where the tensor lay."""
    tensor = torch.arange(2**16)
    state, address = Snapshot.of(tensor, elements=elements), tensor.data_ptr()
    for _ in range(64):
        tensor.data = torch.empty(0, dtype=torch.int64)
        tensor.data = torch.arange(2**16)
        assert not state.is_current(tensor, elements=elements)
        if tensor.data_ptr() == address:
            break


def test_versions_count_where_elements_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "is_checked", lambda _: False)
    tensor = torch.arange(8)
    state = Snapshot.of(tensor)
    assert state.elements is None
    assert state.is_current(tensor)
    tensor.mul_(1)
    assert not state.is_current(tensor)


@pytest.mark.parametrize("size", [8, 2**20 + 1])
def test_inference_tensors_are_compared_unless_they_are_large(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "is_checked", lambda _: False)
    with torch.inference_mode():
        tensor = torch.zeros(size)
        state = Snapshot.of(tensor)
        assert state.is_current(tensor) == (size <= snapshots.MAX_COMPARED)
        tensor.add_(1)
        assert not state.is_current(tensor)


def test_another_view_of_the_memory_is_not_current() -> None:
    tensor = torch.zeros(4, 4)
    state = Snapshot.of(tensor[:2], elements=False)
    assert state.is_current(tensor[:2], elements=False)
    for other in (tensor[1:3], tensor[:2].t(), tensor[:2].view(torch.int32), tensor):
        assert not state.is_current(other, elements=False)


def test_a_failed_result_leaves_the_entry_as_it_was() -> None:
    cache: TensorCache[int] = TensorCache(4)
    tensor = torch.zeros(3)
    assert cache.get("key", [tensor], lambda: int(tensor.sum())) == 0

    def failing() -> int:
        raise ZeroDivisionError

    tensor.fill_(1)
    with pytest.raises(ZeroDivisionError):
        cache.get("key", [tensor], failing)
    tensor.fill_(0)  # the first result is right again
    assert cache.get("key", [tensor], failing) == 0
    tensor.fill_(1)
    assert cache.get("key", [tensor], lambda: int(tensor.sum())) == 3


def test_entries_are_few_and_die_with_a_tensor() -> None:
    cache: TensorCache[int] = TensorCache(3)
    kept, other = torch.zeros(1), torch.zeros(1)
    for key in range(5):
        cache.get(key, [kept, other], lambda key=key: key)
    assert len(cache) == 3
    del other
    assert len(cache) == 0


def test_a_change_while_a_result_is_made_counts() -> None:
    cache: TensorCache[int] = TensorCache(3)
    tensor = torch.zeros(1)

    def slow() -> int:
        read = int(tensor)
        tensor.add_(1)
        return read

    assert cache.get("", [tensor], slow) == 0
    assert cache.get("", [tensor], lambda: int(tensor)) == 1


def test_threads_make_a_result_once() -> None:
    cache: TensorCache[object] = TensorCache(3)
    tensor, start = torch.zeros(1), threading.Barrier(8, timeout=60)

    def one_call(_: int) -> object:
        start.wait()
        return cache.get("", [tensor], object)

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(one_call, range(8)))) == 1


def _dead(make: Callable[[], tuple[torch.Tensor, Any]]) -> bool:
    """Check whether a tensor, and the memory of it, die once only a cache could hold them."""
    tensor, _ = make()
    alive, storage = ref(tensor), snapshots.StorageWeakRef(tensor.untyped_storage())
    del tensor, _
    gc.collect()
    return alive() is None and storage.expired()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("sizes", [(2, 1, 8, 9), (2, 1, 1, 9)])
def test_masks_of_a_models_tensors_die_with_them(sizes: tuple[int, ...], dtype: Any) -> None:
    def make() -> tuple[torch.Tensor, Any]:
        mask = torch.ones(sizes).to(dtype)
        views = [mask[..., :8] for _ in range(2)]
        masks = [given_masks.of_tensor(view, 2, (8, 8))[0] for view in views]
        assert masks[0] is masks[1]
        return mask, masks

    assert _dead(make)


@pytest.mark.parametrize("watched", ["cu_seqlens", "table"])
def test_masks_of_packed_documents_die_with_their_tensors(watched: str) -> None:
    def make() -> tuple[torch.Tensor, Any]:
        cu, kv = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 8])
        table = torch.arange(9)
        inside = predicate(lambda b, h, q, k: table[k] <= q)
        masks = [packed_mask(cu, other, inside, 9) for other in (cu, cu, kv, kv)]
        assert masks[0] is masks[1]
        assert masks[2] is masks[3]
        return cu if watched == "cu_seqlens" else table, masks

    assert _dead(make)


@pytest.mark.parametrize("way", WAYS)
def test_blocks_in_an_operator_follow_their_tensors(way: str) -> None:
    """Blocks that say more than their function: the counts decide."""
    counts = given(way, torch.full((1, 1, 2), 2, dtype=torch.int32))
    indices = torch.arange(2, dtype=torch.int32).expand(1, 1, 2, 2).contiguous()
    text = '{"mask":["blocks",[0,1],[16,16],["plain","causal",[]]]}'

    def kept() -> tuple[torch.Tensor, Any]:
        mask = rebuilt(text, [counts, indices], [], (32, 32), None)[0].mask
        return torch.from_numpy(mask.pairs(32, 32)), kind_of_mask(mask)

    (before, kind), (again, same) = kept(), kept()
    assert torch.equal(before, again)
    assert kind is same
    causal = torch.ones(32, 32).tril().bool()
    assert torch.equal(before, causal)
    WAYS[way](counts, torch.ones(1, 1, 2, dtype=torch.int32))
    expected = causal.clone()
    expected[:, 16:] = False
    assert torch.equal(kept()[0], expected)


def test_blocks_in_an_operator_keep_no_tensor_alive() -> None:
    def make() -> tuple[torch.Tensor, Any]:
        counts = torch.ones(1, 1, 2, dtype=torch.int32)
        indices = torch.zeros(1, 1, 2, 2, dtype=torch.int32)
        text = '{"mask":["blocks",[0,1],[16,16],["keep","k < t0[q]",[2]]]}'
        table = torch.arange(32) + 1
        return table, rebuilt(text, [counts, indices, table], [], (32, 32), None)

    assert _dead(make)
