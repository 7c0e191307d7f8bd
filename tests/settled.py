"""The config that a call would settle on, compiled in this process, and whether it may be used."""

from __future__ import annotations

from tilegen.choose.choice import Shortlist
from tilegen.choose.ranker import by_lower_bound
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.estimate import CostEstimate
from tilegen.model.resources import Resources
from tilegen.pipeline import MAX_COMPILES, best_acceptable
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

OVER, UNDER, SLACK_BYTES = 0.05, 0.01, 1024
"""Predicted shared memory lies within -1 % and +5 % of what pipelined kernels take, or 1 KiB."""


def is_close(predicted: int, reported: int) -> bool:
    """Return True if predicted bytes are within the slack above."""
    low, high = (1 - UNDER) * reported - SLACK_BYTES, (1 + OVER) * reported + SLACK_BYTES
    return low <= predicted <= high


def usable(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> CompiledKernel:
    """Compile the choice of a call; it must be usable, with shared memory as predicted."""
    predicted, built = settled(problem, gpu, kernel)
    what = f"{problem.key} {kernel} {predicted.config}"
    assert acceptable(built.resources, gpu), what
    assert is_close(predicted.smem_bytes, built.resources.shared_bytes), what
    return built


def settled(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel
) -> tuple[CostEstimate, CompiledKernel]:
    """Return the model's estimate of a call's choice, and the compiled kernel."""
    task = KernelTask.of(kernel, problem, gpu)
    candidates = by_lower_bound(task, top=MAX_COMPILES)
    predicted = {one.config: one.estimate for one in candidates}
    ranked = Shortlist(task, tuple(predicted), "model", "the model", tuple(candidates))

    compiled: dict[TileConfig, CompiledKernel] = {}

    def compile(tiled: Tiled) -> Resources | BuildFailed:
        config = tiled.config
        try:
            compiled[config] = compile_for(render(problem, config, kernel), gpu.arch)
        except BuildFailed as error:
            return error
        return compiled[config].resources

    config = best_acceptable(ranked, compile).config
    return predicted[config], compiled[config]
