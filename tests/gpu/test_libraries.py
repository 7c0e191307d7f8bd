"""PyTorch's own kernels on the GPU: measured, checked, and used as tilegen's are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tilegen
from tests.support.records import place, record
from tilegen.check import verification
from tilegen.check.reference import make_inputs
from tilegen.choose.libraries import why_not
from tilegen.gpus.spec import detect
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import FAMILIES, LARGE_CACHE
from tilegen.kernels.spec import BACKENDS, Backend, Direction
from tilegen.launch import libraries
from tilegen.launch.libraries import OPERATORS
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.store import current_versions
from tilegen.tuning.libraries import check_library, tune_libraries

PROBLEM = AttentionProblem.parse("b2 hq8 hkv8 q1024 kv1024 d64 bf16 causal")
SHARED = AttentionProblem.parse("b1 hq8 hkv2 q512 kv512 d128 fp16 full")


@pytest.mark.parametrize("direction", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("problem", [PROBLEM, SHARED], ids=str)
def test_a_library_is_right_or_refuses(
    problem: AttentionProblem, backend: Backend, direction: Direction
) -> None:
    if reason := why_not(problem, backend):
        pytest.skip(reason)
    trouble = check_library(problem, direction, backend, "cuda")
    assert trouble is None or trouble.status != "wrong", trouble


def test_out_and_lse_of_a_library_serve_the_backward_of_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pass by whom it was measured faster; all by the rule of kernels."""
    spec = detect()
    assert spec is not None
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    for kernel in LARGE_CACHE:
        config = TileConfig(block_m=64, block_n=32)
        slow = record(gpu=spec.name, arch=spec.arch, kernel=kernel, problem=PROBLEM, config=config,
                      us=1e6, versions=current_versions())  # fmt: skip
        place(tmp_path, slow)
    recorded = tune_libraries(PROBLEM, spec, "forward")
    if recorded is None:
        pytest.skip("no library computes this on the GPU here")
    used: list[str] = []
    operators = OPERATORS[recorded.library]

    def noted(*given: object) -> tuple[torch.Tensor, torch.Tensor]:
        used.append(recorded.library)
        return operators.forward(*given)

    noting = libraries.Operators(noted, operators.backward)
    monkeypatch.setitem(OPERATORS, recorded.library, noting)
    plans.forget()
    try:
        x = make_inputs(PROBLEM, device="cuda")
        leaves = [one.requires_grad_() for one in (x.q, x.k, x.v)]
        out, lse = tilegen.attention(*leaves, mask=tilegen.causal(), return_lse=True)
        grads = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, x.dout), strict=True))
    finally:
        plans.forget()
    assert used == [recorded.library]
    grads |= {"out": out.detach(), "lse": lse.detach()}
    verification.require(
        verification.judge_all(grads, x.to(torch.bfloat16), 64**-0.5, mask=PROBLEM.mask)
    )
