"""Build machine code from a kernel's source, for a given processor."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from tilegen.cpu import jit
from tilegen.cpu.function import BuildMode, names_of
from tilegen.cpu.objects import CompiledObject, path_of, read, write
from tilegen.cpu.target import Target
from tilegen.cpu.ttir import Source, ttir_of
from tilegen.disk import log
from tilegen.emit import kernel_files
from tilegen.emit.identity import RenderedKernel


def source_of(rendered: RenderedKernel) -> Source:
    """Return the function of an emitted kernel with its declared types."""
    return Source(
        name=rendered.function,
        function=lambda: getattr(kernel_files.load(rendered), rendered.function),
        signature=rendered.signature,
        aligned=rendered.aligned,
    )


def code_of(rendered: RenderedKernel) -> str:
    """Return the text that, with the types of its arguments, determines a kernel's machine code.

    The module's docstring names the problem, and is the only difference between the kernels of many
    problems. It is replaced by empty lines, since checked builds report line numbers of the file.
    """
    text = rendered.source
    if not text.startswith('"""'):
        return text
    end = text.index('"""', 3)
    return "\n" * text.count("\n", 0, end) + text[end:]


def object_of(source: Source, text: str, target: Target, mode: BuildMode = "") -> CompiledObject:
    """Load a kernel's machine code from disk, or compile it and write it to disk. `text` is the
    source code that the function consists of. Raises Unsupported and BuildFailed."""
    path = path_of_object(source, text, target, mode)
    built = read(path)
    if built is None:
        built = compiled(source, target, mode)
        log.info("compiled %s for %s in %.2f s", source.name, target.name, built.seconds)
        write(path, built)
    return built


def path_of_object(source: Source, text: str, target: Target, mode: BuildMode = "") -> Path:
    """Return the path of a kernel's machine code."""
    kind = [text, *source.signature, sorted(source.constants.items())]
    kind += [source.aligned, source.aliases]
    digest = hashlib.sha256(repr(kind).encode()).hexdigest()[:16]
    return path_of(digest, source.name, target, mode)


def compiled(
    source: Source, target: Target, mode: BuildMode = "", *, symbol: str = ""
) -> CompiledObject:
    """Compile a kernel for any processor, not only this machine's. `symbol` names its functions,
    see `jit.object_of`. Raises Unsupported and BuildFailed."""
    # Modules that calls do not need whose kernels are on disk.
    from tilegen.cpu import access, checks, mlir
    from tilegen.cpu.lower import lower

    ways = {"": access.Access, "bounds": checks.CheckedAccess, "count": checks.CountingAccess}
    started = time.perf_counter()
    function = mlir.parse(ttir_of(source), source.file)
    lowered = lower(function, target, ways[mode], aliases=source.aliases)
    return CompiledObject(
        binary=jit.object_of(lowered, target, symbol),
        name=lowered.name,
        arguments=lowered.arguments,
        names=names_of(source.arguments, lowered.arguments),
        scratch_bytes=lowered.scratch_bytes,
        stored=lowered.stored,
        private=lowered.private,
        seconds=time.perf_counter() - started,
    )
