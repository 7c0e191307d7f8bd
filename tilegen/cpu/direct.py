"""`@triton.jit` functions of the package itself, compiled for the CPU when they are launched.

Emitted kernels come with the types of their arguments; here a launch's arguments tell them, as they
do in Triton.
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
from tilegen.cpu.function import CpuFunction, Mode, triton_type
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
        mode: Mode = "",
    ) -> None:
        """With `aliases` arguments may share memory that the function writes. `target` is the
        processor to compile for, by default this machine's; see `cpu.load` for `mode`."""
        self._function = function
        self._aliases = aliases
        self._target = target or host()
        self._mode: Mode = mode
        self._known: dict[tuple[Any, ...], CpuFunction] = {}
        self._lock = Lock()
        parameters = inspect.signature(function.fn).parameters.values()
        self._names = [one.name for one in parameters]
        self._constant = ["constexpr" in str(one.annotation) for one in parameters]

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
            function=self._function,
            signature=signature,
            constants=constants,
            aliases=self._aliases,
        )
        module = sys.modules[self._function.fn.__module__]
        made = build.object_of(source, inspect.getsource(module), self._target, self._mode)
        return CpuFunction(made, self._mode)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return triton_type(value)
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"
