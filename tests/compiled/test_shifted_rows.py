"""Rows shifted by -1e9, or by the least number, in emitted kernels: lse in fp32 has lost how many
keys such a row has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilegen
from tests.compiled.test_scores import FAMILIES
from tests.support.counted import counting_all
from tests.support.inputs import COLUMNS, DIM, ROWS, SHIFTS, expected, shifted_bias
from tests.support.problems import tiled
from tests.support.splits import backward
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import run
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import Mask, causal
from tilegen.masks.kinds import FULL_MASK
from tilegen.masks.score import bias, sinks
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem, DType

SPLIT: dict[Kernel, TileConfig] = {
    "fwd_split": TileConfig(block_m=16, block_n=16, split_kv=32),
    "fwd_combine": TileConfig(block_m=1, block_n=16, num_warps=1, num_stages=1),
    **backward("split_backward", length=32, passes=16),
}
del SPLIT["fwd"]
ONE_PASS = backward("one_pass", length=32, passes=16)
ALL_FAMILIES = {**FAMILIES, "splits": SPLIT, "one pass": ONE_PASS}
PAGED: dict[Kernel, TileConfig] = {
    "fwd_paged": TileConfig(block_m=16, block_n=16, split_kv=32),
    "fwd_combine": SPLIT["fwd_combine"],
}


BEFORE: dict[Kernel, tuple[Kernel, ...]] = {
    "fwd_combine": ("fwd_split",),
    "bwd_dkdv_sum": ("bwd_dkdv_split",),
    "bwd_dq_sum": ("bwd_dq_split", "bwd_one_pass"),
}
"""Kernels whose splits another one joins."""


def agrees(
    name: str,
    configs: Mapping[Kernel, TileConfig],
    *,
    sink: float | None = None,
    dtype: DType = "fp32",
    page: int = 0,
    mask: Mask = FULL_MASK,
    keep: torch.Tensor | None = None,
) -> None:
    problem = AttentionProblem.parse(f"b1 hq2 hkv1 q{ROWS} kv{COLUMNS} d{DIM} {dtype} full")
    made = shifted_bias(name).requires_grad_()
    score = bias(made)
    if sink is not None:
        score = score.then(sinks(torch.full((2,), sink).requires_grad_()))
    problem = replace(problem, score=score.form, page=page, mask=mask)
    inputs: Inputs = make_inputs(problem)
    kernels = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
    by_name: Mapping[str, Any] = run(kernels, inputs, DIM**-0.5, score=score)
    given = (inputs.q, inputs.k, inputs.v, inputs.dout)
    judged = expected(*given, bias=made.detach(), sink=sink, keep=keep)
    judged["dt0"] = judged.pop("d_bias")
    close = {"fp32": 2e-5, "fp16": 6e-3, "bf16": 4e-2}[dtype]
    for result in judged.keys() & by_name.keys():
        torch.testing.assert_close(
            by_name[result].double(),
            judged[result],
            atol=close,
            rtol=close if result != "lse" else 1e-6,
            msg=lambda text, result=result: f"{result}: {text}",
        )


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("sink", [None, -1e9])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_rows_are_means(name: str, sink: float | None, family: str) -> None:
    agrees(name, ALL_FAMILIES[family], sink=sink)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, dtype",
    [*zip(ALL_FAMILIES, itertools.cycle(["fp16", "bf16"])), ("whole_heads", "bf16")],
)
def test_shifted_rows_in_16_bits(family: str, dtype: DType) -> None:
    agrees("-1e9", ALL_FAMILIES[family], dtype=dtype)


@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_rows_without_keys_in_a_split(name: str) -> None:
    """A program visits keys from 32 on for rows 16 to 31, of which the first eight see none."""
    keep = torch.ones(ROWS, COLUMNS, dtype=torch.bool).tril(COLUMNS - ROWS)
    agrees(name, SPLIT, mask=causal("bottom_right"), keep=keep)


@pytest.mark.parametrize("name", SHIFTS)
def test_shifted_rows_in_pages(name: str) -> None:
    agrees(name, PAGED, page=16)


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_second_number_of_each_row_is_counted(family: str) -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q70 kv77 d16 fp32 causal score(2*s)")
    assert problem.pair_lse
    configs, x = ALL_FAMILIES[family], make_inputs(problem)
    launches, moved = counting_all(problem, configs)
    _, lse = passes.forward(launches, x.q, x.k, x.v, 0.1, panel_rows=1 << 20, pairs=True)
    if len(configs) > 2:
        rows = torch.zeros(1, 2, 70)
        passes.gradients(launches, x.q, x.k, x.v, x.dout, lse, rows, 0.1, panel_rows=1 << 20)
    width = configs["fwd_scores"].block_n if "fwd_scores" in configs else 0
    for name, config in configs.items():
        before = next(
            (tiled_kernel for tiled_kernel in BEFORE.get(name, ()) if tiled_kernel in configs), ""
        )
        tiled_kernel = tiled(name, problem, config, joined=configs.get(before), follows=before)
        expected = traffic_of(tiled_kernel, score_width=width or config.block_n)
        if name != "bwd_preprocess":
            actual = moved[name].read_bytes, moved[name].write_bytes
            assert actual == (expected.read_bytes, expected.write_bytes), name


@pytest.mark.parametrize("name", SHIFTS)
def test_calls_differentiate_shifted_rows(name: str) -> None:
    """With the gradient by lse, and of the bias."""
    generator = torch.Generator().manual_seed(2)
    q, dout = torch.randn(2, 1, 2, ROWS, DIM, generator=generator)
    k, v = torch.randn(2, 1, 1, COLUMNS, DIM, generator=generator)
    made = shifted_bias(name)
    judged = expected(q, k, v, dout, bias=made)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, made)]
    out, lse = tilegen.attention(*leaves[:3], score=bias(leaves[3]), return_lse=True)
    assert lse.shape == (1, 2, ROWS)
    assert lse.is_contiguous()
    grads = (out, lse, *torch.autograd.grad(out, leaves, dout, retain_graph=True))
    for (result, item), ours in zip(judged.items(), grads, strict=True):
        torch.testing.assert_close(
            *(ours.double(), item),
            atol=2e-5,
            rtol=2e-5,
            msg=lambda text, result=result: f"{result}: {text}",
        )
    (by_lse,) = torch.autograd.grad(lse[..., 5].sum(), leaves[0])
    mean = k.mean(2) * DIM**-0.5
    torch.testing.assert_close(by_lse[:, :, 5], mean.expand(1, 2, DIM), atol=1e-5, rtol=1e-5)
