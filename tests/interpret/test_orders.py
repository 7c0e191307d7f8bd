"""A verdict does not hang on the order of sums, which each processor, GPU and tile size has of its
own: tiles are visited from the last to the first, and all sums add up backwards."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter

from tests import sliced
from tests.score_inputs import HEADS, SINKS, random
from tilegen.check import interpreter
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require, run
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.masks import Mask, causal, dilated, full, kv_lengths, sliding_window
from tilegen.masks.score import Score, relative_bias, sinks
from tilegen.masks.usual import KvPrefix
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
BACKWARDS = '''

def backwards(*bounds):
    """Count like range, from the end."""
    return reversed(range(*map(int, bounds)))
'''
LOOKED_UP = re.compile(r"tl\.load\((tiles_ptr[\w+ ]*?)(?: \+ after)?, mask=(0|after) < (\w+),")
"""The look-up of a list's first tile, or of the one `after` a step."""
CASES: dict[str, tuple[str, Mask, Score | None]] = {
    # Rows of a single key, whose gradients are exactly 0.
    "one_key": ("b1 hq2 hkv1 q33 kv31 d16 fp32 full", causal() & sliding_window(20), None),
    "lists": ("b1 hq2 hkv1 q33 kv33 d16 fp32 full", causal() & (dilated(3) | KvPrefix(2)), None),
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
        body = body.replace(" in range(", " in backwards(")
    source = head + BACKWARDS + "\n\n@triton.jit" + body
    assert ahead or " in backwards(" in source
    return replace(rendered, source=source, digest=f"{rendered.digest}-backwards")


@pytest.fixture
def reversed_sums(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Have products and sums add up from their last term to their first; return how many turned."""
    interpreter.prepare()
    module: Any = triton.runtime.interpreter
    builder, handle = module.interpreter_builder, module.TensorHandle
    create_dot, add_up = builder.create_dot, module.ReduceOps.sum
    count = 0

    def turned(one: Any, axis: int) -> Any:
        nonlocal count
        count += 1
        return handle(np.ascontiguousarray(np.flip(one.data, axis)), one.dtype.scalar)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(turned(a, -1), turned(b, -2), *rest)

    def sum_(self: Any, value: Any) -> Any:
        (one,) = value if isinstance(value, tuple) else (value,)
        return add_up(self, self.to_tensor(turned(one.handle, self.axis).data, one.dtype))

    monkeypatch.setattr(builder, "create_dot", dot)
    monkeypatch.setattr(module.ReduceOps, "sum", sum_)
    return lambda: count


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CASES)
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
        forward = {kernel: one for kernel, one in kernels.items() if kernel.startswith("fwd")}
        before = run(forward, inputs, 0.2)["out"]
    count = request.getfixturevalue("reversed_sums")
    require(check(turned, inputs, mask=mask, score=score))
    assert count() > 0
    if name == "long_sums":
        assert not torch.equal(run(forward, inputs, 0.2)["out"], before), "another order"
