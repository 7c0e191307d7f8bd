"""A verdict does not hang on the order of sums, which each processor, GPU and tile size has of its
own: tiles are visited from the last to the first, by the code of another processor."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from tests.compiler.runs import TARGETS, WIDE
from tests.support import sliced
from tests.support.score_inputs import HEADS, SINKS, random
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require, run
from tilegen.cpu import target
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.masks import Mask, causal, dilated, full, kv_lengths, sliding_window
from tilegen.masks.score import Score, relative_bias, sinks
from tilegen.masks.usual import kv_prefix
from tilegen.problem import AttentionProblem

pytestmark = pytest.mark.portable

WHOLE_HEADS: dict[Kernel, TileConfig] = dict.fromkeys(
    LARGE_CACHE, TileConfig(block_m=16, block_n=32)
)
FAMILIES: dict[str, dict[Kernel, TileConfig]] = {
    "whole_heads": WHOLE_HEADS,
    "small_cache": sliced.SMALL_CACHE,
    "streamed": sliced.STREAMED,
}
LOOP = re.compile(r"^( *)for (\w+) in range\((.*)\):$", re.MULTILINE)
LOOKED_UP = re.compile(r"tl\.load\((tiles_ptr[\w+ ]*?)(?: \+ after)?, mask=(0|after) < (\w+),")
"""The look-up of a list's first tile, or of the one `after` a step."""
CASES: dict[str, tuple[str, Mask, Score | None]] = {
    # Rows of a single key, whose gradients are exactly 0.
    "one_key": ("b1 hq2 hkv1 q33 kv31 d16 fp32 full", causal() & sliding_window(20), None),
    "lists": ("b1 hq2 hkv1 q33 kv33 d16 fp32 full", causal() & (dilated(3) | kv_prefix(2)), None),
    "decoding": (
        "b3 hq2 hkv1 q1 kv60 d16 fp32 full",
        kv_lengths([1, 33, 0]) & causal("bottom_right"),
        None,
    ),
    "long_sums": ("b1 hq2 hkv2 q20 kv300 d72/40 fp32 full", full(), None),
    "half_precision": ("b1 hq4 hkv2 q70 kv90 d32/16 fp16 full", causal(), None),
    "scores": (
        "b1 hq2 hkv1 q70 kv70 d16 fp32 full",
        causal(),
        relative_bias(random(HEADS, 21)).then(sinks(SINKS)),
    ),
}


def reversed_tiles(rendered: RenderedKernel) -> RenderedKernel:
    """Return a kernel whose loops run from their last step to their first; those that look a list
    up a step ahead go through it from its end."""
    head, _, body = rendered.source.partition("\n@triton.jit")
    body, ahead = LOOKED_UP.subn(r"tl.load(\1 + \3 - 1 - \2, mask=\2 < \3,", body)
    if not ahead:
        body, loops = LOOP.subn(_backwards, body)
        assert loops
    source = head + "\n@triton.jit" + body
    return replace(rendered, source=source, digest=f"{rendered.digest}-backwards")


def _backwards(loop: re.Match[str]) -> str:
    """Return the head of a loop that counts like another, from the end."""
    indent, name, bounds = loop.groups()
    given = ast.parse(f"range({bounds})", mode="eval").body
    assert isinstance(given, ast.Call)
    texts = [ast.unparse(one) for one in given.args]
    first, after, step = ("0", *texts, "1") if len(texts) == 1 else (*texts, "1")[:3]
    last = f"({first}) + (({after}) - 1 - ({first})) // ({step}) * ({step})"
    return (
        f"{indent}for {name}_from_end in range({bounds}):\n"
        f"{indent}    {name} = {last} + ({first}) - {name}_from_end"
    )


@pytest.fixture
def other_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled with vectors of another width, or without fused products: sums and
    products sum in another order, and round otherwise."""
    other = replace(TARGETS.get("sse2", WIDE), level=target.host().level)
    monkeypatch.setattr(target, "host", lambda: other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, family",
    [
        *((name, "whole_heads") for name in CASES),
        *zip(CASES, cycle(["streamed", "small_cache"])),
    ],
)
def test_the_order_of_sums_changes_no_verdict(
    name: str, family: str, request: pytest.FixtureRequest
) -> None:
    text, mask, score = CASES[name]
    problem = replace(AttentionProblem.parse(text), mask=mask.stand_in, score=score and score.form)
    inputs = make_inputs(problem)
    kernels = {
        kernel: render(problem, config, kernel) for kernel, config in FAMILIES[family].items()
    }
    turned = {
        kernel: one if kernel == "bwd_preprocess" else reversed_tiles(one)
        for kernel, one in kernels.items()
    }
    if name == "long_sums":
        before = run(_forward(kernels), inputs, 0.2)["out"]
    request.getfixturevalue("other_sums")
    require(check(turned, inputs, mask=mask, score=score))
    if name == "long_sums":
        assert not torch.equal(run(_forward(turned), inputs, 0.2)["out"], before), "another order"


def _forward(kernels: dict[Kernel, RenderedKernel]) -> dict[Kernel, RenderedKernel]:
    return {kernel: one for kernel, one in kernels.items() if kernel.startswith("fwd")}
