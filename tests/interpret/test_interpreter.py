"""Work skipped in Triton's interpreter: results are the same, and patches end with a launch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

from tests.support import interpreting
from tilegen.check.reference import make_inputs
from tilegen.check.verification import run
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

# In a process of its own: the tests of this folder have it left out from the start.
COMPARE = """
import torch
from tests.support.problems import PROBLEMS
from tests.support import interpreting
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.check.reference import make_inputs
from tilegen.emit.render import render
from tilegen.check.verification import run

interpreting.repair_bfloat16()
skip, interpreting.skip_idle_work = interpreting.skip_idle_work, lambda: None

def results():
    ragged = "b2 hq2 hkv2 q33 kv33 d64 fp16 causal", "b1 hq4 hkv1 q70 kv70 d60 bf16 causal"
    for problem in (*PROBLEMS[:2], *map(AttentionProblem.parse, ragged)):
        kernels = {k: render(problem, TileConfig(block_m=32, block_n=32), k) for k in LARGE_CACHE}
        yield run(kernels, make_inputs(problem), 0.3)

before = list(results())
skip()
for one, other in zip(before, results(), strict=True):
    assert all(torch.equal(one[name], other[name]) for name in one)
"""


def test_results_are_the_same_to_the_bit() -> None:
    subprocess.run([sys.executable, "-c", COMPARE], check=True, env=dict(os.environ))


@triton.jit
def _operators(x_ptr, i_ptr, out_ptr, n: tl.constexpr):  # noqa: ANN001, ANN202
    row = tl.program_id(0)
    at = row * n + tl.arange(0, n)
    x, i, item = tl.load(x_ptr + at), tl.load(i_ptr + at), tl.load(x_ptr + row)
    wide = i.to(tl.int64)
    out = out_ptr + row * 17 * n + tl.arange(0, n)
    tl.store(out + 0 * n, x + i)
    tl.store(out + 1 * n, i * 2.5 - x)
    tl.store(out + 2 * n, (i > 16777216.0) | (x < -1))
    tl.store(out + 3 * n, (i == x) & (wide >= 3))
    tl.store(out + 4 * n, (wide * wide) // 8 + i)
    tl.store(out + 5 * n, 3 - x * x)
    tl.store(out + 6 * n, 1 / x + x / 3)
    tl.store(out + 7 * n, item + x)
    tl.store(out + 8 * n, tl.sum(x[:, None] * x[None, :], 1))
    tl.store(out + 9 * n, tl.where(x != x, 1.0, i + 7))
    tl.store(out + 10 * n, i & 5 | (i + n))
    tl.store(out + 11 * n, x * 1e-40 + (x > 1e-40))
    tl.store(out + 12 * n, -x >= item)
    tl.store(out + 13 * n, x.to(tl.bfloat16) + x.to(tl.bfloat16))
    tl.store(out + 14 * n, tl.load(x_ptr + row + 1))
    tl.store(out + 15 * n, i // 3 + wide // -5 + 100 // (i | 1))
    tl.store(out + 16 * n, i % 3 + wide % -5 + 100 % (i | 1))


def test_operators_agree_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values cached from the first program, which has no edge cases, serve the second."""
    inf = float("inf")
    x = torch.tensor([[1.0] * 8, [0.0, -0.0, 1.5, -2.0, inf, -inf, inf - inf, 16777216.0]])
    i = torch.tensor([[1] * 8, [0, 1, -1, 5, -7, 2**31 - 1, -(2**31), 16777217]])
    i, (remembered, tritons) = i.int(), torch.zeros(2, 2, 17, 8)
    monkeypatch.setattr(interpreting, "_operations", {})
    _operators[(2,)](x, i, remembered, 8)
    assert any(interpreting._operations.values())

    class Nothing(dict[object, None]):
        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: object) -> None:
            return None

    monkeypatch.setattr(interpreting, "_operations", Nothing())
    _operators[(2,)](x, i, tritons, 8)
    assert tritons.abs().nan_to_num(0, 0).sum() > 0
    assert torch.equal(remembered.view(torch.int32), tritons.view(torch.int32))


@triton.jit
def _row_sums(x_ptr, out_ptr, n: tl.constexpr):  # noqa: ANN001, ANN202
    x = tl.load(x_ptr + tl.program_id(0) * n + tl.arange(0, n))
    tl.store(out_ptr + tl.program_id(0), tl.sum(x, 0) + tl.max(x, 0))


def test_language_is_patched_for_each_launch_and_as_it_was_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, out = torch.arange(48.0).view(3, 16), torch.empty(3)
    _row_sums[(3,)](x, out, 16)
    patched, attribute = [], triton_interpreter._patch_builtin

    def seen(pkg: object, *rest: object) -> None:
        patched.append(pkg)
        attribute(pkg, *rest)

    monkeypatch.setattr(triton_interpreter, "_patch_builtin", seen)
    before = dict(vars(tl))
    _row_sums[(3,)](x, out, 16)
    assert torch.equal(out, x.sum(1) + x.max(1).values)
    assert 1 <= patched.count(tl) <= 2
    assert patched.count(tl.core) <= 2, "once, not for each of 6 calls"
    assert dict(vars(tl)) == before
    with pytest.raises(triton_interpreter.InterpreterError):
        _row_sums[(3,)](x, None, 16)
    assert dict(vars(tl)) == before
    _row_sums[(3,)](x, out.zero_(), 16)
    assert torch.equal(out, x.sum(1) + x.max(1).values)


def test_threads_launch_one_after_the_other() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q33 kv33 d16 fp32 causal")
    config = TileConfig(block_m=16, block_n=16)
    kernels: dict[Kernel, RenderedKernel] = {"fwd": render(problem, config, "fwd")}
    given = [make_inputs(problem, seed=seed) for seed in range(4)]
    expected = [run(kernels, one, 0.25)["out"] for one in given]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda one: run(kernels, one, 0.25)["out"], given))
    finally:
        sys.setswitchinterval(before)
    assert all(map(torch.equal, results, expected))


def test_an_unknown_triton_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(triton_interpreter))
    for unknown in ("3.5.1", "3.10.0"):
        monkeypatch.setattr(interpreting, "version", {"triton": unknown}.__getitem__)
        interpreting.skip_idle_work.__wrapped__()
        assert dict(vars(triton_interpreter)) == before
