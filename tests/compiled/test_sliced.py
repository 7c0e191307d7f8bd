"""The small-cache kernels and the streamed forward: right, with exactly the model's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import sliced
from tests.support.counted import counting_all
from tests.support.problems import PROBLEMS, tiled
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import parse_mask
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

FAMILIES = {"small_cache": sliced.SMALL_CACHE, "streamed": sliced.STREAMED}
MASKS = [
    "full",
    "causal",
    "causal(bottom_right)",
    "window(17,0)",
    "window(5,21,bottom_right)",
    "causal&window(33,3)",
    "causal(bottom_right)&window(9,9,bottom_right)",
]


TABLE = [p for p in PROBLEMS if p.seqlen_q < 1000]


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem, family", [(p, list(FAMILIES)[i % 2]) for i, p in enumerate(TABLE)], ids=str
)
def test_agrees_with_the_reference(problem: AttentionProblem, family: str) -> None:
    require(verify(problem, FAMILIES[family]))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS[1::2])
def test_masks_in_dtypes_in_turn(mask: str) -> None:
    turn = MASKS.index(mask) // 2
    lengths, dtype = ("q97 kv70", "q70 kv97")[turn % 2], ("fp16", "bf16", "fp32")[turn]
    problem = AttentionProblem.parse(f"b1 hq2 hkv1 {lengths} d40/24 {dtype} {mask}")
    require(verify(problem, sliced.SMALL_CACHE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "hq2 hkv1 q100 kv70 d320 fp32 causal(bottom_right)",
        "hq2 hkv1 q40 kv130 d576/512 fp16 causal(bottom_right)",
        "hq2 hkv1 q33 kv70 d1024 bf16 full",
    ],
)
def test_large_head_dims(text: str) -> None:
    problem = AttentionProblem.parse(text)
    wide: dict[Kernel, TileConfig] = {
        kernel: replace(config, block_d=64)
        for kernel, config in sliced.SMALL_CACHE.items()
        if config.block_d
    }
    require(verify(problem, wide | sliced.PREPROCESS))


@pytest.mark.slow
@pytest.mark.parametrize("aligned", [True, False])
def test_heads_inside_rows(aligned: bool) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q50 kv70 d64 bf16 causal")
    inputs = make_inputs(problem, heads_inside=True)
    kernels = {k: render(problem, c, k, aligned=aligned) for k, c in sliced.SMALL_CACHE.items()}
    require(check(kernels, inputs, mask=problem.mask))


@pytest.mark.slow
def test_sharp_softmax() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv330 d64 fp16 full")
    kernels = {k: render(problem, c, k) for k, c in sliced.SMALL_CACHE.items()}
    require(check(kernels, make_inputs(problem, sigma=16.0), mask=problem.mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "b1 hq2 hkv2 q520 kv60 d16 fp32 causal(bottom_right)",
        "b1 hq3 hkv1 q300 kv40 d16 fp32 window(200,50)",
        "b1 hq6 hkv2 q40 kv90 d16 fp32 causal",
    ],
)
def test_panels_of_every_size_give_the_same(text: str) -> None:
    """One row of tiles, some rows, one head, parts of a group, several groups, everything."""
    problem = AttentionProblem.parse(text)
    kernels = {k: render(problem, c, k) for k, c in sliced.SMALL_CACHE.items()}
    inputs = make_inputs(problem)
    q = problem.seqlen_q
    sizes = (1, 512, 2 * q, 4 * q, 1 << 20)
    results = [run(kernels, inputs, 0.25, panel_rows=rows) for rows in sizes]
    for result in results[1:]:
        for name in ("out", "lse", "dq"):  # each row is computed alone
            assert torch.equal(result[name], results[0][name]), name
        for name in ("dk", "dv"):  # summed in another order
            torch.testing.assert_close(result[name], results[0][name], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_rows_with_nothing_kept_are_exactly_empty() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv40 d32 bf16 causal(bottom_right)")
    kernels = {k: render(problem, c, k) for k, c in sliced.SMALL_CACHE.items()}
    outputs = run(kernels, make_inputs(problem), 0.2)
    empty = slice(0, 60)
    assert (outputs["out"][:, :, empty] == 0).all()
    assert (outputs["lse"][:, :, empty] == float("-inf")).all()
    assert (outputs["dq"][:, :, empty] == 0).all()
    assert all(tensor.isfinite().all() for name, tensor in outputs.items() if name != "lse")


@pytest.mark.slow
def test_unwritten_parts_are_never_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels are not cleared: leftovers in tiles without kept pairs must not matter, even NaN."""
    problem = AttentionProblem.parse("b1 hq2 hkv1 q300 kv300 d16 fp16 causal&window(60,0)")
    kernels = {k: render(problem, c, k) for k, c in sliced.SMALL_CACHE.items()}
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def poisoned(make: Any) -> Any:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            fresh = make(*arguments, **options)
            return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh

        return made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))
    monkeypatch.setattr(torch, "empty", poisoned(empty))
    outputs = run(kernels, make_inputs(problem), 0.2)
    assert all(tensor.isfinite().all() for tensor in outputs.values())


def counted(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    *,
    aligned: bool,
    panel_rows: int,
) -> dict[Kernel, tuple[int, int]]:
    """Return (read, written) bytes of every kernel, all its launches together."""
    x = make_inputs(problem)
    launch, moved = counting_all(problem, configs, aligned=aligned)
    _, lse = passes.forward(launch, x.q, x.k, x.v, 0.1, panel_rows=panel_rows)
    if "bwd_scores" in configs:
        passes.gradients(launch, x.q, x.k, x.v, x.dout, lse, lse, 0.1, panel_rows=panel_rows)
    return {kernel: (one.read_bytes, one.write_bytes) for kernel, one in moved.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS[::2])
def test_counted_bytes_equal_the_formula(mask: str) -> None:
    """With alignment and without it in turn: each shape meets both."""
    configs = {k: c for k, c in sliced.SMALL_CACHE.items() if c.block_d}
    shapes = ("hq2 hkv1 q128 kv128 d40/24", "hq2 hkv1 q300 kv77 d40/24", "hq2 hkv1 q1 kv200 d40/24")
    aligned = MASKS.index(mask) % 4 == 0
    for shape in shapes:
        problem = AttentionProblem.parse(f"b1 {shape} fp16 {mask}")
        for panel_rows in (1, 1 << 20):
            actual = counted(problem, configs, aligned=aligned, panel_rows=panel_rows)
            for kernel, config in configs.items():
                expected = traffic_of(
                    tiled(kernel, problem, config),
                    aligned=aligned,
                    panel_rows=panel_rows,
                    score_width=configs["fwd_scores"].block_n,
                )
                assert actual[kernel] == (expected.read_bytes, expected.write_bytes), kernel
        streamed = counted(problem, sliced.STREAMED, aligned=aligned, panel_rows=1)
        expected = traffic_of(tiled("fwd_streamed", problem, sliced.STREAMED["fwd_streamed"]))
        assert streamed["fwd_streamed"] == (expected.read_bytes, expected.write_bytes)


@pytest.mark.slow
def test_a_mask_wider_than_the_sequence_is_no_mask() -> None:
    wide = AttentionProblem.parse("b1 hq1 hkv1 q50 kv50 d32 fp32 window(4095,4095)")
    inputs = make_inputs(wide)
    outs = [
        run({k: render(problem, c, k) for k, c in sliced.FORWARD.items()}, inputs, 0.2)["out"]
        for problem in (wide, replace(wide, mask=parse_mask("full")))
    ]
    torch.testing.assert_close(*outs)
