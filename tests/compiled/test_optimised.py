"""A kernel of every family as users compile it. The other tests of this folder have LLVM generate
code in less time."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support import problems as described
from tests.support import sliced
from tests.support.splits import ALL, backward
from tilegen.check.verification import require, verify
from tilegen.cpu import target
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.problem import AttentionProblem

WHOLE_HEADS: dict[Kernel, TileConfig] = dict.fromkeys(
    LARGE_CACHE, TileConfig(block_m=32, block_n=32)
)
PAGED: dict[Kernel, TileConfig] = {name: ALL[name] for name in ("fwd_paged", "fwd_combine")}
SPLIT_KV: dict[Kernel, TileConfig] = {name: ALL[name] for name in ("fwd_split", "fwd_combine")}
CASES: list[tuple[str, Mapping[Kernel, TileConfig]]] = [
    ("b1 hq2 hkv1 q70 kv97 d16 fp32 causal&window(33,3)", WHOLE_HEADS),
    ("b1 hq4 hkv2 q70 kv97 d32 bf16 causal(bottom_right)", WHOLE_HEADS),
    ("b1 hq2 hkv1 q97 kv70 d16 fp16 global(5)|window(9,9) score(tanh(s/5)*5)", WHOLE_HEADS),
    ("b1 hq2 hkv1 q70 kv70 d16 fp32 causal score(s,sinks) dropout", WHOLE_HEADS),
    ("b2 hq4 hkv2 q63 kv63 d32 fp16 causal", described.configs(WHOLE_HEADS["fwd"])),
    ("b1 hq2 hkv1 q70 kv97 d40/24 bf16 causal(bottom_right)", sliced.SMALL_CACHE),
    ("b1 hq2 hkv1 q70 kv97 d40/24 fp16 window(20,9)", sliced.STREAMED),
    ("b1 hq4 hkv2 q9 kv150 d24/16 fp32 causal(bottom_right)", SPLIT_KV),
    ("b2 hq4 hkv2 q9 kv150 d16 bf16 causal(bottom_right) page16", PAGED),
    ("b1 hq4 hkv2 q70 kv97 d24/16 fp16 causal", backward("split_backward")),
    ("b1 hq4 hkv2 q97 kv70 d32 bf16 causal", backward("one_pass")),
]


def test_every_kernel_is_here() -> None:
    on_processors = {name for name, spec in KERNELS.items() if not spec.specialised}
    assert {name for _, configs in CASES for name in configs} == on_processors


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("text, configs", CASES, ids=lambda one: one if type(one) is str else "")
def test_optimised_kernels_agree_with_the_reference(
    text: str, configs: Mapping[Kernel, TileConfig]
) -> None:
    assert target.host().level == 2
    require(verify(AttentionProblem.parse(text), configs))
