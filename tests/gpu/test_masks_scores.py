"""Every form of mask, and scores, on the GPU: right at real tiles, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import tilegen
from tests.support.mask_zoo import BATCH, HEADS, ZOO, Case
from tests.support.problems import sized
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.check.rounding import rounding_floors
from tilegen.check.verification import check, judge, require
from tilegen.choose.ranker import propose
from tilegen.emit.render import render
from tilegen.gpus.spec import detect
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import BACKWARD, FORWARD, LARGE_CACHE
from tilegen.masks import Mask, block_sparse, causal, documents, global_tokens, sliding_window
from tilegen.masks.score import Score, alibi, bias, relative_bias, sinks, softcap, temperature
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

SMALL_CACHE = (*FORWARD["small_cache"].names, *BACKWARD["small_cache"].names)
LENGTH = sized(700, rehearsed=280)  # more than a tile of keys
IDS = torch.arange(LENGTH) // 190
LAYOUT = torch.rand(4, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.5
MASKS: dict[str, Mask] = {
    "causal": causal(),
    "several_ranges": causal() & (global_tokens(100) | sliding_window(130)),
    "documents": causal() & documents(IDS),
    "lists_by_head": block_sparse(LAYOUT, 128),
}


def random(*sizes: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(sizes, generator=generator) * (high - low) + low).cuda()


SCORES: dict[str, Callable[[], Score]] = {
    "softcap": lambda: softcap(2.0),
    "alibi": lambda: alibi(random(4, low=0.01, high=0.5)),
    "temperature": lambda: temperature(random(4, low=0.5, high=2.0)),
    "relative_bias": lambda: relative_bias(random(4, 101)),
    "bias": lambda: bias(random(2, 4, LENGTH, LENGTH).to(torch.bfloat16)),
    "sinks": lambda: relative_bias(random(101)).then(sinks(random(4))),
}


def agrees(
    problem: AttentionProblem,
    mask: Mask,
    score: Score | None,
    kernels: tuple[Kernel, ...],
    judged: Mask | None = None,
) -> None:
    """Compare kernels with the reference, which reads the mask `judged` if there is one."""
    spec = detect()
    assert spec
    problem = replace(problem, mask=mask.stand_in, score=score and score.form)
    rendered = {
        k: render(problem, propose(KernelTask.of(k, problem, spec), top=1)[0].config, k)
        for k in kernels
    }
    require(
        check(
            rendered,
            make_inputs(problem, device="cuda"),
            mask=mask if judged is None else judged,
            score=score,
        )
    )


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_masks_of_the_zoo(case: Case) -> None:
    lengths = f"q{case.seqlen_q} kv{case.seqlen_kv}"
    for dims in ("d64 bf16", "d64 fp32"):
        text = f"b{BATCH} hq{HEADS} hkv1 {lengths} {dims} full"
        problem = AttentionProblem.parse(text)
        agrees(problem, case.mask, None, LARGE_CACHE, case.judged(BATCH))


@pytest.mark.parametrize("dims", ["d64 bf16", "d128 fp16", "d64 fp32", "d512 bf16"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_form_of_mask(mask: str, dims: str) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q{LENGTH} kv{LENGTH} {dims} full")
    agrees(problem, MASKS[mask], None, SMALL_CACHE if "512" in dims else LARGE_CACHE)


@pytest.mark.parametrize("dims", ["d64 bf16", "d128 bf16", "d64 fp32", "d512 bf16"])
@pytest.mark.parametrize("name", SCORES)
def test_every_score(name: str, dims: str) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q{LENGTH} kv{LENGTH} {dims} full")
    mask = MASKS["several_ranges" if name == "softcap" else "documents"]
    agrees(problem, mask, SCORES[name](), SMALL_CACHE if "512" in dims else LARGE_CACHE)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_what_a_score_reads(mask: str) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q{LENGTH} kv{LENGTH} d64 fp32 full")
    x = make_inputs(problem, device="cuda")
    leaves = [random(4, 101), random(4)]

    def gradients(dtype: torch.dtype, attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        own = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        q, k, v, dout = (t.to(dtype) for t in (x.q, x.k, x.v, x.dout))
        score = relative_bias(own[0]).then(softcap(5.0)).then(sinks(own[1]))
        out = attend(q, k, v, mask=MASKS[mask], score=score)
        return list(torch.autograd.grad(out, own, dout))

    def reference(*args: torch.Tensor, **options: object) -> torch.Tensor:
        return attention_reference(*args, **options)[0]  # type: ignore[arg-type]

    grads = gradients(torch.float32, tilegen.attention)
    expected, own = (gradients(d, reference) for d in (torch.float64, torch.float32))
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    floors = rounding_floors(
        x.to(torch.float64),
        mask=MASKS[mask],
        score=relative_bias(wide[0]).then(softcap(5.0)).then(sinks(wide[1])),
        scale=64**-0.5,
        leaves=wide,
    )
    checks = zip(("leaf 0", "leaf 1"), grads, expected, own, strict=True)
    require(tuple(judge(name, a, b, [c], floors[name]) for name, a, b, c in checks))
