"""What a process keeps is bounded and made once, whoever asks; SymPy is asked by one thread."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegen
from tilegen import disk, sympy_lock
from tilegen.bounded_cache import MAX_RECENT, BoundedCache
from tilegen.calls import varlen
from tilegen.check.reference import attention_reference
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.emit import kernel_files
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.masks import parse_mask
from tilegen.masks.snapshots import TensorCache
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, plans
from tilegen.task import KernelTask

THREADS = 16


def together(work: Callable[[int], Any]) -> list[Any]:
    """Call a function on 16 threads at the same time; return the results."""
    start = threading.Barrier(THREADS, timeout=60)

    def one(number: int) -> Any:
        start.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


@pytest.mark.parametrize("hot", [False, True])
def test_the_least_recently_used_goes_first(hot: bool) -> None:
    dropped: list[int] = []
    kept: BoundedCache[int, int] = BoundedCache(3, dropped.append)
    for key in (1, 2, 3, 1, 4, 5):
        known = kept.known(key) if hot else None
        assert (known or kept.get(key, lambda key=key: -key)) == -key
    assert dropped == [-2, -3]
    assert len(kept) == 3
    kept.clear()
    assert len(kept) == 0


def test_a_value_is_made_once_and_its_error_is_not_kept() -> None:
    kept: BoundedCache[str, object] = BoundedCache(3)
    made: list[int] = []

    def make() -> object:
        made.append(1)
        return object()

    def fails() -> object:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        kept.get("key", fails)
    assert len(set(map(id, together(lambda _: kept.get("key", make))))) == 1
    assert len(made) == 1


def test_threads_wait_for_no_other_key() -> None:
    kept: BoundedCache[str, int] = BoundedCache(3)
    inside, go_on = threading.Event(), threading.Event()

    def slow() -> int:
        inside.set()
        assert go_on.wait(60)
        return 1

    thread = threading.Thread(target=lambda: kept.get("slow", slow))
    thread.start()
    assert inside.wait(60)
    assert kept.get("other", lambda: 2) == 2
    go_on.set()
    thread.join()
    assert kept.get("slow", lambda: 3) == 1


def test_a_message_is_logged_once_and_messages_are_few(caplog: pytest.LogCaptureFixture) -> None:
    disk.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tilegen"):
        together(lambda _: disk.say_once("one of many threads"))
        for i in range(disk.MAX_SAID + 5):
            disk.say_once(f"message {i}")
    assert caplog.text.count("one of many threads") == 1
    assert len(disk.say_once._said) == disk.MAX_SAID


def test_symbolic_work_is_done_by_one_thread_at_a_time() -> None:
    inside: list[int] = []

    @sympy_lock.one_at_a_time
    def work(number: int) -> bool:
        inside.append(number)
        alone = inside == [number]
        inside.remove(number)
        return alone and (number < 0 or work(-1 - number))

    assert all(together(work))


def test_only_the_model_takes_the_lock_of_sympy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Counted:
        def __enter__(self) -> None:
            taken.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sympy_lock, "lock", Counted())
    problem = AttentionProblem.parse("hq2 hkv2 q64 d16 fp32 causal")
    h200 = gpu("h200")
    assert h200 is not None
    for work in (
        lambda: tilegen.score(lambda s, b, h, q, k: 2 * s),
        lambda: tilegen.predicate(lambda b, h, q, k: q > k),
        lambda: tilegen.softcap(3).then(tilegen.softcap(4)),
        lambda: render(problem, TileConfig(block_m=16, block_n=16)),
    ):
        work()
        assert not taken
    for work in (
        lambda: propose(KernelTask.of("fwd", problem, h200), top=1),
        lambda: kernels_of(problem, h200),
    ):
        taken.clear()
        work()
        assert taken


def test_threads_trace_call_and_pack_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_masks", TensorCache(varlen.MAX_MASKS, elements=False))
    plans.forget()
    table = torch.rand(2)
    q, cu = torch.randn(1, 2, 40, 16), torch.tensor([0, 13, 40])

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s * table[h] + 0.1 * (q_idx - kv_idx)

    def work(number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, packed = q[:, :, : 30 + number % 4], q[0].transpose(0, 1)
        mask = tilegen.predicate(lambda b, h, q, k: (q - k) % (2 + number % 4) == 0)
        return (
            tilegen.attention(x, x, x, score=score, mask=tilegen.causal()),
            tilegen.attention(x, x, x, mask=mask),
            tilegen.attention_varlen(packed, packed, packed, cu, mask=parse_mask("causal")),
        )

    actual = together(work)
    traced = tilegen.score(score)
    for number, (scored, masked, within) in enumerate(actual):
        x = q[:, :, : 30 + number % 4]
        expected, _ = attention_reference(x, x, x, mask=tilegen.causal(), score=traced)
        torch.testing.assert_close(scored, expected)
        expected, _ = attention_reference(x, x, x, mask=tilegen.dilated(2 + number % 4))
        torch.testing.assert_close(masked, expected)
        assert torch.equal(within, actual[0][2])
    assert len(varlen._masks) == 1


def test_modules_are_imported_once_and_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_files, "_modules", BoundedCache(2, kernel_files._forget))
    imported: list[str] = []
    original = kernel_files._import

    def counted(source: bytes, file: str, digest: str) -> Any:
        imported.append(file)
        return original(source, file, digest)

    monkeypatch.setattr(kernel_files, "_import", counted)
    problem = AttentionProblem.parse("hq2 hkv2 q64 d16 fp32 causal")

    def load(number: int) -> Any:
        config = TileConfig(block_m=16 << number % 2, block_n=16)
        return kernel_files.load(kernel_files.emitted(problem, config, "fwd", aligned=True))

    modules = together(load)
    assert len(imported) == len(set(map(id, modules))) == 2
    last = kernel_files.load(render(problem, TileConfig(block_m=64, block_n=16)))
    assert len(kernel_files._modules) == 2
    assert sys.modules[last.__name__] is last
    gone = [one for one in modules[:2] if one.__name__ not in sys.modules]
    assert len(gone) == 1
    assert callable(gone[0].launch)


def test_plans_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "by_call", BoundedCache(3))
    made: list[int] = []
    new_plan = dispatch._new_plan

    def counted(q: torch.Tensor, *rest: Any) -> Any:
        made.append(q.shape[1])
        return new_plan(q, *rest)

    monkeypatch.setattr(dispatch, "_new_plan", counted)
    for heads in (1, 2, 3, 1, 4, 1, 2):
        q = torch.zeros(1, heads, 8, 16)
        tilegen.attention(q, q, q)
    assert made == [1, 2, 3, 4, 2]
    assert len(plans.by_call) == 3


def test_recent_values_are_recalled_by_facts_until_all_are_forgotten() -> None:
    cache: BoundedCache[str, int] = BoundedCache(9)
    for value in range(MAX_RECENT + 1):
        cache.note(["facts", value], "key", value)
    assert cache.recall(["facts", 0]) is None  # others took its place
    assert [cache.recall(["facts", value]) for value in (3, 2, 1)] == [3, 2, 1]
    cache.clear()
    assert cache.recall(["facts", 3]) is None
