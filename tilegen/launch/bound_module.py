"""Make the launch of an emitted kernel, for calls, `verify` and the tuner alike. The kernel may run
as Triton's compiled code, as machine code for the CPU, or in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilegen.cpu import executable
from tilegen.emit.launch import launch_of
from tilegen.kernels.panels import Launch
from tilegen.launch.binding import BoundKernel
from tilegen.launch.launcher import Described, Run, always, launch_by

if TYPE_CHECKING:
    import torch

    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.emit.identity import RenderedKernel

_interpreter = RLock()
"""Held while a kernel is interpreted. The interpreter patches `triton.language` for all threads,
and knows one program of one grid."""


def bound_kernel(
    rendered: RenderedKernel,
    device: torch.device,
    made: EmittedFunction | ModuleType | None = None,
) -> BoundKernel:
    """Return the launch of an emitted kernel on a device, without the arguments that a mask
    determines. `made` is what `cpu.executable` returns. Raises the errors of `cpu.executable`."""
    made = made or executable(rendered, device)
    launch = _launch(rendered, device, made) if isinstance(made, ModuleType) else made.launch
    return BoundKernel(launch, rendered.problem.mask, rendered.kernel, rendered.config)


def _launch(rendered: RenderedKernel, device: torch.device, module: ModuleType) -> Launch:
    from tilegen.launch.triton_run import TritonRun, is_jitted  # loads Triton

    names = vars(module)
    if is_jitted(function := names[rendered.function]):
        config, roles = rendered.config, rendered.specialised
        run = TritonRun(module, function, config, rendered.aligned, specialised=roles)
        start, tiles = run.start, Described
    else:
        start, tiles = always(partial(_in_turn, module.run)), names.get("TensorDescriptor")
    return launch_by(start, launch_of(rendered.source), device, module.__name__, tiles)


def _in_turn(run: Run, *given: Any) -> None:
    with _interpreter:
        run(*given)
