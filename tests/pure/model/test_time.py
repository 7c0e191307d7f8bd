"""Time: clocks of a step on each unit, waves, L2, and published throughputs."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tilegen.choose.ranker import estimate
from tilegen.gpus.spec import GpuSpec, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model.footprint import footprint
from tilegen.model.formulas import computed
from tilegen.model.on_chip import residents
from tilegen.model.rates import rates_of
from tilegen.model.terms import BUSY
from tilegen.model.time import (
    StepClocks,
    local_clocks,
    queued,
    step_clocks,
    time,
)
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled

PARSE = AttentionProblem.parse
LLAMA = PARSE("b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal")


def config(text: str) -> TileConfig:
    return TileConfig.parse(text)


def ideal(spec: GpuSpec, problem: AttentionProblem, text: str, kernel: Kernel = "fwd") -> dict:
    """Clocks of one step at the peaks of the data sheet."""
    clocks = step_clocks(Tiled.of(kernel, problem, spec, config(text)))
    return {
        "tensor": clocks.tensor * rates_of(spec.arch).tensor_efficiency,
        "exp": clocks.exp,
        "smem": clocks.smem,
    }


def test_units_of_a_b200_step_are_those_of_flashattention_4() -> None:
    """M = N = d = 128: 1024 clocks of products, 1024 of exponentials, 768 of operands; and 512 in
    which keys and values come into shared memory, which FlashAttention-4 does not count."""
    clocks = ideal(gpu("b200"), LLAMA, "m128n128w8s2")
    assert clocks == pytest.approx({"tensor": 1024, "exp": 1024, "smem": 768 + 512}, rel=5e-3)


@pytest.mark.parametrize(
    "name, head_dim",
    [("b200", 128), ("h100", 64), ("a100", 32), ("mi300x", 32), ("v100", 16), ("rtx4090", 8)],
)
def test_below_this_head_dim_exponentials_take_longer(name: str, head_dim: int) -> None:
    """d < F / 4u: products and exponentials balance there."""
    flops_per_clock = gpu(name).tensor_flops_16 / gpu(name).num_sms / gpu(name).clock_hz
    scores, u = 128 * 128, gpu(name).exp_per_clk_per_sm
    products = 4 * scores * head_dim / flops_per_clock
    assert products == pytest.approx(scores / u, rel=5e-3)


@pytest.mark.parametrize(
    "kernel, products", [("fwd", 2), ("bwd_dkdv", 4), ("bwd_dq", 3), ("bwd_preprocess", 0)]
)
def test_products_of_each_kernel(kernel: Kernel, products: int) -> None:
    """Two in the forward; seven in the two backward passes together."""
    work = KERNELS[kernel].step(LLAMA, config("m64n32w4s2"))
    assert work.multiply_adds == products * 64 * 32 * 128


def test_flops_of_a_launch_count_whole_tiles_at_padded_widths() -> None:
    problem = PARSE("b2 hq4 hkv4 q100 kv100 d72/80 bf16 full")
    cost = estimate(Tiled.of("fwd", problem, gpu("h200"), config("m64n64w4s2")))
    assert cost.flops == 2 * 4 * (2 * 2) * 2 * 64 * 64 * (80 + 80)


def test_rescaling_bounds_block_n_from_below() -> None:
    """Issue slots per score fall as block_n grows: the accumulators are rescaled less often."""
    per_score = [
        step_clocks(Tiled.of("fwd", LLAMA, gpu("h200"), config(f"m128n{n}w8s2"))).issue / n
        for n in (16, 32, 64, 128)
    ]
    assert per_score == sorted(per_score, reverse=True)
    assert per_score[0] > 2 * per_score[-1]


def test_wider_outputs_take_issue_slots() -> None:
    """Each accumulator is multiplied by alpha in every step: about two instructions."""
    wide, narrow = (
        step_clocks(
            Tiled.of(
                "fwd", PARSE(f"hq1 q4096 d128/{v} bf16 full"), gpu("h200"), config("m128n64w8s2")
            )
        )
        for v in (128, 64)
    )
    slots = (wide.issue - narrow.issue) * 128
    assert 1 <= slots / (128 * 64) <= 2.5


def test_warps_without_rows_of_their_own_repeat_the_work() -> None:
    """64 rows are four warps of 16: eight do everything twice (64 HMMA per warp either way)."""
    problem = PARSE("hq1 q4096 d64 bf16 full")
    four, eight = (
        step_clocks(Tiled.of("fwd", problem, gpu("a100"), config(f"m64n64w{warps}s2")))
        for warps in (4, 8)
    )
    assert (eight.tensor, eight.exp) == (2 * four.tensor, 2 * four.exp)
    wide = PARSE("hq1 q4096 d128 bf16 full")  # 64 x 128 accumulators: warps share the columns
    four, eight = (
        step_clocks(Tiled.of("fwd", wide, gpu("a100"), config(f"m64n64w{warps}s2")))
        for warps in (4, 8)
    )
    assert (eight.tensor, eight.exp) == (four.tensor, four.exp)


def test_low_tiles_miss_the_wide_matrix_instructions() -> None:
    """wgmma has 64 rows; below, Hopper runs Ampere's instructions."""
    per_row = [
        step_clocks(Tiled.of("fwd", LLAMA, gpu("h200"), config(f"m{m}n64w4s2"))).tensor / m
        for m in (64, 128)
    ]
    low = step_clocks(Tiled.of("fwd", LLAMA, gpu("h200"), config("m32n64w4s2"))).tensor / 32
    assert per_row[0] == pytest.approx(per_row[1])
    assert low == pytest.approx(per_row[0] / rates_of("sm_90").narrow_rate)


def test_a_warp_alone_waits_for_all_units_and_many_for_the_busiest() -> None:
    units = 400.0, 300.0, 100.0
    assert queued(4, 1, units, idle=50.0) == pytest.approx(4 / 4 * (50 + 800)), "nobody else"
    assert queued(1, 1, units, idle=0.0) == pytest.approx(4 * 800), "three schedulers are idle"
    assert queued(4, 400, units, idle=50.0) == pytest.approx(400, rel=0.01)
    by_programs = [queued(4, together, units, idle=50.0) for together in (1, 2, 3, 8)]
    assert by_programs == sorted(by_programs, reverse=True)


def test_two_warps_that_share_two_units() -> None:
    """Each finds the other at one of two equal units: half again as long there, by hand."""
    assert queued(4, 2, (100.0, 100.0), idle=0.0) == pytest.approx((150 + 150) / 2)
    half = queued(2, 3, (100.0, 100.0), idle=0.0) / 2  # six warps on four schedulers
    assert half == pytest.approx((200 + 150) / 2 * 2 / 4)


def test_four_warps_alone_on_an_rtx_3090_overlap_little() -> None:
    """Published: 6.58 ms for the first, 4.64 for the second (GQA forward of 4096 rows)."""
    problem, spec = PARSE("b2 hq32 hkv8 q4096 d128 fp16 causal"), gpu("rtx3090")

    def seconds(text: str, smem: int) -> float:
        tiled = Tiled.of("fwd", problem, spec, config(text))
        return time(tiled, replace(footprint(tiled), registers=255, smem_bytes=smem)).seconds

    alone, shared = seconds("m64n64w4s2", 57344), seconds("m128n32w4s2", 49154)
    assert 1.25 < alone / shared < 1.6
    assert shared == pytest.approx(4.636e-3, rel=0.12)


def busy_clocks(clocks: StepClocks, softmax: float, *, alone: bool, lockstep: float = 0.0) -> float:
    facts = asdict(clocks) | {"softmax": softmax, "alone": alone, "lockstep": lockstep}
    return computed(BUSY, facts)["busy"]


def test_one_warpgroup_alone_cannot_hide_its_waits() -> None:
    """Operands of asynchronous products take longer than the products; then the softmax follows."""
    clocks = StepClocks(
        tensor=600, exp=200, issue=300, masking=0, smem=700, exposed=1.0, asynchronous=True
    )
    assert busy_clocks(clocks, 300, alone=True) == 700 + 300
    assert busy_clocks(clocks, 300, alone=False) == 600 + 300, "two fill each other's time"
    half = replace(clocks, exposed=0.5)
    assert busy_clocks(half, 300, alone=True) == 700 + 150
    assert busy_clocks(half, 300, alone=True, lockstep=0.5) == 700 + 225
    assert busy_clocks(half, 300, alone=False, lockstep=0.5) == 600 + 150
    assert busy_clocks(replace(clocks, smem=100), 300, alone=True) == 600 + 300
    assert busy_clocks(replace(clocks, asynchronous=False), 300, alone=True) == 600 + 300


def test_a_program_alone_on_an_sm_of_hopper_starts_its_products_together() -> None:
    """Two programs of four warps take less than one of eight, as was timed on an H200."""
    problem = AttentionProblem.parse("b32 hq16 hkv16 q512 kv512 d64 bf16 full")
    for kernel in ("fwd", "bwd_dq"):
        large, small = (
            time(tiled, replace(footprint(tiled), registers=registers)).seconds
            for tiled, registers in (
                (Tiled.of(kernel, problem, gpu("h200"), config("m256n64w8s3")), 255),
                (Tiled.of(kernel, problem, gpu("h200"), config("m128n64w4s3")), 255),
            )
        )
        assert 1.02 < large / small < 1.4


def test_a_small_grid_leaves_one_warpgroup_on_each_sm() -> None:
    """Two programs fit, but with 132 of them each has an SM to itself: operands that come slowly
    then delay it more than where a second one works meanwhile."""
    spec, tile = gpu("h200"), config("m64n64w4s2")

    def delay(heads: int) -> float:
        problem = PARSE(f"b1 hq{heads} hkv{heads} q64 kv8192 d128 bf16 full")
        tiled = Tiled.of("fwd", problem, spec, tile)
        clocks, needs = step_clocks(tiled), footprint(tiled)
        assert residents(needs, spec, tile) == 2
        quick, slow = (
            time(tiled, needs, replace(clocks, smem=times * clocks.tensor)).busy_seconds
            for times in (1.0, 1.5)
        )
        return (slow - quick) / (heads / 132)

    assert delay(132) > 1.5 * delay(264)


def test_spilled_bytes_move_as_often_as_was_measured() -> None:
    tile = config("m64n64w4s2")
    h200, rtx3090 = (Tiled.of("fwd", LLAMA, gpu(name), tile) for name in ("h200", "rtx3090"))
    needs = replace(footprint(h200), registers=265)
    assert local_clocks(h200, needs) == 40 * 128 / 128
    assert local_clocks(rtx3090, needs) == 7.5 * 40 * 128 / 128


def test_spills_outside_loops_cost_each_program() -> None:
    """Splits of few keys pay it more often for the same steps."""
    spec, problem = gpu("h200"), PARSE("b1 hq64 hkv8 q1 kv65536 d128 bf16 full")
    for keys, programs in ((1024, 512), (4096, 128)):
        tile = config(f"m2h8n128k{keys}w4s4")
        tiled = Tiled.of("fwd_split", problem, spec, tile)
        needs, clocks = footprint(tiled), step_clocks(tiled)
        less, more = (
            time(tiled, needs, replace(clocks, local_once=words)) for words in (0.0, 4000.0)
        )
        paid = 1e6 * (more.busy_seconds - less.busy_seconds)
        waves = -(-programs // spec.num_sms)
        assert paid == pytest.approx(1e6 * waves * 4000 / spec.clock_hz, rel=0.3)
        assert dict(more.terms)["smem"] > dict(less.terms)["smem"]
