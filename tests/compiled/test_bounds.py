"""Counted loads and stores of emitted kernels are never below the lower bound of the mask."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.study.counting import count
from benchmarks.study.tiles import FAMILIES, configs_of, held_words
from tests.support.counted import least_bytes
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

SMALLEST = {
    direction: {
        name: {kernel: min(configs_of(kernel)) for kernel in family.names}
        for name, family in families.items()
        if not any(kernel.specialised for kernel in family.kernels)  # which no processor runs
    }
    for direction, families in FAMILIES.items()
}
WAYS = [(direction, name) for direction, families in SMALLEST.items() for name in families]
number = st.integers(0, 40)
masks = st.one_of(
    st.sampled_from(["full", "causal", "causal(bottom_right)", "kv_prefix(7)"]),
    st.builds("window({},{})".format, number, number),
    st.builds("causal&window({},0)".format, number),
    st.builds("prefix_lm({})".format, number),
    st.builds("global({})|window({},9)".format, number, number),
)


@pytest.mark.slow
@pytest.mark.parametrize("direction, family", WAYS)
@settings(max_examples=2)
@given(masks, st.integers(1, 60), st.integers(1, 60), st.integers(1, 2))
def test_counted_traffic_is_above_the_bound(
    direction: Direction, family: str, mask: str, seqlen_q: int, seqlen_kv: int, group: int
) -> None:
    """One program after the other, with as much fast memory as it holds."""
    shape = f"hq{group} hkv1 q{seqlen_q} kv{seqlen_kv} d16 fp32"
    problem = AttentionProblem.parse(f"{shape} {mask}").normal()
    configs = SMALLEST[direction][family]
    held = [
        held_words(kernel, config, 16, 4)
        for kernel, config in configs.items()
        if kernel != "bwd_preprocess"
    ]
    moved = count(problem, configs)
    assert least_bytes(problem, direction, max(held)) <= sum(map(sum, moved.values()))
