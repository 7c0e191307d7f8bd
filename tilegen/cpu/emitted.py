"""Emitted kernels compiled for the types of the arguments at a launch.

A rendered kernel declares types, and most launches have them. Lengths and tables may have others,
such as int64 instead of int32. The kernel is then compiled again, as Triton does on a GPU.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import Any

import torch

from tilegen.cpu.build import code_of, object_of, source_of
from tilegen.cpu.function import BuildMode, CpuFunction, triton_type
from tilegen.cpu.objects import CompiledObject
from tilegen.cpu.reports import CountedTraffic
from tilegen.cpu.target import Target
from tilegen.cpu.work import Work
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.launch import launch_of
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import KERNELS
from tilegen.launch.launcher import Run, Start, always, launch_by

Types = tuple[tuple[str, str], ...]


class EmittedFunction:
    """An emitted kernel as machine code for this CPU. Replaces its `@triton.jit` function, and is
    launched on tensors by `launch`."""

    def __init__(self, rendered: RenderedKernel, target: Target, mode: BuildMode) -> None:
        """Compile the kernel for the declared types, or load it from disk. Raises the errors of
        `build.object_of`."""
        self._target = target
        self._mode: BuildMode = mode
        self._source = source_of(rendered)
        self._code = code_of(rendered)
        self._rendered = rendered
        self._known: dict[tuple[bool | torch.dtype, ...], CpuFunction] = {}
        self._lock = Lock()
        self.traffic = CountedTraffic()
        """Bytes that the launches of a counting build have moved."""
        self._declared = self._function(rendered.signature)

    @property
    def arg_names(self) -> list[str]:
        """The names of the arguments, as for a Triton function."""
        return [name for name, _ in self._source.signature]

    @property
    def made(self) -> CompiledObject:
        """The machine code for the declared types."""
        return self._declared.made

    @property
    def launch(self) -> Launch:
        """A new `launch` of the emitted file, for tensors on a CPU. It is for arguments of the same
        types as those of its first call, as a plan has them."""
        tiles: Any = None
        if self._is_described:
            from triton.tools.tensor_descriptor import TensorDescriptor

            tiles = TensorDescriptor
        text, device = launch_of(self._rendered.source), torch.device("cpu")
        return launch_by(self._start, text, device, self._rendered.function, tiles)

    @cached_property
    def _is_described(self) -> bool:
        return any(type_.startswith("tensordesc") for _, type_ in self._source.signature)

    @cached_property
    def _start(self) -> Start:
        """The function for `launch_by`.

        A kernel that adds to copies, one that takes descriptors and one that checks addresses are
        launched with a look at every argument. Else only tensors that the caller gives to write to
        are looked at: those that the launch allocates are no others.
        """
        names, allocated = self.made.names, KERNELS[self._rendered.kernel].allocated
        made = {f"{name}_ptr" for name in allocated}
        written = [i for i in self.made.stored if names[i] not in made]

        def checked(grid: int, arguments: list[Any], device: torch.device) -> None:
            self._launch((grid,), *arguments)

        if self._mode or self.made.private or self._is_described:
            return always(checked)

        def wide(grid: int, arguments: list[Any], device: torch.device) -> None:
            run = self._compiled(arguments, wide=True).by_address
            run(arguments, None, written, checked)(grid, arguments, device)

        def start(grid: int, arguments: list[Any], device: torch.device) -> Run:
            function = self._compiled(arguments, wide=False)
            run = function.by_address(arguments, wide, written, checked)
            run(grid, arguments, device)
            return run

        return start

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *given: Any, **_options: Any) -> None:
        try:
            self._compiled(given, wide=False)[grid](*given)
        except struct.error:  # an integer does not fit the declared 32 bits
            self._compiled(given, wide=True)[grid](*given)

    def _compiled(self, given: Sequence[Any], *, wide: bool) -> CpuFunction:
        kind = wide, *[x.dtype for x in given if isinstance(x, torch.Tensor)]
        function = self._known.get(kind)
        if function is None:
            with self._lock:
                if kind not in self._known:
                    self._known[kind] = self._function(self._types(given, wide=wide))
                function = self._known[kind]
        return function

    def _types(self, given: Sequence[Any], *, wide: bool) -> Types:
        """Return the declared names with the types of the given arguments."""
        types: list[tuple[str, str]] = []
        for (name, declared), value in zip(self._source.signature, given, strict=True):
            type_ = declared
            if isinstance(value, torch.Tensor):
                type_ = triton_type(value)
            elif wide and declared == "i32":
                type_ = "i64"
            types.append((name, type_))
        return tuple(types)

    def _function(self, types: Types) -> CpuFunction:
        source = replace(self._source, signature=types)
        built = object_of(source, self._code, self._target, self._mode)
        kernel = self._rendered
        work = Work.of(kernel.kernel, kernel.config, kernel.problem, built.names)
        return CpuFunction(built, self._mode, self.traffic, work)
