"""Calls on CPU tensors: by kernels compiled once until the compiler or a template changes, by the
choice of a GPU, and by given configs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from zlib import crc32

import pytest
import torch

from tests.compiler.runs import TARGETS, WIDE
from tilegen import cpu
from tilegen.choose.choice import Shortlist
from tilegen.choose.ranker import by_lower_bound
from tilegen.compiling import compiler
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.compiler import CompiledKernel
from tilegen.cpu import direct, target
from tilegen.cpu.objects import compiler_digest
from tilegen.cpu.target import Target
from tilegen.emit.identity import RenderedKernel, generator_digest
from tilegen.emit.render import render
from tilegen.environment import current
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.launch import bound_module, kernels
from tilegen.model.estimate import CostEstimate
from tilegen.model.resources import Resources
from tilegen.pipeline import MAX_COMPILES, best_acceptable
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch, paged_call, plans
from tilegen.task import KernelTask, Tiled


@contextmanager
def compiled_once(tmp_path_factory: pytest.TempPathFactory, level: int = 0) -> Iterator[None]:
    """Run kernels compiled for the CPU, in a cache that all workers of the run share.

    `level` is LLVM's level of optimisation; users have level 2.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tilegen-compiled"
    shared.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        (shared / "kernels").symlink_to(_kept())
    processor = target.host()
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        # As PyTorch then, kernels run code that every x86-64 has.
        processor = TARGETS.get("sse2", WIDE)
    plans.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGEN_CACHE_DIR", str(shared))
        patch.delenv("TILEGEN_CPU")  # kernels are the default
        for module, name in ((dispatch, "torch_run"), (paged_call, "by_request")):
            patch.setattr(module, name, partial(_refuse, getattr(module, name)))
        # Compiling is most of the work of these tests, and which instructions LLVM chooses does not
        # follow from an emitted kernel.
        compile_for(replace(processor, level=level), patch)
        yield
    plans.forget()


def compile_for(processor: Target, patch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled for a processor, and for a level of optimisation."""
    patch.setattr(target, "host", lambda: processor)
    patch.setattr(direct, "host", target.host)


def _kept() -> Path:
    """Return the folder of kernels that earlier runs compiled by the same code. Records of earlier
    runs are not kept: a test would take its choice from them."""
    name = f"kernels-{compiler_digest()}-{generator_digest()[:12]}"
    folder = Path(__file__).parents[2] / ".pytest_cache" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in folder.parent.glob("kernels-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _refuse(by_torch: Callable[..., Any], *given: Any) -> Any:
    """Let PyTorch compute a call only if the setting requests it."""
    assert current().cpu == "torch"
    return by_torch(*given)


Executable = Callable[[RenderedKernel, torch.device], Any]


def broken(old: str, new: str, kernels: Collection[Kernel] = ()) -> Executable:
    """Return a function that makes kernels executable, these or all of them, after changing an
    emitted text."""

    def executable_broken(rendered: RenderedKernel, device: torch.device) -> Any:
        if rendered.kernel in (kernels or rendered.kernel):
            changed = rendered.source.replace(old, new)
            digest = f"{rendered.digest[:8]}{crc32(changed.encode()):08x}"
            rendered = replace(rendered, source=changed, digest=digest)
        return cpu.executable(rendered, device)

    return executable_broken


@contextmanager
def gpu_road(executable: Executable = cpu.executable) -> Iterator[None]:
    """Choose families and tiles by records and the GPU model, and load kernels by `executable`."""
    plans.forget()
    with (
        mock.patch.object(kernels, "runs_compiled", return_value=False),
        mock.patch.object(bound_module, "executable", executable),
    ):
        yield
    plans.forget()


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
            compiled[config] = compiler.compile_for(render(problem, config, kernel), gpu.arch)
        except BuildFailed as error:
            return error
        return compiled[config].resources

    config = best_acceptable(ranked, compile).config
    return predicted[config], compiled[config]


def taking(configs: TileConfig | Mapping[Kernel, TileConfig]) -> Callable[..., Shortlist]:
    """Return a ranking of one config, for all kernels or for each its own."""

    def rank(_: Any, task: KernelTask, **__: Any) -> Shortlist:
        config = configs if isinstance(configs, TileConfig) else configs[task.kernel]
        return Shortlist(task, (config,), "agreement", "a test")

    return rank
