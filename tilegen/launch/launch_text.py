"""The Python of a launch, written for one kernel from the records of its arguments.

A kernel's record says what its launch does: which tensor each argument is taken from, and what is
taken of it. So a launch is written out, and looks nothing up from call to call. What follows from
sizes and strides is kept until a launch is given others: the layers of a model are given the same.
The emitted `launch`, which tilegen.emit.launch prints from the same records, does all that for
people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from tilegen.kernels.arguments import COLUMN_TENSORS, PANELS, Argument
from tilegen.kernels.config import TileConfig
from tilegen.kernels.results import LIKE, Extent, extents
from tilegen.kernels.spec import KernelSpec

MAX_ROW_STRIDE = 2**22  # elements; emitted kernels address a tile of rows with 32 bits
_COUNTS = ("num_heads", "num_rows", "requests", "longest_q", "longest_kv")
"""Numbers given to launches that grids and sizes of results follow from."""
_LAID = ("stride", "size", "units")
"""Kinds of arguments that follow from the size and the strides of a tensor."""


@dataclass(frozen=True, kw_only=True)
class LaunchText:
    """The text of `launch`, a function with the parameters and results of a kernel's emitted
    `launch`, and of `arranged`, which tells it what follows from sizes and strides.

    The text reads names of the module that it runs in: `its`, the launcher, `torch`,
    `empty_on_cpu`, `empty_on_gpu`, `LOG2_E`, `LEAST_SCALE`, `Described`, and `Unfamiliar`.
    """

    spec: KernelSpec
    arguments: Sequence[Argument]
    grid: Sequence[tuple[Argument, int]]
    """The product of ceil(size / divisor) over these pairs."""
    extras: Sequence[str]
    """The names of what masks and scores give."""
    unit: int
    """The elements by which strides are counted."""
    config: TileConfig
    takes_tensors: bool
    """Whether the kernel is given tensors, and not their addresses."""

    def __str__(self) -> str:
        return f"{self._arranged()}\n\n{self._launch()}"

    def _arranged(self) -> str:
        body = [
            *(
                line
                for name in self._strided
                if name not in self.spec.made
                for line in self._read(name)
            ),
            *(f"{name}_n{axis} = {name}_shape[{axis}]" for name, axis in self._other_sizes),
            *(line for name in self.spec.made for line in self._make(name)),
            *(
                f"if {name}_n{axis} == 1: {name}_s{axis} = {self._idle_stride(name)}"
                for name in self._rows
                for axis in range(3)
            ),
            *self._check(),
            f"grid = {self._programs()}",
            f"is_wide = {self._wide()}",
            *(f"{name}_tiled = {self._tiled(name)}" for name in self._described),
            *(
                f"{name} = {', '.join(map(self._value, its))},"
                for name, its in self._groups
                if name
            ),
            f"return {', '.join(self._told)}",
        ]
        return "\n    ".join([f"def arranged({', '.join(self._facts)}):", *body]) + "\n"

    def _launch(self) -> str:
        keywords = f", *, {', '.join(self.extras)}" if self.extras else ""
        tells = self.spec.tells
        results = [*self.spec.made, *([str(getattr(self.config, tells))] if tells else [])]
        extras = (f"{name}={name}" for name in self.extras)
        body = [
            f"device = {self.spec.given[0]}.device",
            f"empty = empty_on_gpu if {self.spec.given[0]}.is_cuda else empty_on_cpu",
            f"facts = {', '.join(self._facts.values())}",
            "known, told = its.arranged",  # at once, since other threads may call too
            "if known != facts:",
            "    told = arranged(*facts)",
            "    its.arranged = facts, told",
            f"{', '.join(self._told)} = told",
            *(
                f"{name} = empty({name}_shape, {name}_stride, {self._dtype(name)})"
                for name in self.spec.made
            ),
            *(f"{name}_at = {name}.data_ptr()" for name in self._addresses),
            *(
                f"{name}_desc = Described({name}.data_ptr(), *{name}_tiled)"
                for name in self._described
            ),
            f"unusual = {self._unusual()}",
            "run = None if unusual else its.run",
            "if run is None:",
            "    try:",
            f"        run = its.prepare(grid, [{self._all(self._shown)}], unusual)",
            "    except Unfamiliar:",
            f"        return its.emitted({', '.join([*self.spec.given, *extras])})",
            f"run(grid, [{self._all(self._shown if self.takes_tensors else self._value)}], device)",
            *([f"return {', '.join(results)}"] if results else []),
        ]
        head = f"def launch({', '.join(self.spec.given)}{keywords}):"
        return "\n    ".join([head, *body]) + "\n"

    # ----------------------------------------------------------------------------------------------
    # What `arranged` is given, and what it tells

    @cached_property
    def _facts(self) -> dict[str, str]:
        """The parameters of `arranged`, and what `launch` gives it for them."""
        given = [name for name in self._strided if name not in self.spec.made]
        shapes = dict.fromkeys((*given, *(name for name, _ in self._other_sizes)))
        return (
            {f"{name}_shape": f"{name}.shape" for name in shapes}
            | {f"{name}_stride": f"{name}.stride()" for name in given}
            | {name: name for name in _COUNTS if name in self.spec.given}
        )

    @property
    def _told(self) -> list[str]:
        """The results of `arranged`."""
        made = (f"{name}_{what}" for name in self.spec.made for what in ("shape", "stride"))
        tiled = (f"{name}_tiled" for name in self._described)
        return ["grid", "is_wide", *made, *tiled, *(name for name, _ in self._groups if name)]

    @cached_property
    def _groups(self) -> list[tuple[str, list[Argument]]]:
        """The arguments in order: those that follow from sizes and strides as far as they stand
        side by side, with a name for them, and others, with none."""
        found = groupby(self.arguments, lambda one: one.taken in _LAID)
        return [
            (f"laid_{i}" if is_laid else "", list(group))
            for i, (is_laid, group) in enumerate(found)
        ]

    def _all(self, value: Callable[[Argument], str]) -> str:
        """Return all arguments in order."""
        return ", ".join(
            f"*{name}" if name else ", ".join(map(value, group)) for name, group in self._groups
        )

    # ----------------------------------------------------------------------------------------------
    # Sizes and strides

    def _read(self, name: str) -> list[str]:
        axes = range(3 if name in PANELS else 4)
        sizes, strides = (", ".join(f"{name}_{what}{axis}" for axis in axes) for what in "ns")
        return [f"{sizes} = {name}_shape", f"{strides} = {name}_stride"]

    def _make(self, name: str) -> list[str]:
        """Return how a result is laid out, as `allocate` does it."""
        sizes = self._sizes(name)
        n, s = ([f"{name}_{what}{axis}" for axis in range(len(sizes))] for what in "ns")
        lines = [
            f"{', '.join(n)} = {', '.join(sizes)}",
            f"{', '.join(s)} = {', '.join(' * '.join(n[i + 1 :]) or '1' for i in range(len(n)))}",
        ]
        if name in LIKE:
            like, _ = LIKE[name]
            lines.append(f"if {like}_s1 < {like}_s2: {s[1]}, {s[2]} = {n[3]}, {n[1]} * {n[3]}")
        return [*lines, f"{name}_shape, {name}_stride = ({', '.join(n)}), ({', '.join(s)})"]

    def _sizes(self, name: str) -> list[str]:
        """Return the sizes of a result."""
        return [
            str(one) if isinstance(one, int) else self._extent(one) for one in self._shape(name)
        ]

    def _shape(self, name: str) -> tuple[Extent | int, ...]:
        # Kernels that change scores take their scale as it is.
        pairs = any(one.name == "softmax_scale" for one in self.arguments)
        return extents(name, self.spec.given, pairs=pairs)

    def _extent(self, one: Extent) -> str:
        size = one.of if one.axis is None else f"{one.of}_n{one.axis}"
        if one.by == "unit":
            return f"-(-{size} // {self.unit}) * {self.unit}"
        keys = self.config.split_kv or self.config.block_n
        return f"-(-{size} // {keys})" if one.by == "keys" else size

    def _dtype(self, name: str) -> str:
        if name in LIKE:
            return f"{LIKE[name][0]}.dtype"
        return "q.dtype" if name in PANELS else "torch.float32"

    def _check(self) -> list[str]:
        """Return a test of strides; the bits of all together tell as much as each number."""
        if not self._rows:
            return []
        doubts = [f"{self._or(3)} > 1", f"{self._or(2)} >= {MAX_ROW_STRIDE}"]
        if self.unit > 1:
            doubts.append(f"strides & {self.unit - 1}")
        rows, described = (
            ", ".join(f"({name}_shape, {name}_stride)" for name in names)
            for names in (self._rows, self._described)
        )
        lines = [
            f"strides = {self._or(0, 1, 2)}",
            f"if {' or '.join(doubts)}: its.check_strides({rows})",
        ]
        if self._described:
            each = (f"{name}_s{axis}" for name in self._described for axis in range(3))
            lines.append(f"if not ({' and '.join(each)}): its.refuse_expanded({described})")
        return lines

    def _idle_stride(self, name: str) -> int:
        """Return the stride of a dimension of size 1, which descriptors refuse to be 0."""
        return self.unit if name in self._described else 0

    def _tiled(self, name: str) -> str:
        """Return sizes and strides, as a descriptor has them."""
        sizes = ", ".join(f"{name}_n{axis}" for axis in range(4))
        return f"({sizes}), ({', '.join(f'{name}_s{axis}' for axis in range(3))}, 1)"

    @cached_property
    def _rows(self) -> list[str]:
        """The tensors (batch, heads, rows, head dim) whose strides are arguments."""
        return [name for name in self._strided if name not in PANELS]

    @cached_property
    def _strided(self) -> list[str]:
        strided = (one.of for one in self.arguments if one.taken in ("stride", "descriptor"))
        return list(dict.fromkeys(strided))

    @cached_property
    def _other_sizes(self) -> list[tuple[str, int]]:
        """The sizes that are taken of tensors whose strides are no arguments."""
        taken = (*self.arguments, *(one for one, _ in self.grid))
        sizes = [(one.of, one.axis) for one in taken if one.taken in ("size", "units")]
        made = (one for name in self.spec.made for one in self._shape(name))
        sizes += [
            (one.of, one.axis) for one in made if isinstance(one, Extent) and one.axis is not None
        ]
        known = (*self._strided, *self.spec.made)
        return list(dict.fromkeys(one for one in sizes if one[0] not in known))

    @cached_property
    def _described(self) -> list[str]:
        """The tensors that descriptors stand for."""
        found = (one.of for one in self.arguments if one.taken == "descriptor")
        return list(dict.fromkeys(found))

    @cached_property
    def _addresses(self) -> list[str]:
        """The tensors, but for those of masks and scores, whose addresses are arguments."""
        named = (*self.spec.given, *self.spec.made)
        taken = [one.of for one in self.arguments if one.taken == "address"]
        return [name for name in taken if name in named]

    def _or(self, *axes: int) -> str:
        return f"({' | '.join(f'{name}_s{axis}' for name in self._rows for axis in axes)})"

    # ----------------------------------------------------------------------------------------------
    # What is launched

    def _wide(self) -> str:
        """Return a test of integers beyond 32 bits, for which Triton compiles other kernels, among
        what follows from sizes and strides."""
        numbers = [f"strides // {self.unit}"] if self._rows else []
        numbers += [
            self._value(one)
            for one in self.arguments
            if one.taken in ("size", "units") or (one.taken == "stride" and one.of in PANELS)
        ]
        return f"({' | '.join(numbers)}) >> 31" if numbers else "0"

    def _unusual(self) -> str:
        """Return a test of what Triton compiles other kernels for: integers beyond 32 bits, and
        addresses that are no multiples of 16 bytes."""
        found = ["is_wide"]
        numbers = [one.of for one in self.arguments if one.taken == "number" and one.type != "fp32"]
        if numbers:
            found.append(f"({' | '.join(numbers)}) >> 31")
        if self.unit > 1 and self._addresses:
            found.append(f"({' | '.join(f'{name}_at' for name in self._addresses)}) & 15")
        return " or ".join(found)

    def _programs(self) -> str:
        factors = [
            self._size(one) if divisor == 1 else f"-(-{self._size(one)} // {divisor})"
            for one, divisor in self.grid
        ]
        return " * ".join(factors) or "1"

    def _size(self, one: Argument) -> str:
        """Return a size of a tensor, or a number that a launch is given."""
        if one.taken == "number":
            return one.of
        found = f"{one.of}_n{one.axis}"
        return f"{found} // {self.unit}" if one.taken == "units" else found

    def _value(self, one: Argument) -> str:
        """Return the expression of an argument's value."""
        match one.taken:
            case "address":
                return f"{one.of}_at" if one.of in self._addresses else f"{one.of}.data_ptr()"
            case "descriptor":
                return f"{one.of}_desc"
            case "stride":
                found = f"{one.of}_s{one.axis}"
                return found if self.unit == 1 else f"{found} // {self.unit}"
            case "base 2":
                return f"max({one.of} * LOG2_E, LEAST_SCALE)"
            case "flag":
                return f"int({one.of})"
            case "nothing":
                return "0"
            case _:
                return self._size(one)

    def _shown(self, one: Argument) -> str:
        """Return the same with a tensor in the place of its address, and descriptors as Triton
        compiles for them."""
        if one.taken == "descriptor":
            rows = self.config.block_n if one.of in COLUMN_TENSORS else self.config.block_m
            return f"its.described({one.of}, {one.of}_desc, {rows}, {one.axis})"
        return one.of if one.taken == "address" else self._value(one)
