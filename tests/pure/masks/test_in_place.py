"""In-place changes of a mask's tensors are seen; invalid values are refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

import tilegen
from tests.support.inputs import CASES, WAYS, given, inputs
from tests.support.tiles import SAME_DOCUMENT, shape_of
from tilegen.check.reference import attention_reference, dense_mask
from tilegen.errors import InvalidProblem
from tilegen.masks import predicate
from tilegen.masks.packed import packed
from tilegen.masks.tiles.tile_lists import ListCache
from tilegen.masks.values import is_checked


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_pytorch_follows_the_tensor_of_a_mask(name: str, way: str) -> None:
    make, before, after = CASES[name]
    q, k, v = inputs()
    tensor = given(way, before.clone())
    mask = make(tensor)
    WAYS[way](tensor, after)
    expected = attention_reference(q, k, v, mask=make(after))[0]
    torch.testing.assert_close(tilegen.attention(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("way", WAYS)
def test_lists_follow_their_tensor(way: str) -> None:
    cache, shape = ListCache(), shape_of(64, 16)
    ids = given(way, torch.arange(64) // 10)
    results = [cache.get(SAME_DOCUMENT, [ids], shape, device="cpu", side="rows") for _ in range(2)]
    assert results[0] is results[1]
    WAYS[way](ids, torch.zeros(64, dtype=torch.int64))
    after = cache.get(SAME_DOCUMENT, [ids], shape, device="cpu", side="rows")
    assert results[0].visited_tiles < after.visited_tiles == 16


def test_compiled_code_does_not_depend_on_values() -> None:
    cu = torch.tensor([0, 30, 31, 70])
    left, other = (packed(cu, tokens=70).stand_in for _ in range(2))
    cu.copy_(torch.tensor([0, 1, 2, 70]))
    assert left == other == packed(cu, tokens=70).stand_in
    same, equal = packed(cu, cu), packed(cu, cu.clone())
    assert same.tables[0].origin != equal.tables[0].origin  # by what they are, not by what they say


def test_values_changed_to_invalid_ones_are_refused() -> None:
    q, k, v = inputs()
    ids, cu, lengths = torch.arange(70) // 9, torch.tensor([0, 9, 70]), torch.tensor([7, 70])
    masks = (tilegen.documents(ids), tilegen.documents(cu_seqlens=cu), tilegen.kv_lengths(lengths))
    ids[60], cu[1], lengths[1] = 0, 80, 2**40
    for mask, said in zip(masks, ("lie in 10 places", "must rise from 0", "2.*30"), strict=True):
        with pytest.raises(InvalidProblem, match=said):
            tilegen.attention(q, k, v, mask=mask)


def test_values_on_a_gpu_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        is_cpu = is_meta = False

    assert is_checked(torch.zeros(1))
    assert not is_checked(OnGpu())
    monkeypatch.setenv("TILEGEN_CHECK", "1")
    assert is_checked(OnGpu())


class _Unseen(torch.Tensor):
    """A tensor whose values must not be read, as on a GPU without waiting."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN206
        if func.__name__ in ("__bool__", "__int__", "item", "tolist", "equal", "unique", "nonzero"):
            raise AssertionError(f"{func.__name__} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("mask", [None, tilegen.causal("bottom_right"), tilegen.prefix_lm(3)])
def test_tables_of_packed_masks_wait_for_no_device(
    mask: tilegen.Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("values", "packed"):
        module = import_module(f"tilegen.masks.{module}")
        monkeypatch.setattr(module, "is_checked", lambda _: False)
    cu = torch.tensor([0, 30, 31, 70]).as_subclass(_Unseen)
    kv = torch.tensor([0, 3, 50, 90]).as_subclass(_Unseen)
    for lengths, whole in (
        ((70, 70), packed(cu, None, mask, tokens=70)),
        ((70, 90), packed(cu, kv, mask, tokens=90)),
    ):
        tables = [value.on(torch.device("cpu"), lengths) for value in whole.tables]
        assert all(isinstance(table, _Unseen) for table in tables)
    ids = torch.arange(70) // 9
    for made in (tilegen.documents(ids), tilegen.documents(ids % 2)):
        recipe = made.tables[0].recipe
        assert recipe is not None
        assert recipe.make(ids.as_subclass(_Unseen), (70, 70))


SAME: dict[int, Callable[[torch.Tensor], Any]] = {
    1: lambda ids: lambda b, h, q, k: ids[q] == ids[k],
    2: lambda ids: lambda b, h, q, k: ids[b, q] == ids[b, k],
}


@pytest.mark.parametrize("checked", [True, False])
def test_ids_of_a_function_need_not_stay_whole(
    checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where elements are not looked at, as on a GPU."""
    for module in ("values", "packed"):
        module = import_module(f"tilegen.masks.{module}")
        monkeypatch.setattr(module, "is_checked", lambda _: checked)
    for ids in (torch.arange(8) // 4, torch.arange(16).view(2, 8) // 4):
        mask = predicate(SAME[ids.ndim](ids))
        for changed in (ids.clone(), (torch.arange(8) % 3).expand_as(ids), ids.flip(-1)):
            ids.copy_(changed)
            expected = ids[..., :, None] == ids[..., None, :]
            batch = len(ids) if ids.ndim == 2 else 1
            actual = dense_mask(mask, 8, 8, batch=batch)
            assert torch.equal(actual.expand(batch, 1, 8, 8)[:, 0], expected.expand(batch, 8, 8))


def test_tensors_that_a_function_makes_follow_those_it_captures() -> None:
    flag, ids = torch.tensor(4), torch.arange(9, dtype=torch.int16) % 3
    mask = predicate(lambda b, h, q, k: (flag % 2 == 0) & ((ids * 2 + flag)[q] > (ids.clone())[k]))
    q, k = torch.arange(9)[:, None], torch.arange(9)
    for step in (0, 1, 3):
        flag.copy_(torch.tensor(4 + step))
        ids.copy_((torch.arange(9) + step) % 3)
        expected = (flag % 2 == 0) & ((ids * 2 + flag)[q] > ids[k])
        assert torch.equal(dense_mask(mask, 9, 9), expected.expand(9, 9)), step


def test_tensors_that_a_score_makes_are_made_at_each_call() -> None:
    weights = torch.ones(4)

    def change(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + (weights * 2)[k]

    x = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        weights += torch.arange(4)
        expected = torch.softmax(x @ x.mT * 8**-0.5 + weights * 2, -1) @ x
        torch.testing.assert_close(tilegen.attention(x, x, x, score=change), expected)
