"""How a kernel is launched: results are allocated, and every argument is found by its name.

One launcher serves kernels that Triton compiles here and binaries of bundles; what differs is the
`Function` that takes the arguments. tilegen/bundles/README.md has the same table of names, for
programs in other languages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import Any, Protocol

import torch

from tilegen.errors import Unsupported
from tilegen.kernels.arguments import Argument, extra, size
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.layout import allocate
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS

MAX_ROW_STRIDE = 2**22  # elements; emitted kernels address a tile of rows with 32 bits
MAX_BOUND = 64
"""Combinations of strides that a plan keeps arguments for; q, k and v have the same in all."""
_NUMBERS: dict[str, Callable[[Any], Any]] = {
    "number": lambda value: value,
    "base 2": partial(mul, math.log2(math.e)),
    "flag": int,
}
"""What an argument holds of a number that a launch is given."""

Run = Callable[[int, list[Any], torch.device], None]
"""Launches a grid of programs on the current stream of a device, with the values of all
arguments: numbers, and addresses of tensors."""


class Function(Protocol):
    """A kernel that can be loaded."""

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return what launches the kernel with arguments like these, tensors in the place of their
        addresses. Raises Unfamiliar where only the emitted `launch` can launch it."""
        ...


class Unfamiliar(Exception):
    """Triton does not offer what a launch without its binder relies on."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """What a launcher has to know of a kernel."""

    kernel: Kernel
    config: TileConfig
    arguments: tuple[str, ...]
    """Names of the function's arguments, in order."""
    stride_unit: int
    grid: tuple[tuple[str, int], ...]
    """One-dimensional: the product of ceil(size / divisor) over these pairs."""
    where: str
    """What errors call it."""


def extra_names(arguments: Iterable[str]) -> tuple[str, ...]:
    """Return what a launch is given by name, for the kernel's mask and score."""
    found = (extra(name) for name in arguments)
    named = (one.of for one in found if one and one.taken in ("address", "number"))
    return tuple(dict.fromkeys(named))


@dataclass
class Bound:
    """What launches with the same sizes and strides have in common."""

    grid: int
    values: list[Any]
    """All arguments; those that differ from launch to launch are still missing."""
    results: Sequence[Callable[[], torch.Tensor]]
    """Allocate what a launch returns."""
    run: Run


class Launcher:
    """A function with the parameters and results of a kernel's emitted `launch`."""

    def __init__(
        self, launched: Launched, function: Function, emitted: Launch | None = None
    ) -> None:
        """`emitted` serves where `function` is unfamiliar. Raises Unsupported for arguments that
        nobody here knows."""
        self.extra_names = extra_names(launched.arguments)
        self._launched = launched
        self._function = function
        self._emitted = emitted
        self.emitted_alone = False
        self._spec = KERNELS[launched.kernel]
        self._tensors = (*self._spec.given, *self._spec.made)
        self._arguments = [_argument(name, launched) for name in launched.arguments]
        self._grid = [
            (self._spec.by_name.get(name) or size(name, self._tensors), divisor)
            for name, divisor in launched.grid
        ]
        strided = {one.of for one in self._arguments if one.taken == "stride"}
        self.strided = [i for i, name in enumerate(self._spec.given) if name in strided]
        # Where an argument stands, and where among given and made its tensor or number does.
        self._addresses: list[tuple[int, int]] = []
        self._numbers: list[tuple[int, int, Callable[[Any], Any]]] = []
        self._extras: list[tuple[int, Argument]] = []
        for place, one in enumerate(self._arguments):
            if one.of not in self._tensors:
                if one.taken != "nothing":
                    self._extras.append((place, one))
            elif one.taken == "address":
                self._addresses.append((place, self._tensors.index(one.of)))
            elif one.taken in _NUMBERS:
                self._numbers.append((place, self._tensors.index(one.of), _NUMBERS[one.taken]))
        tells = self._spec.tells
        self._tells = (getattr(launched.config, tells),) if tells else ()

    def __call__(self, *given: Any, **extras: Any) -> Any:
        """Allocate what is returned, and launch on the current stream of the tensors' device."""
        if self.emitted_alone:
            return self.with_emitted(given, extras)
        made = self._make(given)
        try:
            bound = self._bind(given, made, extras)
        except Unfamiliar:
            return self.with_emitted(given, extras)
        return self.launch(bound, given, made, extras)

    def with_emitted(self, given: tuple[Any, ...], extras: dict[str, Any]) -> Any:
        """Launch by the emitted `launch`, now and from now on."""
        if self._emitted is None:
            raise Unsupported(f"{self._launched.where} cannot be launched here")
        self.emitted_alone = True
        return self._emitted(*given, **extras)

    def of_plan(self, *, one_layout: bool = False) -> Launch:
        """Return a launch for calls whose tensors all have the same sizes, and with `one_layout`
        the same strides; it keeps what sizes and strides determine."""
        one_size = not self._spec.panel and all(one.taken == "size" for one, _ in self._grid)
        return _PlanLauncher(self, () if one_layout else self.strided) if one_size else self

    def bind(self, given: tuple[Any, ...], extras: dict[str, Any]) -> Bound:
        """Return what launches with the same sizes and strides have in common. Raises Unsupported
        for strides that the kernel is not for, and Unfamiliar."""
        return self._bind(given, self._make(given), extras)

    def launch(
        self,
        bound: Bound,
        given: tuple[Any, ...],
        made: Sequence[torch.Tensor],
        extras: dict[str, Any],
    ) -> Any:
        """Fill in what differs from launch to launch, and launch."""
        found = (*given, *made)
        bound.run(bound.grid, self.filled(bound.values, found, extras), given[0].device)
        results = (*made, *self._tells)
        return results[0] if len(results) == 1 else results or None

    def filled(
        self, common: list[Any], found: tuple[Any, ...], extras: dict[str, Any]
    ) -> list[Any]:
        """Return all arguments: those that launches have in common, and those of this one."""
        values = common.copy()
        for place, at in self._addresses:
            values[place] = found[at].data_ptr()
        for place, at, taken in self._numbers:
            values[place] = taken(found[at])
        for place, one in self._extras:
            value = extras[one.of]
            if one.taken == "address":
                value = value.data_ptr()
            elif one.taken == "size":
                value = value.shape[one.axis]
            values[place] = value
        return values

    def _make(self, given: tuple[Any, ...]) -> list[torch.Tensor]:
        named = dict(zip(self._spec.given, given, strict=True))
        unit, block_n = self._launched.stride_unit, self._launched.config.block_n
        return [allocate(name, named, unit, block_n) for name in self._spec.made]

    def _bind(
        self, given: tuple[Any, ...], made: list[torch.Tensor], extras: dict[str, Any]
    ) -> Bound:
        found = (*given, *made)
        named = dict(zip(self._tensors, found, strict=True))
        unit = self._launched.stride_unit
        strides: dict[str, tuple[int, ...]] = {}
        values: list[Any] = [0] * len(self._arguments)
        for place, one in enumerate(self._arguments):
            if one.of not in named:
                continue
            if one.taken == "stride":
                if one.of not in strides:
                    strides[one.of] = _strides(named[one.of], unit)
                values[place] = strides[one.of][one.axis]
            elif one.taken in ("size", "units"):
                values[place] = _size(one, named, unit)
        grid = 1
        for one, divisor in self._grid:
            grid *= -(-_size(one, named, unit) // divisor)
        shown = self.filled(values, found, extras)
        for place, at in self._addresses:
            shown[place] = found[at]
        for place, one in self._extras:
            if one.taken == "address":
                shown[place] = extras[one.of]
        results = [
            partial(
                torch.empty_strided, one.size(), one.stride(), dtype=one.dtype, device=one.device
            )
            for one in made
        ]
        return Bound(grid, values, results, self._function.prepare(grid, shown))


class _PlanLauncher:
    """Launches a kernel for one kind of call: the tensors of all its launches have the same
    sizes, and in a backward seldom other strides (of gradients, or of what hooks give back for
    saved tensors)."""

    def __init__(self, launcher: Launcher, strided: Sequence[int]) -> None:
        """`strided` are the places of tensors whose strides may differ from launch to launch."""
        self._launcher = launcher
        self._strided = strided
        self._bound: dict[tuple[tuple[int, ...], ...], Bound] = {}

    def __call__(self, *given: Any, **extras: Any) -> Any:
        launcher = self._launcher
        if launcher.emitted_alone:
            return launcher.with_emitted(given, extras)
        strides = tuple([given[place].stride() for place in self._strided]) if self._strided else ()
        bound = self._bound.get(strides)
        if bound is None:
            try:
                bound = launcher.bind(given, extras)
            except Unfamiliar:
                return launcher.with_emitted(given, extras)
            if len(self._bound) >= MAX_BOUND:
                self._bound = {}
            self._bound[strides] = bound
        return launcher.launch(bound, given, [make() for make in bound.results], extras)


def _argument(name: str, launched: Launched) -> Argument:
    found = KERNELS[launched.kernel].by_name.get(name)
    if found is None and (found := extra(name)) is not None and found.taken == "size":
        # A size of a tensor that the kernel does not read says nothing.
        found = found if f"{found.of}_ptr" in launched.arguments else None
    if found is None:
        raise Unsupported(
            f"{launched.where} takes {name!r}, which a {launched.kernel} of this tilegen does not; "
            "generate the bundle again"
        )
    return found


def _size(one: Argument, named: dict[str, Any], unit: int) -> int:
    """Return a size of a tensor, perhaps in units, or a number that a launch is given."""
    if one.taken == "number":
        return named[one.of]
    found = named[one.of].shape[one.axis]
    return found // unit if one.taken == "units" else found


def _strides(tensor: torch.Tensor, unit: int) -> tuple[int, ...]:
    """Return all strides but the last in units; a dimension of (batch, heads, seqlen) with size 1
    has none."""
    if tensor.ndim == 3:  # a panel
        head, row, _ = tensor.stride()
        return head // unit, row // unit
    *found, dense = (0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if dense > 1 or any(one % unit for one in found) or found[2] >= MAX_ROW_STRIDE:
        raise Unsupported(
            f"expected a dense last dimension, strides that are multiples of {unit} elements and a "
            f"row stride below {MAX_ROW_STRIDE}, got strides {tensor.stride()} for shape "
            f"{tuple(tensor.shape)}"
        )
    return tuple(one // unit for one in found)
