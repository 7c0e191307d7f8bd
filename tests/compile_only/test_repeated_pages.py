"""A paged call launches the same whatever was called before, although one like the call before it
is checked no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from benchmarks.stand_in import StandInDriver
from tests.support.calls import taking
from tilegen import pipeline
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.launch.triton_run import TritonRun
from tilegen.runtime import dispatch, plans
from tilegen.runtime.paged_call import PagedForm

ADDRESS = 2**32
"""Numbers from here on are addresses."""


def kinds() -> dict[str, tuple[Callable[[], Any], list[torch.Tensor]]]:
    """Return calls, most of which differ from the first in one thing alone, and the tensors that
    they are given."""
    # Heads inside of rows, which kernels take without a copy.
    q = torch.zeros(3, 2, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.zeros(20, 16, 2, 64, dtype=torch.bfloat16) for _ in "kv")
    table = torch.arange(18, dtype=torch.int32).view(3, 6)
    lengths = torch.tensor([90, 3, 17], dtype=torch.int32)
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32)
    packed = torch.zeros(6, 4, 64, dtype=torch.bfloat16)
    flat = torch.zeros(q.numel() + 8, dtype=torch.bfloat16)
    both = torch.zeros(20, 16, 2, 128, dtype=torch.bfloat16)
    shared = torch.zeros(20, 16, 1, 192, dtype=torch.bfloat16)
    wide = torch.zeros(3, 2, 4, 192, dtype=torch.bfloat16).transpose(1, 2)
    causal = tilegen.causal("bottom_right")
    by_name: dict[str, tuple[Callable[[], Any], list[torch.Tensor]]] = {}

    def add(name: str, *given: torch.Tensor, **options: Any) -> None:
        options = {"mask": causal, **options}
        read = [one for one in options.values() if isinstance(one, torch.Tensor)]
        by_name[name] = partial(tilegen.attention_paged, *given, **options), [*given, *read]

    add("first", q, k, v, table, lengths)
    add(
        "the same of other tensors", q.clone(), k.clone(), v.clone(), table.clone(), lengths.clone()
    )
    add("heads outside of rows", q.contiguous(), k, v, table, lengths)
    add("one row", q[:, :, :1].clone(), k, v, table, lengths)
    add("slices of rows", q[:, :, :1], k, v, table, lengths)
    add("fewer requests", q[:2], k, v, table[:2], lengths[:2])
    odd = flat[1 : q.numel() + 1].view(3, 2, 4, 64).transpose(1, 2)
    add("an odd address", odd, k, v, table, lengths)
    add("slices of one cache", q, both[..., :64], both[..., 64:], table, lengths)
    add("values in keys", wide, shared, shared[..., :128], table, lengths)
    add("values apart", wide, shared, torch.zeros_like(shared)[..., :128], table, lengths)
    add("smaller pages", q, k[:, :8], v[:, :8], table, lengths)
    add("tables of 64 bits", q, k, v, table.long(), lengths)
    add("lengths of 64 bits", q, k, v, table, lengths.long())
    add("lengths of 16 bits", q, k, v, table, lengths.short())
    add("columns of a table", q, k, v, table[:, :4], lengths)
    add("every second column", q, k, v, table[:, ::2], lengths)
    add("fewer keys at most", q, k, v, table, lengths, max_kv_length=90)
    add("packed", packed, k, v, table, lengths, q_starts=starts, max_q_length=3)
    add("packed, more at most", packed, k, v, table, lengths, q_starts=starts, max_q_length=4)
    add("packed, no bound", packed, k, v, table, lengths, q_starts=starts)
    add("full", q, k, v, table, lengths, mask=tilegen.full())
    add("a tree", q, k, v, table, lengths, mask=tilegen.tree([-1, 0]))
    add("softcap", q, k, v, table, lengths, score=tilegen.softcap(9.0))
    add("another scale", q, k, v, table, lengths, scale=0.5)
    add("a negative scale", q, k, v, table, lengths, scale=-0.5)
    add("with a result", q, k, v, table, lengths, out=torch.empty_like(q))
    unaligned = torch.empty_like(flat)[1 : q.numel() + 1].view(3, 2, 4, 64).transpose(1, 2)
    add("with a result at an odd address", q, k, v, table, lengths, out=unaligned)
    dense = torch.empty(q.shape, dtype=q.dtype)
    add("with a result that is no view", q, k, v, table, lengths, out=dense)
    add("HND", q, k.transpose(1, 2), v.transpose(1, 2), table, lengths, layout="HND")
    add("keys of fp16", q, k.half(), v, table, lengths)
    add("other heads", q, k, v[:, :, :1], table, lengths)
    add("no such layout", q, k, v, table, lengths, layout="DNH")
    return by_name


@contextmanager
def as_if_on_a_gpu() -> Iterator[StandInDriver]:
    """Have calls launch, with configs for any number of heads."""
    small = TileConfig(block_m=16, block_n=16, split_kv=256)
    configs = {"fwd_paged": small, "fwd_combine": TileConfig(block_m=1, block_n=16)}
    with (
        as_on_a_gpu(notes=True) as driver,
        mock.patch.object(pipeline, "rank", taking(configs)),
        torch.no_grad(),
    ):
        yield driver


def launched(driver: Any, call: Callable[[], Any], given: list[torch.Tensor]) -> Any:
    """Return the launches of a call with names for addresses, or the error that it raises."""
    names = {one.data_ptr(): f"given {i}" for i, one in enumerate(given)}
    driver.launches.clear()
    try:
        call()
    except (InvalidProblem, Unsupported) as error:
        return str(error)
    return [
        (
            *head,
            [names.get(x, "made") if isinstance(x, int) and x >= ADDRESS else x for x in numbers],
        )
        for *head, values in driver.launches
        for numbers in [[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]]
    ]


@pytest.mark.slow
def test_a_paged_call_launches_the_same_whatever_was_called_before() -> None:
    named = kinds()
    with as_if_on_a_gpu() as driver:
        expected: dict[str, Any] = {}
        for name, (call, given) in named.items():
            plans.by_call._recent = ()
            expected[name] = launched(driver, call, given)
        assert expected["first"] == expected["the same of other tensors"]
        assert sum(isinstance(item, str) for item in expected.values()) == 4
        for (before, item), (after, other) in product(named.items(), named.items()):
            launched(driver, *item)
            assert launched(driver, *other) == expected[after], before


@pytest.mark.slow
def test_a_call_like_the_one_before_is_checked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    real = PagedForm.of

    def of(*given: Any) -> PagedForm:
        checked.append(given)
        return real(*given)

    monkeypatch.setattr(dispatch.PagedForm, "of", of)
    named = kinds()
    with as_if_on_a_gpu():
        for name in (
            *("first", "packed", "with a result", "with a result that is no view"),
            *("heads outside of rows", "lengths of 16 bits", "a tree", "softcap"),
        ):
            plans.by_call._recent = ()
            checked.clear()
            for _ in range(3):
                named[name][0]()
            assert len(checked) == 1, name


@pytest.mark.slow
def test_a_paged_call_by_the_run_of_the_file_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton differs, its binder launches."""

    def unfamiliar(*_: Any) -> Any:
        raise AttributeError("no such attribute")

    named = kinds()
    expected: dict[str, Any] = {}
    with as_if_on_a_gpu() as driver:
        for name, (call, given) in named.items():
            expected[name] = launched(driver, call, given)
    monkeypatch.setattr(TritonRun, "_compiled", unfamiliar)
    with as_if_on_a_gpu() as driver:
        for name, (call, given) in named.items():
            assert launched(driver, call, given) == expected[name], name
