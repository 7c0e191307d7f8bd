"""Predicted times of whole launches: programs, waves and tails, L2 and DRAM, limits, published
throughputs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.problems import tiled
from tilegen.choose.ranker import estimate, propose
from tilegen.gpus.nearest import nearest
from tilegen.gpus.spec import GpuSpec, catalogue, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.dram import dram_bytes
from tilegen.model.estimate import CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.formulas import computed
from tilegen.model.on_chip import residents
from tilegen.model.rates import rates_of
from tilegen.model.terms import MEMORY
from tilegen.model.time import (
    facts_of,
    launch_seconds,
    step_clocks,
    time,
)
from tilegen.model.visits import visits
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

PARSE = AttentionProblem.parse
LLAMA = PARSE("b4 hq32 hkv8 q4096 kv4096 d128 bf16 causal")


def config(text: str) -> TileConfig:
    return TileConfig.parse(text)


def test_slow_l2_sets_the_time() -> None:
    spec = replace(gpu("h200"), l2_bandwidth=1e9)
    cost = estimate(Tiled.of("fwd", LLAMA, spec, config("m128n64w8s2")))
    moved = cost.read_bytes + cost.write_bytes
    expected = moved / (1e9 * rates_of("sm_90").l2_efficiency)
    assert cost.seconds == pytest.approx(expected, rel=1e-3)


def test_unequal_programs_leave_a_tail() -> None:
    """Twice the heads take less than twice the time: the last wave is partly empty only once, for
    part of one of its light programs."""
    left, two = (
        estimate(
            Tiled.of(
                "fwd",
                PARSE(f"b1 hq{h} hkv{h} q8192 d128 bf16 causal"),
                gpu("h200"),
                config("m128n64w8s2"),
            )
        )
        for h in (32, 64)
    )
    launch = rates_of("sm_90").launch_seconds
    tail = 2 * (left.seconds - launch) - (two.seconds - launch)
    program = (left.seconds - launch) / (32 * 64 / 132)  # of mean length
    assert 0.01 * program < tail < 0.17 * program  # with the end of a light program


def test_masked_tiles_cost_about_half_again() -> None:
    """130 ISETP and 64 FSEL among 821 instructions: a third of a masked step."""
    clocks = step_clocks(Tiled.of("fwd", LLAMA, gpu("h200"), config("m128n128w8s2")))
    assert 0.25 < clocks.masking / (clocks.issue + clocks.masking) < 0.5


def test_partial_tiles_make_a_launch_slower() -> None:
    """A window that is narrower than a tile: no tile is full."""
    problem = PARSE("b64 hq64 hkv64 q2048 kv2048 d128 bf16 window(30,30)")
    tiled = Tiled.of("fwd", problem, gpu("h200"), config("m128n64w8s3"))
    assert visits(tiled).tiles == visits(tiled).partial_tiles > 0
    needs, clocks = footprint(tiled), step_clocks(tiled)
    assert not needs.spill_bytes
    free = time(tiled, needs, replace(clocks, masking=0.0)).seconds
    assert 1.05 < time(tiled, needs).seconds / free < 1.5


@pytest.mark.parametrize("name", ["a100", "h200", "b200"])
def test_pipelining_hides_latency(name: str) -> None:
    """One program on an SM has nobody but its own pipeline to hide behind."""
    problem = PARSE("b8 hq32 hkv32 q2048 d64 bf16 full")
    spec = replace(gpu(name), registers_per_sm=32 * 255)
    costs = [
        estimate(Tiled.of("fwd", problem, spec, config(f"m64n16w4s{stages}")))
        for stages in (1, 2, 3, 4)
    ]
    latency = [dict(cost.terms)["latency"] for cost in costs]
    assert latency[0] == pytest.approx(latency[1], rel=0.01)  # as long, but in nobody's shadow
    assert latency[1] > 1.8 * latency[2] > 2.4 * latency[3]
    seconds = [cost.seconds for cost in costs]
    assert seconds[0] > 1.2 * seconds[1]
    assert seconds[1] > 1.01 * seconds[2]


def test_one_program_too_many_starts_a_wave() -> None:
    spec = replace(gpu("h200"), num_sms=100)
    tiles = config("m128n64w8s3")

    def seconds(heads: int) -> float:
        return estimate(
            Tiled.of(
                "fwd", PARSE(f"b1 hq{heads} hkv{heads} q128 kv8192 d128 bf16 full"), spec, tiles
            )
        ).seconds

    assert seconds(100) == pytest.approx(seconds(60), rel=0.02)
    assert seconds(101) > 1.8 * seconds(100)
    assert seconds(200) == pytest.approx(seconds(101), rel=0.02)


def test_a_last_wave_of_few_programs_hides_no_latency() -> None:
    """Programs that share an SM fill each other's waits; one alone takes as long as ever (published
    times of 512 programs in 396 places: benchmarks/results/published/README.md, split counts)."""
    spec = replace(gpu("h200"), l2_bandwidth=1e18, dram_bandwidth=1e18)
    tiles = config("m64n16w4s1")

    def seconds(heads: int) -> float:
        problem = PARSE(f"b1 hq{heads} hkv{heads} q64 kv8192 d64 bf16 full")
        return (
            estimate(Tiled.of("fwd", problem, spec, tiles)).seconds
            - rates_of(spec.arch).launch_seconds
        )

    needs = footprint(tiled("fwd", PARSE("hq1 q64 kv8192 d64 bf16 full"), tiles, spec.arch))
    places = spec.num_sms * residents(needs, spec, tiles)
    alone, full = seconds(spec.num_sms), seconds(places)
    assert full < 0.9 * alone * places / spec.num_sms
    assert seconds(places + 1) == pytest.approx(full + alone)
    assert seconds(2 * places) == pytest.approx(2 * full)


def test_waves_count_resident_programs() -> None:
    spec, tiles = gpu("h200"), config("m64n32w4s2")
    problem = PARSE("b4 hq32 hkv8 q4096 d64 bf16 full")
    together = residents(footprint(tiled("fwd", problem, tiles, spec.arch)), spec, tiles)
    assert together > 1
    assert estimate(Tiled.of("fwd", problem, spec, tiles)).waves == pytest.approx(
        4 * 32 * 64 / (132 * together)
    )


def touches(heads: int, programs_per_head: int, in_flight: int) -> int:
    """How many (wave, head) pairs there are when programs run head after head."""
    programs = [i // programs_per_head for i in range(heads * programs_per_head)]
    waves = [programs[i : i + in_flight] for i in range(0, len(programs), in_flight)]
    return sum(len(set(wave)) for wave in waves)


@pytest.mark.parametrize("programs_per_head", [32, 64, 256])
@pytest.mark.parametrize("in_flight", [33, 100, 132])
def test_a_small_l2_reads_keys_once_per_wave(programs_per_head: int, in_flight: int) -> None:
    heads, seqlen = 97, 64 * programs_per_head
    problem = PARSE(f"b1 hq{heads} hkv{heads} q{seqlen} kv4096 d128 bf16 full")
    spec = replace(gpu("h200"), l2_bytes=0)
    tiled_kernel = dram_bytes(
        Tiled.of("fwd", problem, spec, config("m64n64w4s2")), in_flight=in_flight
    )
    queries = heads * seqlen * (2 * 128 * 2 + 4)
    keys = 4096 * 2 * 128 * 2
    assert (tiled_kernel - queries) / keys == pytest.approx(
        touches(heads, programs_per_head, in_flight), rel=0.03
    )


def test_a_large_l2_reads_everything_once() -> None:
    for mask in ("full", "causal", "window(1023,0)"):
        problem = PARSE(f"b2 hq32 hkv8 q4096 d128 bf16 {mask}")
        spec = replace(gpu("h200"), l2_bytes=10**12)
        for kernel in ("fwd", "bwd_dkdv", "bwd_dq", "bwd_preprocess"):
            cost = estimate(Tiled.of(kernel, problem, spec, config("m64n64w4s2")))
            rows, kv_rows = 2 * 32 * 4096, 2 * 8 * 4096
            words = {
                "fwd": 2 * rows + 2 * kv_rows,
                "bwd_dkdv": 2 * rows + 4 * kv_rows,
                "bwd_dq": 3 * rows + 2 * kv_rows,
                "bwd_preprocess": 2 * rows,
            }[kernel]
            vectors = {"fwd": 1, "bwd_dkdv": 2, "bwd_dq": 2, "bwd_preprocess": 1}[kernel]
            assert cost.dram_bytes == words * 128 * 2 + vectors * rows * 4
            assert cost.dram_bytes <= cost.read_bytes + cost.write_bytes


def test_terms_are_sorted_and_the_largest_is_the_limit() -> None:
    cost = estimate(Tiled.of("fwd", LLAMA, gpu("h200"), config("m128n64w8s3")))
    seconds = [term for _, term in cost.terms]
    assert seconds == sorted(seconds, reverse=True)
    assert (cost.limit, cost.terms[0][0]) == ("tensor", "l2"), "its programs take longer than L2"
    assert cost.seconds > seconds[0] > 0
    assert {name for name, _ in cost.terms} == {
        *("tensor", "exp", "issue", "smem", "l2", "dram", "latency")
    }


@pytest.mark.parametrize(
    "text, name, kernel, limit",
    [
        ("b8 hq32 hkv32 q8192 d128 bf16 full", "rtx4090", "fwd", "tensor"),
        ("b8 hq32 hkv32 q8192 d128 fp32 full", "a100", "fwd", "tensor"),
        ("b8 hq64 hkv64 q8192 d64 bf16 full", "h200", "bwd_preprocess", "dram"),
        ("b64 hq32 hkv32 q1 kv16384 d128 bf16 full", "l4", "fwd", "dram"),
    ],
)
def test_limits_are_the_expected_ones(text: str, name: str, kernel: Kernel, limit: str) -> None:
    assert propose(KernelTask.of(kernel, PARSE(text), gpu(name)), top=1)[0].estimate.limit == limit


FASTER = ("tensor_flops_16", "l2_bandwidth", "dram_bandwidth", "exp_per_clk_per_sm", "l2_bytes")


@pytest.mark.parametrize("field", FASTER)
@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv", "bwd_dq", "bwd_preprocess"])
def test_a_better_gpu_is_never_slower(kernel: Kernel, field: str) -> None:
    spec = gpu("h200")
    better = replace(spec, **{field: 2 * getattr(spec, field)})
    for problem in (LLAMA, PARSE("b1 hq8 hkv1 q200 kv40000 d64 fp16 full")):
        for text in ("m64n64w4s2", "m128n32w8s3"):
            before = estimate(Tiled.of(kernel, problem, spec, config(text))).seconds
            if field == "l2_bytes":  # a larger L2 holds more that others wrote
                held = rates_of("sm_90").pushed_out * (better.l2_bytes - spec.l2_bytes)
                before += held / (spec.dram_bandwidth * rates_of("sm_90").dram_efficiency)
            assert estimate(Tiled.of(kernel, problem, better, config(text))).seconds <= before


def seconds_of(spec: GpuSpec, **facts: float) -> dict[str, float]:
    """Return the seconds in which bytes move, in launches of so many programs."""
    facts = {"moved_bytes": 0, "per_launch": 1, "dram_bytes": 0} | facts
    return computed(MEMORY, facts_of(spec) | facts)


def test_data_of_other_kernels_leaves_l2_once() -> None:
    """Until as much has come from DRAM as L2 holds, 0.45 of it goes back besides."""
    spec, rates = gpu("h200"), rates_of("sm_90")
    bandwidth = spec.dram_bandwidth * rates.dram_efficiency
    ends = 2 * rates.latency_seconds
    for moved, in_all in (
        (0, 0),
        (spec.l2_bytes // 2, 1.45 * (spec.l2_bytes // 2)),
        (10 * spec.l2_bytes, 10.45 * spec.l2_bytes),
    ):
        seconds = seconds_of(spec, dram_bytes=moved)["dram"]
        assert seconds == pytest.approx(ends + in_all / bandwidth)


def test_launches_that_follow_take_less() -> None:
    spec, rates = gpu("h200"), rates_of("sm_90")
    assert launch_seconds(KernelTask.of("fwd_split", LLAMA, spec), 1) == rates.launch_seconds
    assert launch_seconds(KernelTask.of("fwd_combine", LLAMA, spec), 1) == rates.following_seconds
    panels = launch_seconds(KernelTask.of("fwd_scores", LLAMA, spec), 5)
    assert panels == pytest.approx(rates.launch_seconds + 4 * rates.following_seconds)
    assert rates.following_seconds < rates.launch_seconds


def test_idle_sms_draw_nothing_from_l2() -> None:
    spec = gpu("h200")
    half, all_sms, more = (
        seconds_of(spec, moved_bytes=1e9, per_launch=spec.num_sms * part)["l2"]
        for part in (0.5, 1, 7)
    )
    assert half == pytest.approx(2 * all_sms)
    assert all_sms == more


def test_joining_reads_from_l2_what_the_splits_left_there() -> None:
    problem = PARSE("b1 hq64 hkv8 q1 kv131072 d128 bf16")
    cost = estimate(Tiled.of("fwd_combine", problem, gpu("h200"), config("m1n16w4s1")))
    assert 0 < cost.read_bytes < gpu("h200").l2_bytes
    assert cost.dram_bytes == cost.write_bytes
    huge = estimate(
        Tiled.of("fwd_combine", replace(problem, batch=128), gpu("h200"), config("m1n16w4s1"))
    )
    assert huge.dram_bytes == huge.read_bytes - gpu("h200").l2_bytes + huge.write_bytes


def throughput(cost: CostEstimate, problem: AttentionProblem) -> float:
    """TFLOP/s by the usual count: unpadded, half of it where causal."""
    heads, half = problem.batch * problem.num_heads_q, problem.mask.notation != "full"
    pairs = heads * problem.seqlen_q * problem.seqlen_kv / (2 if half else 1)
    flops = 2 * pairs * (problem.head_dim_qk + problem.head_dim_v)
    return flops / cost.seconds / 1e12


@pytest.mark.parametrize(
    "name, text, low, high",
    [
        # plain Triton on H100: 395-490 at d128, about 400 at d64; causal is slower
        ("h100", "b1 hq16 hkv16 q16384 d128 bf16 full", 370, 490),
        ("h100", "b1 hq16 hkv16 q16384 d128 bf16 causal", 330, 490),
        ("h100", "b1 hq32 hkv32 q16384 d64 bf16 full", 320, 430),
        ("h100-pcie", "b1 hq32 hkv32 q16384 d64 bf16 full", 220, 330),
        # FlashAttention-2 on A100: 201-225 at d128
        ("a100", "b2 hq64 hkv8 q8192 d128 bf16 full", 180, 225),
    ],
)
def test_published_throughputs(name: str, text: str, low: float, high: float) -> None:
    best = propose(KernelTask.of("fwd", PARSE(text), gpu(name)), top=1)[0].estimate
    assert low < throughput(best, PARSE(text)) < high


def test_every_architecture_has_rates_and_rules() -> None:
    for spec in catalogue():
        assert 0 < rates_of(spec.arch).tensor_efficiency <= 1
        assert footprint(tiled("fwd", LLAMA, config("m64n64w4s2"), spec.arch)).smem_bytes > 0


@pytest.mark.parametrize(
    "arch, expected",
    [
        ("sm_90", "sm_90"),
        ("sm_88", "sm_80"),
        ("sm_103", "sm_100"),
        ("sm_60", "sm_80"),
        ("gfx950", "gfx942"),
        ("gfx908", "gfx90a"),
    ],
)
def test_unknown_architectures_take_the_nearest_older_one(arch: str, expected: str) -> None:
    assert nearest(arch, ["sm_100", "sm_80", "sm_90", "gfx942", "gfx90a"]) == expected
