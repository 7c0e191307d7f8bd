"""Launch kernels that Triton compiles without Triton's binder, which takes longer than the launch.

What this needs of Triton is undocumented, see tilegen/private_triton.py. In a version without it,
the `run` of the emitted file launches.
"""

from __future__ import annotations

import time
from threading import Lock
from types import ModuleType
from typing import Any

import torch

from tilegen.compiling.triton_cache import written
from tilegen.disk import log
from tilegen.emit.identity import VECTOR_BYTES
from tilegen.kernels.config import TileConfig, launched_warps
from tilegen.launch.launcher import Described, Run, by_address
from tilegen.parsing import collection_paused
from tilegen.private_triton import (
    compiled_for,
    current_stream,
    details_of,
    is_jitted,
    knobs,
    launch_of,
)

__all__ = ["TritonRun", "is_jitted"]

MAX_INT = 2**31
_USUAL = """
    if {unusual} or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        return other(grid, arguments, device)
    launch(grid, 1, 1, stream(device.index or 0), kernel, metadata, None, None, None, {values})
"""
"""Launches a kernel that is compiled for aligned addresses and integers within 32 bits."""


class TritonRun:
    """Replaces the `run` of an emitted module, for one device."""

    usual: Run | None = None
    """Launches usual arguments, and passes on others: see _USUAL."""

    def __init__(
        self,
        module: ModuleType,
        jitted: Any,
        config: TileConfig,
        aligned: bool,
        *,
        specialised: bool = False,
    ) -> None:
        """`jitted` is the function that the module's own `run` launches. `aligned` is True if
        Triton compiles another kernel for addresses that are no multiples of 16 bytes,
        `specialised` if warpgroups have roles."""
        self._own: Run = module.run
        self._jitted = jitted
        self._aligned = aligned
        self._options = dict(
            num_warps=launched_warps(config, specialised=specialised),
            num_stages=config.num_stages,
            enable_fp_fusion=True,
        )
        self._describe = vars(module).get("TensorDescriptor")
        self._known: dict[tuple[Any, ...], Any] = {}
        self._lock = Lock()  # Triton loads a kernel in two steps: not thread-safe

    def start(self, grid: int, arguments: list[Any], device: torch.device) -> Run | None:
        """Launch the kernel for any arguments; return the launch of usual ones."""
        given = [self._shown(x) if isinstance(x, Described) else x for x in arguments]
        try:
            compiled = self._compiled(grid, given)
            launch, kernel, metadata = launch_of(compiled)
            hooks: Any = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
            details = None
            stream = current_stream()(device.index or 0)
            if hooks[0].calls or hooks[1].calls:  # a profiler's
                details = details_of(compiled, grid, stream, given)
            else:
                hooks = None, None
            if self.usual is None:
                self.usual = self._usual((launch, kernel, metadata), arguments)
        except (AttributeError, TypeError) as error:
            log.debug("%s is launched by Triton's binder: %s", self._jitted, error)
            self._own(grid, given, device)
            return None
        values = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments)
        launch(grid, 1, 1, stream, kernel, metadata, details, *hooks, *values)
        return self.usual

    def _shown(self, x: Described) -> Any:
        """Return a descriptor in the form that Triton compiles for."""
        assert self._describe is not None
        return self._describe(x.base, x.shape, x.strides, x.block_shape)

    def _compiled(self, grid: int, given: list[Any]) -> Any:
        """Return the kernel for arguments like these. Triton compiles it, or reads its cache."""
        kind = tuple(  # Triton compiles another kernel for each kind
            [
                (x.dtype, x.data_ptr() % VECTOR_BYTES == 0)
                if isinstance(x, torch.Tensor)
                else hasattr(x, "block_shape") or x < MAX_INT
                for x in given
            ]
        )
        with self._lock:
            if kind not in self._known:
                started = time.perf_counter()
                with collection_paused():
                    self._known[kind] = written(
                        lambda: compiled_for(self._jitted, given, grid, self._options)
                    )
                name, seconds = self._jitted.__name__, time.perf_counter() - started
                log.info("compiled %s, or read Triton's cache, in %.2f s", name, seconds)
            return self._known[kind]

    def _usual(self, launched: tuple[Any, ...], arguments: list[Any]) -> Run | None:
        """Return the launch of arguments like these; None if they are not usual."""
        integers = [i for i, x in enumerate(arguments) if type(x) is int]
        # Triton's code depends on the alignment of tensors before all numbers.
        leading = arguments[: integers[0]] if self._aligned else []
        addresses = [i for i, x in enumerate(leading) if isinstance(x, torch.Tensor)]
        if any(arguments[i] >= MAX_INT for i in integers):
            return None
        if any(arguments[i].data_ptr() % VECTOR_BYTES for i in addresses):
            return None
        tests = [f"({' | '.join(f'x{i}' for i in integers)}) >> 31"]
        tests += [f"({' | '.join(f'x{i}' for i in addresses)}) & 15"] if addresses else []
        launch, kernel, metadata = launched
        return by_address(
            arguments,
            _USUAL.replace("{unusual}", " or ".join(tests)),
            **dict(other=self.start, launch=launch, kernel=kernel, metadata=metadata),
            hooks=knobs.runtime,
            stream=current_stream(),
        )
