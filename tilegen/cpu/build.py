"""From a kernel's source to machine code, for one processor."""

from __future__ import annotations

import time

from tilegen.cpu import access, checks, jit, mlir
from tilegen.cpu.function import Mode, names_of
from tilegen.cpu.lower import lower
from tilegen.cpu.objects import CompiledObject
from tilegen.cpu.target import Target
from tilegen.cpu.ttir import Source, ttir_of
from tilegen.emit import kernel_files
from tilegen.emit.identity import RenderedKernel

_WAYS = {"": access.Access, "bounds": checks.CheckedAccess, "count": checks.CountingAccess}


def source_of(rendered: RenderedKernel) -> Source:
    """Return the function of an emitted kernel, with the types that it declares."""
    function = getattr(kernel_files.load(rendered), rendered.function)
    return Source(function=function, signature=rendered.signature, aligned=rendered.aligned)


def compiled(source: Source, target: Target, mode: Mode = "") -> CompiledObject:
    """Compile a kernel for a processor, which need not be this machine's. Raises Unsupported and
    BuildFailed."""
    started = time.perf_counter()
    function = mlir.parse(ttir_of(source), source.file)
    lowered = lower(function, target, _WAYS[mode], aliases=source.aliases)
    return CompiledObject(
        binary=jit.object_of(lowered, target),
        name=lowered.name,
        arguments=lowered.arguments,
        names=names_of(source.arguments, lowered.arguments),
        scratch_bytes=lowered.scratch_bytes,
        stored=lowered.stored,
        seconds=time.perf_counter() - started,
    )
