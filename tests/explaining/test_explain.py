"""Explanations: every number follows from a formula that is shown, and text, JSON and pictures
agree."""

import json
import re
from functools import cache
from typing import Any

import pytest
import sympy
from typer.testing import CliRunner

from tilegen.choose.families import family, kernels_of, ranked_families
from tilegen.choose.ranker import propose
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.explaining.explained import (
    OTHER_FAST_MEMORY,
    ExplainedKernel,
    ExplainedPass,
    explain,
    explain_all,
    moved,
)
from tilegen.explaining.explanation import SECTIONS, Explanation
from tilegen.explaining.facts import values_of
from tilegen.explaining.passes import pass_facts
from tilegen.gpus.spec import GpuSpec, gpu, with_fast_memory
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import rows_for
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.kernels.spec import Direction
from tilegen.model.bounds import lower_bound_bytes
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask
from tilegen.units import memory_text

LARGE = "b2 hq8 hkv2 q1000 d128/64 bf16 causal"
SMALL = "hq6 hkv2 q3000 kv5000 d576/512 bf16 causal"  # several panels a head group
WINDOW = "b2 hq6 hkv2 q1000 kv2000 d72/40 fp32 window(100,3)"
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
H200 = gpu("h200")
ANY_HEAD_DIM = [name for name, spec in KERNELS.items() if not spec.head_dims]


def parse(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


class Sections(dict[str, dict[str, Any]]):
    """The facts of a kernel by section, as JSON has them."""

    def __init__(self, of: ExplainedKernel) -> None:
        super().__init__()
        self.of = of

    def __missing__(self, name: str) -> dict[str, Any]:
        return self.setdefault(name, values_of(SECTIONS[name][1](self.of)))


@cache  # tests read it, and none changes it
def known(text: str, kernel: Kernel, spec: GpuSpec = H200) -> Sections:
    return Sections(explain(KernelTask.of(kernel, parse(text), spec)))


def way(text: str, direction: Direction, spec: GpuSpec = H200) -> ExplainedPass:
    return ExplainedPass(direction, parse(text).normal(), spec)


@cache
def known_of_pass(text: str, direction: Direction, spec: GpuSpec = H200) -> dict[str, Any]:
    return values_of(pass_facts(way(text, direction, spec)))


@cache
def explanation(text: str, kernels: tuple[Kernel, ...] = (), spec: GpuSpec = H200) -> Explanation:
    kernels = kernels or kernels_of(parse(text), spec)
    explained = explain_all(parse(text), spec, kernels, by_model=True)
    return Explanation(problem=parse(text), gpu=spec, explained=explained, with_passes=True)


def value(text: str, values: dict[str, float]) -> float:
    names = {name: sympy.Rational(number) for name, number in values.items()}
    return float(sympy.sympify(text, locals={**names, "Gcd": sympy.gcd}))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# --------------------------------------------------------------------------------------------------
# Formulas give the numbers


@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_values_follow_from_their_formulas(kernel: Kernel, text: str) -> None:
    for section in ("traffic", "bound"):
        facts = known(text, kernel)[section]
        symbols = facts["with"]["value"]
        for label, fact in facts.items():
            if label in ("optimum", "bound", "u") or "formula" not in fact:
                continue
            infinite = re.search(r"\bC\b", fact["formula"]) and "C" not in symbols
            if not infinite:
                expected = pytest.approx(fact["value"], rel=1e-6, abs=1)
                assert value(fact["formula"], symbols) == expected, label


@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW, f"{LARGE} dropout"])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_traffic_is_the_sum_of_its_tensors(kernel: Kernel, text: str) -> None:
    cost = propose(KernelTask.of(kernel, parse(text), H200), top=1)[0].estimate
    traffic = known(text, kernel)["traffic"]
    for direction, total in (("read", cost.read_bytes), ("write", cost.write_bytes)):
        parts = [
            fact["value"] for name, fact in traffic.items() if name.startswith(f"{direction} ")
        ]
        assert sum(parts) == pytest.approx(total, abs=len(parts))
    assert traffic["read"]["value"] == cost.read_bytes
    assert traffic["written"]["value"] == cost.write_bytes


@pytest.mark.parametrize("text", [LARGE, WINDOW, "b8 hq64 hkv8 q8192 d128 bf16"])
@pytest.mark.parametrize("kernel", [*LARGE_CACHE, "fwd_split"])
def test_dram_follows_from_its_formula(kernel: Kernel, text: str) -> None:
    for spec in (H200, gpu("t4")):
        facts = known(text, kernel, spec)["traffic"]
        symbols, dram = facts["with"]["value"], facts["DRAM"]
        assert value(dram["formula"], symbols) == pytest.approx(dram["value"], abs=1)
        assert dram["value"] >= facts["at least"]["value"]
        if kernel not in ("bwd_preprocess", "fwd_split"):
            assert symbols["rho"] == facts["rho"]["value"] >= 1
            assert facts["wave"]["value"] == symbols["n_w"]
            assert value(facts["rho"]["formula"], symbols) == pytest.approx(symbols["rho"])


def test_rows_that_stream_more_than_once_are_said() -> None:
    """Half a megabyte of keys for each of 64 heads, and 4 MB of L2: what one wave leaves behind."""
    facts = known("b8 hq64 hkv8 q8192 d128 bf16", "fwd", gpu("t4"))["traffic"]
    assert facts["rho"]["value"] > 1.5
    assert facts["ratio"]["value"] > 1.1


def test_small_cache_kernels_have_a_number_for_dram_and_no_formula() -> None:
    for kernel in sorted(name for name, one in KERNELS.items() if one.sliced):
        facts = known(SMALL, kernel)["traffic"]
        cost = propose(KernelTask.of(kernel, parse(SMALL), H200), top=1)[0].estimate
        assert facts["DRAM"] == {"value": cost.dram_bytes, "unit": "B between L2 and DRAM"}
        assert "rho" not in facts
        assert ("ratio" in facts) == (kernel == "fwd_streamed")


@pytest.mark.parametrize("text", [LARGE, SMALL, "hq8 q131072 d512 bf16"])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_the_bound_that_applies_is_the_largest(kernel: Kernel, text: str) -> None:
    facts = known(text, kernel)["bound"]
    symbols = facts["with"]["value"]
    names = [name for name in ("LB1", "LB1G", "LB2", "floor") if name in facts]
    each = {name: value(facts[name]["formula"], symbols) for name in names}
    assert each == pytest.approx({name: facts[name]["value"] for name in names})
    least = facts["bound"]["value"]
    assert least == lower_bound_bytes(KernelTask.of(kernel, parse(text), H200))
    assert least == pytest.approx(max(each.values()), abs=1)
    assert each[facts["bound"]["unit"].removeprefix("B at least, by ")] == max(each.values())
    assert facts["ratio"]["value"] >= 1


@pytest.mark.parametrize("mask", ["~full", "kv_prefix(0)", "window(0,0)&~causal"])
def test_a_mask_that_keeps_nothing_is_explained(mask: str) -> None:
    """Nothing streams: L2 holds all heads."""
    text = f"hq8 q1024 d64 bf16 {mask}"
    shown = explanation(text, ("fwd", "bwd_dq")).text("traffic")
    assert len(re.findall(r"^  L2 holds +all$", shown, re.MULTILINE)) == 2
    json.dumps(explanation(text, ("fwd", "bwd_dq")).values, allow_nan=False)


def test_other_bounds_apply_where_sequences_are_long_and_memory_is_small() -> None:
    long = "hq1 q131072 d512 bf16"
    for facts, name in (
        (known(long, "fwd", gpu("t4")), "LB2"),
        (known("hq1 q131072 d128 bf16", "fwd"), "LB1"),
        (known(LARGE, "fwd"), "floor"),
    ):
        assert facts["bound"]["bound"]["unit"] == f"B at least, by {name}"


@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_time_is_the_largest_part_and_the_launches(kernel: Kernel, text: str) -> None:
    time = known(text, kernel)["time"]
    seconds = {name: fact["value"] for name, fact in time.items()}
    parts = {name: seconds[name] for name in ("on_sms", "l2", "dram")}
    assert seconds["time"] == pytest.approx(max(parts.values()) + seconds["launching"])
    assert value(time["time"]["formula"], {**parts, "launching": seconds["launching"]}) == (
        pytest.approx(seconds["time"])
    )
    first = kernel in (
        "fwd",
        "fwd_split",
        "fwd_paged",
        "fwd_streamed",
        "fwd_scores",
        "bwd_preprocess",
    )
    launching = 1.75e-6 * seconds["launches"] + 1.25e-6 * first
    assert seconds["launching"] == pytest.approx(launching)
    largest = max(parts, key=parts.__getitem__)
    units = {name: seconds[name] for name in ("tensor", "exp", "issue", "smem", "latency")}
    busiest = max(units, key=units.__getitem__)
    assert seconds["limit"] == (busiest if largest == "on_sms" else largest)


# --------------------------------------------------------------------------------------------------
# Passes


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
def test_a_pass_sums_up_its_kernels(text: str, direction: Direction) -> None:
    problem, facts = parse(text), known_of_pass(text, direction)
    kernels = kernels_of(problem, H200, direction)
    costs = [propose(KernelTask.of(name, problem, H200), top=1)[0].estimate for name in kernels]
    chosen = facts["family"]["value"]
    assert chosen == family(problem, H200, direction)
    assert facts["kernels"]["value"] == ", ".join(kernels)
    size = sum(map(moved, costs))
    cells = {name: cell["value"] for name, cell in facts["families"][chosen].items()}
    assert facts["traffic"]["value"] == size == cells["traffic"]
    assert cells["written"] == sum(cost.write_bytes for cost in costs)
    assert cells["time"] == pytest.approx(sum(cost.seconds for cost in costs))
    least = lower_bound_bytes(PassTask.of(direction, problem, H200))
    assert facts["ratio"]["value"] == size / least >= 1
    ranked = ranked_families(problem, H200, direction)
    shown = [(name, cells["time"]["value"]) for name, cells in facts["families"].items()]
    assert shown == [(name, pytest.approx(seconds)) for name, seconds in ranked]


@pytest.mark.parametrize(
    "name, forward, backward",
    [("t4", 443, 355), ("a100", 507, 407), ("h200", 545, 437), ("b200", 674, 540)],
)
def test_regimes_are_said_in_words_and_bytes(name: str, forward: int, backward: int) -> None:
    """The head dims are those derived from the schedules' constants, by hand and independently."""
    for direction, head_dim in zip(DIRECTIONS, (forward, backward), strict=True):
        facts = known_of_pass(LARGE, direction, gpu(name))
        regime = {label: fact.get("value") for label, fact in facts.items()}
        assert regime["head dim"] == head_dim
        assert regime["d^2"] == 128**2
        assert regime["d^2 in bytes"] == 2 * 128**2
        assert regime["M"] * 2 == regime["M in bytes"] == gpu(name).on_chip_bytes
        assert regime["dividing bytes"] == pytest.approx(2 * regime["dividing"], abs=1)
        exact = value(facts["dividing"]["formula"], regime["where"])
        assert regime["dividing"] == pytest.approx(exact, abs=1)
        assert regime["M"] / head_dim**2 == pytest.approx(exact / 128**2, rel=0.005)
        assert regime["regime"] == "large cache"


def test_a_wide_head_is_in_the_small_cache() -> None:
    assert known_of_pass(SMALL, "backward")["regime"]["value"] == "small cache"


def test_a_panel_is_shown_where_there_is_one() -> None:
    assert "panels" not in known_of_pass(LARGE, "forward")
    problem = parse(SMALL)
    for direction, copies in zip(DIRECTIONS, (1, 2), strict=True):
        facts = known_of_pass(SMALL, direction)
        assert facts["family"]["value"] == "small_cache"
        rows = facts["panel rows"]["value"]
        assert 0 < rows <= rows_for(problem, H200, direction)
        assert rows * facts["panels"]["value"] >= 6 * 3000
        assert facts["panel bytes"]["value"] == rows * 5000 * 2 * copies


@pytest.mark.slow
def test_another_memory_may_choose_another_family() -> None:
    text = "hq8 q4096 d320 bf16"
    for direction in DIRECTIONS:
        given = known_of_pass(text, direction)["given"]
        chosen = {size: given[memory_text(size)]["family"]["value"] for size in OTHER_FAST_MEMORY}
        assert chosen == {
            size: family(parse(text), with_fast_memory(H200, size), direction)
            for size in OTHER_FAST_MEMORY
        }
        assert len(set(chosen.values())) > 1


def test_other_masks_are_those_that_the_problem_has_not() -> None:
    masks = {
        text: [name for name in way(text, "forward").elsewhere if "KiB" not in name]
        for text in (LARGE, WINDOW)
    }
    assert masks == {LARGE: ["full"], WINDOW: ["full", "causal"]}


# --------------------------------------------------------------------------------------------------
# Other configs


@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_the_next_best_are_slower_and_it_is_said_why(kernel: Kernel) -> None:
    ranked = propose(KernelTask.of(kernel, parse(SMALL), H200), top=4)
    tiles = known(SMALL, kernel)["next"]["tile"]
    assert [*tiles] == [one.config.key for one in ranked]
    best = ranked[0].estimate
    mine, *others = tiles.values()
    assert (mine["times"]["value"], mine["term"]["value"], mine["by"]["value"]) == (1, None, None)
    for cells, candidate in zip(others, ranked[1:], strict=True):
        cost, shown = candidate.estimate, {name: cell["value"] for name, cell in cells.items()}
        assert shown["time"] == cost.seconds
        assert shown["times"] == cost.seconds / best.seconds
        assert cost.cost >= best.cost
        assert shown["traffic"] == moved(cost) / moved(best)
        assert shown["waves"] == cost.waves
        grown = {name: x - dict(best.terms)[name] for name, x in cost.terms}
        assert shown["by"] == grown[shown["term"]]
        assert shown["by"] == (max if shown["times"] >= 1 else min)(grown.values())


def test_a_config_of_ones_own_is_compared_with_better_ones() -> None:
    config = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    facts = Sections(explain(KernelTask.of("fwd", parse(LARGE), H200), config))
    assert facts["tile"]["tile"]["value"] == repr(config)
    assert facts["tile"]["takes"]["value"] > 1
    _, *others = facts["next"]["tile"].values()
    assert all(cells["times"]["value"] < 1 for cells in others)
    assert all(cells["by"]["value"] < 0 for cells in others)


def test_a_config_of_another_kind_of_kernel_is_refused() -> None:
    whole, sliced = (
        TileConfig(block_m=64, block_n=64),
        TileConfig(block_m=64, block_n=64, block_d=64),
    )
    with pytest.raises(Unsupported, match="block_d of fwd_values"):
        explain(KernelTask.of("fwd_values", parse(SMALL), H200), whole)
    with pytest.raises(Unsupported, match="holds head dims whole"):
        explain(KernelTask.of("fwd", parse(SMALL), H200), sliced)


@pytest.mark.parametrize(
    "name, needs",
    [("h200", "bytes of shared memory, of 232448;"), ("b200", "columns of tensor memory, of")],
)
def test_a_config_that_cannot_fit_has_no_time(name: str, needs: str) -> None:
    config = TileConfig(block_m=256, block_n=256, num_warps=8, num_stages=5)
    with pytest.raises(Unsupported, match=f"fits on {name}, got m256n256w8s5: fwd .*{needs}"):
        explain(KernelTask.of("fwd", parse("hq8 q4096 d512 bf16 causal"), gpu(name)), config)
