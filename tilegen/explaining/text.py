"""Format an explanation as lines of text, or as LaTeX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sympy import Symbol

from tilegen.explaining.alternatives import with_alternatives
from tilegen.explaining.formulas import latex
from tilegen.explaining.mask_effect import mask_lines
from tilegen.kernels.config import TileConfig
from tilegen.units import bytes_text, memory_text, seconds_text

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons for the tiles of kernels: as plain values, as text and as a plot."""

    problem: AttentionProblem
    """The problem explained."""
    gpu: GpuSpec
    """The GPU for which the tiles are chosen."""
    explained: tuple[dict[str, Any], ...]
    """A dictionary for each kernel, without alternatives; its pass is under `pass`."""
    with_passes: bool
    """True: text and formulas include the passes."""

    @cached_property
    def values(self) -> tuple[dict[str, Any], ...]:
        """A dictionary for each kernel, serialisable as JSON; its pass is under `pass`."""
        return tuple(with_alternatives(self.explained, self.problem, self.gpu))

    def text(self) -> str:
        """Return the explanation as lines of text."""
        explained = with_alternatives(
            self.explained, self.problem, self.gpu, with_passes=self.with_passes
        )
        return "\n".join(lines_of_all(explained, with_passes=self.with_passes))

    def latex(self) -> str:
        """Return the formulas as LaTeX; needs amsmath."""
        return "\n".join(latex_of_all(self.explained, with_passes=self.with_passes))

    def plot(self, path: Path | str) -> None:
        """Draw traffic and roofline to a .png, .svg or .pdf file. Raises Unsupported."""
        from tilegen.explaining.plot import draw

        draw(self.problem.normal(), self.gpu, list(self.explained), Path(path))


def lines_of_all(explained: Sequence[dict[str, Any]], *, with_passes: bool) -> list[str]:
    """Return explanations of kernels as text, each pass before the first of its kernels."""
    return _joined(explained, with_passes, pass_lines, explain_lines)


def latex_of_all(explained: Sequence[dict[str, Any]], *, with_passes: bool) -> list[str]:
    """Return the formulas of explanations as LaTeX; needs amsmath."""
    return _joined(explained, with_passes, pass_latex, kernel_latex)


def _joined(
    explained: Sequence[dict[str, Any]], with_passes: bool, of_pass: Any, of_kernel: Any
) -> list[str]:
    blocks: list[list[str]] = [
        [line] for line in {facts["rewriting"] for facts in explained} if line
    ]
    seen: set[str] = set()
    for facts in explained:
        if with_passes and facts["pass"]["direction"] not in seen:
            seen.add(facts["pass"]["direction"])
            blocks.append(of_pass(facts))
        blocks.append(of_kernel(facts))
    return [line for i, block in enumerate(blocks) for line in ([""] if i else []) + block]


# --------------------------------------------------------------------------------------------------
# Text


def pass_lines(facts: dict[str, Any]) -> list[str]:
    """Format the explanation of the pass of a kernel."""
    way, bound, regime = facts["pass"], facts["pass"]["bound"], facts["pass"]["regime"]
    moved = way["read_bytes"] + way["write_bytes"]
    lines = [
        f"{way['direction']} for {_subject(facts)}: {way['family']}",
        f"  because    {way['because']}",
        *_table("families", map(_family, way["families"])),
    ]
    lines += [f"             {name:12} left out: {why}" for name, why in way["left_out"].items()]
    lines += [
        f"  traffic    {bytes_text(moved)} between SMs and L2, {bound['ratio']:.1f} times the "
        f"lower bound of the pass: {_bound(bound)}",
        f"  regime     {regime['regime']}: M = {bytes_text(regime['m_bytes'])} = "
        f"{regime['m_words']:.0f} words of {regime['dtype']}, {regime['m_over_d2']:.2f} d^2",
        f"             the theorems divide at d^2 = {regime['theorem_words']} words "
        f"({bytes_text(regime['theorem_bytes'])}), these schedules at "
        f"{regime['dividing_words']:.0f} words ({bytes_text(regime['dividing_bytes'])}); "
        f"with this M at head dim {regime['critical_head_dim']:.0f}",
    ]
    if panel := way["panel"]:
        lines.append(
            f"  panel      {panel['rows']} query rows, {bytes_text(panel['bytes'])} of scores in "
            f"{bytes_text(panel['l2_bytes'])} of L2; {panel['panels']} of them"
        )
    choices = [
        f"{x['fast_memory'] // 1024:3} KiB    {_choice(x)}" for x in way["other_fast_memory"]
    ]
    choices += [f"{x['mask']:10} {_choice(x)}" for x in way["other_masks"]]
    return [*lines, *_table("would be", choices)]


def _subject(facts: dict[str, Any]) -> str:
    memory = f"{memory_text(facts['fast_memory'])} of shared memory"
    return f"'{facts['problem']}' on {facts['gpu']} with {memory}"


def _family(family: dict[str, Any]) -> str:
    kernels = ", ".join(f"{kernel['kernel']} {kernel['key']}" for kernel in family["kernels"])
    moved = bytes_text(family["read_bytes"] + family["write_bytes"])
    spills = "; spills much" if family["spills"] else ""
    return (
        f"{family['family']:12} {seconds_text(family['seconds']):>9} {moved:>8}  {kernels}{spills}"
    )


def _choice(family: dict[str, Any]) -> str:
    if family["family"] is None:
        return "nothing fits"
    return f"{family['family']:12} {seconds_text(family['seconds']):>9}"


def explain_lines(facts: dict[str, Any]) -> list[str]:
    """Format the explanation of a kernel."""
    traffic, bound, time, mask = facts["traffic"], facts["bound"], facts["time"], facts["mask"]
    tiles, moved = facts["tiles"], (traffic["read_bytes"], traffic["write_bytes"])
    seeds, tables = traffic["seed_bytes"], traffic["table_bytes"]
    return [
        f"{facts['kernel']} for {_subject(facts)}",
        f"  tile       {TileConfig(**facts['config'])!r}",
        *([f"  choice     {facts['choice']}"] if facts["choice"] else []),
        f"  because    {facts['reason']}",
        *([f"  splits     {facts['splits']}"] if facts["splits"] else []),
        *([f"  loads      {facts['loads']}"] if facts["loads"] else []),
        "",
        *mask_lines(mask),
        f"  tiles      {tiles['tiles']} visited per head by {tiles['programs']} programs, "
        f"{tiles['partial_tiles']} of them with mask code",
        "",
        "  traffic between SMs and L2, words per key-value head:",
        *(
            f"    {term['direction']:5} {term['tensor']:6} {term['words']}"
            + (" (fp32)" if term["size"] == "fp32" else "")
            for term in traffic["formula"]
        ),
        f"    in all {bytes_text(moved[0])} read, {bytes_text(moved[1])} written, with "
        f"{_values(traffic['values'])}",
        *([f"    {seeds} bytes of it are seeds, for dropout"] if seeds else []),
        *([f"    {tables} bytes of it say where requests and pages lie"] if tables else []),
        *_dram_lines(facts["dram"]),
        "",
        f"  optimum    Theta({bound['complexity']})",
        f"  bound      {_bound(bound)} with {bytes_text(bound['on_chip_bytes'])} on chip"
        + ("" if bound["ratio"] is None else f": these tiles move {bound['ratio']:.1f} times that"),
        *(
            f"    {x['name']:5} {x['text']}"
            for x in bound["formulas"]
            if x["name"] == bound["applies"]
        ),
        *_subgrid_lines(bound["subgrids"]),
        f"  crossover  head dim {bound['critical_head_dim']:.0f}: "
        "beyond it the small-cache algorithms move less",
        "",
        *_time_lines(time),
        "",
        "  next best, and in what they differ",
        *(
            f"    {other['config']:14} {seconds_text(other['seconds']):>8}, "
            f"{other['slowdown']:.2f} times: {other['differs']}"
            for other in facts["next_best"]
        ),
        "",
        "  with other fast memory, or another mask",
        *(
            f"    {memory_text(other['fast_memory']):14} {_config(other)}"
            for other in facts["other_fast_memory"]
        ),
        *(f"    {other['mask']:14} {_config(other)}" for other in facts["other_masks"]),
    ]


def _config(other: dict[str, Any]) -> str:
    if other["config"] is None:
        return "nothing fits"
    return f"{other['config']:14} {seconds_text(other['seconds']):>8}"


def _dram_lines(dram: dict[str, Any]) -> Iterator[str]:
    bound = ""
    if dram["ratio"] is not None:
        bound = f", {dram['ratio']:.1f} times the lower bound with L2 and all SMs as fast memory"
    yield f"  traffic between L2 and DRAM: {bytes_text(dram['bytes'])}{bound}"
    if dram["formulas"]:
        yield f"    {dram['formulas'][0]['text']}"
    else:
        yield "    inputs and outputs once; what streams again with each panel, unless L2 holds it"
    if (wave := dram["wave"]) and len(dram["formulas"]) > 1:
        held = "all" if wave["heads_in_l2"] is None else f"{wave['heads_in_l2']:.1f}"
        yield (
            f"    rho = {wave['sweeps']:.2f}: {wave['programs']} programs in flight read at most "
            f"{wave['heads']} key-value heads, and L2 holds {held}"
        )


def _time_lines(time: dict[str, Any]) -> Iterator[str]:
    parts = time["composition"]
    programs, largest = parts["programs"], parts["largest"]
    yield (
        f"  time       {seconds_text(time['seconds'])} predicted, limited by {time['limit']}; "
        f"{time['waves']:.1f} waves"
    )
    took = "less" if programs is None else seconds_text(programs)
    equal = parts["equal_programs"]
    waves = "in waves, those of the last among themselves" if equal else "the longest first"
    if time["waves"] > 1 and not equal:
        waves += ", half of one as tail"
    named = {"programs": "programs", "l2": "L2", "dram": "DRAM"}[largest]
    yield (
        f"    = max(programs {took}, L2 {seconds_text(parts['l2'])}, "
        f"DRAM {seconds_text(parts['dram'])}), here {named}, "
        f"+ {seconds_text(parts['launch'])} for {parts['launches']} "
        f"launch{'es' * (parts['launches'] > 1)}"
    )
    yield (
        f"    programs run {waves}; a step takes the {parts['overlap_norm']}-norm of its units, a "
        "little more than the busiest"
    )
    for name, seconds in time["terms"].items():
        yield f"    {name:8} {seconds_text(seconds):>10}"


def _bound(bound: dict[str, Any]) -> str:
    others = [
        f"{name} {bytes_text(max(0, size))}"
        for name, size in bound["each"].items()
        if name != bound["applies"]
    ]
    each = f"; {', '.join(others)}" if others else ""
    return f"{bytes_text(bound['bytes'])} ({bound['applies']}{each})"


def _subgrid_lines(subgrids: dict[str, Any] | None) -> Iterator[str]:
    if subgrids:
        form = subgrids["formula"]["text"] if subgrids["formula"] else "counted"
        yield (
            f"    LB1G  u = {subgrids['per_row']:.1f} scores for each row and column of a sub-grid "
            f"of the mask, at most: {form}; w_b = {subgrids['width']}"
        )


def _table(name: str, rows: Iterable[str]) -> Iterator[str]:
    for i, row in enumerate(rows):
        yield f"  {'' if i else name:10} {row}"


def _values(values: dict[str, float]) -> str:
    return ", ".join(
        f"{name}={value:g}" if value != int(value) else f"{name}={int(value)}"
        for name, value in values.items()
    )


# --------------------------------------------------------------------------------------------------
# LaTeX


def pass_latex(facts: dict[str, Any]) -> list[str]:
    """Format the complexity of a pass, its bounds and the dividing point as LaTeX."""
    way = facts["pass"]
    rows = [
        (r"Q_{\mathrm{optimum}}", rf"\Theta\left({way['optimum']['latex']}\right)", None),
        *_bound_rows(way["bound"]),
        (
            r"M_{\mathrm{dividing}}",
            way["regime"]["dividing"]["latex"],
            way["regime"]["dividing_words"],
        ),
    ]
    title = f"{way['direction']} of {facts['problem']} on {facts['gpu']}: {way['family']}"
    return [f"% {title}", *_aligned(rows), _where(way["bound"]["values"] | way["regime"]["values"])]


def kernel_latex(facts: dict[str, Any]) -> list[str]:
    """Format the formulas of a kernel as LaTeX: traffic at both levels, bound and time."""
    traffic, dram, parts = facts["traffic"], facts["dram"], facts["time"]["composition"]
    config = TileConfig(**facts["config"]).key
    head = f"% {facts['kernel']} {config} of {facts['problem']} on {facts['gpu']}"
    moved: list[tuple[str, str, float | None]] = [
        (
            rf"\operatorname{{{term['direction']}}}(\text{{{term['tensor']}}})",
            term["latex"] + (r"\quad\text{(fp32)}" if term["size"] == "fp32" else ""),
            None,
        )
        for term in traffic["formula"]
    ]
    in_all = traffic["read_bytes"] + traffic["write_bytes"]
    moved.append((r"Q_{\mathrm{L2}}", traffic["bytes"]["latex"], in_all))
    names = {"DRAM bytes": r"Q_{\mathrm{DRAM}}", "rho": r"\rho"}
    numbers = {"DRAM bytes": dram["bytes"], "rho": (dram["wave"] or {}).get("sweeps")}
    second = [(names[x["name"]], x["latex"], numbers[x["name"]]) for x in dram["formulas"]] or [
        (names["DRAM bytes"], rf"{dram['bytes']}\ \text{{bytes}}", None)
    ]
    time = (
        r"\max\left(T_{\mathrm{programs}},\ \frac{Q_{\mathrm{L2}}}{\beta_{\mathrm{L2}}},\ "
        r"2 T_{\mathrm{latency}} + \frac{Q_{\mathrm{DRAM}} + Q_{\mathrm{pushed\ out}}}"
        r"{\beta_{\mathrm{DRAM}}}\right) + T_{\mathrm{launch}}"
    )
    norm = parts["overlap_norm"]
    step = rf"\left(\sum_{{\mathrm{{units}}}} t_{{\mathrm{{unit}}}}^{{{norm}}}\right)^{{1/{norm}}}"
    return [
        head,
        "% words between SMs and L2, per key-value head; Q in bytes, whole launch",
        *_aligned(moved),
        _where(traffic["values"]),
        "% bytes between L2 and DRAM, whole launch",
        *_aligned(second),
        *([_where(dram["values"])] if dram["values"] else []),
        "% lower bound in bytes",
        *_aligned(_bound_rows(facts["bound"])),
        _where(facts["bound"]["values"]),
        "% seconds",
        *_aligned([("T", time, facts["time"]["seconds"]), (r"T_{\mathrm{step}}", step, None)]),
    ]


def _bound_rows(bound: dict[str, Any]) -> list[tuple[str, str, float | None]]:
    names = {
        "LB1": r"\mathrm{LB}_1",
        "LB1G": r"\mathrm{LB}_{1,G}",
        "LB2": r"\mathrm{LB}_2",
        "floor": r"\mathrm{floor}",
    }
    rows = [(names[x["name"]], x["latex"], bound["each"][x["name"]]) for x in bound["formulas"]]
    largest = ", ".join(names[x["name"]] for x in bound["formulas"])
    if len(rows) > 1:
        largest = rf"\max\left({largest}\right)"
    return [*rows, (r"Q_{\mathrm{L2}}", rf"\geq {largest}", bound["bytes"])]


def _aligned(rows: Sequence[tuple[str, str, float | None]]) -> list[str]:
    """Return an align* environment. A right side that starts with a relation keeps it."""
    lines: list[str] = []
    for left, right, number in rows:
        relation = "" if right.startswith(r"\geq") else "= "
        shown = "" if number is None else f" = {_number(number)}"
        lines.append(rf"{left} &{relation}{right}{shown}")
    return [r"\begin{align*}", *(line + r" \\" for line in lines[:-1]), lines[-1], r"\end{align*}"]


def _where(values: dict[str, float]) -> str:
    shown = (f"${latex(Symbol(name))} = {_number(value)}$" for name, value in values.items())
    return "where " + ", ".join(shown)


def _number(value: float) -> str:
    if value == int(value):
        return str(int(value))
    mantissa, _, exponent = f"{value:.4g}".partition("e")
    return mantissa + (rf" \cdot 10^{{{int(exponent)}}}" if exponent else "")
