"""The config that a call would settle on, compiled in this process."""

from __future__ import annotations

from tilegen.build.compiler import CompiledKernel, compile_for
from tilegen.choose.chosen import Ranked
from tilegen.choose.ranking import hopefuls
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.estimate import CostEstimate
from tilegen.pipeline import ASKED, best_acceptable
from tilegen.problem import AttentionProblem


def settled(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel
) -> tuple[CostEstimate, CompiledKernel]:
    """Return what the model says of a config, and what the compiler makes of it."""
    candidates = hopefuls(problem, gpu, kernel=kernel, top=ASKED)
    predicted = {one.config: one.estimate for one in candidates}
    ranked = Ranked(kernel, tuple(predicted), "model", "the model", tuple(candidates))

    def compile(config: TileConfig) -> CompiledKernel | BuildFailed:
        try:
            return compile_for(render(problem, config, kernel), gpu.arch)
        except BuildFailed as error:
            return error

    chosen = best_acceptable(problem, gpu, ranked, compile)
    built = chosen.tried[chosen.config]
    assert isinstance(built, CompiledKernel), built
    return predicted[chosen.config], built
