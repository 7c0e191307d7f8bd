"""The `launch` of an emitted kernel: sizes, allocations and grid, printed from a kernel's record.

Calls, the tuner, `verify` and bundles run this text, which needs PyTorch alone, with a `run` and an
`empty` of their own: see tilegen/launch/launcher.py. Values that depend on sizes and strides are
kept until a launch has others: the layers of a model usually share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, takewhile
from textwrap import wrap

from tilegen.emit.arguments import WIDTH, Arguments, packed
from tilegen.kernels.arguments import Argument, Line, size
from tilegen.kernels.config import TileConfig
from tilegen.kernels.results import Extent, extents, sources
from tilegen.kernels.spec import KernelSpec

_ARRANGED = ("stride", "size", "units")
"""Kinds of arguments that depend on sizes and strides of a tensor."""
MARK = (
    "# The launch. Besides PyTorch it needs `run` and `empty`, for which tilegen has faster ones."
)
"""The first line of a launch in an emitted file, of which it is the last part."""


def launch_of(source: str) -> str:
    """Return the launch in an emitted file. Raises ValueError if there is none."""
    return source[source.index(f"\n{MARK}\n") + 1 :]


@dataclass(frozen=True, kw_only=True)
class EmittedLaunch:
    """The fields of `_launch.jinja` for one kernel."""

    spec: KernelSpec
    arguments: Arguments
    config: TileConfig
    grid: tuple[tuple[str, int], ...]
    """The size of the grid: the product of ceil(size / divisor) over these pairs."""
    unit: int
    """Number of elements in a unit of strides."""
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
        if self.arguments.viewed:
            seen = " and ".join(", ".join(self.arguments.viewed).rsplit(", ", 1))
            notes["laid"] = (
                f"shapes, then strides, in which the kernel sees {seen}; None: their own"
            )
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
    def results(self) -> list[str]:
        """The tensors, and the knob if any, that the launch returns."""
        value = self.spec.returned(self.config)
        return [*self.spec.allocated, *([str(value)] if self.spec.returns else [])]

    # ----------------------------------------------------------------------------------------------
    # `launch`

    @property
    def first(self) -> str:
        """The tensor on whose device the kernel runs."""
        return self.spec.parameters[0]

    @property
    def sizes(self) -> list[str]:
        """The lines that collect all sizes and strides on which the kernel's arguments depend."""
        own = [f"{name}.shape" for name in self.arguments.viewed]
        own += [f"{name}.stride()" for name in self.arguments.viewed]
        others = [f"{name}.shape" for name in self._measured] + self._counts
        if not own:
            return [f"sizes = {', '.join(others)},"]
        laid = f"laid or ({', '.join(own)})"
        if not others:
            return [f"sizes = {laid}"]
        return [f"laid = {laid}", f"sizes = *laid, {', '.join(others)}"]

    @property
    def facts(self) -> str:
        """The parameters of `_arrange`: the elements of `sizes`."""
        names = [
            f"{name}_{what}" for what in ("shape", "strides") for name in self.arguments.viewed
        ]
        names += [f"{name}_shape" for name in self._measured] + self._counts
        text = ", ".join(names)
        if len(text) + len("def _arrange():") <= WIDTH:
            return text
        return "\n    " + "\n    ".join(packed([[name] for name in names], WIDTH - 4)) + "\n"

    @property
    def arranged(self) -> str:
        """The results of `_arrange`."""
        made = (f"{name}_{what}" for name in self.spec.allocated for what in ("shape", "strides"))
        tiled = (f"{name}_tiled" for name in self._described)
        return ", ".join(["grid", "numbers", *self._later, *tiled, *made])

    @property
    def allocations(self) -> list[str]:
        """The lines that allocate results, and that describe tensors."""
        lines = [
            f"{name} = empty({name}_shape, {name}_strides, {self._dtype(name)})"
            for name in self.spec.allocated
        ]
        for argument in (one for one in self._own if one.taken == "descriptor"):
            tensor, rows = argument.of, argument.rows
            sizes, tile = f"*{tensor}_tiled", f"[1, 1, {rows}, {argument.axis}]"
            if tensor not in self._described:
                sizes, tile = f"[{tensor}.numel()], [1]", f"[{rows}]"
            lines.append(f"{argument.name} = TensorDescriptor({tensor}, {sizes}, {tile})")
        return lines

    # ----------------------------------------------------------------------------------------------
    # `_arrange`

    @property
    def arrangement(self) -> list[str]:
        """The lines of `_arrange`."""
        return [
            *self._size_lines(),
            *(line for name in self.spec.allocated for line in self._layout(name)),
            f"grid = {self._programs}",
            "numbers = (",
            *(f"    {line}" for line in self.numbers),
            ")",
            *(f"{name}_tiled = _tiled({name}_shape, {name}_strides)" for name in self._described),
        ]

    @property
    def rows(self) -> list[str]:
        """The tensors (batch, heads, rows, head dim) whose strides are arguments."""
        return [name for name in self._strided if not self.spec.tensors[name].is_panel]

    @property
    def keeps_layout(self) -> bool:
        """Return True if a result has the layout of an argument of the launch."""
        return any(self.spec.tensors[name].is_strided for name in self.spec.allocated)

    @property
    def makes_dense(self) -> bool:
        """Return True if a result is dense."""
        return any(not self.spec.tensors[name].is_strided for name in self.spec.allocated)

    # ----------------------------------------------------------------------------------------------
    # Sizes

    @cached_property
    def _named_sizes(self) -> dict[str, tuple[str, int]]:
        """The required sizes by name: a tensor and its dimension."""
        arguments = [*self._own, *(one for one, _ in self._grid)]
        named = {
            argument.name.removesuffix("_units"): (argument.of, argument.axis)
            for argument in arguments
            if argument.taken in ("size", "units") and argument.of not in self.spec.allocated
        }
        for extent in self._extents:
            if extent.axis is not None:
                named.setdefault(self._name(extent), (extent.of, extent.axis))
        return named

    @cached_property
    def _grid(self) -> list[tuple[Argument, int]]:
        tensors = self.spec.tensors.values()
        return [
            (self.spec.by_name.get(name) or size(name, tensors), divisor)
            for name, divisor in self.grid
        ]

    @cached_property
    def _extents(self) -> list[Extent]:
        """The sizes of results that are computed from others."""
        shapes = (self._shape(name) for name in self.spec.allocated if self._like(name) is None)
        return [one for shape in shapes for one in shape if isinstance(one, Extent)]

    @cached_property
    def _measured(self) -> list[str]:
        """The tensors of which only sizes are required."""
        names = [tensor for tensor, _ in self._named_sizes.values()]
        names += [tensor for name in self.spec.allocated for tensor in self._like(name) or ()]
        return [name for name in dict.fromkeys(names) if name not in self.arguments.viewed]

    @cached_property
    def _counts(self) -> list[str]:
        """The numbers that the launch is given and that grid or results depend on."""
        names = [one.of for one, _ in self._grid if one.taken == "number"]
        names += [one.of for one in self._extents if one.axis is None]
        return [name for name in self.spec.parameters if name in names]

    def _size_lines(self) -> Iterator[str]:
        by_tensor: dict[str, dict[int, str]] = {}
        for name, (tensor, axis) in self._named_sizes.items():
            by_tensor.setdefault(tensor, {})[axis] = name
        for tensor in (name for name in self.spec.parameters if name in by_tensor):
            axes = by_tensor[tensor]
            if len(axes) > 1:
                names = (axes.get(i, "_") for i in range(len(self.spec.tensors[tensor].sizes)))
                yield f"{', '.join(names)} = {tensor}_shape"
            else:
                for axis, name in axes.items():
                    yield f"{name} = {tensor}_shape[{axis}]"

    def _name(self, extent: Extent) -> str:
        """Return the name of a size before division."""
        tensor, axis = extent.of, extent.axis
        return tensor if axis is None else self.spec.tensors[tensor].sizes[axis]

    # ----------------------------------------------------------------------------------------------
    # Results and grid

    def _layout(self, name: str) -> list[str]:
        """Return the lines that compute the shape and the strides of a result."""
        if alike := self._like(name):
            like, width = alike
            shape = f"*{like}_shape[:3], {width}_shape[3]"
            strides = f"_like({like}_strides, {name}_shape)"
        else:
            extents_ = (self._extent(one) for one in self._shape(name))
            shape, strides = ", ".join(extents_), f"_dense({name}_shape)"
        return [f"{name}_shape = {shape}", f"{name}_strides = {strides}"]

    def _like(self, name: str) -> tuple[str, str] | None:
        """Return the tensor with a result's layout and that with its head dim; None for a dense
        result."""
        if not self.spec.tensors[name].is_strided:
            return None
        *_, width = self._shape(name)
        assert isinstance(width, Extent)
        return sources(self.spec, name)[0].name, width.of

    def _shape(self, name: str) -> tuple[Extent | int, ...]:
        return extents(self.spec, name, pairs=self.pairs)

    def _extent(self, extent: Extent | int) -> str:
        if isinstance(extent, int):
            return str(extent)
        if extent.by == "unit":
            return _rounded_up(self._name(extent), self.unit) + self.times_unit
        keys = self.config.split_kv or self.config.block_n
        return _rounded_up(self._name(extent), keys if extent.by == "keys" else 1)

    def _dtype(self, name: str) -> str:
        if alike := self._like(name):
            return f"{alike[0]}.dtype"
        return "q.dtype" if self.spec.tensors[name].is_panel else "torch.float32"

    @property
    def _programs(self) -> str:
        factors = (_rounded_up(self._expression(one), divisor) for one, divisor in self._grid)
        programs, most = " * ".join(factors), self.config.persistent
        return f"min({programs}, {most})" if most else programs

    # ----------------------------------------------------------------------------------------------
    # Arguments

    @property
    def passed(self) -> str:
        """The list of arguments."""
        texts = [
            "*numbers" if one is self._numbers[0] else self._expression(one)
            for one in self._own
            if one not in self._numbers[1:]
        ]
        extras = [each for line in self.arguments.extras for each in line.expressions]
        if len(text := f"arguments = [{', '.join(texts + extras)}]") <= WIDTH - 4:
            return text
        lines = [*packed([[each] for each in texts], WIDTH - 8)]
        lines += packed([[each] for each in extras], WIDTH - 8)
        return "\n".join(["arguments = [", *(f"    {line}" for line in lines), "]"])

    @property
    def numbers(self) -> list[str]:
        """The lines of `numbers`, the arguments that depend on sizes and strides alone."""
        strides, sizes_ = list[str](), list[str]()
        for argument in self._numbers:
            tensor = argument.of
            if argument.taken != "stride":
                sizes_.append(self._expression(argument))
            elif self.spec.tensors[tensor].is_panel:
                strides.append(f"*{self._in_units(tensor)}")
            else:
                strides.append(f"*_units({tensor}_shape, {tensor}_strides)")
        groups = [[text] for text in dict.fromkeys(strides)], [[text] for text in sizes_]
        return [line for group in groups for line in packed(group, WIDTH - 8)]

    @cached_property
    def _numbers(self) -> list[Argument]:
        later = dropwhile(lambda one: one.taken not in _ARRANGED, self._own)
        return [*takewhile(lambda one: one.taken in _ARRANGED, later)]

    @property
    def _later(self) -> list[str]:
        """The names of sizes that are arguments, but not among `numbers`."""
        arranged = (one for one in self._own if one.taken in _ARRANGED)
        return [one.name for one in arranged if one not in self._numbers]

    @cached_property
    def _own(self) -> list[Argument]:
        """The arguments without those that masks and scores add."""
        return [one for line in self.arguments.lines for one in line.arguments]

    @cached_property
    def _strided(self) -> list[str]:
        strided = (one.of for one in self._own if one.taken in ("stride", "descriptor"))
        return list(dict.fromkeys(strided))

    @property
    def _described(self) -> list[str]:
        """The tensors (batch, heads, rows, head dim) that are passed as descriptors."""
        of = dict.fromkeys(one.of for one in self._own if one.taken == "descriptor")
        return [name for name in of if self.spec.tensors[name].is_strided]

    def _expression(self, argument: Argument) -> str:
        return argument.expression + (self.per_unit if argument.taken == "units" else "")

    def _in_units(self, panel: str) -> str:
        strides = f"{panel}_strides[:2]"
        return f"(stride{self.per_unit} for stride in {strides})" if self.unit > 1 else strides

    @property
    def per_unit(self) -> str:
        """The division of a stride by its unit."""
        return f" // {self.unit}" if self.unit > 1 else ""

    @property
    def times_unit(self) -> str:
        """The product of a number of units and the unit."""
        return f" * {self.unit}" if self.unit > 1 else ""

    def _list(self, names: list[str]) -> str:
        return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _rounded_up(size: str, by: int) -> str:
    """Return the expression of ceil(size / by)."""
    return size if by == 1 else f"-(-{size} // {by})"
