"""The parts of Triton (3.6 to 3.9) that its documentation lacks, all of which tilegen's other
modules take from here. Importing this module imports Triton."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import triton
from triton import knobs as _knobs
from triton._C.libtriton import ir as _ir
from triton.backends.compiler import GPUTarget as _GPUTarget
from triton.compiler import ASTSource as _ASTSource
from triton.compiler import CompiledKernel as _CompiledKernel
from triton.compiler.compiler import make_backend as _make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Triton has no types.
knobs: Any = _knobs
ir: Any = _ir
GPUTarget: Any = _GPUTarget
ASTSource: Any = _ASTSource
CompiledKernel: Any = _CompiledKernel
make_backend: Any = _make_backend
PROGRAMS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
"""The folder of NVIDIA's programs in Triton's wheel, such as cuobjdump."""


def is_jitted(function: Any) -> bool:
    """Check whether Triton compiles a function, rather than interprets it."""
    return isinstance(function, JITFunction)


def gluon_source() -> Any:
    """Return the class of sources in Gluon, which is imported only where a kernel needs it."""
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def in_gluon(type_: str) -> str:
    """Return the type of an argument of a Gluon kernel: a descriptor's names the layout of its
    tiles in shared memory."""
    from triton.experimental.gluon import language

    match = re.fullmatch(r"tensordesc<(\w+)\[(.*)\]>", type_)
    if match is None:
        return type_
    shape = [int(size) for size in match[2].split(",")]
    layout = language.NVMMASharedLayout(0, 32, rank=1)
    if len(shape) > 1:
        dtype = {"bf16": language.bfloat16, "fp16": language.float16}[match[1]]
        layout = language.NVMMASharedLayout.get_default_for(shape, dtype)
    return f"{type_[:-1]},{layout!r}>"


def compiled_for(function: Any, arguments: list[Any], grid: int, options: dict[str, Any]) -> Any:
    """Return the kernel that a launch with these arguments would run, compiled or from Triton's
    cache. Raises AttributeError and TypeError."""
    compiled = function.warmup(*arguments, grid=(grid,), **options)
    return compiled.result() if hasattr(compiled, "result") else compiled  # by another thread


def launch_of(compiled: Any) -> tuple[Any, Any, Any]:
    """Return a function that launches a compiled kernel, with two of its arguments: the kernel in
    the driver and packed facts. The others are a grid, before, and a stream, the result of
    `details`, hooks and the kernel's arguments. Raises AttributeError."""
    return compiled.run, compiled.function, compiled.packed_metadata  # `run` loads the kernel


def details_of(compiled: Any, grid: int, stream: int, arguments: list[Any]) -> Any:
    """Return the facts of a launch for a profiler's hooks. Raises AttributeError."""
    return compiled.launch_metadata((grid, 1, 1), stream, *arguments)


def current_stream() -> Any:
    """Return the function from a device's index to its current stream."""
    return cast(Any, driver.active).get_current_stream
