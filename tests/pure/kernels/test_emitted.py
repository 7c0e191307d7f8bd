"""Emitted kernels as text, one or two of each family; together they use every template.

Read the difference after a change to a template, then accept it with --update-golden.
"""

import pytest

from tests.conftest import CheckGolden
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

EMITTED = {
    "fwd": ("b4 hq32 hkv8 q4096 d128 bf16 causal", "m128n64w8s3"),
    "fwd of lists": (
        "hq4 hkv2 q100 d72/60 fp32 dilated(3) score(5*tanh(s/5),sinks)",
        "m128n64w8s3",
    ),
    "bwd_dkdv": (
        "b4 hq32 hkv8 q4096 d128 bf16 causal(bottom_right)&window(63,9) dropout",
        "m128n64w8s3",
    ),
    "bwd_dq": (
        "hq4 hkv1 q100 d80/64 fp16 window(63,0) score(s+t0[h]*(k-q),float32)",
        "m64n128w8s2t",
    ),
    "bwd_preprocess": ("b4 hq32 hkv8 q4096 d128 bf16 causal", "m128n64w8s3"),
    "fwd_streamed": ("hq8 hkv2 q8192 d576/512 bf16 causal", "m32n16d64w4s2"),
    "bwd_scores": ("b4 hq32 hkv8 q4096 d128 bf16 causal dropout", "m64n32d64w4s2"),
    "bwd_columns": ("hq8 hkv2 q8192 d576/512 bf16 dilated(3)", "m32n64d64w4s2"),
    "fwd_split": ("hq12 hkv2 q8 kv4096 d128 bf16 causal(bottom_right)", "m8h8n64k2048w4s2t"),
    "fwd_paged": ("hq64 hkv1 q1 kv4096 d576/512 bf16 full page64 latent", "m1h64n32k1024w8s2"),
    "fwd_combine": ("hq8 hkv2 q8 kv4096 d192/80 bf16 full score(s,sinks)", "m1n16w1s1"),
    "bwd_one_pass": (
        "hq4 hkv4 q1024 d40 fp16 kv_prefix(@b:1024) score(s+t0[q],float32+)",
        "m64n64k512w4s2",
    ),
    "bwd_dkdv_split": ("hq8 hkv2 q4096 d80 fp16 dilated(3)", "m32n32k256w4s2"),
    "bwd_dq_sum": ("hq8 hkv2 q64 kv65536 d128 bf16 full", "m1n16w4s1"),
    "fwd_hopper": (
        "hq4 hkv1 q1024 d192/128 fp16 dilated(3) score(5*tanh(s/5),sinks)",
        "m128n64w8s2tp132u",
    ),
    "bwd_dkdv_hopper": (
        "hq4 hkv1 q1024 d64 fp16 keep(less(k+3*h,q)) score(5*tanh(s/5))",
        "m64n128w8s3t",
    ),
    "bwd_dq_hopper": ("hq4 hkv1 q1024 d128 bf16 causal", "m128n128w8s2t"),
}


@pytest.mark.parametrize("name", EMITTED)
def test_text(name: str, golden: CheckGolden) -> None:
    text, config = EMITTED[name]
    kernel, problem = name.split()[0], AttentionProblem.parse(text)
    aligned = None if name != "fwd of lists" else False
    golden(render(problem, TileConfig.parse(config), kernel, aligned=aligned).source)
