"""Each family of kernels, each form of mask and of score once in Triton's interpreter, which shares
nothing with the compiler for the CPU that the tests of tests/compiled run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiled.test_scores import SCORES, made_from
from tests.compiled.test_shifted_rows import BEFORE
from tests.support import interpreting, sliced, splits
from tests.support import problems as described
from tests.support.problems import tiled
from tests.support.score_inputs import BATCH, HEADS, MASKS
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require, verify
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

WHOLE_HEADS: dict[Kernel, TileConfig] = dict.fromkeys(
    LARGE_CACHE, TileConfig(block_m=32, block_n=32)
)
SPLIT = TileConfig(block_m=8, block_n=16, heads=2, split_kv=32)
FAMILIES: dict[str, tuple[str, Mapping[Kernel, TileConfig]]] = {
    "whole heads": ("b1 hq4 hkv2 q70 kv50 d16/32 fp16 causal(bottom_right)", WHOLE_HEADS),
    "descriptors": (
        "b1 hq4 hkv2 q70 kv50 d72/16 bf16 causal",
        described.configs(TileConfig(block_m=32, block_n=32)),
    ),
    "small cache": ("b1 hq2 hkv1 q80 kv90 d72/40 fp16 causal", sliced.SMALL_CACHE),
    "streamed": ("b1 hq2 hkv1 q80 kv90 d72/40 bf16 window(20,3)", sliced.STREAMED),
    "split keys": (
        "b1 hq4 hkv2 q9 kv100 d16/32 bf16 causal(bottom_right)",
        {"fwd_split": SPLIT, "fwd_combine": splits.COMBINE},
    ),
    "split dK and dV": (
        "b1 hq4 hkv2 q90 kv70 d16 fp32 causal",
        splits.backward("split_dkdv"),
    ),
    "split dQ": ("b1 hq4 hkv2 q40 kv90 d16 fp16 full", splits.backward("split_dq")),
    "one pass": ("b1 hq4 hkv2 q60 kv90 d16 fp32 causal", splits.backward("one_pass")),
    "split backward": ("b1 hq4 hkv2 q60 kv90 d16 bf16 full", splits.backward("split_backward")),
}
PAGED: dict[Kernel, TileConfig] = {"fwd_paged": SPLIT, "fwd_combine": splits.COMBINE}
LATENT: dict[Kernel, TileConfig] = {"fwd": WHOLE_HEADS["fwd"]}
CASES = {
    **FAMILIES,
    "pages": ("b2 hq4 hkv2 q9 kv100 d16/32 bf16 causal(bottom_right) page16", PAGED),
    "latent": ("b1 hq4 hkv1 q50 kv70 d48/32 fp16 causal latent", LATENT),
    "dropout": ("b1 hq2 hkv1 q50 kv60 d16 bf16 causal dropout", WHOLE_HEADS),
}


@pytest.mark.parametrize("name", CASES)
def test_every_family_agrees_with_the_reference(name: str) -> None:
    text, configs = CASES[name]
    require(verify(AttentionProblem.parse(text), configs))


FORMS = (
    *("full", "causal", "window(9,30,bottom_right)", "~window(5,5)", "prefix_lm(20)"),
    *("global(5)|window(9,9)", "causal&(kv_prefix(4)|window(8,-1))", "dilated(3)"),
    *("kv_prefix(@b:64)", "neighborhood(8x8,3x3)", "tree(@b:4)&window(30,0,bottom_right)"),
)


@pytest.mark.parametrize("mask", FORMS)
def test_every_form_of_mask(mask: str) -> None:
    """Each dtype in turn."""
    dtype = ("fp32", "bf16", "fp16")[FORMS.index(mask) % 3]
    lengths = "q7 kv70" if "tree" in mask else "q64 kv64"
    problem = AttentionProblem.parse(f"b2 hq2 hkv1 {lengths} d16 {dtype} {mask}")
    require(verify(problem, WHOLE_HEADS))


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_that_reads_tensors(name: str) -> None:
    mask, rows, columns = MASKS[name]
    problem = AttentionProblem.parse(
        f"b{BATCH} hq{HEADS} hkv1 q{rows} kv{columns} d16 fp32 {mask.stand_in}"
    )
    problem = replace(problem, mask=mask.stand_in)
    kernels = {kernel: render(problem, one, kernel) for kernel, one in WHOLE_HEADS.items()}
    require(check(kernels, make_inputs(problem), mask=mask))


@pytest.mark.parametrize("name", SCORES)
def test_every_form_of_score(name: str) -> None:
    score = made_from(SCORES[name])
    problem = AttentionProblem.parse(f"b{BATCH} hq{HEADS} hkv1 q70 kv70 d16/32 fp32 causal")
    problem = replace(problem, score=score.form)
    kernels = {kernel: render(problem, one, kernel) for kernel, one in WHOLE_HEADS.items()}
    require(check(kernels, make_inputs(problem), mask=problem.mask, score=score))


@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_equal_the_model(name: str) -> None:
    """As builds that count have it, which are held to the same model."""
    text, configs = FAMILIES[name]
    problem = AttentionProblem.parse(text)
    x = make_inputs(problem)
    moved: dict[Kernel, tuple[int, int]] = dict.fromkeys(configs, (0, 0))

    def counting(kernel: Kernel, config: TileConfig) -> Any:
        aligned = config.descriptors
        launch = load(render(problem, config, kernel, aligned=aligned)).launch

        def run(*given: Any, **laid: Any) -> Any:
            with interpreting.count_traffic() as actual:
                made = launch(*given, **laid)
            read, written = moved[kernel]
            moved[kernel] = read + actual.read_bytes, written + actual.write_bytes
            return made

        return run

    launches = {kernel: counting(kernel, config) for kernel, config in configs.items()}
    _, lse = passes.forward(launches, x.q, x.k, x.v, 0.1, panel_rows=1 << 20)
    if len(configs) > 2:
        delta = torch.zeros_like(lse)
        passes.gradients(launches, x.q, x.k, x.v, x.dout, lse, delta, 0.1, panel_rows=1 << 20)
    width = configs["fwd_scores"].block_n if "fwd_scores" in configs else 0
    for kernel, config in configs.items():
        before = next((one for one in BEFORE.get(kernel, ()) if one in configs), "")
        expected = traffic_of(
            tiled(kernel, problem, config, joined=configs.get(before), follows=before),
            aligned=config.descriptors,
            score_width=width or config.block_n,
        )
        if kernel != "bwd_preprocess":
            assert moved[kernel] == (expected.read_bytes, expected.write_bytes), kernel
