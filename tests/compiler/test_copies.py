"""Additions to copies in place of atomic ones: the same bits for any threads, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, at_once, launch
from tilegen.cpu import copies
from tilegen.cpu.direct import DirectFunction
from tilegen.cpu.target import Target
from tilegen.errors import Unsupported, WrongResult


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _scattered(places: int, number: int = 5000) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(places, (number,), generator=generator, dtype=torch.int32)
    return _random(number), index


@pytest.mark.parametrize("places", [1, 31, 3000, 200_000, 600_000])
def test_scattered_additions_have_the_same_bits_for_any_threads(places: int) -> None:
    """Few places and many, for as many copies as there may be, for few and for two of them."""
    value, index = _scattered(places)
    start = _random(places, seed=3)
    results: list[torch.Tensor] = []
    for threads in (1, 2, 3, 2, 3):
        torch.set_num_threads(threads)
        results.append(start.clone())
        launch(kernels.scatter_add, (157,), value, index, results[-1], 5000, 32)
    assert all(torch.equal(one, results[0]) for one in results)
    expected = start.double().index_add(0, index, value.double())
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", TARGETS)
def test_rows_are_added_as_vectors_under_masks(name: str) -> None:
    target: Target = TARGETS[name]
    programs, rows, columns = 40, 16, 32
    x = _random(programs, rows, columns)
    for m, n in ((18, 32), (18, 19), (7, 1)):
        results: list[tuple[torch.Tensor, torch.Tensor]] = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append((torch.zeros(m, n), torch.zeros(m)))
            given = x, *results[-1], n, m, rows, columns
            launch(kernels.add_rows, (programs,), *given, target=target)
        whole = torch.zeros(rows + 2, columns, dtype=torch.float64)
        for i in range(programs):
            whole[i % 3 : i % 3 + rows] += x[i]
        for out, sums in results:
            assert torch.equal(out, results[0][0])
            assert torch.equal(sums, results[0][1])
            torch.testing.assert_close(out.double(), whole[:m, :n], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(sums.double(), whole.sum(1)[:m], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64])
def test_other_types_of_numbers(dtype: torch.dtype) -> None:
    value, index = _scattered(7, 500)
    value = (100 * value).to(dtype)
    out = torch.zeros(7, dtype=dtype)
    torch.set_num_threads(2)
    launch(kernels.scatter_add, (16,), value, index, out, 500, 32)
    torch.testing.assert_close(out, torch.zeros(7, dtype=dtype).index_add(0, index, value))


@pytest.mark.parametrize("what", ["", "load", "store"])
def test_a_tensor_that_is_also_loaded_or_stored_has_no_copies(what: str) -> None:
    function = DirectFunction(kernels.mixed_add)
    x, out = _random(100), torch.zeros(100)
    function[(7,)](x, out, 100, what, 16)
    assert torch.equal(out, 2 * x if what == "store" else x)
    (compiled,) = function._known.values()
    assert compiled.made.private == (() if what else (1,))


def test_kernels_without_additions_have_no_chunks() -> None:
    function = DirectFunction(kernels.unary)
    function[(4,)](_random(64), torch.empty(64), 64, "abs", 16)
    (compiled,) = function._known.values()
    assert compiled.made.private == ()


def test_several_python_threads_add_at_once() -> None:
    value, index = _scattered(31)
    torch.set_num_threads(2)
    expected = torch.zeros(31)
    launch(kernels.scatter_add, (157,), value, index, expected, 5000, 32)
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(20):
            out = torch.zeros(31)
            launch(kernels.scatter_add, (157,), value, index, out, 5000, 32)
            if not torch.equal(out, expected):
                wrong.append(i)

    at_once(work)
    assert not wrong


def test_the_number_of_chunks_follows_from_programs_and_memory() -> None:
    mib = 1 << 20
    assert copies.chunks_of(1, 128) == 1
    assert copies.chunks_of(5, 128) == 5
    assert copies.chunks_of(1000, 128) == copies.chunks_of(1000, 4 * mib // 15) == 16
    assert copies.chunks_of(1000, mib) == copies.chunks_of(1000, 21 * mib) == 4
    assert copies.chunks_of(1000, 32 * mib) == 3
    assert copies.chunks_of(1000, 1024 * mib) == 2
    for size in (1, 1000, 10**6, 10**7, 10**8, 10**10):
        taken = (copies.chunks_of(1000, size) - 1) * size
        assert taken <= max(64 * mib, size)


def test_memory_of_copies_follows_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    empty = np.empty

    def noted(shape: tuple[int, int], dtype: type) -> object:
        taken.append(shape[0] * shape[1])
        return empty(shape, dtype)

    monkeypatch.setattr(copies.np, "empty", noted)
    for places in (31, 10**6, 20_000_000):
        value, index = _scattered(places, 500)
        launch(kernels.scatter_add, (16,), value, index, torch.zeros(places), 500, 32)
    assert taken == [15 * (128 + 64), 3 * (4 * 10**6 + 64), 4 * 20_000_000 + 64]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_checked_build_keeps_additions_inside_of_each_copy(threads: int) -> None:
    torch.set_num_threads(threads)
    function = DirectFunction(kernels.scatter_add, mode="bounds")
    value, index = _scattered(7)
    whole = torch.zeros(12)
    out = whole[2:9]
    function[(157,)](value, index, out, 5000, 32)
    torch.testing.assert_close(out, torch.zeros(7).index_add(0, index, value), atol=1e-4, rtol=0)
    for at in (0, 4999):  # by the first chunk, to the tensor itself, and by the last, to a copy
        for place in (7, -1):
            wrong = index.clone()
            wrong[at] = place
            with pytest.raises(WrongResult, match=f"out_ptr: element {place}, counted"):
                function[(157,)](value, wrong, out, 5000, 32)
    assert not whole[:2].any()
    assert not whole[9:].any()


def test_a_counting_build_counts_loads_and_stores_as_with_atomic_additions() -> None:
    function = DirectFunction(kernels.scatter_add, mode="count")
    value, index = _scattered(7)
    function[(157,)](value, index, torch.zeros(7), 5000, 32)
    (compiled,) = function._known.values()
    assert compiled.traffic.read == {"value_ptr": 20_000, "index_ptr": 20_000}
    assert not compiled.traffic.written


def test_a_tensor_with_gaps_is_refused() -> None:
    value, index = _scattered(7, 500)
    with pytest.raises(Unsupported, match=r"strides \(2,\).*pass a contiguous tensor"):
        launch(kernels.scatter_add, (16,), value, index, torch.zeros(14)[::2], 500, 32)


def test_an_empty_tensor_is_added_to_by_nobody() -> None:
    x = torch.empty(0)
    launch(kernels.scatter_add, (3,), x, torch.empty(0, dtype=torch.int32), torch.zeros(0), 0, 32)
