"""A first call in a fresh process whose kernels are on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import warm
from tilegen import cpu

CALL = """
import json, sys
import torch
import tilegen

torch.manual_seed(0)
q = torch.randn(1, 4, 70, 32, requires_grad=True)
k, v = torch.randn(2, 1, 2, 70, 32)
out = tilegen.attention(q, k, v, mask=tilegen.causal() & tilegen.sliding_window(40, 0))
(dq,) = torch.autograd.grad(out.sum(), q)
print(json.dumps([[*sys.modules], out.sum().item(), dq.sum().item()]))
"""


@pytest.mark.skipif(bool(cpu.why_not_compiled()), reason="needs llvmlite to compile for the CPU")
def test_it_loads_no_compiler_of_text_algebra_or_search(tmp_path: Path) -> None:
    env = {"TILEGEN_CACHE_DIR": str(tmp_path), "TILEGEN_CPU": "kernels"}
    cold, *first = json.loads(warm.output(CALL, env=env))
    warmed, *second = json.loads(warm.output(CALL, env=env))
    assert {"triton", "jinja2"} <= {*cold}
    for module in ("triton", "jinja2", "sympy", "optuna", "tilegen.cpu.lower", "tilegen.cpu.mlir"):
        assert module not in warmed, module
    assert first == second
