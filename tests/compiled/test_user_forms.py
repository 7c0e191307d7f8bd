"""Masks and scores as users write them, through the emitted kernels, against PyTorch."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilegen
from tests.support.mask_zoo import Judged
from tests.support.user_forms import BATCH, HEADS, MASKS, SCORES, SEQLEN_KV, SEQLEN_Q, pairs
from tilegen.check.reference import attention_reference, dense_mask, make_inputs
from tilegen.check.verification import check, require
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import causal, predicate
from tilegen.masks.score import score
from tilegen.problem import AttentionProblem

CONFIGS: dict[Kernel, TileConfig] = {
    "fwd": TileConfig(block_m=32, block_n=16),
    "bwd_preprocess": TileConfig(block_m=64, block_n=16),
    "bwd_dkdv": TileConfig(block_m=32, block_n=32),
    "bwd_dq": TileConfig(block_m=16, block_n=32),
}
PROBLEM = AttentionProblem.parse(f"b{BATCH} hq{HEADS} hkv1 q{SEQLEN_Q} kv{SEQLEN_KV} d16 fp32 full")


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_keeps_the_same_pairs_as_pytorch(name: str) -> None:
    """Kernels, tile lists and the reference agree with the function itself."""
    expected = pairs(MASKS[name])
    assert expected.any()
    assert not expected.all()
    mask = predicate(MASKS[name])
    dense = dense_mask(mask, SEQLEN_Q, SEQLEN_KV, batch=BATCH, heads=HEADS)
    assert torch.equal(dense.expand_as(expected), expected)
    problem = replace(PROBLEM, mask=mask)
    # The kernels of a backward spell a mask as the forward does; they meet some forms of each kind.
    backward = list(MASKS).index(name) % 8 == 0
    configs = CONFIGS if backward else {"fwd": CONFIGS["fwd"]}
    kernels = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
    require(check(kernels, make_inputs(problem), mask=Judged(mask, expected)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SCORES)
def test_a_score_equals_pytorchs(name: str) -> None:
    """The reference itself is compared with the function, called pair by pair."""
    made, inputs = score(SCORES[name]), make_inputs(PROBLEM)
    problem = replace(PROBLEM, mask=causal(), score=made.form)
    kernels = {kernel: render(problem, config, kernel) for kernel, config in CONFIGS.items()}
    require(check(kernels, inputs, mask=causal(), score=made))
    out, _ = attention_reference(inputs.q, inputs.k, inputs.v, mask=causal(), score=made)
    scores = (inputs.q @ inputs.k.repeat_interleave(HEADS, 1).mT) * 16**-0.5
    changed = _everywhere(SCORES[name], scores)
    changed = changed.masked_fill(~dense_mask(causal(), SEQLEN_Q, SEQLEN_KV), float("-inf"))
    expected = changed.softmax(-1) @ inputs.v.repeat_interleave(HEADS, 1)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=2e-5, atol=2e-5)


BITS: dict[str, Any] = {
    name: MASKS[name] for name in ("odd", "bits of a product", "exclusive or", "all bits", "morton")
} | {
    "low bits of quotients": lambda b, h, q, k: ((q // 4) & 1) == ((k // 4) & 1),
    "exclusive or of quotients": lambda b, h, q, k: ((q // 3) ^ (k // 3)) < 4,
    "shifts of quotients": lambda b, h, q, k: ((q // 4) << 1) >= ((k // 2) >> 1),
    "bits of a negative quotient": lambda b, h, q, k: (((q - k) // 4) & 3) < 2,
}


@pytest.mark.parametrize("name", BITS)
def test_bits_of_places_within_documents(name: str) -> None:
    cuts = [0, 23, 60]
    q, k, v = torch.randn(3, cuts[-1], 2, 16, generator=torch.Generator().manual_seed(1))
    out = tilegen.attention_varlen(q, k, v, torch.tensor(cuts), mask=predicate(BITS[name]))
    for first, end in itertools.pairwise(cuts):
        places = torch.arange(end - first)
        keep = BITS[name](0, 0, places[:, None], places).expand(end - first, end - first)
        here = (x[first:end].transpose(0, 1).double() for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*here, attn_mask=keep)
        expected = expected.masked_fill(~keep.any(-1)[:, None], 0.0).transpose(0, 1).float()
        torch.testing.assert_close(out[first:end], expected, rtol=2e-5, atol=2e-5)


def _everywhere(function: object, scores: torch.Tensor) -> torch.Tensor:
    over = [(0, None, None, None, 0), (0, None, None, 0, None), (0, None, 0, None, None)]
    over += [(0, 0, None, None, None)]
    every = lambda *args: torch.as_tensor(function(*args), dtype=torch.float32)  # type: ignore # noqa: E731
    for axes in over:
        every = torch.func.vmap(every, axes)
    return every(scores, *map(torch.arange, scores.shape)).detach()
