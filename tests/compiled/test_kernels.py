"""Emitted kernels, compiled for the CPU, against the reference: forward and backward."""

import math
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tilegen
from tests.support.calls import broken
from tests.support.problems import PROBLEMS
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.launch import bound_module
from tilegen.masks import parse_mask
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

SQUARE = TileConfig(block_m=32, block_n=32)
WIDE = TileConfig(block_m=16, block_n=64)
TALL = TileConfig(block_m=64, block_n=16)


def kernels(
    problem: AttentionProblem, config: TileConfig = SQUARE, *, aligned: bool = False
) -> dict[Kernel, RenderedKernel]:
    return {kernel: render(problem, config, kernel, aligned=aligned) for kernel in LARGE_CACHE}


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize(
    "line, new",
    [("    grid = ", "    grid = -1 + "), (f" * {math.log2(math.e)!r}", "")],
    ids=["the last program left out", "the scale not in base 2"],
)
def test_verify_and_calls_run_the_same_launch(
    line: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break the printed launch: `verify` fails, and calls give wrong results."""
    problem = AttentionProblem.parse("b1 hq4 hkv2 q100 kv100 d32 fp32 causal")
    configs = dict.fromkeys(LARGE_CACHE, SQUARE)

    def calls_agree(seed: int) -> bool:
        # Other inputs each time: memory that is not written may hold what was right before.
        x = make_inputs(problem, seed=seed)
        q, k, v = (one.requires_grad_() for one in (x.q, x.k, x.v))
        plans.forget()
        out = tilegen.attention(q, k, v, mask=tilegen.causal())
        plans.forget()
        exact = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.allclose(out, exact, atol=1e-5)

    assert all(one.ok for one in verify(problem, configs))
    assert calls_agree(0)
    monkeypatch.setattr(bound_module, "executable", broken(line, new))
    assert not all(one.ok for one in verify(problem, configs))
    assert not calls_agree(1)


@pytest.mark.slow
def test_unwritten_results_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory that holds the right result of an earlier launch it would look right."""
    problem = AttentionProblem.parse("b1 hq2 q64 d32 fp32 causal")
    given = kernels(problem, aligned=True), make_inputs(problem), 0.2
    assert all(bool(one.isfinite().all()) for one in run(*given).values())
    monkeypatch.setattr(bound_module, "executable", broken("    grid = ", "    grid = -1 + "))
    for name, result in run(*given).items():
        assert result.isnan().any(), name


@pytest.mark.slow
@pytest.mark.parametrize("problem, config", list(zip(PROBLEMS, cycle([SQUARE, WIDE]))), ids=str)
def test_agrees_with_the_reference(problem: AttentionProblem, config: TileConfig) -> None:
    require(verify(problem, dict.fromkeys(LARGE_CACHE, config)))


MASKS = [
    "full",
    "causal",
    "causal(bottom_right)",
    "window(17,0)",
    "window(5,21,bottom_right)",
    "causal&window(33,3)",
    "causal(bottom_right)&window(20,2)",
    "causal(bottom_right)&window(9,9,bottom_right)",
]


DTYPES = ["fp16", "bf16", "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_at_every_kind_of_lengths(mask: str) -> None:
    """The dtypes in turn."""
    dtype = DTYPES[MASKS.index(mask) % 3]
    for lengths in ("q70 kv97", "q97 kv70", "q64 kv64"):
        problem = AttentionProblem.parse(f"b1 hq2 hkv1 {lengths} d16 {dtype} {mask}")
        require(verify(problem, dict.fromkeys(LARGE_CACHE, TALL)))


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [8, 80, "192/128", "40/24", 59])
def test_head_dims_padded_and_split(head_dim: object) -> None:
    problem = AttentionProblem.parse(f"b1 hq2 hkv2 q40 kv72 d{head_dim} fp16 causal(bottom_right)")
    require(verify(problem, dict.fromkeys(LARGE_CACHE, SQUARE)))


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("aligned", [True, False])
def test_heads_inside_rows(aligned: bool) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q50 kv70 d64 bf16 causal")
    inputs = make_inputs(problem, heads_inside=True)
    assert not inputs.q.is_contiguous()
    require(check(kernels(problem, aligned=aligned), inputs, mask=problem.mask))


def test_sharp_softmax() -> None:
    """Logits with a standard deviation of 16: where a query rounded after scaling shows."""
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv130 d64 fp16 full")
    inputs = make_inputs(problem, sigma=16.0)
    require(check(kernels(problem), inputs, mask=problem.mask))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e-4])
def test_scales(scale: float) -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q65 kv70 d32 fp32 causal(bottom_right)")
    require(check(kernels(problem), make_inputs(problem), mask=problem.mask, scale=scale))


@pytest.mark.slow
@pytest.mark.any_triton
def test_rows_with_nothing_kept_are_exactly_empty() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv40 d32 bf16 causal(bottom_right)")
    inputs = make_inputs(problem)
    outputs = run(kernels(problem), inputs, 0.2)
    empty = slice(0, 60)
    assert (outputs["out"][:, :, empty] == 0).all()
    assert (outputs["lse"][:, :, empty] == float("-inf")).all()
    assert (outputs["dq"][:, :, empty] == 0).all()
    assert all(tensor.isfinite().all() for name, tensor in outputs.items() if name != "lse")


def test_dropped_columns_get_no_gradient() -> None:
    problem = AttentionProblem.parse("b1 hq1 hkv1 q40 kv100 d32 fp16 causal")
    outputs = run(kernels(problem), make_inputs(problem), 0.2)
    assert (outputs["dk"][:, :, 40:] == 0).all()
    assert (outputs["dv"][:, :, 40:] == 0).all()


@pytest.mark.slow
def test_masked_values_cannot_leak() -> None:
    """Dropped keys and values may hold anything finite, even huge, and change nothing."""
    problem = AttentionProblem.parse("b1 hq1 hkv1 q48 kv80 d32 fp32 causal")
    inputs = make_inputs(problem)
    before = run(kernels(problem), inputs, 0.2)
    inputs.k[:, :, 48:] = 1e30
    inputs.v[:, :, 48:] = -1e30
    after = run(kernels(problem), inputs, 0.2)
    assert all(torch.equal(before[name], after[name]) for name in ("out", "lse", "dq"))


@pytest.mark.slow
def test_backward_is_deterministic() -> None:
    problem = AttentionProblem.parse("b1 hq4 hkv1 q90 kv90 d32 fp16 causal")
    inputs = make_inputs(problem)
    first, second = (run(kernels(problem), inputs, 0.2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_every_config_gives_the_same_result_class() -> None:
    """Tiles larger than the sequence, and sequences of one row."""
    for text in ("b1 hq1 hkv1 q1 kv1 d16 fp16 causal", "b1 hq1 hkv1 q3 kv200 d16 fp16 full"):
        problem = AttentionProblem.parse(text)
        for config in (TileConfig(block_m=128, block_n=128), TALL):
            require(verify(problem, dict.fromkeys(LARGE_CACHE, config)))


@pytest.mark.slow
def test_a_mask_wider_than_the_sequence_is_no_mask() -> None:
    wide = AttentionProblem.parse("b1 hq1 hkv1 q50 kv50 d32 fp32 window(4095,4095)")
    inputs = make_inputs(wide)
    masked = run(kernels(wide), inputs, 0.2)
    full = run(kernels(replace(wide, mask=parse_mask("full"))), inputs, 0.2)
    torch.testing.assert_close(masked["out"], full["out"])


def test_plans_for_other_types_launch_their_own_code() -> None:
    """Both have the same kernel, and the lengths of one would be read as those of the other."""
    q, k, v = (torch.randn(3, 2, 40, 16) for _ in range(3))
    lengths = torch.tensor([7, 40, 19])
    kept = torch.arange(40) < lengths[:, None, None, None]
    expected = scaled_dot_product_attention(q, k, v, attn_mask=kept)
    plans.forget()
    for dtype in (torch.int32, torch.int64, torch.int32):
        out = tilegen.attention(q, k, v, kv_lengths=lengths.to(dtype))
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
