"""Execute the text of a launch with a `run` that launches a kernel.

The text is the last part of an emitted file (tilegen/emit/launch.py). It ends in a call of `run`,
which the file defines by Triton's public syntax. The functions that replace it take less time:
`TritonRun` for a kernel that Triton compiles, `EmittedFunction` for one that is compiled
for the CPU, and those of tilegen/bundles for binaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, ClassVar

import torch

from tilegen.kernels.allocation import allocator
from tilegen.kernels.panels import Launch

Run = Callable[[int, list[Any], torch.device], None]
"""Launches a grid of programs on the current stream of a device. Takes the kernel's arguments:
tensors, their descriptors, and numbers."""
Start = Callable[[int, list[Any], torch.device], Run | None]
"""Launches as a `Run` does, and returns the `run` of later launches; None if that is not known
yet."""


@dataclass(slots=True)
class Described:
    """The fields of a tensor descriptor that Triton's launcher reads, without Triton's checks."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    padding: ClassVar[str] = "zero"
    round_f32_to_tf32: ClassVar[bool] = False


def launch_by(
    start: Start, text: str, device: torch.device, name: str, descriptor: Any = None
) -> Launch:
    """Return the `launch` of a text for tensors on a device.

    Its kernel, called `name` in tracebacks, is launched by `start`, and takes a `descriptor` of
    each tensor that it reads by tiles.
    """

    def first(grid: int, arguments: list[Any], device: torch.device) -> None:
        if (run := start(grid, arguments, device)) is not None:
            module["run"] = run

    empty = allocator(is_cuda=device.type == "cuda")
    module: dict[str, Any] = dict(torch=torch, run=first, empty=empty)
    module["TensorDescriptor"] = descriptor
    exec(_compiled(text, name), module)
    return module["launch"]


def always(run: Run) -> Start:
    """Return a `Start` for a `run` that takes all arguments."""

    def start(grid: int, arguments: list[Any], device: torch.device) -> Run:
        run(grid, arguments, device)
        return run

    return start


def by_address(
    arguments: Sequence[Any], body: str, written: Sequence[int] = (), /, **names: Any
) -> Run:
    """Compile a `run` for arguments like these: addresses in place of tensors, `x0`, `x1` and so
    on, are `{values}` in its body, which reads `names` besides. Loops would take twice as long.

    If a tensor at a place in `written` may share memory with another, `checked` runs instead.
    """
    values = [f"x{i}" for i in range(len(arguments))]
    pairs = zip(values, arguments, strict=True)
    tensors = [name for name, x in pairs if isinstance(x, torch.Tensor)]
    met = [(values[i], x) for i in written for x in tensors if x != values[i]]
    sizes = "".join(f"n{x} = {x}.untyped_storage().nbytes(); " for x in tensors if met)
    meets = " or ".join(f"{a} < {b} + n{b} and {b} < {a} + n{a}" for a, b in met)
    addresses = "".join(f"{name} = {name}.data_ptr(); " for name in tensors)
    text = f"""
def run(grid, arguments, device):
    {", ".join(values)}, = arguments
    {sizes}{addresses}
    if {meets or False}: return checked(grid, arguments, device)
    {body.strip().replace("{values}", ", ".join(values))}
"""
    exec(_compiled(text, "run"), names)
    return names["run"]


@lru_cache(maxsize=512)
def _compiled(text: str, name: str) -> CodeType:
    return compile(text, f"<launch of {name}>", "exec")
