"""Tasks on a device that a test need not name: most facts of a kernel depend on no device."""

from __future__ import annotations

from tilegen.gpus.spec import gpu, gpu_for
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled


def task(kernel: Kernel, problem: AttentionProblem, arch: str = "") -> KernelTask:
    """Return a kernel for a problem, as it stands, on the H200 or on a GPU of an architecture."""
    device = gpu_for(arch) if arch else gpu("h200")
    return KernelTask(KERNELS[kernel], problem, device)


def tiled(
    kernel: Kernel,
    problem: AttentionProblem,
    config: TileConfig,
    arch: str = "",
    *,
    joined: TileConfig | None = None,
    follows: Kernel = "",
) -> Tiled:
    """Return such a task with a config; `joined` are the splits that the kernel joins, of the
    kernel that it `follows`, or of the usual."""
    kernel_task = task(kernel, problem, arch)
    before = KERNELS[follows] if follows else None
    return Tiled(KernelTask(kernel_task.spec, problem, kernel_task.device, joined, before), config)
