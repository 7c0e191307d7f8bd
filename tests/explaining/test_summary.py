"""The six lines at the head of an explanation, and the units of everything that is printed."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

import tilegen
from tilegen.choose.reason import limit_in_words
from tilegen.cli.main import app
from tilegen.errors import Unsupported
from tilegen.explaining.explained import OTHER_FAST_MEMORY, moved
from tilegen.explaining.explanation import SECTIONS, Explanation
from tilegen.explaining.summary import LABELS, slower
from tilegen.units import bytes_text, memory_text, ratio_text, seconds_text

CAUSAL = "b2 hq8 hkv2 q1000 d128/64 bf16 causal"
PROBLEMS = {
    "causal": (CAUSAL, "h200"),
    "slices": ("hq6 hkv2 q3000 kv5000 d576/512 bf16 causal", "a100"),
    "window": ("b2 hq6 hkv2 q1000 kv2000 d72/40 fp32 window(100,3)", "t4"),
    "long": ("b64 hq64 q131072 d128 bf16 causal", "h200"),  # seconds, and TB
    "nothing kept": ("hq8 q1024 d64 bf16 ~full", "h200"),
    "decode": ("b8 hq32 hkv8 q1 kv8192 d128 bf16 full", "h200"),
    "processor": ("hq8 hkv2 q2000 d128 fp32 causal", "zen3"),
    "processor, long": ("b64 hq64 q131072 d128 bf16 causal", "zen5"),
    "processor, decode": ("hq32 hkv8 q1 kv8192 d128 fp32 full", "zen5"),
    "processor, nothing kept": ("hq8 q1024 d64 fp32 ~full", "zen5"),
}
UNITS = r"(?:[num]?s|min|h|d|y|[kMGTPE]?B|[KMGTPE]iB|[kMGTPE]?flop/s|[kMGTPE]?B/s|[kMGTPE] ?/s|%)"


def explained(name: str) -> Explanation:
    problem, device = PROBLEMS[name]
    return tilegen.explain(problem, device, by_model=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_six_lines_come_first_and_alone(name: str) -> None:
    told = explained(name)
    first, *others = told.text().split("\n\n")
    assert [line[:9].rstrip() for line in first.splitlines()] == [*LABELS]
    for block in others:  # the problem is said once
        assert [line[:9].rstrip() for line in block.splitlines()] == [*LABELS[1:]]
    assert len(others) == len(told.explained) - 1
    assert told.text("all").startswith(told.text() + "\n\n")


def test_the_lines_have_the_numbers_of_the_estimate() -> None:
    for of in tilegen.explain(CAUSAL, "h200", by_model=True).explained:
        alone = tilegen.explain(CAUSAL, "h200", kernel=of.kernel, by_model=True)
        problem, kernel, time, limit, bound, change = alone.text().splitlines()
        cost, key = of.cost, of.tiled.problem.key
        size = memory_text(of.tiled.gpu.smem_per_block)
        assert problem == f"problem  {key}, on h200 with {size} of shared memory"
        tile = of.tiled.spec.loop.tile(of.config)
        assert kernel == f"kernel   {of.kernel} {of.config.key}: {tile}"
        assert time == f"time     {seconds_text(cost.seconds)} predicted"
        assert limit.startswith(f"limit    {limit_in_words(of.tiled, cost)}: programs take ")
        assert f" {seconds_text(dict(cost.terms)['l2'])} in L2 " in limit
        assert bound == (
            f"bound    {bytes_text(moved(cost))} between SMs and L2, "
            f"{ratio_text(moved(cost) / cost.lower_bound_bytes)} times the lower bound of "
            f"{bytes_text(cost.lower_bound_bytes)}"
        )
        assert change.startswith(f"change   next best {of.others[0].config.key}, ")


@pytest.mark.parametrize("name", ["h200", "rtx4090"])
def test_the_last_line_names_the_largest_memory_and_the_masks_that_change_the_tile(
    name: str,
) -> None:
    told = tilegen.explain(CAUSAL, name, kernel="fwd", by_model=True)
    size = tilegen.gpu(name).smem_per_block
    (facts,) = told.values
    given = {label: cells["tile"]["value"] for label, cells in facts["others"]["given"].items()}
    others = {limit: given[memory_text(limit)] for limit in OTHER_FAST_MEMORY}
    mine = others[size]
    less = [limit for limit in others if limit < size and others[limit] != mine]
    more = [limit for limit in others if limit > size and others[limit] != mine]
    assert bool(more) == (name != "h200"), "choose another GPU: this test shows nothing"
    change = told.text().splitlines()[5]
    assert ("of shared memory" in change) == bool(less)
    for limit in less[-1:]:
        assert f"; {others[limit]} with {memory_text(limit)} of shared memory" in change
    masks = {label: tile for label, tile in given.items() if "KiB" not in label}
    assert masks
    for mask, tile in masks.items():
        assert (f"{tile} under {mask}" in change) == (tile != mine)


@pytest.mark.parametrize(
    "ratio, text",
    [(1.0, "as fast"), (1.003, "0.3 % slower"), (0.97, "3.0 % faster"), (2.0, "100 % slower")],
)
def test_ratios_in_words(ratio: float, text: str) -> None:
    assert slower(ratio) == text


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_printed_value_has_an_exponent_or_more_than_four_digits(name: str) -> None:
    problem, device = PROBLEMS[name]
    asked = [problem, "--gpu", device]
    proposed = CliRunner().invoke(app, ["propose", *asked], catch_exceptions=False).stdout
    text = f"{explained(name).text('all')}\n{proposed}"
    assert not re.search(r"\d(\.\d+)?e[+-]?\d", text)
    values = re.findall(rf"(?<![\w.])(-?\d[\d.]*) {UNITS}(?![\w/])", text)
    assert len(values) > 30
    for value in values:
        assert len(value.strip("-").replace(".", "").lstrip("0")) <= 4, value
    assert max(map(len, proposed.splitlines())) <= 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "processor"])
def test_sections_come_in_their_order_whatever_the_order_of_their_names(name: str) -> None:
    told = explained(name)
    both = told.text("time", "tile")
    assert both == told.text("tile", "time")
    titles = {section: title for section, (title, _) in SECTIONS.items()}
    assert both.index(titles["tile"]) < both.index(titles["time"])
    assert titles["mask"] not in both
    everything = told.text("all")
    assert all(title in everything for title in titles.values())
    with pytest.raises(Unsupported, match=r"section must be all or one of pass, tile, .*'tiles'"):
        told.text("tiles")


def test_the_help_lists_the_sections() -> None:
    shown = CliRunner().invoke(app, ["explain", "--help"], catch_exceptions=False).stdout
    words = re.findall(r"\w+", shown)
    assert all(name in words for name in SECTIONS)
