"""Gradients of a score's tensors, from kernels compiled for the CPU, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilegen
from tests.support import sliced
from tests.support.calls import gpu_road, taking
from tests.support.score_inputs import BATCH, HEADS, INF, MASKS, SINKS, SLOPES, random
from tilegen import pipeline
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.check.rounding import rounding_floors
from tilegen.check.verification import judge, require
from tilegen.choose.families import kernels_of
from tilegen.gpus.spec import ASSUMED, gpu
from tilegen.kernels.registry import FAMILIES
from tilegen.masks import Mask, causal, sliding_window
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
from tilegen.problem import AttentionProblem


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

    def lse_grad(dtype: torch.dtype) -> torch.Tensor:
        return torch.linspace(-1, 1, x.q[..., 0].numel(), dtype=dtype).view(x.q.shape[:3])

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
        weighted = (kept * lse_grad(kept.dtype)).sum()
        loss = (out * x.dout.to(out.dtype)).sum().to(kept.dtype) + weighted
        return [out, lse, *torch.autograd.grad(loss, wanted)]

    checks, expected, own = results(None), results(torch.float64), results(x.q.dtype)
    names = ["out", "lse", *(f"leaf {i}" for i in range(len(leaves))), "dq", "dk", "dv"]
    wide = [t.detach().to(torch.float64).requires_grad_() for t in leaves]
    floors = rounding_floors(
        x.to(torch.float64),
        mask=mask,
        score=made(wide),
        scale=x.q.shape[-1] ** -0.5 if scale is None else scale,
        lse_grad=lse_grad(torch.float64),
        leaves=wide,
    )
    require(
        tuple(
            judge(name, a.detach(), b.detach(), [c.detach()], floors[name])
            for name, a, b, c in zip(names, checks, expected, own, strict=False)
        )
    )
    return checks[2 : 2 + len(leaves)]


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


@pytest.mark.slow
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
    for actual, leaf in zip(
        gradients_agree(leaves, made, text, masks[at % len(masks)]), leaves, strict=True
    ):
        assert actual.dtype == leaf.dtype
        assert actual.abs().max() > 1e-4


@pytest.mark.slow
def test_half_precision_tables_get_half_precision_gradients() -> None:
    leaves = [random(HEADS, 21).half()]
    gradients_agree(leaves, lambda t: relative_bias(t[0]), "b2 hq2 hkv1 q40 kv70 d16 fp16 full")


@pytest.mark.slow
def test_only_the_table_is_trained() -> None:
    text = "b1 hq2 hkv1 q40 kv40 d16 fp32 full"
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, trains_inputs=False)
    gradients_agree([SINKS], lambda t: sinks(t[0]), text, trains_inputs=False)


def test_one_of_two_tables_is_wanted() -> None:
    first, second = random(HEADS).requires_grad_(), random(40).requires_grad_()
    made = score(lambda s, b, h, q, k: s + first[h] * second[k])
    x = make_inputs(AttentionProblem.parse("b1 hq2 hkv1 q40 kv40 d16 fp32 full"))
    for wanted in (first, second):
        grads, expected = (
            torch.autograd.grad(attend(x.q, x.k, x.v, score=made)[0].square().sum(), wanted)[0]
            for attend in (lambda *a, **o: (tilegen.attention(*a, **o),), attention_reference)
        )
        torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        out = tilegen.attention(x.q, x.k, x.v, score=made)
    assert not out.requires_grad


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have calls take the small-cache kernels, whatever the head dim."""
    monkeypatch.setattr(
        pipeline, "families_used", lambda _, direction: (FAMILIES[direction]["small_cache"],)
    )
    monkeypatch.setattr(pipeline, "rank", taking(sliced.SMALL_CACHE))
    with gpu_road():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("small_cache")
@pytest.mark.parametrize("name", ["distances", "heads", "pairs", "clipped", "sinks_and_bias"])
def test_small_cache_trains_tables(name: str) -> None:
    leaves, made = TRAINED[name]
    gradients_agree(leaves, made, f"b{BATCH} hq{HEADS} hkv1 q70 kv70 d40 fp32 full", causal())


@pytest.mark.slow
def test_tables_are_trained_at_large_head_dims() -> None:
    text = "b1 hq2 hkv1 q20 kv40 d512 fp32 causal"
    chosen = kernels_of(AttentionProblem.parse(text), gpu(ASSUMED), "backward")
    assert "bwd_scores" in chosen
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, causal())


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_of_every_sign(scale: float) -> None:
    text = "b1 hq2 hkv1 q40 kv70 d16 fp32 full"
    gradients_agree([random(HEADS, 21)], lambda t: relative_bias(t[0]), text, scale=scale)
    gradients_agree([SLOPES], lambda t: alibi(t[0]).then(softcap(2.0)), text, causal(), scale=scale)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["chosen", "small_cache"])
def test_rows_that_do_not_exist_train_nothing(family: str, request: pytest.FixtureRequest) -> None:
    """Their scores, of a query of zeros, may be so large that exp overflows: q reaches 3 * 127."""
    if family == "small_cache":
        request.getfixturevalue(family)
    leaves = [torch.tensor([3.0, -3.0])]
    made = of(lambda t, s, b, h, q, k: s + t[0][h] * q)
    gradients_agree(leaves, made, "b1 hq2 hkv2 q20 kv40 d16 fp32 full")


@pytest.mark.slow
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
