"""The kernels of a backward that split streamed rows: right for any lengths, masks and scores, with
the same bits in each run and exactly the model's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiled.test_scores import SCORES, made_from
from tests.support import score_inputs
from tests.support.counted import counting
from tests.support.mask_zoo import FORMS, Case
from tests.support.problems import tiled
from tests.support.splits import backward
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.launch.binding import BoundKernel
from tilegen.masks import Mask, block_sparse, causal, kv_lengths, parse_mask
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, sinks, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem, DType

DTYPES: tuple[DType, ...] = ("bf16", "fp32", "fp16")
FAMILIES = ("split_dkdv", "split_dq", "split_backward")


def agrees(
    problem: AttentionProblem,
    family: str = "split_backward",
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    inputs: Inputs | None = None,
    dropout: Dropout | None = None,
    **tile: int,
) -> None:
    mask = problem.mask if mask is None else mask
    problem = replace(problem, mask=mask.stand_in, score=score and score.form)
    configs = backward(family, **tile)
    kernels = {name: render(problem, one, name) for name, one in configs.items()}
    given = inputs or make_inputs(problem)
    require(check(kernels, given, mask=mask, score=score, dropout=dropout))


LENGTHS = [
    # queries, keys, rows of a split: 1 to 13 splits
    (1, 1, 16),
    (1, 200, 16),
    (200, 1, 16),
    (130, 77, 32),
    (37, 95, 64),
    (64, 64, 16),
    (100, 33, 128),
    (33, 512, 64),
]


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("case", range(len(LENGTHS)))
def test_any_number_of_queries_keys_and_splits(case: int) -> None:
    """The dtypes in turn, in tiles of its own each; both kinds of heads and masks."""
    queries, keys, length = LENGTHS[case]
    turn = case % 3
    heads, mask = (("hq6 hkv2", "causal(bottom_right)"), ("hq3 hkv1", "full"))[turn % 2]
    problem = AttentionProblem.parse(f"b1 {heads} q{queries} kv{keys} d40/24 {DTYPES[turn]} {mask}")
    agrees(problem, length=length, passes=16, rows=1 << turn)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", ["80", "192/128", "59"])
def test_head_dims_padded_and_split(head_dim: str) -> None:
    problem = AttentionProblem.parse(f"b1 hq4 hkv2 q70 kv90 d{head_dim} bf16 window(60,0)")
    agrees(problem)


@pytest.mark.slow
def test_heads_inside_rows() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q50 kv70 d64 bf16 causal(bottom_right)")
    inputs = make_inputs(problem, heads_inside=True)
    assert not inputs.q.is_contiguous()
    agrees(problem, inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", FORMS[::2], ids=str)
def test_masks_of_the_zoo(case: Case, dtype: DType) -> None:
    problem = case.problem(dtype)
    configs = backward("split_backward")
    kernels = {name: render(problem, config, name) for name, config in configs.items()}
    require(check(kernels, make_inputs(problem), mask=case.judged(problem.batch)))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SCORES)[::3])
def test_scores_and_their_gradients(name: str) -> None:
    """Programs of splits add to the gradients of a score's tensors, as those of tiles do."""
    heads = f"b{score_inputs.BATCH} hq{score_inputs.HEADS} hkv1"
    problem = AttentionProblem.parse(f"{heads} q70 kv83 d16 fp32 full")
    agrees(problem, mask=causal("bottom_right"), score=made_from(SCORES[name]), length=64)


@pytest.mark.slow
def test_sinks() -> None:
    problem = AttentionProblem.parse("b1 hq4 hkv2 q60 kv40 d16 fp32 full")
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0])
    agrees(problem, mask=causal("bottom_right"), score=softcap(5.0).then(sinks(logits)))


@pytest.mark.slow
def test_lengths_on_the_device() -> None:
    problem = AttentionProblem.parse("b4 hq4 hkv2 q50 kv90 d16 fp16 full")
    agrees(problem, mask=kv_lengths([0, 1, 33, 90]) & causal("bottom_right"))


@pytest.mark.slow
def test_splits_drop_the_same_weights() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q60 kv50 d16 fp32 causal dropout")
    agrees(problem, dropout=Dropout(0.3, torch.tensor([1 << 40, 3])))


@pytest.mark.slow
def test_rows_and_columns_with_nothing_kept_get_exactly_nothing() -> None:
    """All splits of theirs are empty: sums of nothing, whatever is in the partial results."""
    problem = AttentionProblem.parse("b1 hq2 hkv1 q100 kv40 d32 bf16 causal(bottom_right)")
    configs = backward("split_backward")
    outputs = run(rendered(problem, configs), make_inputs(problem), 0.2)
    assert (outputs["dq"][:, :, :60] == 0).all()
    assert all(tensor.isfinite().all() for name, tensor in outputs.items() if name != "lse")
    problem = replace(problem, seqlen_q=40, seqlen_kv=100, mask=causal())
    outputs = run(rendered(problem, configs), make_inputs(problem), 0.2)
    assert (outputs["dk"][:, :, 40:] == 0).all()
    assert (outputs["dv"][:, :, 40:] == 0).all()


def rendered(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> dict[Kernel, Any]:
    return {name: render(problem, config, name) for name, config in configs.items()}


@pytest.mark.slow
def test_the_same_bits_in_each_run() -> None:
    problem = AttentionProblem.parse("b1 hq4 hkv1 q90 kv90 d32 fp16 causal")
    kernels, inputs = rendered(problem, backward("split_backward")), make_inputs(problem)
    first, second = (run(kernels, inputs, 0.2) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


BY_HEAD = torch.tensor([[[(i + 2 * j + h) % 3 == 0 for j in range(7)] for i in range(7)]
                        for h in range(4)])  # fmt: skip
MASKS = [
    *("full", "causal", "causal(bottom_right)", "window(40,0)", "window(9,30,bottom_right)"),
    *("prefix_lm(20)", "global(5)|window(9,9)", "~window(5,5)", "causal&window(33,3)"),
]


def moves_what_the_model_says(
    problem: AttentionProblem,
    configs: Mapping[Kernel, TileConfig],
    *,
    lists: bool = False,
    **reads: Any,
) -> None:
    """Check the bytes of each kernel; lists of tiles are read besides."""
    x = make_inputs(problem)
    rows = torch.rand(x.q.shape[:3])
    inputs = (x.q, x.k, x.v, x.dout, rows, rows, 0.1)
    for result, made_of in (("dkdv", (x.k, x.v)), ("dq", (x.q,))):
        given: tuple[Any, ...] = inputs
        for name in (f"bwd_{result}_split", f"bwd_{result}_sum"):
            config = configs[name]
            launch, actual = counting(render(problem, config, name, aligned=False))
            bound = BoundKernel(launch, problem.mask, name, config)
            state = reads if "dropout" in KERNELS[name].supports else {}
            launch = bound.given(problem.mask, Shape.of(x.q, x.k), x.q.device, state)
            made = launch(*given)
            before = configs[f"bwd_{result}_split"]
            expected = traffic_of(tiled(name, problem, config, joined=before), aligned=False)
            assert actual.write_bytes == expected.write_bytes, (name, problem.key)
            if not (lists and name.endswith("split")):
                assert actual.read_bytes == expected.read_bytes, (name, problem.key)
            made = made if isinstance(made, tuple) else (made,)
            given = (*made, *(torch.empty_like(one) for one in made_of), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_bytes_equal_the_model(mask: str) -> None:
    i = MASKS.index(mask)
    configs = backward("split_backward", length=16 << i % 3, stays=16 << i % 2, rows=1 << i % 4)
    for lengths in ("q100 kv100", "q9 kv100", "q64 kv33", "q33 kv64"):
        problem = AttentionProblem.parse(f"b1 hq4 hkv2 {lengths} d16/32 fp16 {mask}")
        moves_what_the_model_says(problem, configs)


@pytest.mark.slow
def test_bytes_of_lists_and_of_heads_that_differ() -> None:
    """Where heads visit different tiles, no program of dK and dV is left out."""
    problem = AttentionProblem.parse("b1 hq4 hkv2 q100 kv100 d16/32 fp16 full")
    for mask in (parse_mask("dilated(3)"), block_sparse(BY_HEAD, 16)):
        changed = replace(problem, mask=mask)
        moves_what_the_model_says(changed, backward("split_backward"), lists=True)


@pytest.mark.slow
def test_bytes_of_seeds_are_those_of_splits_that_are_visited() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q100 kv90 d16 fp16 window(20,0) dropout")
    given = Dropout(0.3, torch.tensor([1 << 40, 3])).given
    moves_what_the_model_says(problem, backward("split_backward"), **given)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_verify_takes_the_families(family: str) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q70 kv50 d64 bf16 causal score(tanh(s/5)*5)")
    checks = verify(problem, backward(family, length=64, stays=32))
    assert {one.tensor for one in checks} == {"out", "lse", "dq", "dk", "dv"}
    require(checks)
