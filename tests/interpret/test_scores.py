"""Score changes in emitted kernels, run by Triton's interpreter, against the reference: values, and
gradients of everything a score reads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import tilegen
from tests import expression_trees, sliced
from tilegen import dispatch
from tilegen.config import BACKWARD, FORWARD, LARGE_CACHE, Kernel, TileConfig
from tilegen.device import gpu
from tilegen.dispatch import INTERPRETED_GPU
from tilegen.families import kernels_of
from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    documents,
    full,
    global_tokens,
    prefix_lm,
    sliding_window,
    values,
)
from tilegen.masks.expression import to_text
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
from tilegen.problem import AttentionProblem, DType
from tilegen.reference import attention_reference, make_inputs
from tilegen.render import render
from tilegen.verify import check, judge, require

BATCH, HEADS = 2, 2
INF = float("inf")
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
MASKS: dict[str, tuple[Mask, int, int]] = {
    "full": (full(), 50, 83),
    "causal": (causal("bottom_right"), 83, 50),
    "window": (sliding_window(20, 3), 70, 70),
    "documents": (documents([0] * 9 + [1] * 40 + [2] * 21) & causal(), 70, 70),
    "several_ranges": (causal() & (global_tokens(20) | sliding_window(7)), 70, 70),
    "by_batch": (prefix_lm(values([11, 48], "b")), 50, 83),
    "lists_by_head": (block_sparse(torch.rand(HEADS, 5, 6).gt(0.5), 16), 70, 83),
}


def random(*sizes: int, seed: int = 0, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(sizes, generator=generator) * (high - low) + low


SLOPES, OFFSETS = torch.tensor([0.5, 0.125]), random(BATCH, HEADS, 83)
SINKS = torch.tensor([0.5, -3.0])
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


@pytest.mark.parametrize("name, mask, dtype", CASES)
def test_kernels_of_whole_heads(name: str, mask: str, dtype: DType) -> None:
    kept, *lengths = MASKS[mask]
    agrees(made_from(SCORES[name]), kept, WHOLE_HEADS, lengths=tuple(lengths), dtype=dtype)


@pytest.mark.parametrize("name, mask, dtype", CASES[::2])
def test_kernels_that_take_slices(name: str, mask: str, dtype: DType) -> None:
    """Other pairs of score and mask than above; the two families in turn."""
    at, around = list(SCORES).index(name), list(MASKS)
    kept, *lengths = MASKS[around[(around.index(mask) + 2) % len(around)]]
    configs = sliced.STREAMED if at % 4 == 0 else sliced.SMALL_CACHE
    agrees(
        made_from(SCORES[name]), kept, configs, lengths=tuple(lengths), dtype=dtype, dims="40/32"
    )


@pytest.mark.parametrize("name", ["relative_bias", "sinks"])
@pytest.mark.parametrize("mask", list(MASKS)[::2])
def test_the_usual_scores_with_every_mask(name: str, mask: str) -> None:
    kept, *lengths = MASKS[mask]
    agrees(made_from(SCORES[name]), kept, WHOLE_HEADS, lengths=tuple(lengths))


@pytest.mark.parametrize(
    "family, dtype", list(zip(FAMILIES, ["fp16", "fp32", "bf16"], strict=True))
)
def test_sharp_softmax(family: str, dtype: DType) -> None:
    """Logits with a standard deviation of 16, and a cap that few reach."""
    agrees(softcap(60.0), causal(), FAMILIES[family], dtype=dtype, sigma=16.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_scale_zero(family: str) -> None:
    agrees(alibi(SLOPES), causal(), FAMILIES[family], scale=0.0)


@pytest.mark.parametrize("seed", range(6))
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
    made = Score(f"s+{text}", tuple(captured[slot] for slot in used)).then(softcap(8.0))
    mask, *lengths = list(MASKS.values())[seed % 5]
    agrees(made, mask, WHOLE_HEADS, lengths=tuple(lengths), heads=expression_trees.HEADS)


# --------------------------------------------------------------------------------------------------
# Gradients


def gradients_agree(
    leaves: list[torch.Tensor],
    made: Callable[[list[torch.Tensor]], Score],
    text: str,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    trains_inputs: bool = True,
) -> list[torch.Tensor]:
    """Check out, lse and every gradient of a loss in both; return those of the leaves."""
    x = make_inputs(AttentionProblem.parse(text))

    def results(dtype: torch.dtype | None) -> list[torch.Tensor]:
        """Of tilegen, or with a dtype of the reference."""
        qkv = [t.detach().to(dtype or t.dtype) for t in (x.q, x.k, x.v)]
        wide = dtype == torch.float64
        own = [t.detach().to(torch.float64 if wide else t.dtype) for t in leaves]
        wanted = [t.requires_grad_() for t in (own + qkv if trains_inputs else own)]
        attend: Any = attention_reference
        if dtype is None:
            attend = lambda *a, **o: tilegen.attention(*a, return_lse=True, **o)  # noqa: E731
        out, lse = attend(*qkv, mask=mask, score=made(own), scale=scale)
        kept = lse.masked_fill(lse == -INF, 0.0)
        weights = torch.linspace(-1, 1, kept.numel(), dtype=kept.dtype).view(kept.shape)
        loss = (out * x.dout.to(out.dtype)).sum().to(kept.dtype) + (kept * weights).sum()
        return [out, lse, *torch.autograd.grad(loss, wanted)]

    found, expected, own = results(None), results(torch.float64), results(x.q.dtype)
    names = ["out", "lse", *(f"leaf {i}" for i in range(len(leaves))), "dq", "dk", "dv"]
    # The sums of tile gradients take another order than PyTorch's, so that both may err as much.
    require(
        tuple(
            judge(name, a.detach(), b.detach(), [c.detach()], relative=3e-6)
            for name, a, b, c in zip(names, found, expected, own, strict=False)
        )
    )
    return found[2 : 2 + len(leaves)]


def of(function: Callable[..., Any]) -> Callable[[list[torch.Tensor]], Score]:
    """Return how a score is made of leaves: by `function(leaves, s, b, h, q, k)`."""
    return lambda leaves: score(lambda *arguments: function(leaves, *arguments))


TRAINED: dict[str, tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], Score]]] = {
    "heads": ([SLOPES], lambda t: alibi(t[0])),
    "divisor": ([random(HEADS, low=0.5, high=2.0)], lambda t: temperature(t[0])),
    "distances": ([random(HEADS, 41)], lambda t: relative_bias(t[0])),
    "shared_distances": ([random(21)], lambda t: relative_bias(t[0])),
    "rows": ([random(70, 1)], lambda t: bias(t[0])),
    "columns": ([random(70)], lambda t: bias(t[0])),
    "pairs": ([random(BATCH, HEADS, 70, 70)], lambda t: bias(t[0])),
    "broadcast_pairs": ([random(BATCH, 1, 70, 70)], lambda t: bias(t[0])),
    "broadcast_rows": ([random(1, HEADS, 1, 70)], lambda t: bias(t[0])),
    "batches": ([random(BATCH)], of(lambda t, s, b, h, q, k: s * t[0][b])),
    "scalar": ([random(1)], of(lambda t, s, b, h, q, k: s * torch.tanh(t[0][0]))),
    "no_dimensions": ([torch.tensor(0.7)], of(lambda t, s, b, h, q, k: s * t[0])),
    "two_places": ([random(70)], of(lambda t, s, b, h, q, k: s + t[0][q] * t[0][k])),
    "negative_index": ([random(HEADS)], of(lambda t, s, b, h, q, k: s + t[0][h - HEADS] * k / 70)),
    "smaller_than_the_sequence": ([random(30)], of(lambda t, s, b, h, q, k: s + t[0][k])),
    "clipped": (
        [random(HEADS), random(9)],
        of(lambda t, s, b, h, q, k: torch.maximum(s * t[0][h], t[1][(q - k).abs().clamp(max=8)])),
    ),
    "sinks": ([SINKS], lambda t: sinks(t[0])),
    "sinks_and_bias": (
        [SINKS, random(HEADS, 21)],
        lambda t: relative_bias(t[1]).then(softcap(2.0)).then(sinks(t[0])),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_what_a_score_reads(name: str) -> None:
    leaves, made = TRAINED[name]
    at = list(TRAINED).index(name)
    dtype = "fp16" if at % 3 == 2 else "fp32"
    masks = [
        causal(),
        MASKS["several_ranges"][0],
        None,
        MASKS["documents"][0],
        sliding_window(20, 3),
    ]
    text = f"b{BATCH} hq{HEADS} hkv1 q70 kv70 d16 {dtype} full"
    for found, leaf in zip(
        gradients_agree(leaves, made, text, masks[at % len(masks)]), leaves, strict=True
    ):
        assert found.dtype == leaf.dtype
        assert found.abs().max() > 1e-4


def test_half_precision_tables_get_half_precision_gradients() -> None:
    leaves = [random(HEADS, 21).half()]
    gradients_agree(leaves, lambda t: relative_bias(t[0]), "b2 hq2 hkv1 q40 kv70 d16 fp16 full")


def test_only_the_table_is_trained() -> None:
    text = "b1 hq2 hkv1 q40 kv40 d16 fp32 full"
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, trains_inputs=False)
    gradients_agree([SINKS], lambda t: sinks(t[0]), text, trains_inputs=False)


def test_one_of_two_tables_is_wanted() -> None:
    first, second = random(HEADS).requires_grad_(), random(40).requires_grad_()
    made = score(lambda s, b, h, q, k: s + first[h] * second[k])
    x = make_inputs(AttentionProblem.parse("b1 hq2 hkv1 q40 kv40 d16 fp32 full"))
    for wanted in (first, second):
        found, expected = (
            torch.autograd.grad(attend(x.q, x.k, x.v, score=made)[0].square().sum(), wanted)[0]
            for attend in (lambda *a, **o: (tilegen.attention(*a, **o),), attention_reference)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        out = tilegen.attention(x.q, x.k, x.v, score=made)
    assert not out.requires_grad


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have calls take the small-cache kernels, whatever the head dim."""
    families = {"forward": FORWARD["small_cache"], "backward": BACKWARD["small_cache"]}
    monkeypatch.setattr(dispatch, "kernels_of", lambda problem, spec, pass_: families[pass_])
    monkeypatch.setattr(
        dispatch, "choose", lambda problem, spec, kernel, **_: (sliced.SMALL_CACHE[kernel], "test")
    )
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("name", ["distances", "heads", "pairs", "clipped", "sinks_and_bias"])
def test_small_cache_trains_tables(name: str) -> None:
    leaves, made = TRAINED[name]
    gradients_agree(leaves, made, f"b{BATCH} hq{HEADS} hkv1 q70 kv70 d40 fp32 full", causal())


def test_tables_are_trained_at_large_head_dims() -> None:
    text = "b1 hq2 hkv1 q20 kv40 d512 fp32 causal"
    chosen = kernels_of(AttentionProblem.parse(text), gpu(INTERPRETED_GPU), "backward")
    assert "bwd_scores" in chosen
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, causal())


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_of_every_sign(scale: float) -> None:
    text = "b1 hq2 hkv1 q40 kv70 d16 fp32 full"
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, scale=scale)
    gradients_agree([SLOPES], lambda t: alibi(t[0]).then(softcap(2.0)), text, causal(), scale=scale)


@pytest.mark.parametrize("family", ["chosen", "small_cache"])
def test_rows_that_do_not_exist_train_nothing(family: str, request: pytest.FixtureRequest) -> None:
    """Their scores, of a query of zeros, may be so large that exp overflows: q reaches 3 * 127."""
    if family == "small_cache":
        request.getfixturevalue(family)
    leaves = [torch.tensor([3.0, -3.0])]
    made = of(lambda t, s, b, h, q, k: s + t[0][h] * q)
    gradients_agree(leaves, made, "b1 hq2 hkv2 q20 kv40 d16 fp32 full")


def test_rows_of_nothing_but_minus_infinity() -> None:
    """Every pair is kept by the mask, and none by the score: as with a mask."""
    weights = random(HEADS)

    def made(t: list[torch.Tensor]) -> Score:
        return score(lambda s, b, h, q, k: torch.where(k + 30 <= q, s + t[0][h] * k / 70, -INF))

    text = "b1 hq2 hkv1 q70 kv70 d16 fp32 full"
    gradients_agree([weights], made, text, sliding_window(60, 60))
    x = make_inputs(AttentionProblem.parse(text))
    out, lse = tilegen.attention(x.q, x.k, x.v, score=made([weights]), return_lse=True)
    assert (out[:, :, :30] == 0).all()
    assert (lse[:, :, :30] == -INF).all()
    assert lse[:, :, 30:].isfinite().all()


def test_sinks_of_rows_with_nothing_kept() -> None:
    """All weight goes to the sink: out is 0, lse the sink's logit."""
    x = make_inputs(AttentionProblem.parse("b1 hq2 hkv1 q90 kv40 d16 fp32 full"))
    for mask in (causal("bottom_right"), sliding_window(4, 3, "bottom_right")):
        out, lse = tilegen.attention(x.q, x.k, x.v, mask=mask, score=sinks(SINKS), return_lse=True)
        assert (out[:, :, :40] == 0).all()
        torch.testing.assert_close(lse[:, :, :40], SINKS.view(1, -1, 1).expand(1, HEADS, 40))


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
    found = tilegen.attention(x.q, x.k, x.v, **options)
    expected, _ = attention_reference(x.q, x.k, x.v, **options)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_nothing_is_read_beyond_a_captured_tensor() -> None:
    """pytorch#172225: broadcast and short tensors, with NaN wherever a stray index would lead."""

    def guarded(*sizes: int) -> torch.Tensor:
        count = math.prod(sizes)
        memory = torch.full((count + 2000,), math.nan)
        memory[1000 : 1000 + count] = random(count)
        return memory[1000 : 1000 + count].view(sizes)

    x = make_inputs(AttentionProblem.parse("b2 hq2 hkv1 q40 kv70 d16 fp32 full"))
    short, by_head = guarded(10), guarded(HEADS)
    for made in (
        bias(guarded(1, HEADS, 1, 70)),
        bias(guarded(2, 1, 40, 1)),
        bias(guarded(40, 1)),
        bias(guarded(30, 50)),  # smaller than the sequences: 0 beyond
        score(lambda s, b, h, q, k: s + short[k] + short[q - 20] + by_head[h]),
        relative_bias(guarded(HEADS, 9)),
    ):
        found = tilegen.attention(x.q, x.k, x.v, score=made)
        expected, _ = attention_reference(x.q, x.k, x.v, score=made)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_what_a_score_reads_may_change_between_calls() -> None:
    """One kernel, other tensors: nothing is kept from the first call."""
    x = make_inputs(AttentionProblem.parse("b1 hq2 hkv1 q40 kv40 d16 fp32 full"))
    for seed in range(2):
        made = relative_bias(random(HEADS, 21, seed=seed))
        found = tilegen.attention(x.q, x.k, x.v, score=made)
        expected, _ = attention_reference(x.q, x.k, x.v, score=made)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
