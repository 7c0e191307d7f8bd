"""An explanation as text: six lines for each kernel, and sections on request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tilegen.device import Device
from tilegen.errors import Unsupported
from tilegen.explaining import cpu_text, gpu_text
from tilegen.explaining.alternatives import Explained, with_alternatives
from tilegen.explaining.cpu_records import CpuPassExplanation
from tilegen.explaining.gpu_records import KernelExplanation, PassExplanation
from tilegen.explaining.latex import kernel_latex, pass_latex
from tilegen.explaining.records import plain
from tilegen.explaining.summary import summaries
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

SECTIONS: Mapping[str, str] = {
    "pass": "kernels that can compute the pass",
    "tile": "the tile, the source of the choice, and the reason",
    "mask": "tiles that the mask leaves",
    "traffic": "bytes that the tiles move",
    "bound": "bytes that any schedule moves",
    "time": "parts of the predicted time",
    "next": "next best tiles, and in what they differ",
    "others": "with other fast memory, on another processor, or under another mask",
    "measured": "times in the records of this device",
}
"""The sections of an explanation, in their order."""
ALL = "all"
"""Name for all sections."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The reasons for the tiles of kernels: as records, as text and as a plot."""

    problem: AttentionProblem
    """The problem explained."""
    gpu: Device
    """The GPU or processor for which the tiles are chosen."""
    explained: tuple[Explained, ...]
    """A record for each kernel, without alternatives."""
    with_passes: bool
    """True: text and formulas include the passes."""

    @cached_property
    def values(self) -> tuple[dict[str, Any], ...]:
        """A dictionary for each kernel, serialisable as JSON; the pass is under `pass`."""
        return tuple(map(plain, with_alternatives(self.explained, self.problem, self.gpu)))

    def text(self, *sections: str) -> str:
        """Return six lines for each kernel, then the sections named, or `all`. Raises Unsupported
        for an unknown section."""
        shown = sections_named(sections)
        with_passes = self.with_passes and "pass" in shown
        explained = with_alternatives(
            self.explained, self.problem, self.gpu, with_passes=with_passes
        )
        return "\n".join(lines_of_all(explained, shown, with_passes=with_passes))

    def latex(self) -> str:
        """Return the formulas as LaTeX; needs amsmath. Raises Unsupported on a processor."""
        return "\n".join(latex_of_all(self._of_gpu("latex"), with_passes=self.with_passes))

    def plot(self, path: Path | str) -> None:
        """Draw traffic and roofline to a .png, .svg or .pdf file. Raises Unsupported."""
        from tilegen.explaining.plot import draw

        explained = self._of_gpu("plot")
        assert isinstance(self.gpu, GpuSpec)
        draw(self.problem.normal(), self.gpu, explained, Path(path))

    def _of_gpu(self, what: str) -> list[KernelExplanation]:
        """Return the records, if they are of a GPU."""
        explained = [facts for facts in self.explained if isinstance(facts, KernelExplanation)]
        if len(explained) < len(self.explained):
            raise Unsupported(
                f"{what} is for GPUs, got the processor {self.gpu.name}; for its numbers: "
                f"tilegen explain '{self.problem}' --gpu {self.gpu.name} --all"
            )
        return explained


def sections_named(names: Sequence[str]) -> tuple[str, ...]:
    """Return sections in their order; `all` stands for all. Raises Unsupported."""
    for name in names:
        if name != ALL and name not in SECTIONS:
            known = ", ".join(SECTIONS)
            raise Unsupported(f"section must be {ALL} or one of {known}; got {name!r}")
    return tuple(name for name in SECTIONS if ALL in names or name in names)


def lines_of_all(
    explained: Sequence[Explained], sections: Sequence[str] = tuple(SECTIONS), *, with_passes: bool
) -> list[str]:
    """Format explanations with alternatives: six lines for each kernel, then sections, that of a
    pass before the first of its kernels."""
    lines = [*dict.fromkeys(facts.rewriting for facts in explained if facts.rewriting)]
    lines += summaries(explained)
    seen: set[Direction] = set()
    for facts in explained:
        way = facts.pass_
        if with_passes and "pass" in sections and way and way.direction not in seen:
            seen.add(way.direction)
            lines += ["", f"{way.direction}: {SECTIONS['pass']}", *_pass_lines(way)]
        whose = f"{facts.kernel}: " if len(explained) > 1 else ""
        for name in sections:
            if name != "pass":
                lines += ["", f"{whose}{SECTIONS[name]}", *_section(name, facts)]
    return lines


def _section(name: str, facts: Explained) -> Iterator[str]:
    if isinstance(facts, KernelExplanation):
        return gpu_text.SECTIONS[name](facts)
    return cpu_text.SECTIONS[name](facts)


def _pass_lines(way: PassExplanation | CpuPassExplanation) -> list[str]:
    if isinstance(way, PassExplanation):
        return gpu_text.pass_lines(way)
    return cpu_text.pass_lines(way)


def latex_of_all(explained: Sequence[KernelExplanation], *, with_passes: bool) -> list[str]:
    """Return the formulas of explanations as LaTeX; needs amsmath."""
    blocks = [[line] for line in dict.fromkeys(facts.rewriting for facts in explained) if line]
    seen: set[Direction] = set()
    for facts in explained:
        if with_passes and facts.pass_ and facts.pass_.direction not in seen:
            seen.add(facts.pass_.direction)
            blocks.append(pass_latex(facts, facts.pass_))
        blocks.append(kernel_latex(facts))
    return [line for i, block in enumerate(blocks) for line in ([""] if i else []) + block]
