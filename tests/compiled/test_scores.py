"""Score changes in emitted kernels, compiled for the CPU, against the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import tilegen
from tests.support import expression_trees, sliced
from tests.support.score_inputs import BATCH, HEADS, INF, MASKS, SINKS, SLOPES, random
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.check.verification import check, require
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.masks import Mask, causal, documents
from tilegen.masks.language.texts import to_text
from tilegen.masks.score import (
    Score,
    alibi,
    bias,
    relative_bias,
    score,
    sinks,
    softcap,
    temperature,
)
from tilegen.masks.values import table_of
from tilegen.problem import AttentionProblem, DType

WHOLE_HEADS: dict[Kernel, TileConfig] = dict(
    zip(
        LARGE_CACHE,
        itertools.cycle([TileConfig(block_m=32, block_n=64), TileConfig(block_m=64, block_n=32)]),
        strict=False,
    )
)
FAMILIES: dict[str, Mapping[Kernel, TileConfig]] = {
    "whole_heads": WHOLE_HEADS,
    "small_cache": sliced.SMALL_CACHE,
    "streamed": sliced.STREAMED,
}
OFFSETS = random(BATCH, HEADS, 83)
PHASES = torch.tensor([1, 0, 0, -1, 1], dtype=torch.int32)

SCORES: dict[str, Score | Callable[..., Any]] = {
    "softcap": softcap(2.0),
    "alibi": alibi(SLOPES),
    "temperature": temperature(random(HEADS, low=0.5, high=2.0)),
    "relative_bias": relative_bias(random(HEADS, 41)),
    "shared_relative_bias": relative_bias(random(11).to(torch.float16)),
    "bias": bias(random(BATCH, HEADS, 83, 83)),
    "bias_of_heads": bias(random(1, HEADS, 1, 83).to(torch.bfloat16)),
    "bias_of_pairs": bias(random(83, 83)),
    "bias_of_rows": bias(random(BATCH, 1, 83, 1)),
    "sinks": sinks(SINKS),
    "chain": alibi(SLOPES).then(softcap(3.0)).then(sinks(SINKS)).then(temperature(SLOPES)),
    # FlexAttention's own tests.
    "flex_identity": lambda s, b, h, q, k: s,
    "flex_times_two": lambda s, b, h, q, k: s * 2,
    "flex_squared": lambda s, b, h, q, k: s * s,
    "flex_causal": lambda s, b, h, q, k: torch.where(q >= k, s, -INF),
    "flex_inverse_causal": lambda s, b, h, q, k: torch.where(q <= k, s, -INF),
    "flex_rel_bias": lambda s, b, h, q, k: s + (q - k),
    "flex_rel_causal": lambda s, b, h, q, k: torch.where(q >= k, s + (q - k), -INF),
    "flex_alibi": lambda s, b, h, q, k: s + (q - k) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "flex_trig": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.sin(b * 1.0),
    "flex_head_offset": lambda s, b, h, q, k: s * SLOPES[h],
    "flex_captured": lambda s, b, h, q, k: s + OFFSETS[b, h, q] - OFFSETS[b, h, k],
    "flex_softcap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "negative_index": lambda s, b, h, q, k: s + SLOPES[h - HEADS] + SLOPES[-1 - h],
    "integers_inside": lambda s, b, h, q, k: s + SLOPES[PHASES[(q + k) % 5]],
}


def agrees(
    made: Score,
    mask: Mask,
    configs: Mapping[Kernel, TileConfig],
    *,
    lengths: tuple[int, int] = (70, 70),
    dtype: DType = "fp32",
    dims: str = "16/32",
    sigma: float = 1.0,
    scale: float | None = None,
    heads: int = HEADS,
) -> None:
    problem = AttentionProblem.parse(
        f"b{BATCH} hq{heads} hkv1 q{lengths[0]} kv{lengths[1]} d{dims} {dtype} full"
    )
    problem = replace(problem, mask=mask.stand_in, score=made.form)
    kernels = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
    inputs = make_inputs(problem, sigma=sigma)
    with np.errstate(over="ignore"):
        require(check(kernels, inputs, mask=mask, score=made, scale=scale))


def made_from(given: Score | Callable[..., Any]) -> Score:
    return given if isinstance(given, Score) else score(given)


CASES = list(
    zip(
        SCORES,
        itertools.cycle(MASKS),
        itertools.cycle(["fp32", "fp16", "fp32", "bf16", "fp16"]),
        strict=False,
    )
)


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize("name, mask, dtype", [*CASES[::3], *CASES[2::3]])
def test_kernels_of_whole_heads(name: str, mask: str, dtype: DType) -> None:
    kept, *lengths = MASKS[mask]
    agrees(made_from(SCORES[name]), kept, WHOLE_HEADS, lengths=tuple(lengths), dtype=dtype)


@pytest.mark.any_triton
@pytest.mark.parametrize("name, mask, dtype", CASES[1::3])
def test_kernels_that_take_slices(name: str, mask: str, dtype: DType) -> None:
    """The other scores; the two families in turn."""
    at, around = list(SCORES).index(name), list(MASKS)
    kept, *lengths = MASKS[around[(around.index(mask) + 2) % len(around)]]
    configs = sliced.STREAMED if at % 2 == 0 else sliced.SMALL_CACHE
    agrees(
        made_from(SCORES[name]), kept, configs, lengths=tuple(lengths), dtype=dtype, dims="40/32"
    )


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_the_usual_scores_with_every_mask(mask: str) -> None:
    name = ("relative_bias", "sinks")[list(MASKS).index(mask) % 2]
    kept, *lengths = MASKS[mask]
    agrees(made_from(SCORES[name]), kept, WHOLE_HEADS, lengths=tuple(lengths))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, dtype", list(zip(FAMILIES, ["fp16", "fp32", "bf16"], strict=True))
)
def test_sharp_softmax(family: str, dtype: DType) -> None:
    """Logits with a standard deviation of 16, and a cap that few reach."""
    agrees(softcap(60.0), causal(), FAMILIES[family], dtype=dtype, sigma=16.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_zero(family: str) -> None:
    agrees(alibi(SLOPES), causal(), FAMILIES[family], scale=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_random_scores(seed: int) -> None:
    tree = expression_trees.score(Random(seed), 3)
    captured = (
        random(expression_trees.HEADS, 10, seed=seed),
        torch.randint(-3, 7, (7,), generator=torch.Generator().manual_seed(seed)),
        random(5, seed=seed) > 0,
    )
    text = to_text(tree)
    used = [slot for slot in range(3) if f"t{slot}" in text]
    for new, old in enumerate(used):  # tensors are numbered by those there are
        text = text.replace(f"t{old}[", f"t{new}[")
    made = Score(f"s+{text}", tuple(table_of(captured[slot]) for slot in used)).then(softcap(8.0))
    mask, *lengths = list(MASKS.values())[seed % 5]
    agrees(made, mask, WHOLE_HEADS, lengths=tuple(lengths), heads=expression_trees.HEADS)


# --------------------------------------------------------------------------------------------------
# Mistakes that others have made


@pytest.mark.parametrize("length", [129, 200])
def test_length_no_multiple_of_128_with_a_score_and_a_mask(length: int) -> None:
    """pytorch#153799: the last tile was wrong."""
    x = make_inputs(AttentionProblem.parse(f"b1 hq2 hkv1 q{length} kv{length} d16 fp32 full"))
    ids = torch.arange(length) // 50
    options: dict[str, Any] = {
        "mask": causal() & documents(ids),
        "score": score(lambda s, b, h, q, k: s + (q - k) * 0.1),
    }
    out = tilegen.attention(x.q, x.k, x.v, **options)
    expected, _ = attention_reference(x.q, x.k, x.v, **options)
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.any_triton
def test_nothing_is_read_beyond_a_captured_tensor() -> None:
    """pytorch#172225: broadcast and short tensors, with NaN wherever a stray index would lead."""

    def guarded(*sizes: int) -> torch.Tensor:
        count = math.prod(sizes)
        memory = torch.full((count + 2000,), math.nan)
        memory[1000 : 1000 + count] = random(count)
        return memory[1000 : 1000 + count].view(sizes)

    x = make_inputs(AttentionProblem.parse("b2 hq2 hkv1 q40 kv70 d16 fp32 full"))
    short, smaller, by_head = guarded(10), guarded(30, 50), guarded(HEADS)
    for made in (
        bias(guarded(1, HEADS, 1, 70)),
        bias(guarded(2, 1, 40, 1)),
        bias(guarded(40, 1)),
        score(lambda s, b, h, q, k: s + smaller[q, k]),  # than the sequences: 0 beyond
        score(lambda s, b, h, q, k: s + short[k] + short[q - 20] + by_head[h]),
        relative_bias(guarded(HEADS, 9)),
    ):
        out = tilegen.attention(x.q, x.k, x.v, score=made)
        expected, _ = attention_reference(x.q, x.k, x.v, score=made)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)


def test_tensors_of_a_score_may_change_between_calls() -> None:
    """One kernel, other tensors: nothing is kept from the first call."""
    x = make_inputs(AttentionProblem.parse("b1 hq2 hkv1 q40 kv40 d16 fp32 full"))
    for seed in range(2):
        made = relative_bias(random(HEADS, 21, seed=seed))
        out = tilegen.attention(x.q, x.k, x.v, score=made)
        expected, _ = attention_reference(x.q, x.k, x.v, score=made)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
