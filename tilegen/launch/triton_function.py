"""Launch kernels that Triton compiles without Triton's binder, which takes longer than the launch.

The only module that relies on undocumented parts of Triton (3.6 to 3.9): `arg_names` of a JIT
function, `warmup`, which returns the compiled kernel for given arguments, and `run`, `function` and
`packed_metadata` of a compiled kernel. A missing attribute raises Unfamiliar, and the emitted
`launch` is used instead.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from threading import Lock
from types import ModuleType
from typing import Any, cast

import torch

from tilegen.compiling.triton_cache import written
from tilegen.disk import log
from tilegen.kernels.config import TileConfig
from tilegen.launch.launcher import Run, Unfamiliar
from tilegen.parsing import collection_paused

MAX_INT = 2**31
_NEEDED = ("run", "function", "packed_metadata", "launch_metadata")


class TritonFunction:
    """The `@triton.jit` function of an emitted module, for one device."""

    takes_tensors = False

    def __init__(self, jitted: Any, config: TileConfig) -> None:
        self._jitted = jitted
        self._options = dict(
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True
        )
        self._known: dict[tuple[Any, ...], Run] = {}
        self._lock = Lock()  # Triton loads a kernel in two steps: not thread-safe

    @staticmethod
    def of(module: ModuleType, config: TileConfig) -> TritonFunction | None:
        """Return the function that `launch` of an emitted module launches; None if Triton does not
        compile it, as on a CPU."""
        from triton.runtime.jit import JITFunction

        functions = [x for x in named_by_launch(module) if isinstance(x, JITFunction)]
        if len(functions) != 1 or not hasattr(functions[0], "arg_names"):
            return None
        return TritonFunction(functions[0], config)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the function's arguments."""
        return tuple(self._jitted.arg_names)

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Compile the function for arguments like these, or load it from Triton's cache. Returns a
        function that launches it."""
        kind = tuple(  # Triton compiles another kernel for each kind
            [
                (x.dtype, x.data_ptr() % 16 == 0)
                if isinstance(x, torch.Tensor)
                else hasattr(x, "block_shape") or -MAX_INT <= x < MAX_INT
                for x in arguments
            ]
        )
        with self._lock:
            if kind not in self._known:
                started = time.perf_counter()
                try:
                    with collection_paused():
                        compiled = written(
                            lambda: self._jitted.warmup(*arguments, grid=(grid,), **self._options)
                        )
                    self._known[kind] = _run_of(compiled)
                    name, seconds = self._jitted.__name__, time.perf_counter() - started
                    log.info("compiled %s, or read Triton's cache, in %.2f s", name, seconds)
                except (AttributeError, TypeError) as error:
                    raise Unfamiliar(str(error)) from error
            return self._known[kind]


def named_by_launch(module: ModuleType) -> list[Any]:
    """Return the objects of a module that the code of its `launch` names; None for names that are
    attributes."""
    return [vars(module).get(name) for name in module.launch.__code__.co_names]


def _run_of(compiled: Any) -> Run:
    """Return a function that launches a compiled kernel. Raises Unfamiliar."""
    from triton import knobs
    from triton.runtime import driver

    if hasattr(compiled, "result"):  # another thread compiled it
        compiled = compiled.result()
    if any(not hasattr(type(compiled), name) and not hasattr(compiled, name) for name in _NEEDED):
        raise Unfamiliar(f"expected a compiled kernel with {', '.join(_NEEDED)}, got {compiled!r}")
    settings, active = knobs.runtime, cast(Any, driver.active)
    launch, metadata = compiled.run, compiled.packed_metadata  # `run` loads the kernel
    function = compiled.function

    def run(grid: int, values: list[Any], device: torch.device) -> None:
        stream = active.get_current_stream(device.index or 0)
        enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
        details = None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's hooks
            details = compiled.launch_metadata((grid, 1, 1), stream, *values)
        else:
            enter = leave = None
        launch(grid, 1, 1, stream, function, metadata, details, enter, leave, *values)

    return run
