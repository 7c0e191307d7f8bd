"""Kernels that Triton compiles, launched without its binder, which takes longer than the launch.

The only place that relies on what Triton does not document: a JIT function's `arg_names`, that its
`warmup` returns the compiled kernel for arguments like those given, and that a compiled kernel has
`run`, `function` and `packed_metadata` (Triton 3.6 to 3.9). What is not there raises Unfamiliar,
and the emitted `launch` is used instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from types import ModuleType
from typing import Any, cast

import torch

from tilegen.kernels.config import TileConfig
from tilegen.launch.launcher import Run, Unfamiliar

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
        self._lock = Lock()  # Triton loads a kernel in two steps

    @staticmethod
    def of(module: ModuleType, config: TileConfig) -> TritonFunction | None:
        """Return the function that an emitted module's `launch` launches; None where it has none
        that Triton compiles, as on a CPU."""
        from triton.runtime.jit import JITFunction

        found = [one for one in named_by_launch(module) if isinstance(one, JITFunction)]
        if len(found) != 1 or not hasattr(found[0], "arg_names"):
            return None
        return TritonFunction(found[0], config)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of the function's arguments."""
        return tuple(self._jitted.arg_names)

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Compile the function for arguments like these, or find it in Triton's cache, and return
        its launch."""
        kind = tuple(
            [
                (one.dtype, one.data_ptr() % 16 == 0)
                if isinstance(one, torch.Tensor)
                else hasattr(one, "block_shape") or -MAX_INT <= one < MAX_INT
                for one in arguments
            ]
        )  # what Triton compiles anew for
        with self._lock:
            if kind not in self._known:
                try:
                    compiled = self._jitted.warmup(*arguments, grid=(grid,), **self._options)
                    self._known[kind] = _run_of(compiled)
                except (AttributeError, TypeError) as error:
                    raise Unfamiliar(str(error)) from error
            return self._known[kind]


def named_by_launch(module: ModuleType) -> list[Any]:
    """Return the objects of a module that its `launch` names; None for names of attributes."""
    return [vars(module).get(name) for name in module.launch.__code__.co_names]


def _run_of(compiled: Any) -> Run:
    """Return the launch of a compiled kernel. Raises Unfamiliar."""
    from triton import knobs
    from triton.runtime import driver

    if hasattr(compiled, "result"):  # compiled by another thread
        compiled = compiled.result()
    if any(not hasattr(type(compiled), name) and not hasattr(compiled, name) for name in _NEEDED):
        raise Unfamiliar(f"expected a compiled kernel with {', '.join(_NEEDED)}, got {compiled!r}")
    settings, active = knobs.runtime, cast(Any, driver.active)
    launch, metadata = compiled.run, compiled.packed_metadata  # `run` loads it into the driver
    function = compiled.function

    def run(grid: int, values: list[Any], device: torch.device) -> None:
        stream = active.get_current_stream(device.index or 0)
        enter, leave = settings.launch_enter_hook, settings.launch_exit_hook
        told = None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # as of a profiler
            told = compiled.launch_metadata((grid, 1, 1), stream, *values)
        else:
            enter = leave = None
        launch(grid, 1, 1, stream, function, metadata, told, enter, leave, *values)

    return run
