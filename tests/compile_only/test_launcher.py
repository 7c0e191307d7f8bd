"""The driver gets the same arguments without Triton's binder as through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilegen
from benchmarks.call_cost import as_on_a_gpu
from benchmarks.stand_in import stand_in
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import TileConfig
from tilegen.launch.bound_module import bound_kernel
from tilegen.launch.triton_run import TritonRun
from tilegen.masks import Mask
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, plans

CONFIG = TileConfig(block_m=16, block_n=16)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim, aligned", [(64, True), (60, False)])
def test_a_launch_is_that_of_the_binder_and_compiles_nothing_else(
    head_dim: int, aligned: bool
) -> None:
    problem = AttentionProblem.parse(f"hq2 q64 d{head_dim} bf16 causal")
    rendered = render(problem, CONFIG, aligned=aligned)
    module = load(rendered)
    ours = bound_kernel(rendered, torch.device("cpu"), module)
    q, k = (torch.zeros(1, 2, n, head_dim, dtype=torch.bfloat16) for n in (64, 96))
    with stand_in(notes=True) as driver:
        results = [launch(q, k, k, 0.125) for launch in (ours.launch, module.launch)]
        assert len(getattr(module, rendered.function).device_caches[0][0]) == 1
    assert [launch[:2] for launch in driver.launches] == [(4 * 2, rendered.function)] * 2
    seen = [
        [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values]
        for *_, values in driver.launches
    ]
    for values, (out, lse) in zip(seen, results, strict=True):
        assert values[3:5] == [out.data_ptr(), lse.data_ptr()]
        values[3:5] = ["out", "lse"]
    assert seen[0] == seen[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        tilegen.causal(),
        tilegen.global_tokens(3) & tilegen.sliding_window(9, 9),  # with a function for its ranges
        tilegen.block_sparse(torch.tensor([[1, 0], [1, 1]]).bool(), 16),  # with lists of tiles
    ],
    ids=["causal", "ranges", "lists"],
)
def test_attention_launches_without_the_binder(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the emitted `launch` is for people, and for where Triton differs."""
    from triton.runtime.jit import JITFunction

    run, bound = JITFunction.run, list[bool]()

    def noted(self: Any, *given: Any, warmup: bool, **options: Any) -> Any:
        bound.append(warmup)
        return run(self, *given, warmup=warmup, **options)

    monkeypatch.setattr(JITFunction, "run", noted)
    q = torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16, requires_grad=True)
    with as_on_a_gpu(notes=True) as driver:
        for _ in range(2):
            out = tilegen.attention(q, q, q, mask=mask)
            out.backward(torch.zeros_like(out))
    names = [name.split("_d16")[0] for _, name, _ in driver.launches]
    ours = ["attention_fwd", "attention_bwd_preprocess", "attention_bwd_dq", "attention_bwd_dkdv"]
    assert names == 2 * ours
    assert bound == [True] * 4


def calls() -> Iterator[tuple[torch.Tensor, torch.Tensor, Mask, Any]]:
    """Yield q, k (which is v too), mask and kv_lengths of calls: lengths that 16 divides, others,
    and 1; caches that grow in place and anew; strides that say nothing, and odd ones."""
    causal = tilegen.causal("bottom_right")
    cache = torch.zeros(2, 2, 300, 16, dtype=torch.bfloat16)
    inside = torch.zeros(2, 300, 2, 16, dtype=torch.bfloat16).transpose(1, 2)
    wide = torch.zeros(2, 2, 300, 17, dtype=torch.bfloat16)
    for rows, columns in [(1, 1), (1, 2), (2, 2), (1, 31), (1, 32), (16, 33), (1, 48), (3, 100)]:
        yield cache[:, :, :rows], cache[:, :, :columns], causal, None
        yield cache[:, :, :rows], cache[:, :, :columns].clone(), causal, None
        yield inside[:, :, :rows], inside[:1, :, :columns].expand(2, -1, -1, -1), causal, None
        yield cache[:1, :, :rows], cache[:1, :, :columns], causal, None
        yield wide[:1, :, :rows, :16], cache[:1, :, :columns], causal, None
        yield wide[..., :rows, 1:], wide[..., :columns, 1:], causal, None
        lengths = torch.tensor([columns, 1], dtype=torch.int32)
        yield cache[:, :, :rows], inside[:, :, :columns], tilegen.sliding_window(5, 0), lengths
        yield cache[:, :, :rows], cache[:, :, :columns], tilegen.sliding_window(5, 0), lengths
        yield cache[:1, :, :rows], cache[:1, :, :columns], causal, lengths[:1]


def missing(*_: Any) -> Any:
    """Stand for a version of Triton without an attribute."""
    raise AttributeError("no such attribute")


@pytest.mark.slow
def test_calls_of_all_lengths_launch_as_by_the_run_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list(calls())
    seen: list[list[Any]] = []
    for _ in range(2):
        with as_on_a_gpu(notes=True) as driver:
            for q, k, mask, lengths in given:
                tilegen.attention(q, k, k, mask=mask, kv_lengths=lengths)
            made = len(plans.by_call)
        for launch in driver.launches:
            of_tensors = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in launch[2]]
            launch[2][:] = [*of_tensors[:3], "out", "lse", *of_tensors[5:]]
        seen.append(driver.launches)
        # The second time by the emitted file.
        monkeypatch.setattr(TritonRun, "_compiled", missing)
    assert len(seen[0]) == len(given)
    for launched, emitted in zip(*seen, strict=True):
        assert launched == emitted
    assert made < len(given)


@pytest.mark.parametrize(
    "lengths", [torch.ones(3), torch.ones(3, 1, dtype=torch.int32), torch.ones(2).int(), [1, 1, 1]]
)
def test_kernels_are_given_no_lengths_that_do_not_fit(lengths: Any) -> None:
    q = torch.zeros(3, 2, 32, 16, dtype=torch.bfloat16)
    with as_on_a_gpu(notes=True) as driver:
        tilegen.attention(q, q, q, kv_lengths=torch.tensor([1, 2, 3], dtype=torch.int32))
        with pytest.raises(InvalidProblem, match=r"kv_lengths must be|size 3 along batch, got 2"):
            tilegen.attention(q, q, q, kv_lengths=lengths)
    assert len(driver.launches) == 1


@pytest.mark.slow
def test_lengths_of_one_bucket_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    new_plan = dispatch._new_plan
    monkeypatch.setattr(
        dispatch, "_new_plan", lambda q, k, *rest: made.append(k.shape[2]) or new_plan(q, k, *rest)
    )
    q, cache = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 70, 16)
    with as_on_a_gpu(notes=True) as driver:
        for length in range(1, 71):
            tilegen.attention(q, cache[:, :, :length], cache[:, :, :length].clone())
    assert made == [1, 2, 3, 5, 9, 17, 33, 65]
    assert [values[19] for *_, values in driver.launches] == list(range(1, 71))


def test_a_negated_query_has_strides_of_its_own() -> None:
    """A part of a wider tensor, whose negation is dense: both scales in turn, one kind of call."""
    wide = torch.zeros(1, 2, 32, 48, dtype=torch.bfloat16)
    q, k = wide[..., :16], torch.zeros(1, 2, 32, 16, dtype=torch.bfloat16)
    with as_on_a_gpu(notes=True) as driver:
        for scale in (0.5, -0.5, 0.5, -0.5):
            tilegen.attention(q, k, k, scale=scale)
    strides = [values[5:8] for *_, values in driver.launches]
    assert strides == [[0, 192, 6], [0, 64, 2]] * 2
