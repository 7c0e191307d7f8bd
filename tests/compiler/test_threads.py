"""Launches on several threads, from several Python threads, and in forked children: by tensors, as
emitted files launch, and by addresses, as calls do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from tests.compiler import kernels, runs
from tilegen import cpu
from tilegen.cpu import function, threads
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.kernels.panels import Launch
from tilegen.launch.bound_module import bound_kernel
from tilegen.launch.launcher import always, launch_by
from tilegen.problem import AttentionProblem

CONFIG = TileConfig(block_m=16, block_n=16)


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture(params=["tensors", "addresses"])
def launch(request: pytest.FixtureRequest) -> Launch:
    """Return the launch of a forward."""
    rendered = render(AttentionProblem.parse("hq4 q300 d32 fp32 causal"), CONFIG)
    made = cpu.load(rendered)
    if request.param == "addresses":
        return made.launch
    start = always(lambda grid, arguments, _: made[(grid,)](*arguments))
    return launch_by(start, launch_of(rendered.source), torch.device("cpu"), made.made.name)


def _given() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    return *(torch.randn(1, 4, 300, 32, generator=generator) for _ in "qkv"), 0.2


def test_threads_change_no_bits(launch: Launch) -> None:
    given, results = _given(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(launch(*given)[0])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_pool_serves_where_openmp_is_missing(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = _given()
    expected = launch(*given)[0]
    started: list[int] = []
    by_pool = threads.by_pool

    def noted(work: Any, data: int, number: int) -> None:
        started.append(number)
        by_pool(work, data, number)

    monkeypatch.setattr(function, "by_pool", noted)
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    threads.parallel.cache_clear()
    try:
        assert torch.equal(launch(*given)[0], expected)
    finally:
        threads.parallel.cache_clear()
    assert started == [2]


def test_many_python_threads_launch_at_once(launch: Launch) -> None:
    given = _given()
    expected = launch(*given)[0]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.equal(launch(*given)[0], expected):
                wrong.append(i)

    runs.at_once(work)
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_hang(
    launch: Launch, in_a_child: Callable[[Callable[[], bool]], bool]
) -> None:
    """The parent's OpenMP threads are not in the child: it launches with one thread."""
    given = _given()
    expected = launch(*given)[0]
    assert in_a_child(lambda: bool((launch(*given)[0].numpy() == expected.numpy()).all()))


def test_memory_is_lent_to_a_single_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "free", [])
    first = threads.lent(100)
    assert first.address % 64 == 0
    assert first.address == first.words.ctypes.data
    second = threads.lent(100)
    assert abs(second.address - first.address) >= 100
    threads.free.append(first)
    assert threads.lent(50) is first
    assert not threads.free
    threads.free.append(first)
    larger = threads.lent(1 << 20)
    assert larger.size == larger.words.nbytes == 1 << 20
    assert larger.address % 64 == 0


@pytest.mark.parametrize("number", [1, 2])
def test_a_launch_inside_of_a_launch_changes_no_result(launch: Launch, number: int) -> None:
    """As a signal's handler may launch, another launch runs at every call of a function in a
    launch, and after it."""
    torch.set_num_threads(number)
    given = _given()
    others = *(tensor.flip(2) for tensor in given[:3]), given[3]
    expected, of_others = launch(*given)[0], launch(*others)[0]
    inner: list[torch.Tensor] = []

    def again(_: FrameType, event: str, __: Any) -> None:
        if event != "call":
            sys.setprofile(None)
            inner.append(launch(*others)[0])
            sys.setprofile(again)

    sys.setprofile(again)
    try:
        out = launch(*given)[0]
    finally:
        sys.setprofile(None)
    assert torch.equal(out, expected)
    assert len(inner) > 20
    assert all(torch.equal(one, of_others) for one in inner)


def test_a_callers_output_tensors_may_not_overlap() -> None:
    """A kernel that writes only what its launch allocates is launched by addresses, without a look
    at them; this one writes what it is given."""
    problem = AttentionProblem.parse("hq2 q32 kv64 d32 fp32 full")
    rendered = render(problem, TileConfig(block_m=1, block_n=16), "fwd_combine")
    combine = bound_kernel(rendered, torch.device("cpu")).launch
    partials, lse = torch.randn(1, 2, 1, 32, 32), torch.zeros(1, 2, 1, 32)
    with pytest.raises(Unsupported, match="written and shares memory with partials_ptr"):
        combine(partials, lse, partials[:, :, 0], torch.zeros(1, 2, 32))


def test_integers_beyond_32_bits_are_launched_by_other_code() -> None:
    rendered = render(AttentionProblem.parse("hq4 q300 d32 fp32 full"), CONFIG)
    emitted = cpu.load(rendered)
    q, *_ = _given()
    given = [q if type_.startswith("*") else 1 for _, type_ in rendered.signature]
    usual = emitted._compiled(given, wide=False)
    assert "i64" not in usual.made.arguments
    assert emitted._compiled(given, wide=False) is usual
    assert "i64" in emitted._compiled(given, wide=True).made.arguments


@pytest.mark.parametrize("grid", [(7,), (3, 5), (4, 1, 3), (2, 3, 4)])
def test_every_program_of_a_grid_runs_at_its_place(grid: tuple[int, ...]) -> None:
    x, y, z = (*grid, 1, 1)[:3]
    out = torch.full((z, y, x), -1, dtype=torch.int32)
    runs.launch(kernels.places, grid, out)
    at = torch.arange
    expected = 100 * at(x) + 10 * at(y)[:, None] + at(z)[:, None, None]
    assert torch.equal(out, expected.int())
