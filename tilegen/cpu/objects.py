"""Compiled kernels on disk, beside the emitted ones: later processes link them in milliseconds.

A file is a line of JSON followed by an object file. The file name includes target and compiler, so
files for another processor or by another LLVM or tilegen are not read. `tilegen cache prune`
removes the files of other compilers. Only files that no other user can have written are linked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tilegen.cpu.target import Target
from tilegen.disk import log, say_once
from tilegen.emit.kernel_files import folder_of, write_beside
from tilegen.errors import Unsupported
from tilegen.private_files import NotPrivate, check_private, read_private

SUFFIX = ".o"


@dataclass(frozen=True, kw_only=True)
class CompiledObject:
    """The machine code of a kernel, with the facts that a launch needs."""

    binary: bytes
    name: str
    """Name of the kernel's function."""
    arguments: tuple[str, ...]
    """LLVM types of the arguments."""
    names: tuple[str, ...]
    """Names of the arguments; parts of a tensor descriptor have the name of the descriptor."""
    scratch_bytes: int
    """Scratch memory of one thread [bytes]."""
    stored: tuple[int, ...]
    """Arguments through which the kernel writes."""
    private: tuple[int, ...]
    """Arguments that the kernel only adds to; launches may pass copies of them, see `copies`."""
    seconds: float
    """Compile time [s]."""


@cache
def compiler_digest() -> str:
    """Return a digest of everything that compiles: tilegen's modules, LLVM and Triton."""
    digest = hashlib.sha256()
    for package in ("llvmlite", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            digest.update(version(package).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def path_of(digest: str, function: str, target: Target, mode: str) -> Path:
    """Return the path of an object; `digest` covers the function's text and types."""
    processor = hashlib.sha256(target.key.encode()).hexdigest()[:8]
    parts = [function, target.name, processor, *([mode] if mode else []), compiler_digest()]
    return folder_of(digest) / (".".join(parts) + SUFFIX)


def is_stale(path: Path) -> bool:
    """Check whether an object was made by another compiler, so that nothing reads it again."""
    return path.name.endswith(SUFFIX) and path.name.split(".")[-2] != compiler_digest()


def read(path: Path) -> CompiledObject | None:
    """Read the object of a kernel; None if there is none that may be linked."""
    try:
        data = read_private(path)
    except NotPrivate as doubt:
        say_once(
            f"{doubt}, so compiled kernels there are not linked but compiled in every process; set "
            "TILEGEN_CACHE_DIR to a folder that only you can write to"
        )
        return None
    if data is None:
        return None
    try:
        head, _, binary = data.partition(b"\n")
        fields = json.loads(head)
        if fields.pop("sha256") != hashlib.sha256(binary).hexdigest():
            raise ValueError("the digest does not match")
        for name in ("arguments", "names", "stored", "private"):
            fields[name] = tuple(fields[name])
        return CompiledObject(binary=binary, **fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("compiled kernel %s is damaged (%s); compiled again", path, error)
        return None


def write(path: Path, made: CompiledObject) -> None:
    """Write an object for later processes to link; a read-only folder is not an error."""
    fields = {**asdict(made), "sha256": hashlib.sha256(made.binary).hexdigest()}
    fields.pop("binary")
    with contextlib.suppress(NotPrivate, Unsupported):
        check_private(path)
        write_beside(path, json.dumps(fields).encode() + b"\n" + made.binary)
