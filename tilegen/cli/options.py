"""What all commands share: options, how they are read, and how results are printed."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

EXAMPLE = "b4 hq32 hkv8 q4096 d128 bf16 causal"

Problem = Annotated[str, typer.Argument(help=f'notation, such as "{EXAMPLE}"')]
Gpu = Annotated[str | None, typer.Option(help="catalogue name; default: the one here, else h200")]
FastMemory = Annotated[
    str | None, typer.Option(help="shared memory per program instead of the GPU's, such as 48KiB")
]
OneKernel = Annotated[str, typer.Option(help=", ".join(KERNELS))]
Kernels = Annotated[str, typer.Option(help=f"{', '.join(KERNELS)}; all: what the problem needs")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would happen, change nothing")]

console = Console(highlight=False, soft_wrap=True, markup=False)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    print(json.dumps(value, indent=2, default=str))


def positive(value: float | None) -> float | None:
    """Return a number of seconds. Raises BadParameter for what is none."""
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"expected a number above 0, got {value}")
    return value


def say_unless(quiet: bool) -> Any:
    """Return a function that prints a line for people, or does nothing."""
    return (lambda line: None) if quiet else console.print


def gpu_of(name: str | None, fast_memory: str | None = None) -> GpuSpec:
    """Return the GPU of a catalogue name, or the one to use without. Raises Unsupported."""
    from tilegen.gpus.spec import current_gpu, gpu, parse_size, with_fast_memory

    spec = gpu(name) if name is not None else current_gpu()
    return spec if fast_memory is None else with_fast_memory(spec, parse_size(fast_memory))


def kernel_named(name: str) -> Kernel:
    """Return the kernel of a name. Raises Unsupported."""
    for kernel in KERNELS:
        if kernel == name:
            return kernel
    raise Unsupported(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")


def kernels_in_use(name: str, problem: AttentionProblem, gpu: GpuSpec) -> tuple[Kernel, ...]:
    """Return one kernel, or for `all` those that a call uses: records have a say. Raises
    Unsupported."""
    from tilegen.choose.families import kernels_used
    from tilegen.choose.known import Known

    return kernels_used(Known(problem, gpu)) if name == "all" else (kernel_named(name),)


def kernels_named(name: str, problem: AttentionProblem, gpu: GpuSpec) -> tuple[Kernel, ...]:
    """Return one kernel, or for `all` those that the problem needs. Raises Unsupported."""
    from tilegen.choose.families import kernels_of

    return kernels_of(problem, gpu) if name == "all" else (kernel_named(name),)
