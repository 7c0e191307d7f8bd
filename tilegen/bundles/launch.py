"""How a binary is launched: results are allocated, and every argument is found by its name.

README.md beside this file has the same table of names, for programs in other languages.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Protocol

import torch

from tilegen.bundles.manifest import Binary
from tilegen.errors import Unsupported
from tilegen.kernels.arguments import Argument, extra, size
from tilegen.kernels.layout import allocate
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS

Values = Mapping[str, Any]
"""Tensors and numbers of one launch, by name."""
Rule = Callable[[Values], Any]

_FORMATS = {"i32": "i", "fp32": "f"}  # of `struct`; all others are pointers


class Function(Protocol):
    """A kernel that the driver has loaded."""

    def launch(self, grid: int, threads: int, parameters: int, *, device: int, stream: int) -> None:
        """Run `grid` programs; `parameters` is the address of an array of their addresses."""
        ...


def extra_names(binary: Binary) -> tuple[str, ...]:
    """Return what a launch is given by name, for the kernel's mask and score."""
    found = (extra(name) for name, _ in binary.arguments)
    named = (one.of for one in found if one and one.taken in ("address", "number"))
    return tuple(dict.fromkeys(named))


def launch_of(binary: Binary, load: Callable[[], Function]) -> Launch:
    """Return a function with the parameters and results of the emitted kernel's `launch`.

    `load` is called when it is first needed. Raises Unsupported for arguments nobody here knows.
    """
    return _Launcher(binary, load).launch


class _Launcher:
    """Packs the arguments of one binary."""

    def __init__(self, binary: Binary, load: Callable[[], Function]) -> None:
        self._binary = binary
        self._load = load
        self._function: Function | None = None
        self._spec = KERNELS[binary.kernel]
        arguments = [_argument(name, binary) for name, _ in binary.arguments]
        # Strides are read a tensor at a time, all else name by name.
        self._strided: dict[str, list[tuple[str, int]]] = {}
        self._rules: list[tuple[str, Rule]] = []
        needed = {one.name: one for one in arguments}
        for name, _ in binary.grid:
            needed.setdefault(name, size(name, (*self._spec.given, *self._spec.made)))
        for one in needed.values():
            if one.taken == "stride":
                self._strided.setdefault(one.of, []).append((one.name, one.axis))
            elif rule := _rule(one, binary.stride_unit):
                self._rules.append((one.name, rule))
        self._pick = itemgetter(*(one.name for one in arguments))
        self._struct = struct.Struct("".join(_FORMATS.get(t, "P") for _, t in binary.arguments))
        self._memory = threading.local()

    def launch(self, *given: Any, **extras: Any) -> Any:
        """Allocate what is returned, and launch on the current stream of the tensors' device."""
        values = dict(zip(self._spec.given, given, strict=True))
        unit, block_n = self._binary.stride_unit, self._binary.config.block_n
        made = {name: allocate(name, values, unit, block_n) for name in self._spec.made}
        self._run({**values, **made, **extras}, given[0].device)
        results: list[Any] = list(made.values())
        if self._spec.tells:
            results.append(getattr(self._binary.config, self._spec.tells))
        return results[0] if len(results) == 1 else tuple(results) or None

    def _run(self, values: dict[str, Any], device: torch.device) -> None:
        for name, rule in self._rules:
            values[name] = rule(values)
        for of, names in self._strided.items():
            strides = _strides(values[of], self._binary.stride_unit)
            for name, axis in names:
                values[name] = strides[axis]
        grid = 1
        for name, divisor in self._binary.grid:
            grid *= -(-values[name] // divisor)
        memory, addresses = self._buffers()
        try:
            self._struct.pack_into(memory, 0, *self._pick(values))
        except struct.error as error:
            name = self._binary.function
            raise Unsupported(f"{name}: a size or stride is too large: {error}") from None
        if self._function is None:
            self._function = self._load()
        self._function.launch(
            grid,
            self._binary.threads,
            addresses,
            device=device.index or 0,
            stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        )

    def _buffers(self) -> tuple[Any, int]:
        """Return this thread's memory for arguments, and the address of their addresses."""
        if not hasattr(self._memory, "array"):
            memory = ctypes.create_string_buffer(self._struct.size)
            formats, start = self._struct.format, ctypes.addressof(memory)
            places = [
                start + struct.calcsize(formats[: i + 1]) - struct.calcsize(one)
                for i, one in enumerate(formats)
            ]
            self._memory.array = (ctypes.c_void_p * len(places))(*places)
            self._memory.buffers = memory, ctypes.addressof(self._memory.array)
        return self._memory.buffers


def _argument(name: str, binary: Binary) -> Argument:
    found = KERNELS[binary.kernel].by_name.get(name)
    if found is None and (found := extra(name)) is not None and found.taken == "size":
        # A size of a tensor that the kernel does not read says nothing.
        found = found if any(one == f"{found.of}_ptr" for one, _ in binary.arguments) else None
    if found is None:
        raise Unsupported(
            f"{binary.file} takes {name!r}, which a {binary.kernel} of this tilegen does not; "
            "generate the bundle again"
        )
    return found


def _rule(one: Argument, unit: int) -> Rule | None:
    """Return how an argument or a size follows from the values of a launch; None for what it is
    given under the argument's name."""
    match one.taken:
        case "address":
            return lambda values: values[one.of].data_ptr()
        case "size":
            return lambda values: values[one.of].shape[one.axis]
        case "units":
            return lambda values: values[one.of].shape[one.axis] // unit
        case "base 2":
            return lambda values: values[one.of] * math.log2(math.e)
        case "nothing":
            return lambda values: 0
        case _:
            return None


def _strides(tensor: torch.Tensor, unit: int) -> tuple[int, ...]:
    """Return all strides but the last in units; a dimension of (batch, heads, seqlen) with size 1
    has none."""
    if tensor.ndim == 3:  # a panel
        head, row, _ = tensor.stride()
        return head // unit, row // unit
    (batches, heads, rows, _), (batch, head, row, _) = tensor.shape, tensor.stride()
    batch, head, row = batches > 1 and batch, heads > 1 and head, rows > 1 and row
    if batch % unit or head % unit or row % unit:
        raise Unsupported(
            f"expected strides that are multiples of {unit} elements, got {tensor.stride()}"
        )
    return batch // unit, head // unit, row // unit
