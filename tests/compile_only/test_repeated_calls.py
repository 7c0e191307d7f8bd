"""Values cached between calls change nothing: each call launches the same as if it were the first,
and is refused the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import TileConfig
from tilegen.launch.binding import BoundKernel
from tilegen.launch.bound_module import bound_kernel
from tilegen.launch.changes import Changes
from tilegen.launch.triton_run import TritonRun
from tilegen.masks.dropout import Dropout
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, plans
from tilegen.runtime.dispatch import Plan

CONFIG = TileConfig(block_m=16, block_n=16)

# --------------------------------------------------------------------------------------------------
# Lengths of padded batches

NO_LENGTHS: dict[str, tuple[Any, type[Exception], str]] = {
    "two of three": (torch.ones(2).int(), InvalidProblem, "size 3 along batch, got 2"),
    "two dimensions": (torch.ones(3, 1).int(), InvalidProblem, r"shape \(batch,\)"),
    "no dimension": (torch.tensor(3).int(), InvalidProblem, r"shape \(batch,\)"),
    "64 bits, four": (torch.ones(4).long(), InvalidProblem, "size 3 along batch, got 4"),
    "floats": (torch.ones(3), InvalidProblem, "must be integers, got torch.float32"),
    "truths": (torch.ones(3).bool(), InvalidProblem, "must be integers, got torch.bool"),
    "a list": ([1, 2, 3], InvalidProblem, r"must be a dense tensor of shape \(batch,\)"),
    "sparse": (torch.ones(3).int().to_sparse(), InvalidProblem, "must be a dense tensor"),
    "nowhere": (torch.ones(3, device="meta").int(), InvalidProblem, "must hold values"),
}


@pytest.mark.parametrize("name", NO_LENGTHS)
def test_invalid_lengths_are_refused_on_the_first_and_the_hundredth_call(name: str) -> None:
    lengths, error, said = NO_LENGTHS[name]
    right = torch.tensor([1, 2, 3], dtype=torch.int32)
    q = torch.zeros(3, 2, 32, 16, dtype=torch.bfloat16)
    with as_on_a_gpu(notes=True) as driver:
        for i in range(1, 101):
            if i in (1, 100):
                with pytest.raises(error, match=said):
                    tilegen.attention(q, q, q, kv_lengths=lengths)
            tilegen.attention(q, q, q, kv_lengths=right)
    assert len(driver.launches) == 100


@pytest.mark.slow
def test_kernels_read_the_lengths_themselves_where_they_can() -> None:
    q = torch.zeros(3, 2, 32, 16, dtype=torch.bfloat16)
    dense = torch.tensor([1, 2, 3], dtype=torch.int32)
    given = (dense, dense.long(), dense.repeat_interleave(2)[::2], dense.short(), dense)
    with as_on_a_gpu(notes=True) as driver:
        for lengths in given:
            tilegen.attention(q, q, q, kv_lengths=lengths)
    *_, values = driver.launches[0]
    at = values.index(dense.data_ptr())
    taken = [values[at] for *_, values in driver.launches]
    own = [lengths.data_ptr() for lengths in given]
    assert [a == b for a, b in zip(taken, own, strict=True)] == [True, True, False, False, True]


def test_lengths_of_each_dtype_have_a_kernel_that_differs_in_its_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []
    compile = TritonRun._compiled

    def noted(self: Any, *given: Any) -> Any:
        compiled.append(compile(self, *given).asm["ttir"])
        return compile(self, *given)

    monkeypatch.setattr(TritonRun, "_compiled", noted)
    q = torch.zeros(3, 2, 32, 16, dtype=torch.bfloat16)
    lengths = torch.tensor([1, 2, 3], dtype=torch.int32)
    with as_on_a_gpu():
        for given in (lengths, lengths.long(), lengths.short()):
            tilegen.attention(q, q, q, kv_lengths=given)
    narrow, wide, converted = compiled
    read = [set(re.findall(r"tt.load %\w+ : !tt.ptr<(i\d+)>", text)) for text in compiled]
    assert read == [{"i32"}, {"i64"}, {"i32"}]
    # Positions in 64 bits would take twice the registers.
    assert narrow.count("xi64>") == wide.count("xi64>") == converted.count("xi64>")


@pytest.mark.slow
def test_kernels_read_where_requests_lie_as_it_is_given() -> None:
    """In 32 and in 64 bits, without an operator that converts them."""
    q, pages = torch.zeros(3, 8, 1, 16, dtype=torch.bfloat16), torch.zeros(9, 16, 2, 16).bfloat16()
    table, lengths = torch.arange(9, dtype=torch.int32).view(3, 3), torch.tensor([40, 1, 33])
    kinds = {
        "32 bits": (table, lengths.int()),
        "64 bits": (table.long(), lengths),
        "of both": (table, lengths),
        "16 bits": (table.short(), lengths.short()),
    }
    for name, where in kinds.items():
        with as_on_a_gpu(notes=True) as driver:
            for _ in range(2):
                tilegen.attention_paged(q, pages, pages, *where)
        own = {x.data_ptr() for x in where}
        taken = [own <= set(values) for *_, values in driver.launches[::2]]  # and the combine
        assert taken == [name != "16 bits"] * 2, name


def test_changed_settings_are_seen_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16)
    for lengths in (torch.tensor([2**30]), torch.tensor([2**30], dtype=torch.int32)):
        with as_on_a_gpu(notes=True) as driver:
            for _ in range(2):
                tilegen.attention(q, q, q, kv_lengths=lengths)
                monkeypatch.setenv("TILEGEN_CHECK", "1")
                with pytest.raises(InvalidProblem, match=r"must be 0\.\.32"):
                    tilegen.attention(q, q, q, kv_lengths=lengths)
                monkeypatch.delenv("TILEGEN_CHECK")
        assert len(driver.launches) == 2


# --------------------------------------------------------------------------------------------------
# Sizes and strides


def launches() -> tuple[BoundKernel, Any]:
    """Return a bound kernel, and its emitted module."""
    problem = AttentionProblem.parse("hq4 hkv2 q64 d64 bf16 causal")
    rendered = render(problem, CONFIG)
    module = load(rendered)
    return bound_kernel(rendered, torch.device("cpu"), module), module


def run_of(bound: BoundKernel) -> Any:
    """Return the function that launches the kernel."""
    return vars(bound)["launch"].__globals__["run"]


def is_kernel(x: Any) -> bool:
    return isinstance(x, JITFunction) and not x.__name__.startswith("_")


def binaries(module: Any) -> int:
    """Return how many binaries Triton has of a module's kernel."""
    (kernel,) = (one for one in vars(module).values() if is_kernel(one))
    return len(kernel.device_caches[0][0])


def tensors(heads: int, rows: int, wide: int = 0, *, inside: bool = False) -> torch.Tensor:
    """Return bf16 zeros (2, heads, rows, 64) in rows of `wide` more elements; `inside`: heads lie
    inside of rows."""
    if inside:
        return tensors(rows, heads, wide).transpose(1, 2)
    return torch.zeros(2, heads, rows, 64 + wide, dtype=torch.bfloat16)[..., :64]


@pytest.mark.slow
def test_a_launch_is_the_same_whatever_was_launched_before() -> None:
    """Sizes or strides of one tensor after the other differ from those of the launch before."""
    queries, cache = tensors(4, 40), tensors(2, 60)
    q, k, less = queries[:, :, :32], cache[:, :, :48], cache[:, :, :47]
    given = [
        *((q, k, k), (queries[:, :, :33], k, k), (tensors(2, 32), k, k)),
        *((q, less, k), (q[:1], k[:1], k[:1])),
        *((tensors(4, 32, 8), k, k), (q, tensors(2, 48, 8), k), (q, k, tensors(2, 48, 8))),
        *((tensors(4, 32, inside=True), k, k), (q, tensors(2, 48, inside=True), k)),
        (q, k, tensors(2, 48, inside=True)),
    ]

    def launched(launch: Any, x: tuple[torch.Tensor, ...]) -> Any:
        out, lse = launch(*x, 0.125)
        grid, _, values = driver.launches.pop()
        return grid, values[5:], out.shape, out.stride(), lse.shape, lse.stride()

    with as_on_a_gpu(notes=True) as driver:
        ours, module = launches()
        expected = [launched(module.launch, x) for x in given]
        assert len({str(one) for one in expected}) == len(given)
        for (_, before), (i, after) in product(enumerate(given), enumerate(given)):
            launched(ours.launch, before)
            assert launched(ours.launch, after) == expected[i]


@pytest.mark.slow
def test_an_address_that_16_does_not_divide_has_a_binary_of_its_own() -> None:
    """Such as a gradient passed by a caller; usual calls keep the other binary."""
    q, k = tensors(4, 32), tensors(2, 48)
    shifted = torch.zeros(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with as_on_a_gpu(notes=True):
        ours, module = launches()
        ours.launch(q, k, k, 0.125)
        usual, compiled = run_of(ours), binaries(module)
        ours.launch(shifted, k, k, 0.125)
        assert (run_of(ours), binaries(module)) == (usual, compiled + 1)
        module.launch(shifted, k, k, 0.125)
        assert binaries(module) == compiled + 1


class Far(torch.Tensor):
    """A tensor like another but for one stride, in no memory."""

    @staticmethod
    def __new__(cls: type[Far], like: torch.Tensor, axis: int, stride: int) -> Far:
        strides = (*like.stride()[:axis], stride, *like.stride()[axis + 1 :])
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, like.shape, strides=strides, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented

    def data_ptr(self) -> int:
        """Return an address that 16 divides."""
        return 4096


@pytest.mark.slow
def test_a_stride_beyond_32_bits_has_a_binary_of_its_own() -> None:
    q, k = tensors(4, 32), tensors(2, 48)
    with as_on_a_gpu(notes=True) as driver:
        ours, module = launches()
        ours.launch(q, k, k, 0.125)
        usual, compiled = run_of(ours), binaries(module)
        ours.launch(q, Far(k, 0, 2**33), k, 0.125)  # in units of 8 elements: 32 bits hold it
        assert (run_of(ours), binaries(module)) == (usual, compiled)
        ours.launch(q, Far(k, 0, 2**34), k, 0.125)
        assert (run_of(ours), binaries(module)) == (usual, compiled + 1)
    assert [values[8] for *_, values in driver.launches] == [768, 2**30, 2**31]


@pytest.mark.parametrize(
    "axis, stride", [(0, 2**20 + 4), (1, 2**20 + 4), (2, 65), (2, 66), (2, 68), (2, 2**22), (3, 2)]
)
def test_strides_that_a_kernel_is_not_for_are_refused_every_time(axis: int, stride: int) -> None:
    q, k = tensors(4, 32), tensors(2, 48)
    with as_on_a_gpu(notes=True) as driver:
        ours, _ = launches()
        for given in ((Far(q, axis, stride), k, k), (q, Far(k, axis, stride), k)) * 2:
            with pytest.raises(ValueError, match=r"multiples of 8 elements.*got strides"):
                ours.launch(*given, 0.125)
            ours.launch(q, k, k, 0.125)
    assert len(driver.launches) == 4


# --------------------------------------------------------------------------------------------------
# Plans


def kinds() -> dict[str, Callable[[], Plan]]:
    """Return calls of different kinds, most of which differ from the first in one thing alone."""
    q, k, v = (torch.zeros(1, heads, 40, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    flat = torch.zeros(2 * 4 * 40 * 64 + 8, dtype=torch.bfloat16)
    shared, lengths = torch.zeros(1, 1, 40, 64, dtype=torch.bfloat16), torch.tensor([3])
    trained = tilegen.bias(torch.zeros(40, 40, requires_grad=True))
    causal, half = tilegen.causal(), (q.half(), k.half(), v.half())

    def call(*x: torch.Tensor, mask: tilegen.Mask = causal, **changes: Any) -> Plan:
        return dispatch.plan_of(*x, Changes(mask, **changes))

    def under(context: Any, *x: torch.Tensor, **changes: Any) -> Plan:
        with context:
            return call(*x, **changes)

    by_name: dict[str, Callable[[], Plan]] = {
        "first": partial(call, q, k, v),
        "more rows": partial(call, q.repeat(1, 1, 3, 1), k, v),
        "more columns": partial(call, q, k.repeat(1, 1, 3, 1), v.repeat(1, 1, 3, 1)),
        "fewer rows of the same strides": partial(call, q[:, :, :9], k, v),
        "fewer heads of the same strides": partial(call, q[:, :2], k, v),
        "narrower": partial(call, q[..., :32], k[..., :32], v),
        "narrower values": partial(call, q, k, v[..., :32]),
        "fp16": partial(call, *half),
        "keys of fp16": partial(call, q, half[1], v),
        "keys elsewhere": partial(call, q, k.to("meta"), v),
        "three dimensions": partial(call, q[0], k[0], v[0]),
        "an odd address": partial(call, flat[1 : q.numel() + 1].view(q.shape), k, v),
        "odd strides": partial(call, *(torch.zeros(1, 4, 40, 65).bfloat16()[..., :64], k, v)),
        "expanded keys": partial(call, q, k[:, :, :1].expand(k.shape), v),
        "heads inside of rows": partial(call, q, k, v.transpose(1, 2).clone().transpose(1, 2)),
        "no head in common": partial(call, q, shared, shared.clone()),
        "values in keys": partial(call, q, shared, shared),
        "full": partial(call, q, k, v, mask=tilegen.full()),
        "lengths": partial(call, q, k, v, kv_lengths=lengths),
        "lengths of 32 bits": partial(call, q, k, v, kv_lengths=lengths.int()),
        "lengths of 16 bits": partial(call, q, k, v, kv_lengths=lengths.short()),
        "two lengths": partial(call, q, k, v, kv_lengths=torch.tensor([3, 4])),
        "softcap": partial(call, q, k, v, score=tilegen.softcap(9.0)),
        "trained": partial(call, q, k, v, score=trained),
        "not trained": lambda: under(torch.no_grad(), q, k, v, score=trained),
        "dropout": partial(call, q, k, v, dropout=Dropout(0.1, torch.zeros(2).long())),
    }
    for dtype in (torch.bfloat16, torch.float16):
        context = partial(torch.autocast, "cpu", dtype=dtype)
        by_name[f"autocast to {dtype}"] = lambda its=context: under(its(), q, k, v)
    return by_name


def test_a_plan_is_the_same_whatever_was_called_before() -> None:
    def planned(call: Callable[[], Plan]) -> Plan | str:
        try:
            return call()
        except InvalidProblem as error:
            return str(error)

    named = kinds()
    with as_on_a_gpu():
        expected: dict[str, Plan | str] = {}
        for name, call in named.items():
            plans.by_call._recent = ()
            expected[name] = planned(call)
        apart = {name: item for name, item in expected.items() if name != "heads inside of rows"}
        assert len({id(item) for item in apart.values()}) == len(apart)
        for (before, item), (after, other) in product(named.items(), named.items()):
            planned(item)
            assert planned(other) == expected[after], before


def test_plans_that_are_forgotten_are_made_anew() -> None:
    with as_on_a_gpu():
        call = kinds()["first"]
        item = call()
        assert call() is item
        plans.forget()
        assert call() is not item
