"""The Python of a launch, written for one kernel from the records of its arguments.

What a launch does is known when its kernel is: which tensor each argument is taken from, and what
of it. Written out there is nothing to look up from call to call, and nothing that a call of other
lengths or strides would have to find anew. The emitted `launch` does the same, for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilegen.kernels.arguments import COLUMN_TENSORS, PANELS, Argument
from tilegen.kernels.config import TileConfig
from tilegen.kernels.layout import LIKE, OF_ROWS
from tilegen.kernels.spec import KernelSpec

MAX_ROW_STRIDE = 2**22  # elements; emitted kernels address a tile of rows with 32 bits


@dataclass(frozen=True, kw_only=True)
class LaunchText:
    """The text of `launch`, a function with the parameters and results of a kernel's emitted
    `launch`.

    It reads names of its module: `its`, the launcher, `torch`, `allocate`, `empty_on_cpu`,
    `empty_on_gpu`, `LOG2_E`, `Described`, and `Unfamiliar`.
    """

    spec: KernelSpec
    arguments: Sequence[Argument]
    grid: Sequence[tuple[Argument, int]]
    """The product of ceil(size / divisor) over these pairs."""
    extras: Sequence[str]
    """The names of what masks and scores give."""
    unit: int
    """Elements that strides are counted by."""
    config: TileConfig

    def __str__(self) -> str:
        keywords = f", *, {', '.join(self.extras)}" if self.extras else ""
        made, tells = self.spec.made, self.spec.tells
        results = [*made, *([str(getattr(self.config, tells))] if tells else [])]
        shown = ", ".join(map(self._shown, self.arguments))
        extras = (f"{name}={name}" for name in self.extras)
        body = [
            f"device = {self.spec.given[0]}.device",
            f"empty = empty_on_gpu if {self.spec.given[0]}.is_cuda else empty_on_cpu",
            *(line for name in self._rows if name not in made for line in self._read(name)),
            *(line for name in made for line in self._make(name)),
            *(f"{name}_s0, {name}_s1, _ = {name}.stride()" for name in self._panels),
            *(
                f"if {name}_n{axis} == 1: {name}_s{axis} = {self._idle_stride(name)}"
                for name in self._rows
                for axis in range(3)
            ),
            *self._check(),
            *(f"{name}_at = {name}.data_ptr()" for name in self._addresses),
            *(
                f"{name}_desc = Described({name}.data_ptr(), {self._shape(name)})"
                for name in self._described
            ),
            f"grid = {self._programs()}",
            f"unusual = {self._unusual()}",
            "run = None if unusual else its.run",
            "if run is None:",
            "    try:",
            f"        run = its.prepare(grid, [{shown}], unusual)",
            "    except Unfamiliar:",
            f"        return its.emitted({', '.join([*self.spec.given, *extras])})",
            f"run(grid, [{', '.join(map(self._value, self.arguments))}], device)",
            *([f"return {', '.join(results)}"] if results else []),
        ]
        head = f"def launch({', '.join(self.spec.given)}{keywords}):"
        return "\n    ".join([head, *body]) + "\n"

    def _read(self, name: str) -> list[str]:
        sizes, strides = (
            ", ".join(f"{name}_{what}{axis}" for axis in range(4)) for what in ("n", "s")
        )
        return [f"{sizes} = {name}.shape", f"{strides} = {name}.stride()"]

    def _make(self, name: str) -> list[str]:
        """Return how a result is allocated, as `allocate` does."""
        if like := OF_ROWS.get(name):
            batch, heads, rows = (f"{like}_n{axis}" for axis in range(3))
            return [
                f"{name} = empty(({batch}, {heads}, {rows}), "
                f"({heads} * {rows}, {rows}, 1), torch.float32)"
            ]
        if name in LIKE:
            like, width = LIKE[name]
            batch, heads, rows = (f"{like}_n{axis}" for axis in range(3))
            width = f"{width}_n3" if width in self._rows else f"{width}.shape[3]"
            n, s = ([f"{name}_{what}{axis}" for axis in range(4)] for what in "ns")
            return [
                f"{', '.join(n)} = {batch}, {heads}, {rows}, {width}",
                f"{s[0]}, {s[3]} = {heads} * {rows} * {width}, 1",
                f"if {like}_s1 < {like}_s2: {s[1]}, {s[2]} = {width}, {heads} * {width}",
                f"else: {s[1]}, {s[2]} = {rows} * {width}, {width}",
                f"{name} = empty(({', '.join(n)}), ({', '.join(s)}), {like}.dtype)",
            ]
        given = ", ".join(f"{one}={one}" for one in self.spec.given)
        keys = self.config.split_kv or self.config.block_n
        return [f"{name} = allocate({name!r}, dict({given}), {self.unit}, {keys})"]

    def _check(self) -> list[str]:
        """Return a test of strides; the bits of all together tell as much as each number."""
        if not self._rows:
            return []
        doubts = [f"{self._or(3)} > 1", f"{self._or(2)} >= {MAX_ROW_STRIDE}"]
        if self.unit > 1:
            doubts.append(f"strides & {self.unit - 1}")
        lines = [
            f"strides = {self._or(0, 1, 2)}",
            f"if {' or '.join(doubts)}: its.check_strides({', '.join(self._rows)})",
        ]
        if self._described:
            each = (f"{name}_s{axis}" for name in self._described for axis in range(3))
            named = ", ".join(self._described)
            lines.append(f"if not ({' and '.join(each)}): its.refuse_expanded({named})")
        return lines

    def _idle_stride(self, name: str) -> int:
        """Return the stride of a dimension of size 1, which descriptors refuse to be 0."""
        return self.unit if name in self._described else 0

    def _shape(self, name: str) -> str:
        """Return sizes and strides, as a descriptor has them."""
        sizes = ", ".join(f"{name}_n{axis}" for axis in range(4))
        return f"({sizes}), ({', '.join(f'{name}_s{axis}' for axis in range(3))}, 1)"

    @cached_property
    def _rows(self) -> list[str]:
        """The tensors (batch, heads, rows, head dim) whose strides are arguments."""
        return [name for name in self._strided if name not in PANELS]

    @cached_property
    def _panels(self) -> list[str]:
        """The tensors (heads, rows, columns) whose strides are arguments."""
        return [name for name in self._strided if name in PANELS]

    @property
    def _strided(self) -> Iterable[str]:
        strided = (one.of for one in self.arguments if one.taken in ("stride", "descriptor"))
        return dict.fromkeys(strided)

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

    def _unusual(self) -> str:
        """Return a test of what Triton compiles other kernels for: addresses that are no multiples
        of 16 bytes, and integers beyond 32 bits."""
        numbers = [f"strides // {self.unit}"] if self._rows else []
        numbers += [
            self._value(one)
            for one in self.arguments
            if one.type != "fp32"
            and (one.taken in ("size", "units", "number") or one.of in self._panels)
            and one.taken != "address"
        ]
        found = [f"({' | '.join(numbers)}) >> 31"] if numbers else []
        if self.unit > 1 and self._addresses:
            found.append(f"({' | '.join(f'{name}_at' for name in self._addresses)}) & 15")
        return " or ".join(found) or "0"

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
        known = one.of in self._rows
        found = f"{one.of}_n{one.axis}" if known else f"{one.of}.shape[{one.axis}]"
        return f"{found} // {self.unit}" if one.taken == "units" else found

    def _value(self, one: Argument) -> str:
        """Return what an argument holds."""
        match one.taken:
            case "address":
                return f"{one.of}_at" if one.of in self._addresses else f"{one.of}.data_ptr()"
            case "descriptor":
                return f"{one.of}_desc"
            case "stride":
                found = f"{one.of}_s{one.axis}"
                return found if self.unit == 1 else f"{found} // {self.unit}"
            case "base 2":
                return f"{one.of} * LOG2_E"
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
