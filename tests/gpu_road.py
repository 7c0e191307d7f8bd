"""Calls on CPU tensors that choose kernels as calls on a GPU do, and run them compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch

from tilegen import cpu, pipeline
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.launch import kernels
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

Executable = Callable[[RenderedKernel, torch.device], ModuleType]


@contextmanager
def gpu_road(executable: Executable = cpu.executable) -> Iterator[None]:
    """Choose families and tiles by records and the GPU model, and load kernels by `executable`."""

    def load_kernel(
        problem: AttentionProblem, config: TileConfig, kernel: Kernel, *, aligned: bool
    ) -> ModuleType:
        rendered = render(problem, config, kernel, aligned=aligned)
        return executable(rendered, torch.device("cpu"))

    plans.forget()
    with (
        mock.patch.object(kernels, "runs_compiled", return_value=False),
        mock.patch.object(pipeline, "load_kernel", load_kernel),
    ):
        yield
    plans.forget()
