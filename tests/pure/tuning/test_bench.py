"""Measuring and checking a config for a GPU, as far as possible without one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.records import H200, PROBLEM
from tilegen.check import verification
from tilegen.check.sizes import reduced
from tilegen.check.verification import Check
from tilegen.errors import Unsupported, WrongResult
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning import bench as bench_module
from tilegen.tuning.bench import check_config
from tilegen.tuning.measure import Measurement


def checks_with(*wrong: str) -> tuple[Check, ...]:
    """Return the checks of `verify` with these tensors wrong."""
    values = {"error": 1.0, "allowed": 0.1, "index": (0,), "found": 1.0, "expected": 0.0}
    names = ("out", "lse", "dq", "dk", "dv")
    return tuple(Check(tensor=name, ok=name not in wrong, **values) for name in names)


TRIED = TileConfig(block_m=64, block_n=64)
OUTPUTS = {
    "fwd": {"out", "lse"},
    "bwd_preprocess": {"dq", "dk", "dv"},
    "bwd_dkdv": {"dk", "dv"},
    "bwd_dq": {"dq"},
}


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_real_check_judges_the_outputs_of_the_kernel(
    kernel: Kernel, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[AttentionProblem, dict[str, TileConfig]]] = []

    def verified(
        problem: AttentionProblem, configs: dict[str, TileConfig], device: None
    ) -> tuple[Check, ...]:
        assert device is None
        asked.append((problem, configs))
        return checks_with(tensor) if TRIED in configs.values() else checks_with()

    monkeypatch.setattr(verification, "verify", verified)
    actual = check_config(PROBLEM, kernel, TRIED)
    if tensor in OUTPUTS[kernel]:
        assert actual is not None
        assert actual.status == "wrong"
        assert re.match(f"{tensor} +WRONG +error 1, allowed", actual.message)
    else:
        assert actual is None
    problem, configs = asked[0]
    assert problem == reduced(PROBLEM)
    others = {k: bench_module.smallest_config(k) for k in bench_module.partners(kernel, PROBLEM)}
    assert configs == {**others, kernel: TRIED}


@pytest.mark.parametrize("kernel", [k for k in LARGE_CACHE if k != "fwd"])
@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_other_kernels_that_fail_are_not_held_against_a_config(
    how: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verified(*_: Any, device: None) -> tuple[Check, ...]:
        if how == "raises":
            raise RuntimeError("CUDA error: out of memory")
        return checks_with("dq", "dk", "dv")

    monkeypatch.setattr(verification, "verify", verified)
    with pytest.raises(WrongResult, match=r"smallest tiles \(m16n16w4s1\), to check bwd_"):
        check_config(PROBLEM, kernel, TRIED)


@pytest.mark.parametrize("kernel", LARGE_CACHE)
def test_real_check_maps_errors_of_a_kernel(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: Any, configs: dict[str, TileConfig], device: None) -> tuple[Check, ...]:
        if TRIED in configs.values():
            raise RuntimeError("CUDA error: invalid argument\n  more")
        return checks_with()

    monkeypatch.setattr(verification, "verify", explode)
    actual = check_config(PROBLEM, kernel, TRIED)
    expected = Measurement(status="launch_failed", message="CUDA error: invalid argument more")
    assert expected == actual


def test_inputs_that_cannot_be_made_are_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def too_large(*_: Any) -> list[Any]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 GiB")

    monkeypatch.setattr(bench_module, "make_launches", too_large)
    measure = bench_module._measure_with(KernelTask.of("fwd", PROBLEM, H200))
    with pytest.raises(Unsupported, match=r"no inputs for 'b4 hq32 .*512.00 GiB"):
        measure(TileConfig(block_m=64, block_n=64))


def test_a_refusal_of_inputs_keeps_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> list[Any]:
        raise Unsupported("no such mask")

    monkeypatch.setattr(bench_module, "make_launches", refused)
    measure = bench_module._measure_with(KernelTask.of("fwd", PROBLEM, H200))
    with pytest.raises(Unsupported, match=r"^no such mask$"):
        measure(TileConfig(block_m=64, block_n=64))
