"""Compile `@triton.jit` functions of this package for the CPU at their first launch.

Emitted kernels declare the types of their arguments. Here the types are those of a launch's
arguments, as in Triton.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import torch

from tilegen.cpu import build
from tilegen.cpu.function import BuildMode, CpuFunction, triton_type
from tilegen.cpu.target import Target, host
from tilegen.cpu.ttir import Source


class DirectFunction:
    """A `@triton.jit` function, launched as `function[grid](*arguments)` on CPU tensors."""

    def __init__(
        self,
        function: Any,
        *,
        aliases: bool = False,
        target: Target | None = None,
        mode: BuildMode = "",
    ) -> None:
        """With `aliases`, arguments may share memory that the function writes. `target` is the
        processor to compile for, by default this machine's. See `cpu.load` for `mode`."""
        self._function = function
        self._aliases = aliases
        self._target = target or host()
        self._mode: BuildMode = mode
        self._known: dict[tuple[Any, ...], CpuFunction] = {}
        self._lock = Lock()
        parameters = inspect.signature(function.fn).parameters.values()
        self._names = [parameter.name for parameter in parameters]
        self._constant = ["constexpr" in str(parameter.annotation) for parameter in parameters]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *given: Any) -> None:
        types = [
            "constexpr" if constant or value is None else _type_of(value)
            for value, constant in zip(given, self._constant, strict=True)
        ]
        constants = {
            name: value
            for name, value, type_ in zip(self._names, given, types, strict=True)
            if type_ == "constexpr"
        }
        key = (*types, *constants.values())
        with self._lock:
            if key not in self._known:
                signature = list(zip(self._names, types, strict=True))
                self._known[key] = self._compiled(signature, constants)
        passed = (value for value, type_ in zip(given, types, strict=True) if type_ != "constexpr")
        self._known[key][grid](*passed)

    def _compiled(self, signature: list[tuple[str, str]], constants: dict[str, Any]) -> CpuFunction:
        source = Source(
            name=self._function.__name__,
            function=lambda: self._function,
            signature=signature,
            constants=constants,
            aliases=self._aliases,
        )
        module = sys.modules[self._function.fn.__module__]
        built = build.object_of(source, inspect.getsource(module), self._target, self._mode)
        return CpuFunction(built, self._mode)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return triton_type(value)
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
