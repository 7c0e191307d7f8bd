"""Kernels as shared objects: compiled and linked ahead of time, for any processor, and opened by a
process without LLVM.

An object exports two functions, which tilegen/bundles/README.md describes for programs in other
languages, and needs no symbol of another library.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from tilegen.cpu.objects import CompiledObject
from tilegen.cpu.processors import PROCESSORS, OnCpu, Processor
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import BuildFailed, Unsupported

ELF = b"\x7fELF"
_LLVM_TYPES = {"i32": "i32", "fp32": "float"}
"""LLVM types of arguments, by Triton's; all others are pointers."""
_MACHINES = {"x86_64-linux-gnu": ("x86_64", "AMD64"), "aarch64-linux-gnu": ("aarch64", "arm64")}


def compile_for_processor(rendered: RenderedKernel, name: str) -> tuple[bytes, OnCpu]:
    """Compile and link a kernel for a processor, also for another than this machine's. Raises
    Unsupported and BuildFailed."""
    from tilegen.cpu import build, jit

    processor = PROCESSORS[name]
    linker = linker_of(processor)  # before the compiler's seconds
    jit.initialise_all()
    made = build.compiled(build.source_of(rendered), processor.target, symbol=rendered.function)
    return _linked(made.binary, processor, linker, rendered.function), OnCpu(
        features=processor.features,
        scratch_bytes=made.scratch_bytes,
        written=tuple(made.names[i] for i in made.stored),
        added=tuple(made.names[i] for i in made.private),
    )


@cache
def linker_of(processor: Processor) -> str:
    """Return the path of a linker for a processor. Raises Unsupported, naming those that would
    do."""
    is_native = platform.machine() in _MACHINES[processor.triple]
    names = [f"{processor.triple}-ld", "ld.lld", "lld"]
    for name in ["ld", *names] if is_native else names:
        if path := shutil.which(name):
            return path
    raise Unsupported(
        f"no linker for {processor.name}: looked for {', '.join(names[:2])}; install one of them "
        f"(Debian: binutils-{processor.triple.replace('_', '-')}, or lld)"
    )


@cache
def release_of(linker: str) -> str:
    """Return name and version of a linker, which belong to what determines a bundle's bytes."""
    ran = subprocess.run([linker, "--version"], capture_output=True, text=True, check=True)
    line = ran.stdout.partition("\n")[0]
    match = re.search(r"(LLD|GNU ld|GNU gold).*?(\d+(?:\.\d+)+)", line)
    return f"{match[1]} {match[2]}" if match else line[:60]


def _linked(code: bytes, processor: Processor, linker: str, function: str) -> bytes:
    """Link an object file to a shared object. Raises BuildFailed, also for a symbol that is not
    defined."""
    with tempfile.TemporaryDirectory() as name:
        # Relative names: an error and the object must not tell of a folder's path.
        folder = Path(name)
        (folder / "kernel.o").write_bytes(code)
        options = ["-shared", "-m", processor.emulation, "--no-undefined", "-Bsymbolic", "-s"]
        options += ["--build-id=none", "--hash-style=gnu", "-z", "noexecstack", "-z", "relro"]
        command = [linker, *options, "kernel.o", "-o", "kernel.so"]
        if Path(linker).name == "lld":
            command[1:1] = ["-flavor", "gnu"]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            why = " ".join(ran.stderr.split())[:400]
            raise BuildFailed(f"{function} for {processor.name}: {linker} failed: {why}")
        return (folder / "kernel.so").read_bytes()


class SharedObject:
    """A kernel in a shared object that is opened in this process."""

    def __init__(self, path: Path, function: str) -> None:
        """Open a file, which the caller has checked. Raises Unsupported."""
        try:
            self._library = ctypes.CDLL(str(path))
            self.work = ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value or 0
        except (OSError, AttributeError) as error:
            raise Unsupported(f"{path} cannot be opened: {' '.join(str(error).split())}") from None


def as_compiled(
    function: str, arguments: tuple[tuple[str, str], ...], facts: OnCpu
) -> CompiledObject:
    """Return the facts about a kernel that a launch needs, for arguments of Triton's types."""
    names = tuple(name for name, _ in arguments)
    return CompiledObject(
        binary=b"",
        name=function,
        arguments=tuple(_LLVM_TYPES.get(type_, "ptr") for _, type_ in arguments),
        names=names,
        scratch_bytes=facts.scratch_bytes,
        stored=tuple(names.index(name) for name in facts.written),
        private=tuple(names.index(name) for name in facts.added),
        seconds=0.0,
    )
