"""Format the formulas of an explanation as LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sympy import Symbol

from tilegen.explaining.formulas import latex
from tilegen.explaining.gpu_records import KernelExplanation, PassExplanation
from tilegen.explaining.records import BoundFacts


def pass_latex(facts: KernelExplanation, way: PassExplanation) -> list[str]:
    """Format the complexity of a kernel's pass, bounds and the dividing point as LaTeX."""
    rows = [
        (r"Q_{\mathrm{optimum}}", rf"\Theta\left({way.optimum.latex}\right)", None),
        *_bound_rows(way.bound),
        (
            r"M_{\mathrm{dividing}}",
            way.regime.dividing.latex,
            way.regime.dividing_words,
        ),
    ]
    title = f"{way.direction} of {facts.problem} on {facts.gpu}: {way.family}; "
    title += f"optimum and dividing point of the {way.bound.theorems_of}"
    return [f"% {title}", *_aligned(rows), _where({**way.bound.values, **way.regime.values})]


def kernel_latex(facts: KernelExplanation) -> list[str]:
    """Format the formulas of a kernel as LaTeX: traffic at both levels, bound and time."""
    traffic, dram, parts = facts.traffic, facts.dram, facts.time.composition
    config = facts.config.key
    head = f"% {facts.kernel} {config} of {facts.problem} on {facts.gpu}"
    moved: list[tuple[str, str, float | None]] = [
        (
            rf"\operatorname{{{term.direction}}}(\text{{{term.tensor}}})",
            term.latex + (r"\quad\text{(fp32)}" if term.size == "fp32" else ""),
            None,
        )
        for term in traffic.formula
    ]
    moved.append((r"Q_{\mathrm{L2}}", traffic.bytes.latex, traffic.moved))
    names = {"DRAM bytes": r"Q_{\mathrm{DRAM}}", "rho": r"\rho"}
    numbers = {"DRAM bytes": dram.bytes, "rho": dram.wave and dram.wave.sweeps}
    second = [(names[x.name], x.latex, numbers[x.name]) for x in dram.formulas] or [
        (names["DRAM bytes"], rf"{dram.bytes}\ \text{{bytes}}", None)
    ]
    time = (
        r"\max\left(T_{\mathrm{programs}},\ \frac{Q_{\mathrm{L2}}}{\beta_{\mathrm{L2}}},\ "
        r"2 T_{\mathrm{latency}} + \frac{Q_{\mathrm{DRAM}} + Q_{\mathrm{pushed\ out}}}"
        r"{\beta_{\mathrm{DRAM}}}\right) + T_{\mathrm{launch}}"
    )
    norm = parts.overlap_norm
    step = rf"\left(\sum_{{\mathrm{{units}}}} t_{{\mathrm{{unit}}}}^{{{norm}}}\right)^{{1/{norm}}}"
    return [
        head,
        "% words between SMs and L2, per key-value head; Q in bytes, whole launch",
        *_aligned(moved),
        _where(traffic.values),
        "% bytes between L2 and DRAM, whole launch",
        *_aligned(second),
        *([_where(dram.values)] if dram.values else []),
        "% lower bound in bytes",
        *_aligned(_bound_rows(facts.bound)),
        _where(facts.bound.values),
        "% seconds",
        *_aligned([("T", time, facts.time.seconds), (r"T_{\mathrm{step}}", step, None)]),
    ]


def _bound_rows(bound: BoundFacts) -> list[tuple[str, str, float | None]]:
    names = {
        "LB1": r"\mathrm{LB}_1",
        "LB1G": r"\mathrm{LB}_{1,G}",
        "LB2": r"\mathrm{LB}_2",
        "floor": r"\mathrm{floor}",
    }
    rows = [(names[x.name], x.latex, bound.each[x.name]) for x in bound.formulas]
    largest = ", ".join(names[x.name] for x in bound.formulas)
    if len(rows) > 1:
        largest = rf"\max\left({largest}\right)"
    return [*rows, (r"Q_{\mathrm{L2}}", rf"\geq {largest}", bound.bytes)]


def _aligned(rows: Sequence[tuple[str, str, float | None]]) -> list[str]:
    """Return an align* environment. A right side that starts with a relation keeps it."""
    lines: list[str] = []
    for left, right, number in rows:
        relation = "" if right.startswith(r"\geq") else "= "
        shown = "" if number is None else f" = {_number(number)}"
        lines.append(rf"{left} &{relation}{right}{shown}")
    return [r"\begin{align*}", *(line + r" \\" for line in lines[:-1]), lines[-1], r"\end{align*}"]


def _where(values: Mapping[str, float]) -> str:
    shown = (f"${latex(Symbol(name))} = {_number(value)}$" for name, value in values.items())
    return "where " + ", ".join(shown)


def _number(value: float) -> str:
    if value == int(value):
        return str(int(value))
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    return mantissa + (rf" \cdot 10^{{{int(exponent)}}}" if exponent else "")
