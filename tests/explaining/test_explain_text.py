"""Explanations as text, LaTeX and JSON: the same facts in each."""

import json
import re

import pytest
import sympy

from tests.explaining.test_explain import (
    LARGE,
    SMALL,
    WINDOW,
    explanation,
    known,
    parse,
    run,
)
from tilegen.choose.families import kernels_of
from tilegen.explaining.explanation import SECTIONS
from tilegen.explaining.facts import Fact, latex_of, lines_of, values_of
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import direction_of
from tilegen.model.traffic import terms_of
from tilegen.units import ratio_text, seconds_text


def test_facts_are_printed_in_columns_and_tables() -> None:
    """A row of each kind: numbers with and without a formula, words, symbols, and a table."""
    d, e = sympy.symbols("d e")
    cells = [("time", 2e-3, "s"), ("times", None, "times"), ("because", "it fits", "")]
    facts = [
        Fact("s", "read", 33_600_000, "B between L2 and DRAM", d * e),
        Fact("s", "a longer label", 1.25, "times the bound"),
        Fact("s", "words", "of a sentence"),
        Fact("s", "optimum", None, "of the problem", d / e),
        Fact("s", "with", {"d": 128, "rho": 0.03125}),
        Fact("s", "m64n64", tuple(Fact("s", *cell) for cell in cells), "tile"),
    ]
    assert [*lines_of(facts)] == [
        "  read            33.6 MB between L2 and DRAM  d*e",
        "  a longer label  1.25 times the bound",
        "  words           of a sentence",
        "  optimum         d/e of the problem",
        "  with            d=128, rho=0.03125",
        "  tile       time  times  because",
        "  m64n64  2.00 ms      -  it fits",
    ]
    assert values_of(facts) == {
        "read": {"value": 33_600_000, "unit": "B between L2 and DRAM", "formula": "d*e"},
        "a longer label": {"value": 1.25, "unit": "times the bound"},
        "words": {"value": "of a sentence"},
        "optimum": {"value": None, "unit": "of the problem", "formula": "d/e"},
        "with": {"value": {"d": 128, "rho": 0.03125}},
        "tile": {
            "m64n64": {
                "time": {"value": 2e-3, "unit": "s"},
                "times": {"value": None, "unit": "times"},
                "because": {"value": "it fits"},
            }
        },
    }
    assert latex_of(facts) == [
        r"\begin{align*}",
        r"\mathrm{read} &= d e = 33600000\ \text{B} \\",
        r"\mathrm{optimum} &= \frac{d}{e}",
        r"\end{align*}",
        r"where $d = 128$, $\rho = 0.03125$",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("text", [LARGE, SMALL])
def test_the_text_says_what_the_json_says(text: str) -> None:
    explained = json.loads(run(text, "--gpu", "a100", "--json"))
    shown = run(text, "--gpu", "a100", "--all")
    for facts in explained:
        time, bound = facts["time"], facts["bound"]
        assert f"{seconds_text(time['time']['value'])} predicted" in shown
        assert re.search(rf"^  limit +{time['limit']['value']}$", shown, re.MULTILINE)
        assert f"{TileConfig(**facts['config'])!r}" in shown
        assert f"{ratio_text(bound['ratio']['value'])} times the bound, by these tiles" in shown
        assert f"{facts['direction']}: {SECTIONS['pass'][0]}" in shown
        assert re.search(rf"^  family +{facts['pass']['family']['value']}$", shown, re.MULTILINE)
    kernels = [facts["kernel"] for facts in explained]
    assert kernels == list(kernels_of(parse(text), gpu("a100")))
    assert all(facts["direction"] == direction_of(facts["kernel"]) for facts in explained)


@pytest.mark.slow
def test_one_kernel_alone_is_explained_without_its_pass() -> None:
    shown = run(LARGE, "--gpu", "h200", "--kernel", "bwd_dq", "--all").splitlines()
    assert shown[1].startswith("kernel   bwd_dq ")
    assert not any("families" in line for line in shown)


def test_another_fast_memory_is_said_and_changes_the_bound() -> None:
    asked = (LARGE, "--gpu", "h200", "--fast-memory", "48KiB", "--kernel", "fwd")
    assert "on h200 with 48 KiB of shared memory" in run(*asked)
    (small,) = json.loads(run(*asked, "--json"))
    assert small["tile"]["memory"]["value"] <= 48
    whole = known(LARGE, "fwd")["bound"]["memory"]["value"]
    assert small["bound"]["memory"]["value"] == whole - (227 - 48)


@pytest.mark.slow
def test_json_is_finite_and_has_stable_keys() -> None:
    explained = [
        json.loads(json.dumps(one, allow_nan=False))
        for text in (LARGE, SMALL, WINDOW, "hq1 q1 d64 bf16")
        for one in explanation(text).values
    ]
    assert len({tuple(one) for one in explained}) == 1
    for section, labels in {
        "time": ("time", "limit", "on_sms", "tensor", "l2", "dram", "waves", "products"),
        "traffic": ("read", "written", "DRAM", "with"),
        "bound": ("optimum", "floor", "bound", "memory", "with", "crossover"),
        "pass": ("family", "because", "kernels", "families", "traffic", "regime", "M", "given"),
    }.items():
        assert all(set(labels) <= set(one[section]) for one in explained), section
    for name in ("read", "written"):
        assert all(one["traffic"][name]["value"] > 0 for one in explained)


@pytest.mark.slow
def test_latex_has_every_formula_and_is_balanced() -> None:
    told = explanation(LARGE, ("fwd", "bwd_dkdv"))
    shown = told.latex()
    assert run(LARGE, "--gpu", "h200", "--kernel", "fwd", "--latex").count("align*") == 6
    for of in told.explained:
        for term in terms_of(of.kernel):
            assert sympy.latex(sympy.Symbol("H_kv") * term.bytes) in shown
        assert str(of.cost.lower_bound_bytes) in shown
    for what in (r"\Theta", r"\mathrm{LB1}", r"\mathrm{dividing}", r"\rho &="):
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
    for line in explanation(text).latex().splitlines():
        if line.startswith("where "):
            shown.update(line.removeprefix("where ").split(", "))
        elif line and not line.startswith(("%", r"\begin", r"\end")) and "cases" not in line:
            equation = line.removesuffix(r" \\").replace("&", "")
            shown.add(f"${equation}$")
    for equation in sorted(shown):
        mathtext.parse(equation)
