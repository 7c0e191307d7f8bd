"""Generate the Python of a launch for one kernel from the records of its arguments.

A record holds from which tensor an argument is taken, and which of its properties it is. The
generated code therefore looks nothing up at a call. Values that depend on sizes and strides are
cached until a launch has other sizes: the layers of a model usually share them. The emitted
`launch`, which tilegen.emit.launch prints from the same records, is for readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from tilegen.kernels.arguments import Argument
from tilegen.kernels.config import TileConfig
from tilegen.kernels.results import Extent, extents, sources
from tilegen.kernels.spec import KernelSpec

MAX_ROW_STRIDE = 2**22  # elements; emitted kernels address a tile of rows with 32 bits
_COUNTS = ("num_heads", "num_rows", "requests", "longest_q", "longest_kv")
"""Numbers passed to launches that determine grids and sizes of results."""
_LAID = ("stride", "size", "units")
"""Kinds of arguments that depend on sizes and strides of a tensor."""


@dataclass(frozen=True, kw_only=True)
class LaunchText:
    """The text of two functions: `launch`, with the parameters and results of a kernel's emitted
    `launch`, and `arranged`, which computes the values that depend on sizes and strides.

    `launch` has one more parameter: `laid`, the shapes, then the strides, in which the kernel sees
    the caller's tensors. A call that knows them need not make views of its tensors.

    The text reads these names of its module: `launcher`, `torch`, `empty_on_cpu`,
    `empty_on_gpu`, `LOG2_E`, `LEAST_SCALE`, `Described` and `Unfamiliar`.
    """

    spec: KernelSpec
    arguments: Sequence[Argument]
    grid: Sequence[tuple[Argument, int]]
    """The size of the grid: the product of ceil(size / divisor) over these pairs."""
    extras: Sequence[str]
    """Names of the keyword arguments for mask and score."""
    unit: int
    """Number of elements in a unit of strides."""
    config: TileConfig
    takes_tensors: bool
    """True if the kernel takes tensors instead of their addresses."""

    def __str__(self) -> str:
        return f"{self._arranged()}\n\n{self._launch()}"

    def _arranged(self) -> str:
        body = [
            *([f"{', '.join(self._laid)} = laid"] if self._laid else []),
            *(
                line
                for name in self._strided
                if name not in self.spec.allocated
                for line in self._read(name)
            ),
            *(f"{name}_n{axis} = {name}_shape[{axis}]" for name, axis in self._other_sizes),
            *(line for name in self.spec.allocated for line in self._make(name)),
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
                f"{name} = {', '.join(map(self._value, group))},"
                for name, group in self._groups
                if name
            ),
            f"return {', '.join(self._arranged_names)}",
        ]
        return "\n    ".join([f"def arranged({', '.join(self._facts)}):", *body]) + "\n"

    def _launch(self) -> str:
        extras_as_keywords = "".join(f", {name}" for name in self.extras)
        knob = self.spec.returns
        results = [*self.spec.allocated, *([str(getattr(self.config, knob))] if knob else [])]
        emitted = [*self.spec.parameters, "laid=laid", *(f"{name}={name}" for name in self.extras)]
        body = [
            f"device = {self.spec.parameters[0]}.device",
            f"empty = empty_on_gpu if {self.spec.parameters[0]}.is_cuda else empty_on_cpu",
            f"facts = {', '.join(self._facts.values())},",
            "known, values = launcher.arranged",  # one assignment: other threads may call too
            "if known != facts:",
            "    values = arranged(*facts)",
            "    launcher.arranged = facts, values",
            f"{', '.join(self._arranged_names)} = values",
            *(
                f"{name} = empty({name}_shape, {name}_stride, {self._dtype(name)})"
                for name in self.spec.allocated
            ),
            *(f"{name}_at = {name}.data_ptr()" for name in self._addresses),
            *(
                f"{name}_desc = Described({name}.data_ptr(), *{name}_tiled)"
                for name in self._described
            ),
            f"unusual = {self._unusual()}",
            "run = None if unusual else launcher.run",
            "if run is None:",
            "    try:",
            f"        run = launcher.prepare(grid, [{self._all(self._shown)}], unusual)",
            "    except Unfamiliar:",
            f"        return launcher.emitted({', '.join(emitted)})",
            f"run(grid, [{self._all(self._shown if self.takes_tensors else self._value)}], device)",
            *([f"return {', '.join(results)}"] if results else []),
        ]
        head = f"def launch({', '.join(self.spec.parameters)}, *, laid=None{extras_as_keywords}):"
        return "\n    ".join([head, *body]) + "\n"

    # ----------------------------------------------------------------------------------------------
    # Parameters and results of `arranged`

    @cached_property
    def viewed(self) -> list[str]:
        """The tensors of the caller whose shapes and strides are in `laid`, in that order."""
        # The kernel may take no strides of v, if values are in keys; `laid` has them nevertheless.
        strided = [x.of for x in self.spec.by_name.values() if x.taken == "stride"]
        strided += self._strided
        return [name for name in dict.fromkeys(strided) if name not in self.spec.allocated]

    @cached_property
    def _laid(self) -> list[str]:
        """The names of the elements of `laid`."""
        return [f"{name}_{what}" for what in ("shape", "stride") for name in self.viewed]

    @cached_property
    def _facts(self) -> dict[str, str]:
        """The parameters of `arranged`, with the expressions that `launch` passes."""
        own = [f"{name}.shape" for name in self.viewed]
        own += [f"{name}.stride()" for name in self.viewed]
        others = dict.fromkeys(x for x, _ in self._other_sizes if x not in self.viewed)
        return (
            ({"laid": f"laid or ({', '.join(own)})"} if own else {})
            | {f"{name}_shape": f"{name}.shape" for name in others}
            | {name: name for name in _COUNTS if name in self.spec.parameters}
        )

    @property
    def _arranged_names(self) -> list[str]:
        """The results of `arranged`."""
        made = (f"{name}_{what}" for name in self.spec.allocated for what in ("shape", "stride"))
        tiled = (f"{name}_tiled" for name in self._described)
        return ["grid", "is_wide", *made, *tiled, *(name for name, _ in self._groups if name)]

    @cached_property
    def _groups(self) -> list[tuple[str, list[Argument]]]:
        """The arguments in order, in groups. Adjacent arguments that depend on sizes and strides
        form a group with a name; other groups have the name ""."""
        groups = groupby(self.arguments, lambda argument: argument.taken in _LAID)
        return [
            (f"laid_{i}" if is_laid else "", list(group))
            for i, (is_laid, group) in enumerate(groups)
        ]

    def _all(self, value: Callable[[Argument], str]) -> str:
        """Return the expressions of all arguments in order."""
        return ", ".join(
            f"*{name}" if name else ", ".join(map(value, group)) for name, group in self._groups
        )

    # ----------------------------------------------------------------------------------------------
    # Sizes and strides

    def _read(self, name: str) -> list[str]:
        axes = range(len(self.spec.tensors[name].sizes))
        sizes, strides = (", ".join(f"{name}_{what}{axis}" for axis in axes) for what in "ns")
        return [f"{sizes} = {name}_shape", f"{strides} = {name}_stride"]

    def _make(self, name: str) -> list[str]:
        """Return lines that compute shape and strides of a result, as `allocate` does."""
        sizes = self._sizes(name)
        n, s = ([f"{name}_{what}{axis}" for axis in range(len(sizes))] for what in "ns")
        lines = [
            f"{', '.join(n)} = {', '.join(sizes)}",
            f"{', '.join(s)} = {', '.join(' * '.join(n[i + 1 :]) or '1' for i in range(len(n)))}",
        ]
        if self.spec.tensors[name].is_strided:
            like = sources(self.spec, name)[0].name
            lines.append(f"if {like}_s1 < {like}_s2: {s[1]}, {s[2]} = {n[3]}, {n[1]} * {n[3]}")
        return [*lines, f"{name}_shape, {name}_stride = ({', '.join(n)}), ({', '.join(s)})"]

    def _sizes(self, name: str) -> list[str]:
        """Return the expressions of a result's sizes."""
        return [
            str(size) if isinstance(size, int) else self._extent(size) for size in self._shape(name)
        ]

    def _shape(self, name: str) -> tuple[Extent | int, ...]:
        # A kernel with a score takes the scale unchanged, and writes lse in pairs.
        pairs = any(argument.name == "softmax_scale" for argument in self.arguments)
        return extents(self.spec, name, pairs=pairs)

    def _extent(self, extent: Extent) -> str:
        size = extent.of if extent.axis is None else f"{extent.of}_n{extent.axis}"
        if extent.by == "unit":
            return f"-(-{size} // {self.unit}) * {self.unit}"
        keys = self.config.split_kv or self.config.block_n
        return f"-(-{size} // {keys})" if extent.by == "keys" else size

    def _dtype(self, name: str) -> str:
        first = sources(self.spec, name)[0].name
        return "torch.float32" if self.spec.tensors[name].dtype == "fp32" else f"{first}.dtype"

    def _check(self) -> list[str]:
        """Return lines that check strides; tests of all strides combined with | are enough."""
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
            f"if {' or '.join(doubts)}: launcher.check_strides({rows})",
        ]
        if self._described:
            strides = (f"{name}_s{axis}" for name in self._described for axis in range(3))
            lines.append(f"if not ({' and '.join(strides)}): launcher.refuse_expanded({described})")
        return lines

    def _idle_stride(self, name: str) -> int:
        """Return the stride for a dimension of size 1; descriptors reject a stride of 0."""
        return self.unit if name in self._described else 0

    def _tiled(self, name: str) -> str:
        """Return the expression of sizes and strides of a descriptor."""
        sizes = ", ".join(f"{name}_n{axis}" for axis in range(4))
        return f"({sizes}), ({', '.join(f'{name}_s{axis}' for axis in range(3))}, 1)"

    @cached_property
    def _rows(self) -> list[str]:
        """The tensors (batch, heads, rows, head dim) whose strides are arguments."""
        return [name for name in self._strided if not self.spec.tensors[name].is_panel]

    @cached_property
    def _strided(self) -> list[str]:
        strided = (x.of for x in self.arguments if x.taken in ("stride", "descriptor"))
        return list(dict.fromkeys(strided))

    @cached_property
    def _other_sizes(self) -> list[tuple[str, int]]:
        """The sizes that arguments or results need of tensors whose strides are not arguments."""
        taken = (*self.arguments, *(argument for argument, _ in self.grid))
        sizes = [(x.of, x.axis) for x in taken if x.taken in ("size", "units")]
        extents_of = (extent for name in self.spec.allocated for extent in self._shape(name))
        sizes += [
            (x.of, x.axis) for x in extents_of if isinstance(x, Extent) and x.axis is not None
        ]
        known = (*self._strided, *self.spec.allocated)
        return list(dict.fromkeys(size for size in sizes if size[0] not in known))

    @cached_property
    def _described(self) -> list[str]:
        """The tensors that are passed as descriptors."""
        names = (argument.of for argument in self.arguments if argument.taken == "descriptor")
        return list(dict.fromkeys(names))

    @cached_property
    def _addresses(self) -> list[str]:
        """The tensors whose addresses are arguments, except those of masks and scores."""
        named = (*self.spec.parameters, *self.spec.allocated)
        taken = [argument.of for argument in self.arguments if argument.taken == "address"]
        return [name for name in taken if name in named]

    def _or(self, *axes: int) -> str:
        return f"({' | '.join(f'{name}_s{axis}' for name in self._rows for axis in axes)})"

    # ----------------------------------------------------------------------------------------------
    # Arguments of the launch

    def _wide(self) -> str:
        """Return a test for sizes and strides beyond 32 bits: Triton compiles other kernels for
        them."""
        numbers = [f"strides // {self.unit}"] if self._rows else []
        numbers += [
            self._value(x)
            for x in self.arguments
            if x.taken in ("size", "units")
            or (x.taken == "stride" and self.spec.tensors[x.of].is_panel)
        ]
        return f"({' | '.join(numbers)}) >> 31" if numbers else "0"

    def _unusual(self) -> str:
        """Return a test for arguments that need another compiled kernel: integers beyond 32 bits,
        and addresses that are not multiples of 16 bytes."""
        tests = ["is_wide"]
        numbers = [x.of for x in self.arguments if x.taken == "number" and x.type != "fp32"]
        if numbers:
            tests.append(f"({' | '.join(numbers)}) >> 31")
        if self.unit > 1 and self._addresses:
            tests.append(f"({' | '.join(f'{name}_at' for name in self._addresses)}) & 15")
        return " or ".join(tests)

    def _programs(self) -> str:
        factors = [
            self._size(argument) if divisor == 1 else f"-(-{self._size(argument)} // {divisor})"
            for argument, divisor in self.grid
        ]
        return " * ".join(factors) or "1"

    def _size(self, argument: Argument) -> str:
        """Return the expression of a tensor's size, or of a number passed to the launch."""
        if argument.taken == "number":
            return argument.of
        size = f"{argument.of}_n{argument.axis}"
        return f"{size} // {self.unit}" if argument.taken == "units" else size

    def _value(self, argument: Argument) -> str:
        """Return the expression of an argument's value."""
        match argument.taken:
            case "address":
                known = argument.of in self._addresses
                return f"{argument.of}_at" if known else f"{argument.of}.data_ptr()"
            case "descriptor":
                return f"{argument.of}_desc"
            case "stride":
                stride = f"{argument.of}_s{argument.axis}"
                return stride if self.unit == 1 else f"{stride} // {self.unit}"
            case "base 2":
                return f"max({argument.of} * LOG2_E, LEAST_SCALE)"
            case "flag":
                return f"int({argument.of})"
            case "nothing":
                return "0"
            case _:
                return self._size(argument)

    def _shown(self, argument: Argument) -> str:
        """Return the expression of an argument to compile for: a tensor instead of an address, and
        Triton's own descriptor."""
        name = argument.of
        if argument.taken == "descriptor":
            rows = getattr(self.config, argument.rows)
            return f"launcher.described({name}, {name}_desc, {rows}, {argument.axis})"
        return name if argument.taken == "address" else self._value(argument)
