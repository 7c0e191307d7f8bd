"""Launch a kernel: allocate results, and derive every argument from its name.

One launcher serves kernels that Triton compiles here and binaries of bundles; they differ in the
`Function` that takes the arguments. tilegen/bundles/format.md has the same table of names, for
programs in other languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from tilegen.errors import Unsupported
from tilegen.kernels.allocation import allocator
from tilegen.kernels.arguments import LEAST_SCALE, Argument, extra, size
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.layout import Laid
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS
from tilegen.launch.launch_text import MAX_ROW_STRIDE, LaunchText

Run = Callable[[int, list[Any], torch.device], None]
"""Launches a grid of programs on the current stream of a device. Takes the values of all
arguments: numbers, and addresses of tensors."""


class Function(Protocol):
    """A kernel that can be launched."""

    @property
    def takes_tensors(self) -> bool:
        """True if it takes tensors and Triton's descriptors instead of addresses."""
        ...

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return a function that launches the kernel with arguments like these, which hold tensors
        instead of addresses. Raises Unfamiliar if only the emitted `launch` can launch the
        kernel."""
        ...


@dataclass(slots=True)
class Described:
    """The fields of a tensor descriptor that Triton's launcher reads, without the tensor."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: ClassVar[str] = "zero"
    round_f32_to_tf32: ClassVar[bool] = False

    @property
    def base(self) -> Described:
        """The object with the address: this object."""
        return self

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


class Unfamiliar(Exception):
    """This version of Triton lacks an attribute that a launch without Triton's binder needs."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """Facts about a kernel that its launcher needs."""

    kernel: Kernel
    config: TileConfig
    arguments: tuple[str, ...]
    """Names of the function's arguments, in order."""
    stride_unit: int
    grid: tuple[tuple[str, int], ...]
    """The size of the grid: the product of ceil(size / divisor) over these pairs."""
    where: str
    """Name of the kernel in errors."""
    described: tuple[Argument, ...] = ()
    """Arguments that are tensor descriptors."""
    of_batch: frozenset[str] = frozenset()
    """Arguments that equal the batch size of q, although they are named as sizes of other tensors.
    The lengths of padded batches have that size: the call has checked it."""


def extra_names(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the keyword arguments that a launch takes for mask and score."""
    extras = (extra(name) for name in arguments)
    named = (x.of for x in extras if x and x.taken in ("address", "number"))
    return tuple(dict.fromkeys(named))


class Launcher:
    """Launcher of one kernel. `launch` has the parameters and results of the emitted `launch`; it
    allocates and launches on the current stream of the tensors' device."""

    launch: Launch
    run: Run | None = None
    """The prepared launch for usual arguments: aligned addresses, and integers within 32 bits."""
    arranged: tuple[Any, Any] = (None, None)
    """Shapes and strides of the last launch, and the values computed from them."""

    def __init__(
        self, launched: Launched, function: Function, emitted: Launch | None = None
    ) -> None:
        """`emitted` is the fallback if `function` raises Unfamiliar. Raises Unsupported for unknown
        arguments."""
        spec = KERNELS[launched.kernel]
        names = extra_names(launched.arguments)
        self.extra_names = tuple(name for name in names if name not in spec.parameters)
        self._launched = launched
        self._function = function
        self._emitted = emitted
        self._is_unfamiliar = False
        tensors = spec.tensors.values()
        sizes = [(spec.by_name.get(name) or size(name, tensors), by) for name, by in launched.grid]
        text = LaunchText(
            spec=spec,
            arguments=[_argument(name, launched) for name in launched.arguments],
            grid=sizes,
            extras=self.extra_names,
            unit=launched.stride_unit,
            config=launched.config,
            takes_tensors=function.takes_tensors,
        )
        self.text, self._viewed = str(text), [spec.parameters.index(name) for name in text.viewed]
        module: dict[str, Any] = {
            **dict(launcher=self, torch=torch, Unfamiliar=Unfamiliar, Described=Described),
            "empty_on_cpu": allocator(is_cuda=False),
            "empty_on_gpu": allocator(is_cuda=True),
            "LOG2_E": math.log2(math.e),
            "LEAST_SCALE": LEAST_SCALE,
        }
        exec(compile(self.text, f"<launch of {launched.where}>", "exec"), module)
        self.launch = module["launch"]

    def prepare(self, grid: int, arguments: Sequence[Any], unusual: int) -> Run:
        """Return a function that launches the kernel with arguments like these, and cache it unless
        they are `unusual`. Raises Unfamiliar."""
        if self._is_unfamiliar:
            raise Unfamiliar
        try:
            run = self._function.prepare(grid, arguments)
        except Unfamiliar:
            self._is_unfamiliar = True
            raise
        if not unusual:
            self.run = run
        return run

    def emitted(self, *given: Any, laid: tuple[Any, ...] | None, **extras: Any) -> Any:
        """Launch by the emitted `launch`, with the views that `laid` describes. Raises Unsupported
        if there is no such function."""
        if self._emitted is None:
            raise Unsupported(f"{self._launched.where} cannot be launched here")
        seen = [*given]
        if laid is not None:
            shapes, strides = laid[: len(laid) // 2], laid[len(laid) // 2 :]
            for i, shape, stride in zip(self._viewed, shapes, strides, strict=True):
                seen[i] = given[i].as_strided(shape, stride)
        return self._emitted(*seen, **extras)

    def described(self, tensor: torch.Tensor, tiles: Described, rows: int, columns: int) -> Any:
        """Return a descriptor of tiles in the form that Triton compiles for."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(tensor, [*tiles.shape], [*tiles.strides], [1, 1, rows, columns])

    def refuse_expanded(self, *laid: Laid) -> None:
        """Raise Unsupported for strides of 0, which descriptors cannot hold."""
        strides = " and ".join(str(stride) for _, stride in laid)
        raise Unsupported(
            f"{self._launched.where} uses tensor descriptors, which cannot read expanded "
            f"(stride-0) dimensions, got strides {strides}; pass contiguous tensors"
        )

    def check_strides(self, *laid: Laid) -> None:
        """Raise Unsupported for strides that the kernel cannot address."""
        unit = self._launched.stride_unit
        for shape, strides in laid:
            sizes = zip(shape, strides, strict=True)
            *others, dense = (0 if n == 1 else stride for n, stride in sizes)
            if dense > 1 or any(s % unit for s in others) or others[2] >= MAX_ROW_STRIDE:
                raise Unsupported(
                    f"expected a dense last dimension, strides that are multiples of {unit} "
                    f"elements and a row stride below {MAX_ROW_STRIDE}, got strides "
                    f"{strides} for shape {tuple(shape)}"
                )


def _argument(name: str, launched: Launched) -> Argument:
    described = {argument.name: argument for argument in launched.described}
    argument = described.get(name) or KERNELS[launched.kernel].by_name.get(name)
    if argument is None and (argument := extra(name)) is not None and argument.taken == "size":
        # The kernel may use a size only of a tensor that it reads.
        argument = argument if f"{argument.of}_ptr" in launched.arguments else None
        if name in launched.of_batch:
            argument = Argument(name, "i32", "q", "size")
    if argument is None:
        raise Unsupported(
            f"unknown argument {name!r} of {launched.where}, a {launched.kernel}; "
            "generate the bundle again"
        )
    return argument
