"""Calls on CPU tensors that choose kernels as calls on a GPU do, and run them compiled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock
from zlib import crc32

import torch

from tilegen import cpu
from tilegen.emit.identity import RenderedKernel
from tilegen.kernels.config import Kernel
from tilegen.launch import bound_module, kernels
from tilegen.runtime import plans

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
