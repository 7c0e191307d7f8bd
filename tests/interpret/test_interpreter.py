"""What is left out of Triton's interpreter: results are the same, and patches end with a launch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter

# In a process of its own: the tests of this folder have it left out from the start.
COMPARE = """
import torch
from tests.problems import PROBLEMS
from tilegen.check import interpreter
from tilegen.kernels.config import LARGE_CACHE, TileConfig
from tilegen.check.reference import make_inputs
from tilegen.emit.render import render
from tilegen.check.verification import run

interpreter.repair_bfloat16()
skip, interpreter.skip_idle_work = interpreter.skip_idle_work, lambda: None

def results():
    for problem in PROBLEMS[:4]:
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
