"""The arguments of a kernel as its template prints them: parameters, and arguments of `launch`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilegen.kernels.arguments import SCALE, SCALE_IN_BASE_2, Line
from tilegen.kernels.config import Dim, TileConfig
from tilegen.kernels.descriptors import described_lines
from tilegen.kernels.spec import KernelSpec

WIDTH = 115
"""Maximum columns of a line of arguments."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """All arguments of one kernel of a problem."""

    spec: KernelSpec
    lines: tuple[Line, ...]
    extras: tuple[Line, ...]
    """Arguments that masks and scores add."""

    @classmethod
    def of(
        cls,
        spec: KernelSpec,
        config: TileConfig,
        head_dims: Mapping[Dim, int],
        extras: Sequence[Line],
        changes_scores: bool,
        absent: Collection[str] = (),
    ) -> Arguments:
        """Return a kernel's arguments. If scores are changed, their scale is passed unchanged.
        Tensors that are `absent` have no address and no strides."""
        lines = described_lines(spec, config, head_dims) if config.descriptors else spec.lines
        lines = [kept for line in lines if (kept := line.without(absent)).arguments]
        lines = (SCALE if changes_scores and line is SCALE_IN_BASE_2 else line for line in lines)
        return cls(spec=spec, lines=tuple(lines), extras=tuple(extras))

    def types(self, dtype: str) -> tuple[tuple[str, str], ...]:
        """Return (argument, Triton type) of the function, for inputs of a dtype."""
        return tuple(
            (one.name, one.type_for(dtype)) for line in self._all for one in line.arguments
        )

    @property
    def parameters(self) -> list[str]:
        """The lines of the function's parameters."""
        return [line.parameters for line in self._all]

    @property
    def pointers(self) -> int:
        """Number of leading arguments that are addresses or descriptors."""
        return len(self.lines[0].arguments)

    @property
    def unspecialised(self) -> int:
        """Index after the last argument whose value must not trigger a compilation: integers, and
        all that masks and scores add."""
        every = [
            one for line in (self._all if self.extras else self.lines) for one in line.arguments
        ]
        return len(every) - (0 if self.extras else sum(one.type == "fp32" for one in every))

    @cached_property
    def viewed(self) -> list[str]:
        """The parameters of `launch` whose strides are read."""
        # The kernel may take no strides of v, if values are in keys: v is one of them nevertheless.
        strided = dict.fromkeys(x.of for x in self.spec.by_name.values() if x.taken == "stride")
        return [name for name in strided if name in self.spec.parameters]

    @property
    def given(self) -> str:
        """The parameters of `launch`."""
        names = [*self.spec.parameters, *(one.of for line in self.extras for one in line.arguments)]
        names = list(dict.fromkeys(names))
        if self.viewed:  # the kernel may see them in other shapes
            names += ["*", "laid=None"]
        if len(text := ", ".join(names)) + len("def launch():") <= WIDTH:
            return text
        return "\n    " + "\n    ".join(packed([[name] for name in names], WIDTH - 4)) + "\n"

    @property
    def _all(self) -> tuple[Line, ...]:
        return (*self.lines, *self.extras)


def packed(groups: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield lines of argument groups, each line as long as allowed. A group is never split."""
    line = ""
    for group in groups:
        text = ", ".join(group) + ","
        if line and len(line) + 1 + len(text) > width:
            yield line
            line = ""
        line = f"{line} {text}" if line else text
    if line:
        yield line
