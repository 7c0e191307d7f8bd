"""Compile emitted kernels for the CPU.

    RenderedKernel -> TTIR (ttir) -> values and operations (mlir) -> LLVM IR (lower)
    -> machine code (jit), kept on disk (objects) -> CpuFunction (function)

The Triton source is the one emitted for a GPU. `lower` turns it into tiles (tiles, access), loops
over tiles (loops), matrix products (products) and operations on elements (arithmetic). README.md
describes each step, and what is unsupported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from tilegen.bounded_cache import BoundedCache
from tilegen.environment import current
from tilegen.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.cpu.function import BuildMode
    from tilegen.emit.identity import RenderedKernel

MAX_KERNELS = 2048
"""Compiled kernels kept in memory."""
_kernels: BoundedCache[tuple[str, str, BuildMode], EmittedFunction] = BoundedCache(MAX_KERNELS)


@cache
def why_not_compiled() -> str:
    """Return the reason why kernels cannot be compiled for the CPU; empty if they can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed; run pip install llvmlite"
    try:
        importlib.import_module("llvmlite.binding")
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not load ({error}); run pip install --force-reinstall llvmlite"
    return ""


def load(rendered: RenderedKernel, mode: BuildMode = "") -> EmittedFunction:
    """Return an emitted kernel compiled for this CPU; `.launch(...)` runs it.

    Mode "bounds" checks every address: a launch raises WrongResult for one out of bounds. Mode
    "count" counts bytes (`.traffic`). Raises Unsupported if kernels cannot be compiled here, or for
    operations that the compiler does not know.
    """
    key = rendered.digest, rendered.kernel, mode
    return _kernels.get(key, lambda: _loaded(rendered, mode))


def is_interpreting() -> bool:
    """Check whether TRITON_INTERPRET=1 is set: Triton then interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def serves_calls() -> bool:
    """Check whether calls on CPU tensors run emitted kernels, rather than PyTorch."""
    return not why_not()


def why_not() -> str:
    """Return the reason why PyTorch computes calls on CPU tensors; empty if kernels do.

    With TILEGEN_CPU=kernels PyTorch never replaces a kernel: `load` raises if it cannot be
    compiled.
    """
    if current().cpu == "torch":
        return "TILEGEN_CPU=torch is set"
    if is_interpreting():  # Triton's interpreter gives wrong numbers for bf16
        return "TRITON_INTERPRET=1 is set, with which nothing is compiled"
    return "" if current().cpu == "kernels" else why_not_compiled()


def runs_compiled(device: torch.device) -> bool:
    """Check whether emitted kernels run on a device as code compiled for the CPU."""
    return device.type == "cpu" and not is_interpreting()


def executable(rendered: RenderedKernel, device: torch.device) -> EmittedFunction | ModuleType:
    """Make a kernel executable: `.launch` takes tensors on a device. Raises the errors of `load`.

    The result is the compiled kernel on a CPU. On a GPU, or if Triton interprets the kernel for
    tests, it is the emitted module.
    """
    if not runs_compiled(device):
        from tilegen.emit import kernel_files

        return kernel_files.load(rendered)
    return load(rendered, "bounds" if current().check_bounds else "")


def _loaded(rendered: RenderedKernel, mode: BuildMode) -> EmittedFunction:
    if reason := why_not_compiled():
        raise Unsupported(reason)
    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.cpu.target import host

    return EmittedFunction(rendered, host(), mode)
