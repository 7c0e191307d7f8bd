"""The emitted `launch`: sizes, allocations and grid, printed from a kernel's record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from textwrap import wrap

from tilegen.emit.arguments import WIDTH, Arguments
from tilegen.kernels.arguments import Line, size
from tilegen.kernels.config import TileConfig
from tilegen.kernels.results import Extent, extents, sources
from tilegen.kernels.spec import KernelSpec


@dataclass(frozen=True, kw_only=True)
class EmittedLaunch:
    """The fields of `_launch.jinja` for one kernel."""

    spec: KernelSpec
    arguments: Arguments
    config: TileConfig
    pairs: bool
    """True if log-sum-exps are kept as two numbers."""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        if self.results:
            return f"Return {self._list(self.results)}."
        return f"Fill {self._list([one.name for one in self.spec.outputs])}."

    @property
    def tensors(self) -> list[str]:
        """The lines of the docstring on the shapes of tensors."""
        named = [one for one in self.spec.inputs if not isinstance(one, Line)]
        notes = {one.name: one.described(pairs=self.pairs) for one in (*named, *self.spec.outputs)}
        if "pages" in self.spec.supports:
            notes = {name: note.replace("(batch", "(1") for name, note in notes.items()}
        indent = max(len(name) for name in notes if notes[name]) + 2
        return [
            line
            for name, note in notes.items()
            if note
            for line in wrap(
                f"{name:{indent}}{note}",
                WIDTH,
                subsequent_indent=" " * indent,
                break_long_words=False,
            )
        ]

    @property
    def sizes(self) -> list[str]:
        """The lines that name the sizes of tensors."""
        return list(self._size_lines())

    @property
    def allocations(self) -> list[str]:
        """The lines that allocate results."""
        counts = (self._count(one) for name in self.spec.allocated for one in self._shape(name))
        lines = [f"{name} = {value}" for name, value in dict.fromkeys(filter(None, counts))]
        return lines + [line for name in self.spec.allocated for line in self._allocation(name)]

    @property
    def keeps_layout(self) -> bool:
        """Return True if a result has the layout of an argument of the launch."""
        return any(self.spec.tensors[name].is_strided for name in self.spec.allocated)

    @property
    def grid(self) -> str:
        """The size of the grid."""
        factors: list[str] = []
        for name, divisor in self.spec.grid:
            by = f"{str(divisor).upper()}.value"
            factors.append(name if divisor == 1 else f"triton.cdiv({name}, {by})")
        if len(line := f"({' * '.join(factors)},)") <= WIDTH - len("    grid = "):
            return line
        return "(\n    " + "\n    * ".join(factors) + ",\n)"

    @property
    def results(self) -> list[str]:
        """The tensors, and the knob if any, that the launch returns."""
        knob = self.spec.returns
        return [*self.spec.allocated, *([f"{knob.upper()}.value"] if knob else [])]

    # ----------------------------------------------------------------------------------------------

    def _list(self, names: list[str]) -> str:
        names = [name.removesuffix(".value") for name in names]
        return names[0] if len(names) == 1 else f"({', '.join(names)})"

    @cached_property
    def _named_sizes(self) -> dict[str, tuple[str, int]]:
        """The required sizes by name: a tensor and its dimension."""
        arguments = [each for line in self.arguments.lines for each in line.arguments]
        arguments += [size(name, self.spec.tensors.values()) for name, _ in self.spec.grid]
        named = {
            argument.name.removesuffix("_units"): (argument.of, argument.axis)
            for argument in arguments
            if argument.taken in ("size", "units") and argument.of not in self.spec.allocated
        }
        for name in (x for x in self.spec.allocated if not self.spec.tensors[x].is_strided):
            for extent in self._shape(name):
                if isinstance(extent, Extent) and extent.axis is not None:
                    named.setdefault(self._name(extent), (extent.of, extent.axis))
        return named

    def _name(self, extent: Extent) -> str:
        """Return the name of a size before division."""
        tensor, axis = extent.of, extent.axis
        return tensor if axis is None else self.spec.tensors[tensor].sizes[axis]

    def _size_lines(self) -> Iterator[str]:
        by_tensor: dict[str, dict[int, str]] = {}
        for name, (tensor, axis) in self._named_sizes.items():
            by_tensor.setdefault(tensor, {})[axis] = name
        for tensor in (name for name in self.spec.parameters if name in by_tensor):
            axes = by_tensor[tensor]
            if len(axes) > 1:
                names = (axes.get(i, "_") for i in range(len(self.spec.tensors[tensor].sizes)))
                yield f"{', '.join(names)} = {tensor}.shape"
            else:
                for axis, name in axes.items():
                    yield f"{name} = {tensor}.shape[{axis}]"

    def _shape(self, name: str) -> tuple[Extent | int, ...]:
        return extents(self.spec, name, pairs=self.pairs)

    def _count(self, extent: Extent | int) -> tuple[str, str] | None:
        """Return the name and the value of a computed size; None for other sizes."""
        if isinstance(extent, int) or not extent.by:
            return None
        name = self._name(extent)
        if extent.by == "unit":
            return "width", f"triton.cdiv({name}, STRIDE_UNIT.value) * STRIDE_UNIT.value"
        if not self.config.split_kv:
            return "score_tiles", f"triton.cdiv({name}, BLOCK_N.value)"
        return "splits", f"triton.cdiv({name}, {self.spec.split_name.upper()}.value)"

    def _allocation(self, name: str) -> list[str]:
        tensor, first = self.spec.tensors[name], sources(self.spec, name)[0].name
        shape = self._shape(name)
        if tensor.is_strided:
            assert isinstance(shape[-1], Extent)
            return [f"{name} = _empty_like({first}, {shape[-1].of}.shape[3])"]
        counts = (self._count(extent) for extent in shape)
        sizes = (
            count[0] if count else str(extent) if isinstance(extent, int) else self._name(extent)
            for extent, count in zip(shape, counts, strict=True)
        )
        given = f"({', '.join(sizes)})"
        if tensor.is_panel:
            return [f"{name} = q.new_empty({given})"]
        given += f", device={first}.device, dtype=torch.float32"
        line = f"{name} = torch.empty({given})"
        return [line] if len(line) <= WIDTH else [line[: -len(given) - 1], f"    {given}", ")"]
