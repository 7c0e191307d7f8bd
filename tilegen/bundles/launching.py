"""Launches of a bundle's binaries: arguments are packed into memory for the driver."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilegen.bundles.manifest import Binary
from tilegen.bundles.on_cpu import OnCpuFunction
from tilegen.errors import Unsupported
from tilegen.launch.launcher import Launched, Launcher, Run

if TYPE_CHECKING:
    from tilegen.bundles.driver import DriverFunction
    from tilegen.cpu.function import CpuFunction

_FORMATS = {"i32": "i", "fp32": "f"}
"""Format characters of `struct` for types of arguments; all other types are pointers."""


class Packed:
    """A function of the driver that takes its arguments packed into memory."""

    takes_tensors = False

    def __init__(
        self, types: Sequence[str], threads: int, where: str, load: Callable[[], DriverFunction]
    ) -> None:
        """Prepare memory for arguments of `types`; `load` is called at the first launch."""
        self._struct = struct.Struct("".join(_FORMATS.get(type_, "P") for type_ in types))
        self._threads = threads
        self._where = where
        self._load = load
        self._loaded: DriverFunction | None = None
        self._memory = threading.local()

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return the function that launches the binary; it is the same for all arguments."""
        return self._run

    def _run(self, grid: int, values: list[Any], device: torch.device) -> None:
        memory, addresses = self._buffers()
        try:
            self._struct.pack_into(memory, 0, *values)
        except struct.error as error:
            raise Unsupported(f"{self._where}: a size or stride is too large: {error}") from None
        if self._loaded is None:
            self._loaded = self._load()
        self._loaded.launch(
            grid,
            self._threads,
            addresses,
            device=device.index or 0,
            stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
        )

    def _buffers(self) -> tuple[Any, int]:
        """Return this thread's memory for arguments, and the address of their addresses' array."""
        if not hasattr(self._memory, "array"):
            memory = ctypes.create_string_buffer(self._struct.size)
            formats, start = self._struct.format, ctypes.addressof(memory)
            places = [
                # The size up to an argument includes the padding before it.
                start + struct.calcsize(formats[: i + 1]) - struct.calcsize(format_)
                for i, format_ in enumerate(formats)
            ]
            self._memory.array = (ctypes.c_void_p * len(places))(*places)
            self._memory.buffers = memory, ctypes.addressof(self._memory.array)
        return self._memory.buffers


def launcher_of(binary: Binary, load: Callable[[], DriverFunction]) -> Launcher:
    """Return a launcher with the parameters and results of the emitted kernel's `launch`.

    `load` is called at the first launch. Raises Unsupported for unknown arguments.
    """
    types = [type_ for _, type_ in binary.arguments]
    return Launcher(_launched(binary), Packed(types, binary.threads, binary.function, load))


def launcher_on_cpu(binary: Binary, load: Callable[[], CpuFunction]) -> Launcher:
    """Return the same for a binary that runs on this machine's processor."""
    return Launcher(_launched(binary), OnCpuFunction(binary, load))


def _launched(binary: Binary) -> Launched:
    return Launched(
        kernel=binary.kernel,
        config=binary.config,
        arguments=tuple(name for name, _ in binary.arguments),
        stride_unit=binary.stride_unit,
        grid=binary.grid,
        where=binary.file,
    )
