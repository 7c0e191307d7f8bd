"""Explanations: every number follows from a formula that is shown, and text, JSON and pictures
agree."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import sympy
from typer.testing import CliRunner

from tilegen.choose.families import family, kernels_of, ranked_families
from tilegen.choose.ranker import propose
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.explaining.alternatives import (
    OTHER_FAST_MEMORY,
    alternatives_of_pass,
    with_alternatives,
)
from tilegen.explaining.explanation import explain_all
from tilegen.explaining.gpu_records import KernelExplanation
from tilegen.explaining.on_gpu import explain
from tilegen.explaining.pass_choice import explain_pass
from tilegen.explaining.records import plain
from tilegen.explaining.text import SECTIONS, latex_of_all, lines_of_all
from tilegen.gpus.spec import GpuSpec, gpu, with_fast_memory
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import rows_for
from tilegen.kernels.registry import KERNELS, LARGE_CACHE, direction_of
from tilegen.kernels.spec import Direction
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.traffic import terms_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask
from tilegen.units import ratio_text, seconds_text

LARGE = "b2 hq8 hkv2 q1000 d128/64 bf16 causal"
SMALL = "hq6 hkv2 q3000 kv5000 d576/512 bf16 causal"  # several panels a head group
WINDOW = "b2 hq6 hkv2 q1000 kv2000 d72/40 fp32 window(100,3)"
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
H200 = gpu("h200")
ANY_HEAD_DIM = [name for name, spec in KERNELS.items() if not spec.head_dims]


def parse(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


@cache  # tests read it, and none changes it
def told(text: str, kernel: Kernel, spec: GpuSpec = H200) -> dict[str, Any]:
    return plain(explain(KernelTask.of(kernel, parse(text), spec)))


@cache
def told_of_pass(text: str, direction: Direction, spec: GpuSpec = H200) -> dict[str, Any]:
    return plain(explain_pass(parse(text), spec, direction))


@cache
def told_of_all(text: str) -> tuple[Any, ...]:
    return explain_all(parse(text), H200, kernels_of(parse(text), H200), by_model=True)


def of_gpu(explained: Sequence[Any]) -> list[KernelExplanation]:
    assert all(isinstance(one, KernelExplanation) for one in explained)
    return [*explained]


def value(text: str, values: dict[str, float]) -> float:
    names = {name: sympy.Rational(number) for name, number in values.items()}
    return float(sympy.sympify(text, locals={**names, "Gcd": sympy.gcd}))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["explain", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# --------------------------------------------------------------------------------------------------
# Formulas give the numbers


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_traffic_follows_from_its_formula(kernel: Kernel, text: str) -> None:
    traffic = told(text, kernel)["traffic"]
    sizes = {"element": traffic["values"]["e"], "fp32": 4}
    for direction in ("read", "write"):
        words = (
            value(term["words"], traffic["values"]) * sizes[term["size"]]
            for term in traffic["formula"]
            if term["direction"] == direction
        )
        tables = traffic["table_bytes"] if direction == "read" else 0
        assert traffic["values"]["H_kv"] * sum(words) + tables == traffic[f"{direction}_bytes"]
    both = traffic["read_bytes"] + traffic["write_bytes"] - traffic["table_bytes"]
    assert value(traffic["bytes"]["text"], traffic["values"]) == both


@pytest.mark.parametrize("text", [LARGE, WINDOW, "b8 hq64 hkv8 q8192 d128 bf16"])
@pytest.mark.parametrize("kernel", [*LARGE_CACHE, "fwd_split"])
def test_dram_follows_from_its_formula(kernel: Kernel, text: str) -> None:
    for spec in (H200, gpu("t4")):
        dram = told(text, kernel, spec)["dram"]
        formulas = {one["name"]: one["text"] for one in dram["formulas"]}
        assert value(formulas["DRAM bytes"], dram["values"]) == pytest.approx(dram["bytes"], abs=1)
        assert dram["bytes"] >= dram["bound_bytes"]
        if kernel not in ("bwd_preprocess", "fwd_split"):
            assert dram["wave"]["sweeps"] >= 1
            assert dram["values"]["rho"] == dram["wave"]["sweeps"]
            assert dram["wave"]["programs"] == dram["values"]["n_w"]
            assert value(formulas["rho"], dram["values"]) == pytest.approx(dram["values"]["rho"])


def test_rows_that_stream_more_than_once_are_said() -> None:
    """Half a megabyte of keys for each of 64 heads, and 4 MB of L2: what one wave leaves behind."""
    dram = told("b8 hq64 hkv8 q8192 d128 bf16", "fwd", gpu("t4"))["dram"]
    assert dram["wave"]["sweeps"] > 1.5
    assert dram["ratio"] > 1.1


def test_small_cache_kernels_have_a_number_for_dram_and_no_formula() -> None:
    for kernel in sorted(name for name, one in KERNELS.items() if one.sliced):
        dram = told(SMALL, kernel)["dram"]
        cost = propose(KernelTask.of(kernel, parse(SMALL), H200), top=1)[0].estimate
        assert (dram["bytes"], dram["formulas"], dram["wave"]) == (cost.dram_bytes, [], None)
        assert (dram["ratio"] is None) == (kernel != "fwd_streamed")


@pytest.mark.parametrize("text", [LARGE, SMALL, "hq8 q131072 d512 bf16"])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_the_bound_that_applies_is_the_largest(kernel: Kernel, text: str) -> None:
    bound = told(text, kernel)["bound"]
    each = {one["name"]: value(one["text"], bound["values"]) for one in bound["formulas"]}
    assert each == pytest.approx(bound["each"])
    assert bound["bytes"] == lower_bound_bytes(KernelTask.of(kernel, parse(text), H200))
    assert bound["bytes"] == pytest.approx(max(each.values()), abs=1)
    assert each[bound["applies"]] == max(each.values())
    assert bound["ratio"] >= 1


@pytest.mark.parametrize("mask", ["~full", "kv_prefix(0)", "window(0,0)&~causal"])
def test_a_mask_that_keeps_nothing_is_explained(mask: str) -> None:
    """Nothing streams: L2 holds all heads."""
    for kernel in ("fwd", "bwd_dq"):
        text = f"hq8 q1024 d64 bf16 {mask}"
        explanation = explain(KernelTask.of(kernel, parse(text), H200))
        every = with_alternatives([explanation], parse(text), H200, with_passes=False)
        assert any("L2 holds all" in line for line in lines_of_all(every, with_passes=False))


def test_other_bounds_apply_where_sequences_are_long_and_memory_is_small() -> None:
    long = "hq1 q131072 d512 bf16"
    assert told(long, "fwd", gpu("t4"))["bound"]["applies"] == "LB2"
    assert told("hq1 q131072 d128 bf16", "fwd")["bound"]["applies"] == "LB1"
    assert told(LARGE, "fwd")["bound"]["applies"] == "floor"


@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_time_is_the_largest_part_and_the_launches(kernel: Kernel, text: str) -> None:
    time = told(text, kernel)["time"]
    parts = time["composition"]
    running = [parts[name] for name in ("programs", "l2", "dram") if parts[name] is not None]
    assert time["seconds"] == pytest.approx(max(running) + parts["launch"])
    assert parts[parts["largest"]] == max(running)
    first = kernel in (
        "fwd",
        "fwd_split",
        "fwd_paged",
        "fwd_streamed",
        "fwd_scores",
        "bwd_preprocess",
    )
    assert parts["launch"] == pytest.approx(1.75e-6 * parts["launches"] + 1.25e-6 * first)
    largest = parts["largest"]
    of_programs = [name for name in time["terms"] if name not in ("l2", "dram")]
    assert time["limit"] == (of_programs[0] if largest == "programs" else largest)


# --------------------------------------------------------------------------------------------------
# Passes


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("text", [LARGE, SMALL, WINDOW])
def test_a_pass_sums_up_its_kernels(text: str, direction: Direction) -> None:
    problem = parse(text)
    way = told_of_pass(text, direction)
    kernels = kernels_of(problem, H200, direction)
    explained = [told(text, kernel) for kernel in kernels]
    assert way["family"] == family(problem, H200, direction)
    assert tuple(way["kernels"]) == kernels
    for key in ("read_bytes", "write_bytes"):
        assert way[key] == sum(one["traffic"][key] for one in explained)
    assert way["seconds"] == pytest.approx(sum(one["time"]["seconds"] for one in explained))
    moved = way["read_bytes"] + way["write_bytes"]
    assert way["bound"]["ratio"] == moved / lower_bound_bytes(PassTask.of(direction, problem, H200))
    assert way["bound"]["ratio"] >= 1
    ranked = ranked_families(problem, H200, direction)
    assert [(one["family"], one["seconds"]) for one in way["families"]] == [
        (name, pytest.approx(seconds)) for name, seconds in ranked
    ]


@pytest.mark.parametrize(
    "name, forward, backward",
    [("t4", 443, 355), ("a100", 507, 407), ("h200", 545, 437), ("b200", 674, 540)],
)
def test_regimes_are_said_in_words_and_bytes(name: str, forward: int, backward: int) -> None:
    """The head dims are those derived from the schedules' constants, by hand and independently."""
    for direction, head_dim in zip(DIRECTIONS, (forward, backward), strict=True):
        regime = told_of_pass(LARGE, direction, gpu(name))["regime"]
        assert round(regime["critical_head_dim"]) == head_dim
        assert regime["theorem_words"] == 128**2
        assert regime["theorem_bytes"] == 2 * 128**2
        assert regime["m_words"] * 2 == regime["m_bytes"] == gpu(name).on_chip_bytes
        assert regime["dividing_bytes"] == 2 * regime["dividing_words"]
        assert regime["m_words"] / head_dim**2 == pytest.approx(
            regime["dividing_words"] / 128**2, rel=0.005
        )
        assert regime["regime"] == "large cache"


def test_a_wide_head_is_in_the_small_cache() -> None:
    assert told_of_pass(SMALL, "backward")["regime"]["regime"] == "small cache"


def test_a_panel_is_shown_where_there_is_one() -> None:
    assert told_of_pass(LARGE, "forward")["panel"] is None
    problem = parse(SMALL)
    for direction, copies in zip(DIRECTIONS, (1, 2), strict=True):
        way = told_of_pass(SMALL, direction)
        panel = way["panel"]
        assert way["family"] == "small_cache"
        assert 0 < panel["rows"] <= rows_for(problem, H200, direction)
        assert panel["rows"] * panel["panels"] >= 6 * 3000
        assert panel["bytes"] == panel["rows"] * 5000 * 2 * copies


def test_another_memory_may_choose_another_family() -> None:
    problem = parse("hq8 q4096 d320 bf16")
    for direction in DIRECTIONS:
        way = explain_pass(problem, H200, direction)
        others = alternatives_of_pass(way, problem, H200).other_fast_memory or ()
        chosen = {one.fast_memory: one.family for one in others}
        assert chosen == {
            size: family(problem, with_fast_memory(H200, size), direction)
            for size in OTHER_FAST_MEMORY
        }
        assert len(set(chosen.values())) > 1


def test_other_masks_are_those_that_the_problem_has_not() -> None:
    masks = {
        text: [one.mask for one in alternatives_of_pass(way, parse(text), H200).other_masks or ()]
        for text in (LARGE, WINDOW)
        for way in (explain_pass(parse(text), H200, "forward"),)
    }
    assert masks == {LARGE: ["full"], WINDOW: ["full", "causal"]}


# --------------------------------------------------------------------------------------------------
# Other configs


@pytest.mark.parametrize("kernel", ANY_HEAD_DIM)
def test_the_next_best_are_slower_and_it_is_said_why(kernel: Kernel) -> None:
    problem = parse(SMALL)
    ranked = propose(KernelTask.of(kernel, problem, H200), top=4)
    others = told(SMALL, kernel)["next_best"]
    assert [one["config"] for one in others] == [one.config.key for one in ranked[1:]]
    best = ranked[0].estimate
    for said, candidate in zip(others, ranked[1:], strict=True):
        cost = candidate.estimate
        moved = [one.read_bytes + one.write_bytes for one in (best, cost)]
        assert said["slowdown"] == cost.seconds / best.seconds
        assert cost.cost >= best.cost
        assert said["traffic_ratio"] == moved[1] / moved[0]
        assert said["waves"] == cost.waves
        grown = dict(cost.terms)[said["term"]] - dict(best.terms)[said["term"]]
        assert said["term_seconds"] == grown
        assert ("the same traffic" in said["differs"]) == (moved[0] == moved[1])


def test_a_config_of_ones_own_is_compared_with_better_ones() -> None:
    config = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    shown = plain(explain(KernelTask.of("fwd", parse(LARGE), H200), config))
    assert shown["config"]["block_m"] == 16
    assert all(one["slowdown"] < 1 for one in shown["next_best"])
    assert all(one["term_seconds"] < 0 for one in shown["next_best"])


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


# --------------------------------------------------------------------------------------------------
# Text, LaTeX and JSON


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, SMALL])
def test_the_text_says_what_the_json_says(text: str) -> None:
    explained = json.loads(run(text, "--gpu", "a100", "--json"))
    shown = run(text, "--gpu", "a100", "--all")
    for explanation in explained:
        assert f"{seconds_text(explanation['time']['seconds'])} predicted" in shown
        assert f"limited by {explanation['time']['limit']}" in shown
        assert f"{TileConfig(**explanation['config'])!r}" in shown
        assert f"these tiles move {ratio_text(explanation['bound']['ratio'])} times that" in shown
        way = explanation["pass"]
        assert f"{ratio_text(way['bound']['ratio'])} times the lower bound of the pass" in shown
        assert f"{way['direction']}: {SECTIONS['pass']}" in shown
        assert f"  family     {way['family']}\n" in shown
    kernels = [explanation["kernel"] for explanation in explained]
    assert kernels == list(kernels_of(parse(text), gpu("a100")))
    assert all(item["pass"]["direction"] == direction_of(item["kernel"]) for item in explained)


def test_one_kernel_alone_is_explained_without_its_pass() -> None:
    shown = run(LARGE, "--gpu", "h200", "--kernel", "bwd_dq", "--all").splitlines()
    assert shown[1].startswith("kernel   bwd_dq ")
    assert not any("families" in line for line in shown)


def test_another_fast_memory_is_said_and_changes_the_bound() -> None:
    shown = run(LARGE, "--gpu", "h200", "--fast-memory", "48KiB", "--kernel", "fwd")
    assert "on h200 with 48 KiB of shared memory" in shown
    (small,) = json.loads(
        run(LARGE, "--gpu", "h200", "--fast-memory", "48KiB", "--kernel", "fwd", "--json")
    )
    whole = told(LARGE, "fwd")
    assert small["footprint"]["smem_bytes"] <= 48 * 1024 == small["fast_memory"]
    assert small["bound"]["on_chip_bytes"] == whole["bound"]["on_chip_bytes"] - (227 - 48) * 1024


@pytest.mark.slow
def test_json_is_finite_and_has_stable_keys() -> None:
    explained = [
        json.loads(json.dumps(plain(one), allow_nan=False))
        for text in (LARGE, SMALL, WINDOW, "hq1 q1 d64 bf16")
        for one in told_of_all(text)
    ]
    assert len({tuple(one) for one in explained}) == 1
    for key in ("traffic", "dram", "bound", "footprint", "time", "pass"):
        assert len({tuple(one[key]) for one in explained}) == 1, key
    assert all(
        one["traffic"]["read_bytes"] > 0 < one["traffic"]["write_bytes"] for one in explained
    )


def test_latex_has_every_formula_and_is_balanced() -> None:
    explained = explain_all(parse(LARGE), H200, ("fwd", "bwd_dkdv"), by_model=True)
    shown = "\n".join(latex_of_all(of_gpu(explained), with_passes=True))
    assert run(LARGE, "--gpu", "h200", "--kernel", "fwd", "--latex").count("align*") == 8
    for explanation in explained:
        for term in terms_of(explanation.kernel):
            assert sympy.latex(term.words) in shown
        assert str(explanation.traffic.read_bytes + explanation.traffic.write_bytes) in shown
    for what in (
        r"\Theta",
        r"\mathrm{LB}_1",
        r"\mathrm{LB}_2",
        r"M_{\mathrm{dividing}}",
        r"\rho &=",
    ):
        assert what in shown
    for opens, closes in (("{", "}"), (r"\left", r"\right"), (r"\begin", r"\end")):
        assert shown.count(opens) == shown.count(closes)
    assert all(not line.endswith(r"\\ \\") for line in shown.splitlines())
    for block in shown.split(r"\begin{align*}")[1:]:
        rows = block.split(r"\end{align*}")[0].strip().split("\n")
        assert all("&" in row for row in rows)
        assert all(row.endswith(r"\\") for row in rows[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, SMALL])
def test_latex_can_be_set(text: str) -> None:
    """matplotlib sets all of it but environments; the one formula with cases is left out."""
    mathtext = pytest.importorskip("matplotlib.mathtext").MathTextParser("path")
    shown = set[str]()
    for line in latex_of_all(of_gpu(told_of_all(text)), with_passes=True):
        if line.startswith("where "):
            shown.update(line.removeprefix("where ").split(", "))
        elif line and not line.startswith(("%", r"\begin", r"\end")) and "cases" not in line:
            equation = line.removesuffix(r" \\").replace("&", "")
            shown.add(f"${equation}$")
    for equation in sorted(shown):
        mathtext.parse(equation)
