"""The backward in one pass: right for any lengths, masks and scores, with the same bits in each run
and for any number of threads, and exactly the model's bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiled.test_score_gradients import TRAINED
from tests.support import score_inputs
from tests.support.counted import counting
from tests.support.problems import tiled
from tests.support.splits import backward
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import check, launch_of, require, verify
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.allocation import poisoned
from tilegen.kernels.config import TileConfig
from tilegen.launch.binding import BoundKernel
from tilegen.masks import Mask, block_sparse, causal, documents, kv_lengths, parse_mask
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, sinks, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

PARSE = AttentionProblem.parse
NAMES = "bwd_one_pass", "bwd_dq_sum"
RESULTS: tuple[str, ...] = ("dq", "dk", "dv")
Gradients = dict[str, torch.Tensor]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """A function that sets the number of threads, which the test gives back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def dense(x: Inputs, keep: torch.Tensor, scale: float) -> tuple[Gradients, torch.Tensor, Any]:
    """Return gradients in fp64 by autograd, and lse and delta in fp32."""
    q, k, v = (one.double().clone().requires_grad_() for one in (x.q, x.k, x.v))
    group = q.shape[1] // k.shape[1]
    s = (q @ k.repeat_interleave(group, 1).mT * scale).masked_fill(~keep, float("-inf"))
    lse = s.logsumexp(-1)
    p = (s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out, dout = p @ v.repeat_interleave(group, 1), x.dout.double()
    grads = torch.autograd.grad(out, (q, k, v), dout)
    delta = (out * dout).sum(-1)
    return dict(zip(RESULTS, grads, strict=True)), lse.detach().float(), delta.detach().float()


def gradients(
    problem: AttentionProblem,
    x: Inputs,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    mask: Mask | None = None,
    **tile: int,
) -> Gradients:
    """Return the gradients of the kernels alone, in memory that held NaN before."""
    configs, mask = backward("one_pass", **tile), problem.mask if mask is None else mask
    made: dict[str, Any] = {}
    with poisoned():
        for name in NAMES:
            made[name] = launch_of(render(problem, configs[name], name), mask, {}, x.q, x.k)
        given = (x.q, x.k, x.v, x.dout, lse, delta, scale)
        grads = passes.gradients(made, *given, panel_rows=1)
    assert all(one is not None for one in grads)
    return {name: one for name, one in zip(RESULTS, grads, strict=True) if one is not None}


CLOSE = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.5e-2}
"""Error over the largest gradient of a tensor."""


def agree(gradients: Gradients, expected: Gradients, dtype: str) -> None:
    for name, tensor in expected.items():
        error = (gradients[name].double() - tensor).abs().max() / tensor.abs().max()
        assert error <= CLOSE[dtype], (name, float(error))


_Q, _K = torch.arange(200)[:, None], torch.arange(200)
_ALL = (_Q >= 0) & (_K >= 0)
_IDS = torch.arange(90) // 40
_BLOCKS = (torch.arange(6)[:, None] * torch.arange(6) % 4) != 1
_HEADS = torch.stack([_BLOCKS, ~_BLOCKS, _BLOCKS.T, torch.ones(6, 6, dtype=torch.bool)])


def _spread(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(16, -1).repeat_interleave(16, -2)


CASES: dict[str, tuple[str, Mask | None, torch.Tensor, int]] = {
    # problem, a mask that reads tensors, pairs that are kept, keys of a share
    "full": ("b1 hq3 hkv3 q70 kv45 d16 fp32 full", None, _ALL, 64),
    "causal, a group": ("b2 hq4 hkv1 q100 kv77 d40/24 bf16 causal", None, _K <= _Q, 32),
    "causal(bottom_right)": (
        *("b1 hq8 hkv2 q50 kv130 d64 fp32 causal(bottom_right)", None, _K <= _Q + 80, 32),
    ),
    "rows of nothing": (
        *("b1 hq2 hkv1 q90 kv40 d32 fp32 causal(bottom_right)", None, _K <= _Q - 50, 16),
    ),
    "window": (
        *("b1 hq4 hkv2 q90 kv90 d80 fp16 window(20,9)", None),
        *((_K >= _Q - 20) & (_K <= _Q + 9), 32),
    ),
    "documents": (
        *("b1 hq2 hkv1 q90 kv90 d32 bf16 full", documents(_IDS.tolist()) & causal()),
        *((_IDS[:, None] == _IDS) & (_K[:90] <= _Q[:90]), 16),
    ),
    "lists": (
        "b1 hq4 hkv2 q90 kv83 d16 fp32 full",
        block_sparse(_BLOCKS, 16),
        _spread(_BLOCKS),
        32,
    ),
    "heads": ("b1 hq4 hkv2 q96 kv96 d24 fp16 full", block_sparse(_HEADS, 16), _spread(_HEADS), 64),
    "wide": ("b1 hq2 hkv1 q40 kv50 d512/256 fp32 causal", None, _K <= _Q, 32),
    "two pieces": ("b1 hq2 hkv1 q40 kv50 d192/128 bf16 full", None, _ALL, 16),
}


@pytest.mark.any_triton
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_dense_attention(name: str) -> None:
    text, mask, keep, length = CASES[name]
    problem = PARSE(text)
    problem = problem if mask is None else replace(problem, mask=mask.stand_in)
    x = make_inputs(problem)
    keep = keep[..., : problem.seqlen_q, : problem.seqlen_kv]
    scale = problem.head_dim_qk**-0.5
    expected, lse, delta = dense(x, keep, scale)
    grads = gradients(problem, x, lse, delta, scale, mask, length=length)
    agree(grads, expected, problem.dtype)
    kept = keep.expand(problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
    assert (grads["dq"][:, ~kept.any(-1)] == 0).all()


def test_lengths_on_the_device_and_heads_inside_rows() -> None:
    lengths = [0, 1, 33, 90]
    problem = PARSE("b4 hq4 hkv2 q50 kv90 d16 fp16 full")
    mask = kv_lengths(lengths) & causal("bottom_right")
    problem = replace(problem, mask=mask.stand_in)
    configs = backward("one_pass")
    kernels = {name: render(problem, one, name) for name, one in configs.items()}
    require(check(kernels, make_inputs(problem, heads_inside=True), mask=mask))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_keys_that_do_not_exist_add_nothing(dtype: str) -> None:
    """A key of zeros has the score 0, which weighs exp(200) where all others have -200."""
    problem = PARSE(f"b1 hq2 hkv1 q64 kv45 d16 {dtype} full")
    x = make_inputs(problem)
    x = replace(x, q=x.q / 8 + 3.5, k=x.k / 8 - 3.5)
    keep = torch.ones(64, 45, dtype=torch.bool)
    expected, lse, delta = dense(x, keep, 1.0)
    assert lse.max() < -150
    grads = gradients(problem, x, lse, delta, 1.0)
    assert all(one.isfinite().all() for one in grads.values())
    error = (grads["dq"].double() - expected["dq"]).abs().max()
    assert error <= {"fp32": 1e-3, "fp16": 0.3}[dtype] * expected["dq"].abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows", "columns", "two_places", "distances", "clipped"])
def test_scores_and_gradients_of_their_tensors(name: str) -> None:
    """Tiles are transposed: gradients of rows and of columns are sums along the other axis."""
    leaves, made = TRAINED[name]
    score = made([one.clone().requires_grad_() for one in leaves])
    heads = f"b{score_inputs.BATCH} hq{score_inputs.HEADS} hkv1"
    problem = PARSE(f"{heads} q70 kv70 d16 fp32 causal")
    agrees(replace(problem, score=score.form), problem.mask, score)


@pytest.mark.slow
def test_sinks_and_dropout() -> None:
    problem = PARSE("b1 hq4 hkv2 q60 kv40 d16 fp32 causal dropout")
    score = softcap(5.0).then(sinks(torch.tensor([2.0, -1.0, 0.5, 3.0], requires_grad=True)))
    dropout = Dropout(0.3, torch.tensor([1 << 40, 3]))
    agrees(replace(problem, score=score.form), problem.mask, score, dropout)


def agrees(
    problem: AttentionProblem, mask: Mask, score: Score, dropout: Dropout | None = None
) -> None:
    configs = backward("one_pass")
    kernels = {name: render(problem, one, name) for name, one in configs.items()}
    require(check(kernels, make_inputs(problem), mask=mask, score=score, dropout=dropout))


def test_verify_takes_the_family() -> None:
    problem = PARSE("b2 hq4 hkv2 q70 kv50 d64 bf16 causal")
    checks = verify(problem, backward("one_pass", length=64, stays=32))
    assert {one.tensor for one in checks} == {"out", "lse", "dq", "dk", "dv"}
    require(checks)


@pytest.mark.parametrize("text", ["hq4 hkv1 q150 kv190 d32 fp16", "hq2 hkv2 q100 kv100 d64 fp32"])
def test_the_same_bits_for_any_number_of_threads(text: str, threads: Callable[[int], None]) -> None:
    problem = PARSE(f"b2 {text} causal")
    x = make_inputs(problem)
    keep = _K[: problem.seqlen_kv] <= _Q[: problem.seqlen_q]
    _, lse, delta = dense(x, keep, 0.2)
    results: list[Gradients] = []
    for number in (1, 2, 3, 1):
        threads(number)
        results.append(gradients(problem, x, lse, delta, 0.2, length=32))
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)


MASKS = [
    *("full", "causal", "causal(bottom_right)", "window(40,0)", "window(9,30,bottom_right)"),
    *("prefix_lm(20)", "global(5)|window(9,9)", "~window(5,5)"),
]


def moves_what_the_model_says(
    problem: AttentionProblem, config: TileConfig, *, lists: bool = False, **reads: Any
) -> None:
    """Check the bytes of both kernels; lists of tiles are read besides."""
    x = make_inputs(problem)
    rows = torch.rand(x.q.shape[:3])
    given: tuple[Any, ...] = (x.q, x.k, x.v, x.dout, rows, rows, 0.1)
    sums = TileConfig(block_m=4, block_n=2)
    first, second = (
        tiled(NAMES[0], problem, config),
        tiled(NAMES[1], problem, sums, joined=config, follows=NAMES[0]),
    )
    for each, state in ((first, reads), (second, {})):
        name = each.spec.name
        launch, actual = counting(render(problem, each.config, name, aligned=False))
        bound = BoundKernel(launch, problem.mask, name, each.config)
        made = bound.given(problem.mask, Shape.of(x.q, x.k), x.q.device, state)(*given)
        expected = traffic_of(each, aligned=False)
        assert actual.write_bytes == expected.write_bytes, (name, problem.key)
        if not (lists and name == NAMES[0]):
            assert actual.read_bytes == expected.read_bytes, (name, problem.key)
        given = (*made[2:], torch.empty_like(x.q), 0.1) if made else ()


@pytest.mark.parametrize("mask", MASKS)
def test_bytes_equal_the_model(mask: str) -> None:
    config = TileConfig(block_m=16, block_n=16 << MASKS.index(mask) % 2, split_kv=32)
    for lengths in ("q100 kv100", "q9 kv100", "q64 kv33"):
        problem = PARSE(f"b1 hq4 hkv2 {lengths} d16/32 fp16 {mask}")
        moves_what_the_model_says(problem, config)


@pytest.mark.slow
def test_bytes_of_lists_heads_and_seeds() -> None:
    problem = PARSE("b1 hq4 hkv2 q96 kv96 d16/32 fp16 full")
    config = TileConfig(block_m=16, block_n=16, split_kv=32)
    for mask in (parse_mask("dilated(3)"), block_sparse(_HEADS, 16)):
        moves_what_the_model_says(replace(problem, mask=mask), config, lists=True)
    drops = PARSE("b2 hq4 hkv2 q100 kv90 d16 fp16 window(20,0) dropout")
    moves_what_the_model_says(drops, config, **Dropout(0.3, torch.tensor([1 << 40, 3])).given)
