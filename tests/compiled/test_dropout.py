"""Dropout in emitted kernels, compiled for the CPU: the same pairs as PyTorch's, for any tiles;
outputs and gradients; bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import tilegen
from tests.support import sliced
from tests.support.counted import counting_all
from tests.support.problems import tiled
from tests.support.score_inputs import MASKS, random
from tilegen.check.reference import Inputs, attention_reference, make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.masks.dropout import Dropout
from tilegen.masks.score import Score, bias, sinks, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.bench import Timed

STATE = torch.tensor([-0x0123456789ABCDEF, 2**40 + 3])  # all bits of the seed, some of the offset
WHOLE: dict[Kernel, TileConfig] = dict.fromkeys(LARGE_CACHE, TileConfig(block_m=32, block_n=64))
FAMILIES: dict[str, Mapping[Kernel, TileConfig]] = {
    "whole_heads": WHOLE,
    "small_cache": sliced.SMALL_CACHE,
    "streamed": sliced.STREAMED,
}


def of_tiles(configs: Mapping[Kernel, TileConfig], m: int, n: int) -> dict[Kernel, TileConfig]:
    """The same kernels, those that draw with other tiles."""
    least = {kernel: max(n, KERNELS[kernel].knobs.block_n[0]) for kernel in configs}
    return {
        kernel: replace(config, block_m=m, block_n=least[kernel])
        if "dropout" in KERNELS[kernel].supports
        else config
        for kernel, config in configs.items()
    }


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize(
    "family, m, n, p",
    [
        ("whole_heads", 16, 16, 0.3),
        ("whole_heads", 64, 32, 0.01),
        ("whole_heads", 16, 64, 1.0),
        ("small_cache", 64, 32, 0.3),
        ("small_cache", 16, 64, 0.9),
        ("streamed", 16, 16, 0.3),
        ("streamed", 64, 64, 0.9),
    ],
)
def test_kernels_drop_as_pytorch_does_for_any_tiles(family: str, m: int, n: int, p: float) -> None:
    """Weights are equal where queries are 0, and values of an identity show them: so does dv."""
    problem = AttentionProblem.parse("b2 hq2 hkv1 q50 kv64 d16/64 fp32 full dropout")
    eye = torch.eye(64)
    x = Inputs(
        q=torch.zeros(2, 2, 50, 16),
        k=torch.zeros(2, 1, 64, 16),
        v=eye.expand(2, 1, 64, 64),
        dout=eye[:50].expand(2, 2, 50, 64),
    )
    kernels = {
        kernel: render(problem, config, kernel)
        for kernel, config in of_tiles(FAMILIES[family], m, n).items()
    }
    dropout = Dropout(p, STATE)
    outputs = run(kernels, x, 0.25, mask=problem.mask, dropout=dropout)
    factors = dropout.factors(2, 2, 50, 64).float()
    torch.testing.assert_close(outputs["out"] * 64, factors)
    if "dv" in outputs:
        torch.testing.assert_close(outputs["dv"][..., :50].mT * 64, factors.sum(1, keepdim=True))


TEXTS = [
    "b2 hq4 hkv2 q60 kv50 d16 fp32 causal dropout",
    "b1 hq2 hkv2 q40 kv83 d32/16 bf16 window(20,9) dropout",
    "b1 hq2 hkv1 q40 kv70 d64 fp16 full score(tanh(s/5)*5) dropout",
    "b1 hq2 hkv1 q70 kv70 d16 fp32 causal&(kv_prefix(4)|window(8,-1)) score(s,sinks) dropout",
]
IN_TURNS = ["small_cache", "streamed", "streamed", "small_cache"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, text",
    [*(("whole_heads", text) for text in TEXTS), *zip(IN_TURNS, TEXTS, strict=True)],
)
def test_outputs_and_gradients_agree_with_the_reference(family: str, text: str) -> None:
    require(verify(AttentionProblem.parse(text), FAMILIES[family]))


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_form_of_mask(mask: str) -> None:
    made, rows, columns = MASKS[mask]
    shape = f"b2 hq2 hkv1 q{rows} kv{columns} d16 fp32"
    problem = AttentionProblem.parse(f"{shape} {made.notation} dropout")
    configs = (WHOLE, sliced.SMALL_CACHE)[list(MASKS).index(mask) % 2]
    kernels = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
    require(check(kernels, make_inputs(problem), mask=made, dropout=Dropout(0.4, STATE)))


def leaf(*sizes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator).requires_grad_()


def gradients(
    attend: Any, leaves: list[torch.Tensor], read: list[torch.Tensor]
) -> list[torch.Tensor]:
    out, lse = attend(*leaves)
    loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, [*leaves, *read])]


TABLE, LOGITS = random(40, 50).requires_grad_(), random(4).requires_grad_()
CALLS: dict[str, tuple[dict[str, Any], list[torch.Tensor]]] = {
    "causal": ({"mask": tilegen.causal("bottom_right")}, []),
    "kv_lengths": ({"kv_lengths": torch.tensor([50, 17])}, []),
    "trained score": ({"score": bias(TABLE).then(softcap(3.0))}, [TABLE]),
    "sinks": ({"score": sinks(LOGITS), "mask": tilegen.causal()}, [LOGITS]),
    "negative scale": ({"scale": -0.3}, []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_drop_by_their_seed(name: str) -> None:
    options, read = CALLS[name]
    leaves = [leaf(2, 4, 40, 16), leaf(2, 2, 50, 16, seed=1), leaf(2, 2, 50, 16, seed=2)]
    torch.manual_seed(7)
    grads = gradients(
        partial(tilegen.attention, **options, dropout_p=0.4, return_lse=True), leaves, read
    )
    torch.manual_seed(7)
    dropout = Dropout.drawn(0.4, torch.device("cpu"))
    given = dict(options)
    if (lengths := given.pop("kv_lengths", None)) is not None:
        given["mask"] = tilegen.kv_lengths(lengths)
    score: Score | None = given.get("score")
    assert score is None or read
    expected = gradients(partial(attention_reference, **given, dropout=dropout), leaves, read)
    for left, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(left, other, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_dilated_mask_drops_by_places_in_its_groups_as_on_a_cpu() -> None:
    q, k, v = leaf(1, 2, 40, 16), leaf(1, 2, 40, 16, seed=1), leaf(1, 2, 40, 16, seed=2)
    mask = tilegen.sliding_window(8, 8) & tilegen.dilated(2)
    torch.manual_seed(7)
    out = tilegen.attention(q, k, v, mask=mask, dropout_p=0.4)
    torch.manual_seed(7)
    factors = Dropout.drawn(0.4, torch.device("cpu")).factors(2, 2, 20, 20).float()
    weights = tilegen.attention(q, k, torch.eye(40).expand(1, 2, 40, 40), mask=mask)
    for remainder in (0, 1):
        part = weights[:, :, remainder::2, remainder::2] * factors[remainder]
        torch.testing.assert_close(out[:, :, remainder::2], part @ v[:, :, remainder::2])


def test_packed_sequences_drop_by_their_place_among_all_tokens() -> None:
    q, k, v = leaf(40, 4, 16), leaf(40, 2, 16, seed=1), leaf(40, 2, 16, seed=2)
    cu = torch.tensor([0, 11, 40])
    torch.manual_seed(7)
    out = tilegen.attention_varlen(q, k, v, cu, mask=tilegen.causal(), dropout_p=0.4)
    torch.manual_seed(7)
    dropout = Dropout.drawn(0.4, torch.device("cpu"))
    expected, _ = attention_reference(
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        mask=tilegen.documents(torch.tensor([0] * 11 + [1] * 29)) & tilegen.causal(),
        dropout=dropout,
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask, family",
    list(zip(["full", "causal(bottom_right)", "window(9,3)"], FAMILIES, strict=True)),
)
def test_bytes_of_the_seed_are_counted(mask: str, family: str) -> None:
    configs = FAMILIES[family]
    problem = AttentionProblem.parse(f"b1 hq2 hkv1 q70 kv60 d32 fp16 {mask} dropout")
    x = make_inputs(problem)
    state = Dropout(0.5, STATE).given
    reads = {kernel: state for kernel in configs if "dropout" in KERNELS[kernel].supports}
    launches, moved = counting_all(problem, configs, reads)
    _, lse = passes.forward(launches, x.q, x.k, x.v, 0.1, panel_rows=1 << 20)
    if len(configs) > 2:
        passes.gradients(launches, x.q, x.k, x.v, x.dout, lse, lse, 0.1, panel_rows=1 << 20)
    for kernel, config in configs.items():
        width = configs["fwd_scores"].block_n if "fwd_scores" in configs else 0
        expected = traffic_of(tiled(kernel, problem, config), score_width=width or config.block_n)
        if kernel != "bwd_preprocess":
            actual = moved[kernel].read_bytes, moved[kernel].write_bytes
            assert actual == (expected.read_bytes, expected.write_bytes), kernel


@pytest.mark.parametrize("kernel", ["fwd", "bwd_preprocess", "bwd_dkdv", "fwd_values"])
def test_timed_kernels_drop_weights_too(kernel: Kernel) -> None:
    problem = AttentionProblem.parse("hq2 hkv1 q40 kv70 d32 fp16 causal dropout")
    config = {**WHOLE, **sliced.SMALL_CACHE}[kernel]
    Timed.of(KernelTask.of(kernel, problem, tilegen.gpu("h200")), "cpu").runs(config)()


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_few_queries_drop(rows: int) -> None:
    q, k = torch.zeros(1, 2, rows, 16), torch.zeros(1, 2, 40, 16)
    v = torch.ones(1, 2, 40, 16)
    out = tilegen.attention(q, k, v, dropout_p=0.5)
    kept = out * 40 * 0.5  # equal weights, so that this is a count
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)
    assert 0 < float(kept.mean()) < 40
