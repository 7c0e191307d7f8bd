"""Make the launch of an emitted module, for calls, `verify` and the tuner alike. The kernel may run
as Triton's compiled code, as machine code for the CPU, or in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

from tilegen.cpu import executable
from tilegen.emit.launch import launch_of
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.launch.binding import BoundKernel
from tilegen.launch.launcher import Described, Run, always, launch_by
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from tilegen.emit.identity import RenderedKernel

_interpreter = RLock()
"""Held while a kernel is interpreted. The interpreter patches `triton.language` for all threads,
and knows one program of one grid."""


def bound_kernel(rendered: RenderedKernel, device: torch.device) -> BoundKernel:
    """Return the launch of a rendered kernel on a device. Raises the errors of `cpu.executable`."""
    module, given = executable(rendered, device), (rendered.problem, rendered.kernel)
    config, aligned = rendered.config, rendered.aligned
    return bound_module(module, *given, config, aligned=aligned, device=device)


def bound_module(
    module: Any,
    problem: AttentionProblem,
    kernel: Kernel,
    config: TileConfig,
    *,
    aligned: bool,
    device: torch.device,
) -> BoundKernel:
    """Return the launch of an emitted module, without the arguments that a mask determines."""
    names = vars(module)
    (function,) = (names[name] for name in module.run.__code__.co_names if name in names)
    tiles = names.get("TensorDescriptor")
    if hasattr(function, "starting"):  # compiled for the CPU
        start = function.starting(KERNELS[kernel].allocated)
    else:
        from tilegen.launch.triton_run import TritonRun, is_jitted  # loads Triton

        if is_jitted(function):
            roles = KERNELS[kernel].specialised
            run = TritonRun(module, function, config, aligned, specialised=roles)
            start, tiles = run.start, Described
        else:
            start = always(partial(_in_turn, module.run))
    launch = launch_by(start, launch_of(module.SOURCE), device, module.__name__, tiles)
    return BoundKernel(launch, problem.mask, kernel, config)


def _in_turn(run: Run, *given: Any) -> None:
    with _interpreter:
        run(*given)
