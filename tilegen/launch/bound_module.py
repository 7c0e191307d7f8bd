"""Make the launch of an emitted module, for calls, `verify` and the tuner alike. The kernel may run
as Triton's compiled code, as machine code for the CPU, or in Triton's interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilegen.cpu import executable
from tilegen.emit.identity import stride_unit
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import described_lines
from tilegen.kernels.registry import KERNELS, grid_of
from tilegen.launch.binding import BoundKernel
from tilegen.launch.compiled_function import CompiledFunction
from tilegen.launch.launcher import Launched, Launcher
from tilegen.launch.tensor_function import TensorFunction
from tilegen.launch.triton_function import TritonFunction
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from tilegen.emit.identity import RenderedKernel


def bound_kernel(rendered: RenderedKernel, device: torch.device) -> BoundKernel:
    """Return the launch of a rendered kernel on a device. Raises the errors of `cpu.executable`."""
    problem, unit = rendered.problem, stride_unit(rendered.problem, rendered.aligned)
    module = executable(rendered, device)
    return bound_module(module, problem, rendered.kernel, rendered.config, unit)


def bound_module(
    module: Any, problem: AttentionProblem, kernel: Kernel, config: TileConfig, unit: int
) -> BoundKernel:
    """Return the launch of an emitted module, without the arguments that a mask determines."""
    function = (
        TritonFunction.of(module, config)
        or CompiledFunction.of(module, KERNELS[kernel].allocated)
        or TensorFunction.of(module, config)
    )
    if function is None:  # not an emitted kernel: use the module's own launch
        return BoundKernel(module.launch, problem.mask, kernel, config)
    launcher = launcher_of_module(module, function, problem, kernel, config, unit)
    return BoundKernel(launcher.launch, problem.mask, kernel, config, launcher.extra_names)


def launcher_of_module(
    module: Any,
    function: TritonFunction | CompiledFunction | TensorFunction,
    problem: AttentionProblem,
    kernel: Kernel,
    config: TileConfig,
    unit: int,
) -> Launcher:
    """Return the launcher of an emitted kernel. Its strides are counted in `unit` elements."""
    lines = (
        described_lines(KERNELS[kernel], config, problem.head_dims) if config.descriptors else []
    )
    every = (argument for line in lines for argument in line.arguments)
    of_batch: list[str] = []
    if not problem.page and "q" in KERNELS[kernel].parameters:
        of_batch = [
            f"t{i}_n0"
            for i, (value, owner) in enumerate(problem.mask.places_of_tables)
            if value.axes == "b" and owner is None
        ]
    launched = Launched(
        kernel=kernel,
        config=config,
        arguments=function.arguments,
        stride_unit=unit,
        grid=grid_of(kernel, config, problem.group_size),
        where=module.__name__,
        described=tuple(argument for argument in every if argument.taken == "descriptor"),
        of_batch=frozenset(of_batch),
    )
    return Launcher(launched, function, module.launch)
