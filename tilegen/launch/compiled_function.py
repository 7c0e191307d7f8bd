"""The function of an emitted kernel that takes addresses: machine code for the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilegen.launch.triton_function import named_by_launch

if TYPE_CHECKING:
    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.launch.launcher import Run


class CompiledFunction:
    """A kernel compiled for the CPU that writes only what its launch allocates.

    Such a kernel is launched with addresses: nothing needs a look at each launch. Kernels that
    write what the caller gives, which may share memory with what they read, are launched with
    tensors; see `TensorFunction`.
    """

    takes_tensors = False

    def __init__(self, function: EmittedFunction) -> None:
        self._function = function
        self.arguments: tuple[str, ...] = tuple(function.arg_names)

    @staticmethod
    def of(module: ModuleType, made: Collection[str]) -> CompiledFunction | None:
        """Return the function that a module's `launch` launches, where all that it writes is
        `made` by the launch; otherwise None."""
        names = [f"{name}_ptr" for name in made]
        for one in named_by_launch(module):
            if hasattr(one, "writes_only") and one.writes_only(names):
                return CompiledFunction(one)
        return None

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return the launch of the function that is compiled for arguments like these."""
        return self._function.compiled_for(tuple(arguments)).run
