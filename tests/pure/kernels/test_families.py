"""Which kernels compute a problem, and how rows are cut into panels."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support import splits
from tilegen.choose import families
from tilegen.choose.families import CLEARLY_FASTER, family, kernels_of, ranked_families
from tilegen.errors import Unsupported
from tilegen.gpus.spec import gpu, with_fast_memory
from tilegen.kernels.config import TileConfig
from tilegen.kernels.panels import PANEL_STEP, panels, panels_per_group, rows_for
from tilegen.kernels.registry import KERNELS, SMALL_CACHE, check_config
from tilegen.problem import AttentionProblem
from tilegen.theory.regimes import critical_head_dim

H200 = gpu("h200")
FAST_MEMORY = (48, 99, 227)
HEAD_DIMS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024)


def layer(head_dim: int, dtype: str = "bf16") -> AttentionProblem:
    return AttentionProblem.parse(f"b4 hq16 hkv16 q8192 kv8192 d{head_dim} {dtype} causal")


def test_ordinary_head_dims_keep_queries_on_chip() -> None:
    for head_dim in (64, 128, 256):
        assert kernels_of(layer(head_dim), H200) == (
            *("fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"),
        )


def test_large_head_dims_go_through_panels() -> None:
    """Beyond the theorem's crossovers on an H200, 545 forward and 437 backward; 576 is no
    multiple of their slices."""
    assert kernels_of(layer(640), H200) == SMALL_CACHE
    assert family(layer(448), H200, "backward") == "small_cache"


def test_a_backward_of_few_wide_heads_does_not_leave_sms_idle() -> None:
    """At head dim 256 one key-value head has 32 programs for dK and dV, and 132 SMs, unless queries
    are split over more; sixteen have enough, and are not turned by what the model may err."""
    few, many = (
        AttentionProblem.parse(f"b1 hq48 hkv{heads} q2048 kv2048 d256 bf16 causal")
        for heads in (1, 16)
    )
    assert family(few, H200, "backward") == "split_dkdv"
    assert family(many, H200, "backward") == "two_pass"
    assert family(few, H200, "forward") == "q_stationary"
    for problem, expected in ((few, True), (many, False)):
        of = dict(ranked_families(problem.bucket, H200, "backward"))
        assert (of["two_pass"] > CLEARLY_FASTER * of["small_cache"]) == expected


def test_other_families_of_ordinary_head_dims_are_not_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(families, "ranked_families", None)
    assert family(layer(128), H200, "backward") == "two_pass"
    with pytest.raises(TypeError):
        family(layer(256), H200, "backward")


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_less_fast_memory_flips_the_choice_earlier(direction: str) -> None:
    flips: list[int] = []
    for kib in FAST_MEMORY:
        spec = with_fast_memory(H200, kib * 1024)
        chosen = [family(layer(d), spec, direction) for d in HEAD_DIMS]  # type: ignore[arg-type]
        small = [name not in ("q_stationary", "two_pass") for name in chosen]
        assert small == sorted(small), f"{kib} KiB: more than one flip, {chosen}"
        flips.append(HEAD_DIMS[small.index(True)])
        # Never later than where the theorem's constants place it: those leave no room for buffers.
        crossing = critical_head_dim(spec, direction)  # type: ignore[arg-type]
        assert flips[-1] <= min(d for d in HEAD_DIMS if d >= crossing)
    assert all(less <= more for less, more in pairwise(flips))
    assert flips[0] < flips[-1]


def test_fp32_flips_earlier() -> None:
    assert family(layer(320, "fp32"), H200, "backward") == "small_cache"
    assert family(layer(128, "fp32"), H200, "forward") == "q_stationary"


def test_families_are_ranked_by_their_predicted_time() -> None:
    ranked = ranked_families(layer(320).bucket, H200, "forward")
    assert {name for name, _ in ranked} == {"q_stationary", "q_streamed", "small_cache"}
    assert all(seconds > 0 for _, seconds in ranked)


# --------------------------------------------------------------------------------------------------
# Panels


@pytest.mark.parametrize(
    "num_heads, group_size, seqlen_q",
    [(1, 1, 1), (6, 1, 700), (6, 3, 300), (16, 4, 256), (8, 8, 1000), (12, 3, 5)],
)
def test_panels_cover_every_row_once(num_heads: int, group_size: int, seqlen_q: int) -> None:
    for rows in (1, 256, 511, 512, 2 * seqlen_q, 5 * seqlen_q, 7 * seqlen_q, 10**9):
        seen: list[tuple[int, int]] = []
        open_groups: set[int] = set()
        for p in panels(num_heads, group_size, seqlen_q, rows):
            assert p.row_first % PANEL_STEP == 0
            assert p.num_heads * p.num_rows <= max(rows, PANEL_STEP)
            groups = {h // group_size for h in range(p.head_first, p.head_first + p.num_heads)}
            # What a group's first panel begins its last one ends, and nothing comes between.
            assert p.begins == (not groups & open_groups)
            open_groups = set() if p.ends else groups
            assert len(groups) == 1 or (p.begins and p.ends)
            seen += [
                (head, row)
                for head in range(p.head_first, p.head_first + p.num_heads)
                for row in range(p.row_first, p.row_first + p.num_rows)
            ]
        assert not open_groups
        assert seen == [(head, row) for head in range(num_heads) for row in range(seqlen_q)]


def test_panels_of_a_group_are_counted() -> None:
    for rows in (1, 600, 1024, 3000, 10**9):
        every = list(panels(12, 4, 700, rows))
        in_first = [p for p in every if p.head_first < 4]
        assert panels_per_group(4, 700, rows) == len(in_first)


@pytest.mark.parametrize("length", [1024, 8192, 131072, 2**20])
def test_a_panel_stays_in_l2_or_gives_every_sm_a_program(length: int) -> None:
    problem = AttentionProblem.parse(f"hq1 hkv1 q{length} kv{length} d512 bf16 full")
    rows = rows_for(problem, H200, "forward")
    in_l2 = rows * length * 2 <= H200.l2_bytes / 2
    assert in_l2 or rows == -(-H200.num_sms // 4) * 128
    assert rows_for(problem, H200, "backward") <= rows


def test_memory_of_panels_is_linear_in_the_length() -> None:
    bytes_per_key = [
        rows_for(AttentionProblem.parse(f"hq1 hkv1 q{n} kv{n} d512 bf16 full"), H200, "forward")
        for n in (2**18, 2**19, 2**20)
    ]
    assert len(set(bytes_per_key)) == 1


# --------------------------------------------------------------------------------------------------
# Configs


def test_configs_belong_to_a_kind_of_kernel() -> None:
    whole = TileConfig(block_m=64, block_n=64)
    others = splits.ALL  # see test_split_kv.py and test_split_backward.py
    for kernel in (one for one in KERNELS if one not in others):
        if KERNELS[kernel].sliced:
            with pytest.raises(Unsupported, match=f"block_d of {kernel} must be one of"):
                check_config(whole, kernel)
        elif KERNELS[kernel].specialised:
            with pytest.raises(Unsupported, match="through tensor descriptors: add t, got m64n64"):
                check_config(whole, kernel)
        else:
            check_config(whole, kernel)
            with pytest.raises(Unsupported, match="remove d from m64n64d32w4s2"):
                check_config(TileConfig.parse("m64n64d32w4s2"), kernel)


def test_kernels_whose_loop_takes_splits_have_the_knob_for_them() -> None:
    """A part of a sum is read by the kernel that follows, in the order of the splits."""
    for spec in KERNELS.values():
        assert (spec.splits or spec.shares) == (spec.knobs.split_kv != (0,)), spec.name
        assert spec.parts == any(x.in_parts for x in spec.outputs), spec.name
        assert spec.joins == any(one.startswith("partial") for one in spec.parameters), spec.name


def test_score_tiles_hold_whole_steps_of_values() -> None:
    widths = KERNELS["fwd_scores"].knobs.block_n
    steps = KERNELS["fwd_values"].knobs.block_n
    assert all(width % step == 0 for width in widths for step in steps)


def test_sliced_configs_round_trip() -> None:
    config = TileConfig(block_m=128, block_n=64, block_d=32, num_warps=8, num_stages=3)
    assert config.key == "m128n64d32w8s3"
    assert TileConfig.parse(config.key) == config
    assert eval(repr(config)) == config
