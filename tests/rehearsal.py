"""A pytest plugin that rehearses tests/gpu without a GPU: "cuda" is the CPU, kernels run in
Triton's interpreter, and a CUDA graph runs again what was launched in it.

    TRITON_INTERPRET=1 pytest -p tests.rehearsal tests/gpu

A GPU is here rarely and not for long: what a test says about the rest of the code should not be
wrong then. One case of each test is run, on problems that the interpreter is fast enough for: tests
say both sizes with `sized`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.pure.gpus.test_device import H200_DRIVER
from tests.support import interpreting

FILES_LEFT_OUT = {
    "test_bundles": "needs a driver that loads binaries",
    "test_sliced": "takes minutes",
    "test_split_backward": "takes minutes",
}
LEFT_OUT = {
    "test_tensor_descriptors": "takes minutes",
    "test_sdpa_runs_on_tilegen_while_it_is_active": "needs PyTorch's operators of a GPU",
    "test_varlen_attn_runs_on_tilegen_while_it_is_active": "needs PyTorch's operators of a GPU",
    "test_slopes_and_other_refusals_reach_pytorchs_own_kernel": "needs PyTorch's kernels of a GPU",
    "test_a_compiled_call_is_that_of_eager": "needs a GPU to compile for",
    "test_reduced_overhead_sees_a_mask_that_changes_in_place": "needs a GPU to compile for",
    "test_replays_of_a_graph_drop_other_pairs_and_their_backward_the_same_as_their_forward": (
        "needs autograd within a graph"
    ),
    "test_the_same_bits_in_any_batch_chunk_and_page": "takes minutes",
    "test_lengths_never_recompile": "needs Triton's compiler",
    "test_tuning_for_half_a_minute_leaves_a_record_that_calls_use": "needs Triton's compiler",
    "test_a_later_run_measures_nothing_again": "needs Triton's compiler",
    "test_benchmark_rows_are_checked_and_timed": "needs binaries that have digests",
}
"""Tests of which nothing but their fixtures is rehearsed, and why."""

# --------------------------------------------------------------------------------------------------
# Hooks


@pytest.hookimpl(tryfirst=True)  # before tests are skipped for want of a GPU
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Select the rehearsed tests, and make this process treat the CPU as a GPU."""
    for name, stand_in in STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    torch.Generator = OnCpuGenerator  # type: ignore
    interpreting.prepare()
    _note_launches()
    OnCpu().__enter__()
    seen: set[str] = set()
    kept: list[pytest.Item] = []
    for item in items:
        assert isinstance(item, pytest.Function)
        name = item.originalname
        if name not in seen:
            kept.append(item)
        if reason := FILES_LEFT_OUT.get(item.path.stem):
            item.add_marker(pytest.mark.skip(reason=reason))
        seen.add(name)
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    assert isinstance(item, pytest.Function)
    if reason := LEFT_OUT.get(item.originalname):
        pytest.skip(reason)


# --------------------------------------------------------------------------------------------------
# "cuda" is the CPU

_Generator = torch.Generator


def _here(device: Any) -> Any:
    return "cpu" if str(device).startswith("cuda") else device


class OnCpuGenerator(_Generator):
    """A generator on the CPU where one on a GPU is asked for; a class, as annotations want it."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _Generator.__new__(cls, _here(device))


class OnCpu(TorchFunctionMode):
    """Have tensors made on the CPU that are asked for on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: _here(value) for name, value in (kwargs or {}).items()}
        args = [_here(one) if isinstance(one, str | torch.device) else one for one in args]
        return func(*args, **kwargs)


# --------------------------------------------------------------------------------------------------
# A CUDA graph runs again what was launched in it


class Graph:
    """The launches and the operations of PyTorch of a captured region."""

    capturing: Graph | None = None

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        for step in self.steps:
            step()


def _note_launches() -> None:
    from triton.runtime.interpreter import GridExecutor

    launch: Any = GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        if Graph.capturing:
            Graph.capturing.steps.append(lambda: launch(self, *args, **kwargs))
        launch(self, *args, **kwargs)

    GridExecutor.__call__ = noted


class Noting(TorchFunctionMode):
    """Note operations that compute tensors; a replay writes their results where they were."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        actual = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if isinstance(actual, torch.Tensor) and "empty" not in name and name != "__get__":

            def again() -> None:
                new = func(*args, **kwargs)
                if new is not actual:
                    actual.data.copy_(new)

            assert Graph.capturing
            Graph.capturing.steps.append(again)
        return actual


@contextmanager
def graph(captured: Graph) -> Generator[None]:
    """Capture the launches inside the block."""
    Graph.capturing = captured
    try:
        with Noting():
            yield
    finally:
        Graph.capturing = None


# --------------------------------------------------------------------------------------------------
# An H200, as PyTorch describes it

H200 = SimpleNamespace(**H200_DRIVER)


class Event:
    """A point in time, for benchmarks of which nobody reads the times."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1.0


STAND_INS: dict[str, Any] = {
    "CUDAGraph": Graph,
    "graph": graph,
    "Event": Event,
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda *_: H200.name,
    "get_device_properties": lambda *_: H200,
    "get_device_capability": lambda *_: (H200.major, H200.minor),
    "mem_get_info": lambda: (2**33, 2**34),
    "synchronize": lambda *_: None,
    "empty_cache": lambda: None,
    "set_sync_debug_mode": lambda _: None,
    "reset_peak_memory_stats": lambda: None,
    "memory_allocated": lambda: 0,
    "max_memory_allocated": lambda: 0,
}
