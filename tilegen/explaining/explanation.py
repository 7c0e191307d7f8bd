"""An explanation of the kernels of a problem, with its printers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilegen.device import Device
from tilegen.errors import Unsupported
from tilegen.explaining.costs import bound_facts, time_facts, traffic_facts
from tilegen.explaining.explained import ExplainedKernel
from tilegen.explaining.facts import Fact, latex_of, lines_of, values_of
from tilegen.explaining.passes import pass_facts
from tilegen.explaining.summary import summaries
from tilegen.explaining.tiles import (
    mask_facts,
    measured_facts,
    next_facts,
    other_facts,
    tile_facts,
)
from tilegen.gpus.spec import GpuSpec
from tilegen.problem import AttentionProblem

Facts = Callable[[ExplainedKernel], Iterable[Fact]]
SECTIONS: Mapping[str, tuple[str, Facts]] = {
    "pass": ("kernels that can compute the pass", lambda of: pass_facts(of.way)),
    "tile": ("the tile, the source of the choice, and the reason", tile_facts),
    "mask": ("tiles that the mask leaves", mask_facts),
    "traffic": ("bytes that the tiles move", traffic_facts),
    "bound": ("bytes that any schedule moves", bound_facts),
    "time": ("parts of the predicted time", time_facts),
    "next": ("next best tiles, and in what they differ", next_facts),
    "others": ("with other fast memory, on another processor, or under another mask", other_facts),
    "measured": ("times in the records of this device", measured_facts),
}
"""The sections of an explanation in their order, with titles and facts."""
FORMULAS = ("pass", "traffic", "bound", "time")
"""Sections with formulas."""
ALL = "all"
"""Name for all sections."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons for the tiles of kernels: as facts, as text, as LaTeX and as a plot."""

    problem: AttentionProblem
    """The problem explained."""
    gpu: Device
    """The GPU or processor for which the tiles are chosen."""
    explained: tuple[ExplainedKernel, ...]
    """The kernels with their choices."""
    with_passes: bool
    """True: text and formulas include the passes."""

    @cached_property
    def values(self) -> tuple[dict[str, Any], ...]:
        """A dictionary for each kernel, serialisable as JSON: facts by section and label, each with
        value, unit and formula."""
        passes = {of.way: values_of(pass_facts(of.way)) for of in self.explained}
        return tuple(
            {
                "problem": of.tiled.problem.key,
                "gpu": self.gpu.name,
                "title": self.gpu.title,
                "kernel": of.kernel,
                "config": asdict(of.config),
                "rewriting": of.rewriting,
                "direction": of.way.direction,
                "pass": passes[of.way],
            }
            | {
                name: values_of(facts(of))
                for name, (_, facts) in SECTIONS.items()
                if name != "pass"
            }
            for of in self.explained
        )

    def text(self, *sections: str) -> str:
        """Return six lines for each kernel, then the sections named, or `all`. Raises Unsupported
        for an unknown section."""
        rewritten = dict.fromkeys(of.rewriting for of in self.explained if of.rewriting)
        lines = [*rewritten, *summaries(self.explained)]
        shown = sections_named(sections)
        for of, name, title in self._blocks(shown):
            lines += ["", title, *lines_of(SECTIONS[name][1](of))]
        return "\n".join(lines)

    def latex(self) -> str:
        """Return the formulas as LaTeX; needs amsmath."""
        lines = [*dict.fromkeys(of.rewriting for of in self.explained if of.rewriting)]
        for of, name, title in self._blocks(FORMULAS):
            whose = f"{of.config.key} of {of.tiled.problem.key} on {self.gpu.name}"
            lines += ["", f"% {title}: {whose}", *latex_of([*SECTIONS[name][1](of)])]
        return "\n".join(lines).lstrip()

    def _blocks(self, sections: Sequence[str]) -> Iterator[tuple[ExplainedKernel, str, str]]:
        """Yield kernels with sections and titles; a pass comes before the first of its kernels."""
        seen: set[str] = set()
        for of in self.explained:
            whose = f"{of.kernel}: " if len(self.explained) > 1 else ""
            for name in sections:
                title = SECTIONS[name][0]
                if name != "pass":
                    yield of, name, f"{whose}{title}"
                elif self.with_passes and of.way.direction not in seen:
                    seen.add(of.way.direction)
                    yield of, name, f"{of.way.direction}: {title}"

    def plot(self, path: Path | str) -> None:
        """Draw traffic and roofline to a .png, .svg or .pdf file. Raises Unsupported."""
        from tilegen.explaining.plot import draw

        if not isinstance(self.gpu, GpuSpec):
            raise Unsupported(
                f"plot is for GPUs, got the processor {self.gpu.name}; for its numbers: "
                f"tilegen explain '{self.problem}' --gpu {self.gpu.name} --all"
            )
        draw(self.problem.normal(), self.gpu, self.explained, Path(path))


def sections_named(names: Sequence[str]) -> tuple[str, ...]:
    """Return sections in their order; `all` stands for all. Raises Unsupported."""
    for name in names:
        if name != ALL and name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise Unsupported(f"section must be {ALL} or one of {known}; got {name!r}")
    return tuple(name for name in SECTIONS if ALL in names or name in names)
