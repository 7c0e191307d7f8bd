"""Functions of emitted kernels that take addresses: machine code for the CPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tilegen.launch.triton_function import named_by_launch

if TYPE_CHECKING:
    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.launch.launcher import Run


class CompiledFunction:
    """A kernel compiled for the CPU that writes only tensors that its launch allocates.

    Such a kernel is launched with addresses and without checks. A kernel that writes tensors of the
    caller, which may overlap with its inputs, is launched with tensors: see `TensorFunction`.
    """

    takes_tensors = False

    def __init__(self, function: EmittedFunction) -> None:
        self._function = function
        self.arguments: tuple[str, ...] = tuple(function.arg_names)

    @staticmethod
    def of(module: ModuleType, made: Collection[str]) -> CompiledFunction | None:
        """Return the function that `launch` of a module launches; None unless it writes only the
        tensors named in `made`, which the launch allocates."""
        names = [f"{name}_ptr" for name in made]
        for function in named_by_launch(module):
            if hasattr(function, "writes_only") and function.writes_only(names):
                return CompiledFunction(function)
        return None

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return a function that launches the code compiled for arguments like these."""
        return self._function.compiled_for(tuple(arguments)).run
