"""Explanations for a processor: terms, levels of memory, other tiles, and what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tilegen
from tests.support.records import timed
from tilegen.choose import on_cpu
from tilegen.choose.families import kernels_of
from tilegen.cli.main import app
from tilegen.cpus.host import current_cpu
from tilegen.cpus.spec import CpuSpec, catalogue, cpu
from tilegen.device import ONE_THREAD
from tilegen.disk import say_once
from tilegen.environment import current
from tilegen.errors import Unsupported
from tilegen.explaining.explained import ExplainedKernel, moved
from tilegen.explaining.explanation import Explanation
from tilegen.kernels.config import TileConfig
from tilegen.model import cpu_time
from tilegen.model.bounds import lower_bound_bytes
from tilegen.problem import AttentionProblem
from tilegen.store import Location, TuningRecord, Versions, save
from tilegen.task import KernelTask

CAUSAL = "hq8 hkv2 q2048 d128 fp32 causal"
FEW = "hq3 hkv3 q512 d64 fp32 full"
"""Few programs: tiles leave threads idle."""
PROBLEMS = (
    CAUSAL,
    "b2 hq8 hkv8 q1024 d64 bf16 full",
    "hq4 hkv4 q300 kv700 d96 fp32 window(63,0)",
    "hq32 hkv8 q1 kv8192 d128 fp32 full",
    "hq1 hkv1 q32768 d128 fp32 full",
    "hq8 q1024 d64 fp32 ~full",
)
PROCESSORS = ("zen3", "zen5")


def parse(text: str) -> AttentionProblem:
    return AttentionProblem.parse(text)


@cache
def told(text: str, name: str) -> Explanation:
    return tilegen.explain(text, name, by_model=True)


def kernels(text: str, name: str) -> list[tuple[ExplainedKernel, dict[str, Any]]]:
    """Return the kernels of a call, each with its facts."""
    return list(zip(told(text, name).explained, told(text, name).values, strict=True))


def seconds_of(terms: dict[str, Any]) -> dict[str, float]:
    return {name: cells["time"]["value"] for name, cells in terms.items()}


EACH = [(text, name) for text in PROBLEMS for name in PROCESSORS]


@pytest.mark.slow
@pytest.mark.parametrize("text, name", EACH)
def test_every_kernel_of_a_call_is_explained(text: str, name: str) -> None:
    used = kernels_of(parse(text), cpu(name))
    assert [of.kernel for of, _ in kernels(text, name)] == list(used)
    for of, facts in kernels(text, name):
        assert of.kernel in facts["pass"]["kernels"]["value"].split(", ")
        assert facts["kernel"] == of.kernel


@pytest.mark.parametrize("text, name", EACH)
def test_time_is_the_sum_of_its_terms_and_the_launch(text: str, name: str) -> None:
    for of, facts in kernels(text, name):
        terms = seconds_of(facts["time"]["term"])
        assert set(terms) == {*cpu_time.TERMS, "launch"}
        assert facts["time"]["time"]["value"] == pytest.approx(sum(terms.values()))
        assert terms.pop("launch") == cpu_time.LAUNCH_SECONDS
        assert terms[facts["time"]["limit"]["value"]] == max(terms.values())
        plain = cpu_time.terms_of(of.tiled)
        for term, cells in facts["time"]["term"].items():
            if term != "launch":
                weighted = cells["weight"]["value"] * plain[term]
                assert cells["time"]["value"] == pytest.approx(weighted)


@pytest.mark.parametrize("text, name", EACH)
def test_no_level_moves_less_than_its_lower_bound(text: str, name: str) -> None:
    for of, facts in kernels(text, name):
        levels = facts["traffic"]["from"]
        assert [*levels] == ["L2", "L3", "memory"]
        sizes = [level["these tiles"]["value"] for level in levels.values()]
        least = [level["at least"]["value"] for level in levels.values()]
        for size, bound in zip(sizes, least, strict=True):
            assert size >= bound >= 0, of.kernel
        assert sizes == sorted(sizes, reverse=True)
        assert least == sorted(least, reverse=True)
        # The bound of the tile is that of a core's L2.
        assert least[1] == facts["bound"]["bound"]["value"]
        assert sizes[0] >= moved(of.cost)


def streams_from(facts: dict[str, Any]) -> str:
    """Return the level that holds what a head streams."""
    return facts["traffic"]["streamed"]["unit"].split()[-2]


@pytest.mark.parametrize("text, name", EACH)
def test_levels_agree_with_the_terms_of_time(text: str, name: str) -> None:
    spec = cpu(name)
    for of, facts in kernels(text, name):
        tiled, levels = of.tiled, facts["traffic"]["from"]
        if tiled.spec.joins:  # the test has no splits to join
            continue
        near, source = levels["L2"], levels[streams_from(facts)]
        terms, both = cpu_time.terms_of(tiled), moved(of.cost)
        beyond = near["these tiles"]["value"] - both
        assert beyond == pytest.approx(terms["l1"] * spec.l2_bandwidth, abs=1)
        assert source["these tiles"]["value"] >= both
        seconds = both / source["rate of a core"]["value"]
        if of.kernel not in ("fwd", "fwd_split"):
            assert terms["moved"] == pytest.approx(seconds)
            continue
        # The keys of all heads may lie in a slower level than those of a head.
        problem, at = tiled.problem, [*levels].index(streams_from(facts))
        width = (problem.head_dim_qk + problem.head_dim_v) * problem.element_bytes
        keys = problem.batch * problem.num_heads_kv * problem.seqlen_kv * width
        slowest = max(at, (2 * keys > spec.l2_bytes) + (2 * keys > spec.l3_bytes))
        rates = spec.l2_bandwidth, spec.l3_bandwidth, spec.dram_bandwidth
        first = min(keys, both) * (1 / rates[slowest] - 1 / rates[at])
        assert terms["moved"] + terms["inputs"] == pytest.approx(seconds + first)


def test_bounds_of_levels_are_those_of_their_fast_memory() -> None:
    """The problem is so long that its lower bound depends on the size of memory."""
    spec = cpu("zen3")
    of, facts = kernels("hq1 hkv1 q32768 d128 fp32 full", "zen3")[0]
    assert facts["bound"]["bound"]["unit"] == "B at least, by LB1"
    sizes = spec.l1_bytes, spec.l2_bytes, spec.l3_bytes
    for level, size in zip(facts["traffic"]["from"].values(), sizes, strict=True):
        task = KernelTask.of(of.kernel, of.tiled.problem, replace(spec, l2_bytes=size))
        assert level["faster level"]["value"] * 1024 == size
        assert level["at least"]["value"] == lower_bound_bytes(task)


def test_streams_come_from_the_smallest_cache_of_which_they_fill_half() -> None:
    spec = cpu("zen5")
    for keys, level in ((500, "L2"), (600, "L3"), (2048, "L3"), (2**17, "memory")):
        text = f"hq1 hkv1 q1024 kv{keys} d128 fp32 full"
        facts = tilegen.explain(text, "zen5", kernel="fwd", by_model=True).values[0]
        streamed = facts["traffic"]["streamed"]["value"]
        assert streamed == keys * 2 * 128 * 4
        assert streams_from(facts) == level
        size = {"L2": spec.l2_bytes, "L3": spec.l3_bytes}.get(level)
        assert size is None or streamed <= size / 2


def test_a_sum_of_splits_moves_the_splits_of_the_kernel_before_it() -> None:
    *_, (splits, _), (sums, facts) = kernels(CAUSAL, "zen5")
    assert (splits.kernel, sums.kernel) == ("bwd_one_pass", "bwd_dq_sum")
    keys = 2048 // splits.config.split_kv
    assert keys > 1
    assert facts["traffic"]["with"]["value"]["n_s"] == keys


@pytest.mark.slow
@pytest.mark.parametrize("text", [CAUSAL, FEW])
def test_other_tiles_are_those_of_the_ranking(text: str) -> None:
    for of, facts in kernels(text, "zen5"):
        task = KernelTask.of(of.kernel, parse(text), cpu("zen5"))
        if of.space == 1:
            assert facts["next"] == {"none": {"value": "rules leave this tile alone"}}
            continue
        ranked = on_cpu.candidates(task)
        assert of.config == ranked[0].config
        assert facts["next"]["ranked"]["value"] == len(ranked)
        tiles = facts["next"]["tile"]
        assert [*tiles] == [candidate.config.key for candidate in ranked[:4]]
        for cells, candidate in zip(tiles.values(), ranked, strict=False):
            cost = candidate.estimate.cost / ranked[0].estimate.cost
            assert cells["cost"]["value"] == pytest.approx(cost)
            assert cells["cost"]["value"] >= 1


def test_threads_that_programs_leave_idle() -> None:
    asked = tilegen.explain("hq3 hkv3 q64 d64 fp32 full", "zen5", kernel="fwd", by_model=True)
    time = asked.values[0]["time"]
    programs = time["programs"]["value"]
    for threads, cells in time["threads"].items():
        rounds = -(-programs // int(threads))
        expected = 100 * (1 - programs / (int(threads) * rounds))
        assert cells["idle"]["value"] == pytest.approx(expected)
    assert time["threads"]["1"]["idle"]["value"] == 0


def test_a_tile_of_ones_own_is_compared_with_better_tiles() -> None:
    asked = tilegen.explain(CAUSAL, "zen5", kernel="fwd", config="m16n16w4s2")
    (of,), (facts,) = asked.explained, asked.values
    assert of.config == TileConfig.parse("m16n16w4s2")
    _, *others = facts["next"]["tile"].values()
    assert all(cells["times"]["value"] < 1 for cells in others)
    change = asked.text().splitlines()[5]
    (model, *_) = tilegen.propose(CAUSAL, "zen5", kernel="fwd", top=1)
    assert change.startswith(f"change   next best {model.config.key}, ")
    assert " on " not in change, "all processors have the model's tile of this one"
    assert " % faster" in asked.text()


def test_a_launch_limits_a_kernel_that_does_little() -> None:
    asked = tilegen.explain("hq8 hkv2 q16 d64 fp32 full", "zen5", kernel="bwd_preprocess")
    (of,), (facts,) = asked.explained, asked.values
    terms = seconds_of(facts["time"]["term"])
    assert max(terms, key=terms.__getitem__) == "launch"
    assert asked.text().splitlines()[3].startswith("limit    a launch from Python: 20.0 us, ")
    assert of.candidate.reason.endswith(" of the time is a launch from Python")


def test_values_are_json_and_alternatives_are_there() -> None:
    explained = told(CAUSAL, "zen5")
    for of, facts in zip(
        explained.explained, json.loads(json.dumps(explained.values)), strict=True
    ):
        assert facts["gpu"] == "zen5"
        given = {*facts["others"]["given"]}
        assert given == {spec.name for spec in catalogue()} - {"zen5"} | {"full"}
        assert facts["direction"] in ("forward", "backward")
        assert [*facts["measured"]] == ["none"]
        assert of.rewriting == facts["rewriting"] == ""


def test_formulas_of_a_processor_are_latex_too() -> None:
    shown = tilegen.explain(CAUSAL, "zen5", kernel="fwd", by_model=True).latex()
    assert r"\mathrm{products} &= " in shown
    assert shown.count(r"\begin{align*}") == shown.count(r"\end{align*}") == 3


# --------------------------------------------------------------------------------------------------
# Measured and predicted


def save_record(text: str, spec: CpuSpec, config: str, us: float) -> None:
    record = TuningRecord(
        gpu=spec.name,
        arch=spec.arch,
        kernel="fwd",
        problem=parse(text).rounded,
        policy=ONE_THREAD,
        config=TileConfig.parse(config),
        measurement=timed(us),
        versions=Versions(),
        trials=7,
        date="2026-11-26T12:00:00Z",
    )
    own = Location(str(current().cache_dir), "own")
    assert save(record, location=own).written


def test_a_measured_time_is_shown_beside_the_prediction_with_the_tile_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    spec = cpu("zen5")
    without = tilegen.explain(CAUSAL, "zen5", kernel="fwd")
    assert "measured" not in without.text()
    assert "no record of zen5; to measure there: tilegen tune" in without.text("measured")
    save_record(CAUSAL, spec, "m64n64w4s2", 123456.0)
    (of,) = (explained := tilegen.explain(CAUSAL, "zen5", kernel="fwd")).explained
    assert of.config == TileConfig.parse("m64n64w4s2"), "calls use the record"
    assert of.choice.endswith(".json")
    (facts,) = explained.values
    assert facts["measured"]["median"] == {"value": pytest.approx(0.123456), "unit": "s measured"}
    assert facts["measured"]["tried"]["value"] == 7
    assert facts["measured"]["surroundings"]["value"] == "in unknown surroundings"
    time = explained.text().splitlines()[2]
    assert time.endswith(" predicted on one thread; 123 ms measured")
    assert "123 ms predicted" not in explained.text("all")
    assert re.search(r"^  median +123 ms measured$", explained.text("measured"), re.MULTILINE)
    # Another length of the bucket: the record is of another problem.
    nearby = tilegen.explain(CAUSAL.replace("2048", "1800"), "zen5", kernel="fwd").text()
    assert "; 123 ms measured for 'b1 hq8 hkv2 q2048 kv2048 d128 fp32 causal'" in nearby
    # A tile that nobody has measured.
    other = tilegen.explain(CAUSAL, "zen5", kernel="fwd", config="m128n128w4s2").text()
    assert "; 123 ms measured with m64n64w4s2" in other
    assert "measured" not in tilegen.explain(CAUSAL, "zen5", kernel="fwd", by_model=True).text()


def test_the_processor_here_is_explained_by_the_command() -> None:
    asked = ["explain", "hq2 q256 d64 fp32 causal", "--gpu", "cpu", "--kernel", "fwd"]
    shown = CliRunner().invoke(app, asked, catch_exceptions=False).stdout.splitlines()
    assert f", on {current_cpu().name} (" in shown[0]
    assert shown[6:] == ["", "more: --all, or --section NAME; see tilegen explain --help"]


@pytest.mark.parametrize("options", [["--plot", "it.svg"], ["--static"]])
def test_what_is_for_gpus_alone_says_what_to_type(options: list[str]) -> None:
    asked = ["explain", CAUSAL, "--gpu", "zen5", "--kernel", "fwd", *options]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, Unsupported)
    assert "the processor zen5" in str(error)
    assert "tilegen explain " in str(error)
    assert "--gpu zen5" in str(error)


def test_a_kernel_of_a_processor_is_shown_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is compiled for a GPU whose architecture is that of a processor."""
    say_once.cache_clear()
    shown = tilegen.show("hq2 q256 d64 fp32 causal", "zen5").source
    assert "tl.constexpr" in shown
    assert not caplog.records


def test_the_bound_is_that_of_the_processor() -> None:
    for of, facts in kernels(CAUSAL, "zen3"):
        spec = cpu("zen3")
        assert facts["bound"]["memory"]["value"] * 1024 == spec.l2_bytes
        task = KernelTask.of(of.kernel, parse(CAUSAL), spec)
        if not task.spec.joins:
            assert facts["bound"]["bound"]["value"] == lower_bound_bytes(task)


def test_a_proposal_a_listing_and_an_explanation_join_the_same_splits() -> None:
    """Without a family for processors, the sum would follow a kernel that no processor runs."""
    before = KernelTask.of("bwd_dq_sum", parse(CAUSAL), cpu("zen5")).before
    assert before
    assert before.kernel == "bwd_one_pass"
    (proposed,) = tilegen.propose(CAUSAL, "zen5", kernel="bwd_dq_sum", top=1)
    (*_, (of, facts)) = kernels(CAUSAL, "zen5")
    assert proposed.estimate.seconds == facts["time"]["time"]["value"]
    assert proposed.estimate.read_bytes == facts["traffic"]["read"]["value"]
    assert tilegen.show(CAUSAL, "zen5", kernel="bwd_dq_sum").config == of.config


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "cpu"])
def test_theorems_name_their_problem(gpu: str) -> None:
    """The optimum and the crossover leave the mask out, which the bound follows."""
    for mask, of in (("window(127,0)", "unmasked problem"), ("full", "problem")):
        asked = ["explain", f"hq8 q4096 d128 bf16 {mask}", "--gpu", gpu, "--model"]
        asked += ["--kernel", "fwd", "--section", "bound"]
        text = CliRunner().invoke(app, asked, catch_exceptions=False).stdout.splitlines()
        (optimum,) = (line for line in text if line.startswith("  optimum"))
        assert optimum.endswith(f") of the {of}")
        crossovers = [line for line in text if line.startswith("  crossover")]
        assert len(crossovers) == (gpu == "h200")
        assert all(f" of the {of}: " in line for line in crossovers)
        known, *_ = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
        assert known["bound"]["optimum"]["unit"] == f"of the {of}"
