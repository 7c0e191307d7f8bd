"""The number of threads of a launch, the order of its programs, and launches where threads end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.compiler import kernels, runs
from tilegen import cpu
from tilegen.cpu import function, threads
from tilegen.cpu.work import ENOUGH, Work
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

CONFIG = TileConfig(block_m=16, block_n=32)
WAYS = ["openmp", "pool"]


pytestmark = pytest.mark.usefixtures("two_threads")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of threads of launches to come."""
    noted: list[int] = []
    start = function.CpuFunction._threads

    def note(self: Any, programs: int, values: list[Any]) -> int:
        noted.append(start(self, programs, values))
        return noted[-1]

    monkeypatch.setattr(function.CpuFunction, "_threads", note)
    return noted


def _forward(rows: int, columns: int, heads: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, rows, 32, generator=generator)
    k, v = torch.randn(2, 1, heads, columns, 32, generator=generator)
    rendered = render(AttentionProblem.parse("hq4 q300 d32 fp32 full"), CONFIG)
    return cpu.load(rendered).launch(q, k, v, 0.2)


def test_one_thread_runs_programs_in_their_order() -> None:
    """Emitted kernels give programs with most work the first numbers."""
    torch.set_num_threads(1)
    out = torch.full((100,), -1, dtype=torch.int32)
    runs.launch(kernels.numbered, (100,), torch.zeros(1, dtype=torch.int32), out)
    assert torch.equal(out, torch.arange(100, dtype=torch.int32))


@pytest.mark.parametrize(
    "rows, columns, expected",
    [(16, 16, 1), (1, 600, 1), (64, 64, 1), (1, 40_000, 2), (300, 300, 2), (2000, 16, 2)],
)
def test_small_launches_take_one_thread(
    rows: int, columns: int, expected: int, taken: list[int]
) -> None:
    _forward(rows, columns)
    assert taken == [expected]


def test_the_number_of_threads_follows_from_sizes_not_from_time(taken: list[int]) -> None:
    for _ in range(5):
        _forward(50, 100)
        _forward(250, 250)
    assert taken == 5 * [1, 2]


def _work(kernel: Kernel, problem: str, config: TileConfig = CONFIG) -> tuple[Work, int]:
    rendered = render(AttentionProblem.parse(problem), config, kernel)
    emitted = cpu.load(rendered)
    work = Work.of(rendered.kernel, rendered.config, rendered.problem, emitted.made.names)
    assert work is not None
    return work, work.place


@pytest.mark.parametrize(
    "kernel, problem, flops",
    [
        # Products of a row that stays and one that passes: two of the forward, three of dQ, and
        # four of dK and dV, for each query head of a group.
        ("fwd", "hq4 hkv4 q300 d32 fp32 full", 16 * 4 * 32),
        ("fwd", "hq4 hkv4 q300 d64/32 fp32 full", 16 * 2 * 96),
        ("bwd_dq", "hq4 hkv4 q300 d32 fp32 full", 16 * 6 * 32),
        ("bwd_dkdv", "hq4 hkv2 q300 d32 fp32 full", 2 * 32 * 8 * 32),
    ],
)
def test_work_is_that_of_products(kernel: Kernel, problem: str, flops: int) -> None:
    work, place = _work(kernel, problem)
    assert work.per_row == flops
    tile = 16 if kernel == "bwd_dkdv" else 32
    values = [0] * place + [3 * tile + 1]
    limit = ENOUGH / (flops * 4 * tile)
    assert work.is_small(int(limit), values)
    assert not work.is_small(int(limit) + 1, values)


@pytest.mark.parametrize("dtype, size", [("fp32", 4), ("bf16", 2)])
def test_work_of_few_rows_is_that_of_reading(dtype: str, size: int) -> None:
    """A row of 32 and 32 elements: 128 flops of products for each query, 1.2 for each byte."""
    problem = f"hq4 hkv4 q1 kv4096 d32 {dtype} full"
    for queries in (1, 16):
        config = TileConfig(block_m=queries, block_n=32, split_kv=1024)
        work, _ = _work("fwd_split", problem, config)
        assert work.per_row == max(128 * queries, round(1.2 * size * 64))


def test_programs_of_shares_work_on_their_share_of_the_keys() -> None:
    """Two shares of 256 keys have the work of 512 keys; a share of 65536 has that of all keys."""
    places: list[tuple[int, int]] = []
    for split in (256, 65536):
        config = TileConfig(block_m=16, block_n=32, split_kv=split)
        work, place = _work("bwd_one_pass", "hq4 hkv2 q300 d32 fp32 full", config)
        assert work.per_row == 2 * 10 * 32  # five products, for both query heads of a group
        places.append((place, work.stays))
        lengths = [0] * max(place, work.stays) + [0]
        lengths[place], lengths[work.stays] = 320, 512
        shares = -(-512 // split)
        least = ENOUGH / (512 * 320 * work.per_row)  # heads that are enough together
        assert work.is_small(int(least) * shares, lengths)
        assert not work.is_small((int(least) + 1) * shares, lengths)
    assert places[0] == places[1]


def test_programs_of_splits_work_on_a_split() -> None:
    config = TileConfig(block_m=16, block_n=32, split_kv=256)
    work, place = _work("fwd_split", "hq4 hkv4 q1 kv100000 d32 fp32 full", config)
    long, split = [0] * place + [100_000], [0] * place + [256]
    for programs in (1, 10, 100, 1000):
        assert work.is_small(programs, long) == work.is_small(programs, split)
    assert not work.is_small(1000, long)


@pytest.mark.parametrize("queries", [8, 2048])
def test_work_of_joining_grows_with_splits(queries: int, taken: list[int]) -> None:
    problem = AttentionProblem.parse(f"hq2 q{queries} kv64 d32 fp32 full")
    config = TileConfig(block_m=1, block_n=16)
    partials, lse = torch.randn(1, 2, 1, queries, 32), torch.zeros(1, 2, 1, queries)
    results = torch.empty(1, 2, queries, 32), torch.zeros(1, 2, queries)
    cpu.load(render(problem, config, "fwd_combine")).launch(partials, lse, *results)
    assert taken == ([1] if queries == 8 else [2])
    work, place = _work("fwd_combine", str(problem), config)
    whole, more = ([0] * place + [splits] for splits in (16, 17))
    least = ENOUGH // (16 * work.per_row)
    assert work.is_small(least, whole) == work.is_small(least, [0] * place + [1])
    assert not work.is_small(least, more)


def test_work_of_pages_is_bounded_by_the_longest_request() -> None:
    config = TileConfig(block_m=1, heads=4, block_n=32, split_kv=512)
    work, place = _work("fwd_paged", "hq8 hkv2 q1 kv4096 d32 fp32 full page16", config)
    plain, _ = _work("fwd_split", "hq8 hkv2 q1 kv4096 d32 fp32 full", config)
    assert (work.per_row, work.tile, work.most) == (plain.per_row, plain.tile, plain.most)
    assert work.is_small(2, [0] * place + [16])
    assert not work.is_small(2 * 64, [0] * place + [4096])


def test_set_num_threads_holds_for_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _forward(300, 300)[0]
    torch.set_num_threads(1)
    monkeypatch.setattr(function, "parallel", lambda: pytest.fail("a second thread was asked for"))
    assert torch.equal(_forward(300, 300)[0], expected)


def test_launches_inside_of_parallel_work() -> None:
    """OpenMP gives nested work one thread, which takes all programs."""
    expected, results = _forward(300, 300)[0], []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(_: int) -> None:
        results.append(_forward(300, 300)[0])

    start = threads.parallel()
    if start is None:
        pytest.skip("PyTorch has no OpenMP here")
    start(ctypes.cast(work, ctypes.c_void_p), None, 2, 0)
    assert len(results) == 2
    assert all(torch.equal(one, expected) for one in results)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Have launches take OpenMP's threads, or those of the pool."""
    if request.param == "pool":
        monkeypatch.setattr(threads, "_openmp", lambda: None)
    threads.parallel.cache_clear()
    yield request.param
    threads.parallel.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_of_a_process_that_used_threads_launches_alone(
    way: str, in_a_child: Callable[[Callable[[], bool]], bool]
) -> None:
    expected = _forward(300, 300)[0]

    def is_right() -> bool:
        same = bool((_forward(300, 300)[0].numpy() == expected.numpy()).all())
        return threads.usable_threads(100) == 1 and same

    assert in_a_child(is_right)


ENDING = """
import sys, threading, time
import torch
import tilegen
from tilegen.cpu import function, threads

way, daemon = sys.argv[1:]
launches = []
count = function.CpuFunction._threads

def noted(kernel, programs, arguments):
    launches.append((kernel[(programs,)], arguments))
    return count(kernel, programs, arguments)

function.CpuFunction._threads = noted
if way == "pool":
    threads._openmp = lambda: None
torch.set_num_threads(2)
q, k, v = torch.randn(3, 1, 4, 300, 32).unbind()
kept = tilegen.attention(q, k, v, return_lse=True)
function.CpuFunction._threads = count

def launch():
    kernel, arguments = launches[0]
    while True:
        kernel(*arguments)

def call():
    until = time.perf_counter() + 1.5
    while time.perf_counter() < until:
        if not torch.equal(tilegen.attention(q, k, v), kept[0]):
            print("wrong", flush=True)
    print("ended", flush=True)

is_daemon = daemon == "daemon"
threading.Thread(target=launch if is_daemon else call, daemon=is_daemon).start()
time.sleep(0.5)
print("main ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["daemon", "joined"])
@pytest.mark.parametrize("way", WAYS)
def test_an_interpreter_ends_while_a_thread_calls(way: str, daemon: str) -> None:
    """A daemon thread is left; the interpreter waits for any other, which goes on and is right.

    The daemon thread launches, but makes no tensors: those abort the process in PyTorch's own
    calls, too.
    """
    result = subprocess.run(
        [sys.executable, "-c", ENDING, way, daemon],
        env={**os.environ, "TILEGEN_CPU": "kernels"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = "main ends\n" if daemon == "daemon" else "main ends\nended\n"
    assert result.stdout == expected, result.stderr
    assert "Traceback" not in result.stderr


def test_a_helper_that_comes_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    late: list[Any] = []

    class Pool:
        def submit(self, work: Any) -> None:
            late.append(work)
            if len(late) == 2:
                raise RuntimeError("cannot schedule new futures after shutdown")

    calls: list[int] = []
    monkeypatch.setattr(threads, "_pool", Pool)
    threads.by_pool(calls.append, 5, 4)
    for helper in late:
        helper()
    assert calls == [5]
    assert len(late) == 2
