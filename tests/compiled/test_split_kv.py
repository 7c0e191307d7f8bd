"""The kernels that split the keys: right for any number of queries, keys and splits, with exactly
the model's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiled.test_scores import SCORES, made_from
from tests.support import score_inputs
from tests.support.counted import counting
from tests.support.mask_zoo import FORMS, Case
from tests.support.problems import tiled
from tests.support.splits import NAMES, splits
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.emit.render import render
from tilegen.launch.binding import BoundKernel
from tilegen.masks import Mask, causal, kv_lengths
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, alibi, sinks, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem, DType

DTYPES: tuple[DType, ...] = ("bf16", "fp32", "fp16")


def agrees(
    problem: AttentionProblem,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    inputs: Inputs | None = None,
    **tile: int,
) -> None:
    mask = problem.mask if mask is None else mask
    problem = replace(problem, mask=mask.stand_in, score=score and score.form)
    kernels = {name: render(problem, one, name) for name, one in splits(problem, **tile).items()}
    require(check(kernels, inputs or make_inputs(problem), mask=mask, score=score))


LENGTHS = [
    # queries, keys, keys of a split: up to 40 splits
    (1, 1, 16),
    (1, 640, 16),
    (1, 1000, 64),
    (1, 4000, 256),
    (2, 37, 32),
    (3, 333, 16),
    (8, 700, 128),
    (17, 95, 32),
    (33, 512, 64),
    (64, 64, 16),
    (130, 257, 64),
    (300, 40, 16),
]


@pytest.mark.any_triton
@pytest.mark.parametrize("case", range(len(LENGTHS)))
def test_any_number_of_queries_keys_and_splits(case: int) -> None:
    queries, keys, split = LENGTHS[case]
    heads, mask = (("hq6 hkv2", "causal(bottom_right)"), ("hq3 hkv1", "full"))[case % 2]
    problem = AttentionProblem.parse(
        f"b1 {heads} q{queries} kv{keys} d40/24 {DTYPES[case % 3]} {mask}"
    )
    agrees(problem, keys=split, rows=16 << case % 2)


@pytest.mark.parametrize(
    "heads, rows",
    [("hq1 hkv1", 16), ("hq4 hkv4", 32), ("hq10 hkv2", 16), ("hq64 hkv1", 64), ("hq24 hkv2", 16)],
)
def test_groups_of_any_size_share_a_tile(heads: str, rows: int) -> None:
    problem = AttentionProblem.parse(f"b2 {heads} q3 kv70 d16 fp16 causal(bottom_right)")
    agrees(problem, rows=rows)


@pytest.mark.parametrize("head_dim", ["80", "192/128", "59"])
def test_head_dims_padded_and_split(head_dim: str) -> None:
    problem = AttentionProblem.parse(f"b1 hq4 hkv2 q5 kv150 d{head_dim} bf16 window(90,0)")
    agrees(problem, keys=64)


def test_heads_inside_rows() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q9 kv70 d64 bf16 causal(bottom_right)")
    inputs = make_inputs(problem, heads_inside=True)
    assert not inputs.q.is_contiguous()
    agrees(problem, inputs=inputs)


@pytest.mark.parametrize("case, dtype", FORMS, ids=str)
def test_masks_of_the_zoo(case: Case, dtype: DType) -> None:
    problem = case.problem(dtype)
    configs = splits(problem)
    kernels = {name: render(problem, one, name) for name, one in configs.items()}
    require(check(kernels, make_inputs(problem), mask=case.judged(problem.batch)))


@pytest.mark.parametrize("name", list(SCORES)[1::3])
def test_scores(name: str) -> None:
    heads = f"b{score_inputs.BATCH} hq{score_inputs.HEADS} hkv1"
    problem = AttentionProblem.parse(f"{heads} q70 kv83 d16 fp32 full")
    agrees(problem, mask=causal("bottom_right"), score=made_from(SCORES[name]))


def test_sinks_count_once() -> None:
    """However many splits there are, and where a row keeps nothing else."""
    problem = AttentionProblem.parse("b1 hq4 hkv2 q60 kv40 d16 fp32 full")
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    agrees(problem, mask=causal("bottom_right"), score=softcap(5.0).then(sinks(logits)), keys=16)


def test_lengths_on_the_device() -> None:
    problem = AttentionProblem.parse("b4 hq4 hkv2 q2 kv300 d16 fp16 full")
    agrees(problem, mask=kv_lengths([0, 1, 33, 300]) & causal("bottom_right"), keys=64)


def test_rows_with_nothing_kept_are_exactly_empty() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv40 d32 bf16 causal(bottom_right)")
    kernels = {name: render(problem, one, name) for name, one in splits(problem).items()}
    outputs = run(kernels, make_inputs(problem), 0.2)
    assert (outputs["out"][:, :, :60] == 0).all()
    assert (outputs["lse"][:, :, :60] == float("-inf")).all()
    assert outputs["out"].isfinite().all()


def test_keys_beyond_the_length_are_not_read() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv1 q2 kv100 d32 fp32 full")
    mask = kv_lengths([37])
    problem = replace(problem, mask=mask.stand_in)
    kernels = {name: render(problem, one, name) for name, one in splits(problem).items()}
    inputs = make_inputs(problem)
    before = run(kernels, inputs, 0.2, mask=mask)
    inputs.k[:, :, 48:], inputs.v[:, :, 48:] = float("nan"), float("nan")
    after = run(kernels, inputs, 0.2, mask=mask)
    assert torch.equal(before["out"], after["out"])


MASKS = [
    *("full", "causal", "causal(bottom_right)", "window(40,0)", "window(9,30,bottom_right)"),
    *("prefix_lm(20)", "global(5)|window(9,9)", "~window(5,5)", "causal&window(33,3)"),
]


@pytest.mark.parametrize("mask", MASKS)
def test_bytes_equal_the_model(mask: str) -> None:
    i = MASKS.index(mask)
    for lengths in ("q100 kv100", "q1 kv100", "q64 kv33", "q33 kv64"):
        problem = AttentionProblem.parse(f"b1 hq4 hkv2 {lengths} d16/32 fp16 {mask}")
        configs = splits(problem, keys=16 << i % 3, rows=16 << i % 2)
        x = make_inputs(problem)
        out, lse = torch.empty(*x.q.shape[:3], 32, dtype=x.q.dtype), torch.empty(x.q.shape[:3])
        given: tuple[Any, ...] = (x.q, x.k, x.v, 0.1)
        for name, config in configs.items():
            launch, actual = counting(render(problem, config, name, aligned=False))
            made = launch(*given)
            given = (*(made or ()), out, lse)
            expected = traffic_of(
                tiled(name, problem, config, joined=configs[NAMES[0]]), aligned=False
            )
            counted = actual.read_bytes, actual.write_bytes
            assert counted == (expected.read_bytes, expected.write_bytes), (name, lengths)


@pytest.mark.slow
def test_splits_of_lists_are_counted_as_they_are_visited() -> None:
    """Written results show which splits of a listed mask are visited; lists are read besides."""
    for mask in ("dilated(3)", "dilated(40)", "~dilated(2)"):
        problem = AttentionProblem.parse(f"b1 hq4 hkv2 q100 kv100 d16/32 fp16 {mask}")
        config = splits(problem)[NAMES[0]]
        x = make_inputs(problem)
        counted, actual = counting(render(problem, config, NAMES[0], aligned=False))
        bound = BoundKernel(counted, problem.mask, NAMES[0], config)
        launch = bound.given(problem.mask, Shape.of(x.q, x.k), x.q.device)
        launch(x.q, x.k, x.v, 0.1)
        assert (
            actual.write_bytes
            == traffic_of(tiled(NAMES[0], problem, config), aligned=False).write_bytes
        )


def test_verify_takes_the_family() -> None:
    problem = AttentionProblem.parse("b2 hq16 hkv2 q1 kv500 d64 bf16 full")
    require(verify(problem, splits(problem, keys=128)))


def test_heads_that_differ_have_tiles_of_their_own() -> None:
    problem = AttentionProblem.parse("b1 hq4 hkv2 q9 kv70 d16 fp32 full")
    score = alibi(torch.tensor([1.0, 0.5, 0.25, 0.125]))
    assert splits(replace(problem, score=score.form))[NAMES[0]].heads == 1
    agrees(problem, score=score)
