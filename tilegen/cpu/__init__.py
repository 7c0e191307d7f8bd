"""Emitted kernels compiled for the CPU.

    RenderedKernel -> TTIR (ttir) -> values and operations (mlir) -> LLVM IR (lower)
    -> machine code (jit), kept on disk (objects) -> CpuFunction (function)

The Triton text stays as it is emitted for a GPU. `lower` makes tiles of it (tiles, access), loops
over tiles (loops), matrix products (products) and operations on elements (arithmetic). README.md
says how, and what is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

from tilegen.bounded_cache import BoundedCache
from tilegen.errors import Unsupported
from tilegen.settings import settings

if TYPE_CHECKING:
    import torch

    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.cpu.function import Mode
    from tilegen.emit.identity import RenderedKernel

MAX_MODULES = 2048
"""Compiled modules that stay in memory."""
_modules: BoundedCache[tuple[str, str, Mode], ModuleType] = BoundedCache(MAX_MODULES)


@cache
def trouble() -> str:
    """Return the reason why kernels cannot be compiled for the CPU here; empty where they can."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed; run pip install llvmlite"
    try:
        importlib.import_module("llvmlite.binding")
    except (ImportError, OSError, RuntimeError) as error:
        return f"llvmlite does not load ({error}); run pip install --force-reinstall llvmlite"
    return ""


def load(rendered: RenderedKernel, mode: Mode = "") -> ModuleType:
    """Return the emitted module with its kernel compiled for this CPU; `.launch(...)` runs it.

    `mode` "bounds" checks every address (a launch raises WrongResult), "count" counts bytes
    (`function_of(...).traffic`). Raises Unsupported where nothing can be compiled, and for
    operations that the compiler does not know.
    """
    key = rendered.digest, rendered.kernel, mode
    return _modules.get(key, lambda: _loaded(rendered, mode))


def is_interpreting() -> bool:
    """Return True where TRITON_INTERPRET=1 has Triton interpret kernels, and compile none."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def serves_calls() -> bool:
    """Return True where calls on CPU tensors run emitted kernels, and PyTorch computes none."""
    return not why_not()


def why_not() -> str:
    """Return the reason why PyTorch computes calls on CPU tensors; empty where kernels do.

    Where TILEGEN_CPU=kernels asks for kernels, `load` raises the reason why they cannot be
    compiled, and PyTorch computes nothing in their place.
    """
    if settings().cpu == "torch":
        return "TILEGEN_CPU=torch is set"
    if is_interpreting():  # Triton's interpreter gives wrong numbers for bf16
        return "TRITON_INTERPRET=1 is set, with which nothing is compiled"
    return "" if settings().cpu == "kernels" else trouble()


def runs_compiled(device: torch.device) -> bool:
    """Return True where emitted kernels run compiled for the CPU."""
    return device.type == "cpu" and not is_interpreting()


def executable(rendered: RenderedKernel, device: torch.device) -> ModuleType:
    """Return the module whose `launch` runs on a device: compiled for the CPU, or as it is emitted
    for a GPU, and where Triton interprets it for tests. Raises what `load` raises."""
    if not runs_compiled(device):
        from tilegen.emit import kernel_files

        return kernel_files.load(rendered)
    return load(rendered, "bounds" if settings().check_bounds else "")


def function_of(module: ModuleType) -> EmittedFunction:
    """Return the compiled function of a module that `load` made."""
    return vars(module)[module.FUNCTION]


def _loaded(rendered: RenderedKernel, mode: Mode) -> ModuleType:
    if reason := trouble():
        raise Unsupported(reason)
    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.cpu.target import host
    from tilegen.emit import kernel_files

    emitted = kernel_files.load(rendered)
    module = ModuleType(f"{emitted.__name__}_cpu{mode}")
    module.__file__ = emitted.__file__
    exec(compile(rendered.source, str(emitted.__file__), "exec"), module.__dict__)
    setattr(module, rendered.function, EmittedFunction(rendered, host(), mode))
    module.FUNCTION = rendered.function  # type: ignore[attr-defined]
    return module
