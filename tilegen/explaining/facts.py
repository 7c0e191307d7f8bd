"""The facts of an explanation, and their printers: as text, as values for JSON, and as LaTeX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tilegen.units import (
    bytes_text,
    memory_text,
    number_text,
    percent_text,
    rate_text,
    ratio_text,
    seconds_text,
)

if TYPE_CHECKING:
    import sympy as sp


@dataclass(frozen=True, slots=True)
class Fact:
    """A row of an explanation."""

    section: str
    label: str
    value: float | str | Mapping[str, float] | tuple[Fact, ...] | None
    """A number, words, the values of symbols, or the cells of a line of a table."""
    unit: str = ""
    """The unit and what is counted; for a line of a table, the heading above the labels."""
    formula: sp.Expr | None = None
    """The formula of the value, in symbols that a fact of the section lists, or in the names of
    `model.terms`."""


Cell = tuple[float | str | None, str]
"""The value and unit of a cell."""


def line(
    section: str,
    heading: str,
    label: str,
    cells: Mapping[str, Cell],
    formula: sp.Expr | None = None,
) -> Fact:
    """Return a line of a table, from cells by the name of their column."""
    values = tuple(Fact(section, name, *cell) for name, cell in cells.items())
    return Fact(section, label, values, heading, formula)


# --------------------------------------------------------------------------------------------------
# Text

_RATES = ("flop", "flop/s", "B/s", "/s")
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": seconds_text,
    "B": bytes_text,
    "KiB": lambda size: memory_text(1024 * size),
    "%": lambda percent: percent_text(percent / 100),
    "times": lambda ratio: f"{ratio_text(ratio)} times",
    **{unit: lambda rate, unit=unit: rate_text(rate, unit) for unit in _RATES},
}
"""The formats of numbers, by the first word of their unit."""


def text_of(fact: Fact) -> str:
    """Format a value with its unit."""
    value, (unit, _, counted) = fact.value, fact.unit.partition(" ")
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={number_text(number)}" for name, number in value.items())
    if not isinstance(value, int | float):
        return value if isinstance(value, str) else ""
    if unit in _FORMATS:
        return f"{_FORMATS[unit](value)} {counted}".rstrip()
    number = number_text(value) if value == int(value) else ratio_text(value)
    return f"{number} {fact.unit}".rstrip()


WIDTH = 80
"""Columns of a line beyond which a formula stands in a line of its own."""
LONGEST = 160
"""Characters of a formula beyond which it is left to LaTeX and JSON."""


def lines_of(facts: Iterable[Fact]) -> Iterator[str]:
    """Format the facts of a section as lines, in columns; lines of a table stand below a header."""
    for heading, group in groupby(facts, _heading):
        together = list(group)
        yield from _list(together) if heading is None else _table(heading, together)


def _heading(fact: Fact) -> str | None:
    return fact.unit if isinstance(fact.value, tuple) else None


def _list(facts: Sequence[Fact]) -> Iterator[str]:
    labels = max(9, *(len(fact.label) for fact in facts))
    numbers = [text_of(fact) for fact in facts if isinstance(fact.value, int | float)]
    digits = max((len(text.split()[0]) for text in numbers), default=0)
    for fact in facts:
        text, formula = text_of(fact), "" if fact.formula is None else str(fact.formula)
        if fact.value is None:
            text, formula = f"{formula} {text or fact.unit}", ""
        elif isinstance(fact.value, int | float):
            text = " " * (digits - len(text.split()[0])) + text
        start = f"  {fact.label:{labels}}  {text}"
        if len(formula) > LONGEST:
            formula = ""
        aligned = f"{start:{labels + digits + 8}}  {formula}".rstrip()
        yield aligned if len(aligned) <= WIDTH or not formula else start
        if formula and len(aligned) > WIDTH:
            yield f"    {formula}"


def _table(heading: str, facts: Sequence[Fact]) -> Iterator[str]:
    """Format lines of a table: words begin at the left of a column, numbers end at its right."""
    cells = [_cells(fact) for fact in facts]
    columns = [[heading, *(fact.label for fact in facts)]]
    columns += [[row[0].label, *map(_short, row)] for row in zip(*cells, strict=True)]
    words = [
        True,
        *(any(isinstance(cell.value, str) for cell in row) for row in zip(*cells, strict=True)),
    ]
    widths = [max(map(len, column)) for column in columns]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH else " "
    for texts in zip(*columns, strict=True):
        aligned = (
            f"{text:{'<' if left else '>'}{width}}"
            for text, left, width in zip(texts, words, widths, strict=True)
        )
        yield f"  {gap.join(aligned)}".rstrip()


def _cells(fact: Fact) -> tuple[Fact, ...]:
    assert isinstance(fact.value, tuple), fact
    return fact.value


def _short(cell: Fact) -> str:
    """Format a cell; a ratio, whose column has a name, without `times`."""
    return "-" if cell.value is None else text_of(cell).removesuffix(" times")


# --------------------------------------------------------------------------------------------------
# Values, for JSON


def values_of(facts: Iterable[Fact]) -> dict[str, Any]:
    """Return facts by label: value, unit and formula, without those that are missing. Lines of a
    table stand under its heading, with their cells."""
    values: dict[str, Any] = {}
    for fact in facts:
        if isinstance(fact.value, tuple):
            cells = values_of(fact.value)
            known = cells if fact.formula is None else cells | {"formula": str(fact.formula)}
            values.setdefault(fact.unit, {})[fact.label] = known
        else:
            value = dict(fact.value) if isinstance(fact.value, Mapping) else fact.value
            known = {
                "unit": fact.unit,
                "formula": "" if fact.formula is None else str(fact.formula),
            }
            values[fact.label] = {"value": value} | {name: x for name, x in known.items() if x}
    return values


# --------------------------------------------------------------------------------------------------
# LaTeX


def latex_of(facts: Sequence[Fact]) -> list[str]:
    """Format the formulas of a section as LaTeX, with the values of their symbols; needs
    amsmath."""
    rows = [
        rf"{_left(fact.label)} &= {latex(fact.formula)}{_right(fact)}"
        for fact in facts
        if fact.formula is not None
    ]
    values = [fact.value for fact in facts if isinstance(fact.value, Mapping)]
    where = [f"${_left(name)} = {_number(x)}$" for one in values for name, x in one.items()]
    if not rows:
        return []
    lines = [r"\begin{align*}", *(row + r" \\" for row in rows[:-1]), rows[-1], r"\end{align*}"]
    return [*lines, *([f"where {', '.join(where)}"] if where else [])]


def _left(label: str) -> str:
    """Return the left side of an equation: a symbol, or words."""
    import sympy as sp

    return latex(sp.Symbol(label)) if label.isidentifier() else rf"\text{{{label}}}"


def _right(fact: Fact) -> str:
    """Return the value of an equation; for a line of a table, that of its first cell."""
    if isinstance(fact.value, tuple):
        return _right(fact.value[0])
    if not isinstance(fact.value, int | float):
        return ""
    unit = fact.unit.split(" ")[0]
    return f" = {_number(fact.value)}" + (rf"\ \text{{{unit}}}" if unit in ("s", "B") else "")


@lru_cache(maxsize=1024)  # kernels, bounds and terms have some hundred expressions
def latex(expression: sp.Expr) -> str:
    """Return an expression as LaTeX: symbols of one letter as in the papers, words upright."""
    import sympy as sp

    words = {
        symbol: rf"\mathrm{{{symbol.name}}}".replace("_", r"\_")
        for symbol in expression.free_symbols
        if len(symbol.name.split("_")[0]) > 1 and symbol.name not in ("alpha", "kappa", "rho")
    }
    between = {"mul_symbol": r" \, "} if words else {}
    return sp.latex(expression, symbol_names=words, **between)


def _number(value: float) -> str:
    if value == int(value):
        return str(int(value))
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    return mantissa + (rf" \cdot 10^{{{int(exponent)}}}" if exponent else "")
