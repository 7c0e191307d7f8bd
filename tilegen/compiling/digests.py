"""Digests of the machine code that ran, so that one binary under two names is seen to be one."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Generator
from typing import Any

DIGITS = 12
EXECUTABLE = 0x4
"""Flag of a section of an ELF file that holds instructions."""


def digest_of(binary: bytes, *, num_warps: int, shared_bytes: int) -> str:
    """Return twelve hexadecimal digits of the SHA-256 of a binary's machine code, with the warps
    and the shared memory that it is launched with.

    The compiler's name for a binary and the file that it came from do not count: emitted files of
    two configs have names of their own, even where both come out as the same instructions.
    """
    code = hashlib.sha256(f"{num_warps} {shared_bytes}".encode())
    code.update(instructions(binary))
    return code.hexdigest()[:DIGITS]


def instructions(binary: bytes) -> bytes:
    """Return the bytes of an ELF file's executable sections (cubin, hsaco), or all bytes of a file
    of another kind or of a damaged file."""
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


class Launched:
    """Compiled kernels of Triton's that were launched, each once."""

    def __init__(self) -> None:
        self._kernels: dict[int, Any] = {}

    def note(self, compiled: Any) -> None:
        """Remember a kernel."""
        self._kernels.setdefault(id(compiled), compiled)

    @property
    def digest(self) -> str:
        """The digests of the kernels in the order of their first launch, with spaces between; empty
        where none was seen."""
        return " ".join(dict.fromkeys(digest for _, digest in self.named))

    @property
    def named(self) -> list[tuple[str, str]]:
        """The name and the digest of each kernel, in the order of their first launch."""
        return [
            (
                one.name,
                digest_of(
                    one.kernel,
                    num_warps=one.metadata.num_warps,
                    shared_bytes=one.metadata.shared,
                ),
            )
            for one in self._kernels.values()
        ]


@contextlib.contextmanager
def noting_launches() -> Generator[Launched, None, None]:
    """Note which kernels Triton launches meanwhile in this process; launches are slower.

    The digests rely on what Triton does not document: that every launch asks `launch_metadata` of a
    compiled kernel while something hangs on `launch_enter_hook` (Triton 3.6 to 3.9). Elsewhere, and
    where Triton is missing, nothing is seen.
    """
    seen = Launched()
    try:
        from triton import knobs
        from triton.compiler import CompiledKernel

        ask, hooks = CompiledKernel.launch_metadata, knobs.runtime.launch_enter_hook
        hang, unhang = hooks.add, hooks.remove
    except (ImportError, AttributeError):
        yield seen
        return

    def noted(self: Any, *given: Any, **named: Any) -> Any:
        seen.note(self)
        return ask(self, *given, **named)

    def nothing(*_: object) -> None: ...

    CompiledKernel.launch_metadata = noted
    hang(nothing)
    try:
        yield seen
    finally:
        unhang(nothing)
        CompiledKernel.launch_metadata = ask
