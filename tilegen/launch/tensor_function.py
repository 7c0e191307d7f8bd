"""Functions of emitted kernels that take tensors: interpreted, or compiled for the CPU with checks
of the arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilegen import cpu
from tilegen.kernels.config import TileConfig
from tilegen.launch.triton_function import named_by_launch

if TYPE_CHECKING:
    import torch

    from tilegen.launch.launcher import Run

_interpreter = RLock()
"""Held while a kernel is interpreted. The interpreter patches `triton.language` for all threads,
and knows one program of one grid."""


class TensorFunction:
    """A function that is launched as `function[grid](*arguments)`, with tensors for addresses."""

    takes_tensors = True

    def __init__(self, function: Any, config: TileConfig) -> None:
        self._function = function
        self.arguments: tuple[str, ...] = tuple(function.arg_names)
        self._options = dict(
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True
        )
        self._turn = _interpreter if cpu.is_interpreting() else nullcontext()

    @staticmethod
    def of(module: ModuleType, config: TileConfig) -> TensorFunction | None:
        """Return the function that `launch` of a module launches, or None."""
        functions = [x for x in named_by_launch(module) if hasattr(x, "arg_names")]
        return TensorFunction(functions[0], config) if len(functions) == 1 else None

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return a function that launches the kernel, the same for all arguments."""
        return self._run

    def _run(self, grid: int, values: list[Any], device: torch.device) -> None:
        with self._turn:
            self._function[(grid,)](*values, **self._options)
