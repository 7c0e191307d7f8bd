"""The backward in one pass, compiled for GPUs, on which it was never timed: by addresses and tensor
descriptors, with masks and scores."""

from __future__ import annotations

import re

import pytest

from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import compile_many
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

CASES = [
    ("hq4 hkv1 q1024 d64 bf16 causal", "m64n64k512w4s2"),
    ("hq4 hkv2 q1024 d192/128 fp16 window(100,9)", "m32n64k256w8s2"),
    ("hq4 hkv2 q1024 d64 bf16 dilated(3)", "m32n32k128w4s3"),
    ("hq4 hkv2 q1024 d32 fp32 full score(s+t0[k],float32+) dropout", "m32n32k256w4s1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_it_compiles_with_one_barrier_more_for_each_tile_of_keys(arch: str) -> None:
    wanted = [render(AttentionProblem.parse(t), TileConfig.parse(c), NAME) for t, c in CASES]
    if arch == "sm_90":
        config = TileConfig.parse("m64n64k512w4s2t")
        wanted.append(render(AttentionProblem.parse(CASES[0][0]), config, NAME))
    results = dict(compile_many(wanted, arch, workers=1))
    for item in wanted:
        made = results[item]
        assert isinstance(made, CompiledKernel), made
        body = item.source.split("def attention_bwd")[1]
        loop = body.split("for tile_n in range(share")[1]
        assert re.match(r"[^\n]*\n(\s*#[^\n]*\n)*\s*tl\.debug_barrier\(\)\n", loop)


NAME = "bwd_one_pass"
