"""Digests of the machine code that ran, by which equal binaries of two configs are recognised."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Generator
from typing import Any

DIGITS = 12
EXECUTABLE = 0x4
"""Flag of the sections of an ELF file that hold instructions."""


def digest_of(binary: bytes, *, num_warps: int, shared_bytes: int) -> str:
    """Compute twelve hexadecimal digits of the SHA-256 of a binary's machine code, with the warps
    and the shared memory of its launch.

    Names of functions and files do not count: they differ between two configs even if the
    instructions are the same.
    """
    code = hashlib.sha256(f"{num_warps} {shared_bytes}".encode())
    code.update(instructions(binary))
    return code.hexdigest()[:DIGITS]


def instructions(binary: bytes) -> bytes:
    """Return the bytes of the executable sections of an ELF file (cubin, hsaco). Other files, and
    damaged files, are returned whole."""
    if not binary.startswith(b"\x7fELF\x02\x01"):  # 64 bits, little-endian
        return binary
    try:
        (first,) = struct.unpack_from("<Q", binary, 0x28)
        size, count = struct.unpack_from("<HH", binary, 0x3A)
        headers = [
            struct.unpack_from("<IIQQQQ", binary, first + size * index) for index in range(count)
        ]
    except struct.error:
        return binary
    code = [binary[at : at + n] for _, _, flags, _, at, n in headers if flags & EXECUTABLE]
    return b"".join(code) or binary


class LaunchedBinaries:
    """Compiled Triton kernels that were launched, each once."""

    def __init__(self) -> None:
        self._kernels: dict[int, Any] = {}

    def note(self, compiled: Any) -> None:
        """Add a kernel, unless it was added before."""
        self._kernels.setdefault(id(compiled), compiled)

    @property
    def digest(self) -> str:
        """Digests of the kernels in the order of their first launches, separated by spaces; empty
        if no launch was seen."""
        return " ".join(dict.fromkeys(digest for _, digest in self.named))

    @property
    def named(self) -> list[tuple[str, str]]:
        """Name and digest of each kernel, in the order of first launches."""
        return [
            (
                compiled.name,
                digest_of(
                    compiled.kernel,
                    num_warps=compiled.metadata.num_warps,
                    shared_bytes=compiled.metadata.shared,
                ),
            )
            for compiled in self._kernels.values()
        ]


@contextlib.contextmanager
def noting_launches() -> Generator[LaunchedBinaries, None, None]:
    """Record the kernels that Triton launches in this process during the block; launches are
    slower.

    This relies on undocumented behaviour of Triton 3.6 to 3.9: each launch calls `launch_metadata`
    of the compiled kernel while `launch_enter_hook` has a function. With other versions, or without
    Triton, no launch is seen.
    """
    seen = LaunchedBinaries()
    try:
        from tilegen.private_triton import CompiledKernel, knobs

        original, hooks = CompiledKernel.launch_metadata, knobs.runtime.launch_enter_hook
        add_hook, remove_hook = hooks.add, hooks.remove
    except (ImportError, AttributeError):
        yield seen
        return

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.note(self)
        return original(self, *args, **kwargs)

    def nothing(*_: object) -> None: ...

    CompiledKernel.launch_metadata = noting
    add_hook(nothing)  # without a hook, launches do not call launch_metadata
    try:
        yield seen
    finally:
        remove_hook(nothing)
        CompiledKernel.launch_metadata = original
