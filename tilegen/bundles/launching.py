"""Launches of a bundle's binaries: arguments are packed into memory for the driver."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tilegen.bundles.manifest import Binary
from tilegen.errors import Unsupported
from tilegen.launch.launcher import Run, by_address

if TYPE_CHECKING:
    from tilegen.bundles.driver import DriverFunction

_FORMATS = {"i32": "i", "fp32": "f"}
"""Format characters of `struct` for types of arguments; all other types are pointers."""


class Packed:
    """A function of the driver that takes its arguments packed into memory."""

    def __init__(self, binary: Binary, load: Callable[[], DriverFunction]) -> None:
        """Prepare memory for the arguments; `load` is called at the first launch."""
        types = (type_ for _, type_ in binary.arguments)
        self._struct = struct.Struct("".join(_FORMATS.get(type_, "P") for type_ in types))
        self._binary = binary
        self._load = load
        self._memory = threading.local()

    def start(self, grid: int, arguments: list[Any], device: torch.device) -> Run:
        """Launch the binary, and return the function that launches it for all arguments."""
        function = self._load()
        scratch = len(self._binary.arguments) - len(arguments)
        run = by_address(
            arguments,
            f"launch(function, grid, device, {{values}}{', 0' * scratch})",
            **dict(launch=self._launch, function=function),
        )
        run(grid, arguments, device)
        return run

    def _launch(
        self, function: DriverFunction, grid: int, device: torch.device, *values: Any
    ) -> None:
        memory, addresses = self._buffers()
        try:
            self._struct.pack_into(memory, 0, *values)
        except struct.error as error:
            name = self._binary.function
            raise Unsupported(f"{name}: a size or stride is too large: {error}") from None
        function.launch(
            grid,
            self._binary.threads,
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
