"""Environment of a measurement (GPU, driver, versions, commit), and options of many commands."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tilegen.cpu import target
from tilegen.store import current_versions

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""Folder of result files."""
Minutes = Annotated[float, typer.Option(help="Start nothing new after this long.")]
Seconds = Annotated[float, typer.Option(help="Measuring time of one row.")]
Csv = Annotated[
    Path | None, typer.Option(help="Result file. Default: benchmarks/results/<gpu>/<date>.csv.")
]


def _here(name: str) -> Any:
    """Return a field that this process fills in."""
    return field(default_factory=lambda: _values()[name])


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Columns that every row of a result file ends with: rows inherit them, and by default they say
    where the row is made."""

    gpu: str = _here("gpu")
    """Name that the driver gives the GPU; the processor's if there is none."""
    driver: str = _here("driver")
    cuda: str = _here("cuda")
    python: str = _here("python")
    torch: str = _here("torch")
    triton: str = _here("triton")
    commit: str = _here("commit")
    """Commit of this checkout; ends in -dirty when files differ from it."""
    date: str = _here("date")
    command: str = _here("command")
    """Command line that makes the row again."""


@cache
def _values() -> dict[str, str]:
    import torch

    versions = current_versions()
    return {
        "gpu": torch.cuda.get_device_name() if has_gpu() else processor(),
        "driver": versions.driver,
        "cuda": versions.cuda,
        "python": platform.python_version(),
        "torch": versions.torch,
        "triton": versions.triton,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command_line(),
    }


def has_gpu() -> bool:
    """Return True if PyTorch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def gpu_at_hand(without: str) -> GpuSpec:
    """Return the GPU at hand. Without a GPU, print so and `without`, and exit with 1."""
    from tilegen.gpus.spec import detect

    if (spec := detect()) is None:
        print(f"no GPU that PyTorch can use: {without}")
        raise typer.Exit(1)
    return spec


def start_over(deadline: float, *options: str) -> NoReturn:
    """Replace this process by the same command, until `deadline`: after a launch that broke the
    CUDA context nothing else helps. `deadline` is a time of `time.monotonic`."""
    minutes = f"--minutes={max(0.0, deadline - time.monotonic()) / 60:.3f}"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *options, minutes])


def gpu_folder() -> Path:
    """Return the folder of results of the GPU at hand, by its catalogue key or its name in short;
    that of processors if there is none."""
    from tilegen.gpus.spec import detect

    if not has_gpu():
        return RESULTS / "cpu"
    spec = detect()
    return RESULTS / (spec.name if spec else Environment().gpu.lower().replace(" ", "-"))


def dated(csv: Path | None) -> Path:
    """Return the result file that was named, or that of today."""
    return csv or gpu_folder() / f"{Environment().date}.csv"


def processor() -> str:
    """Return the processor's model and the number of cores this process may use."""
    return f"{target.processor()}, {len(os.sched_getaffinity(0))} cores"


def path_of_calls() -> str:
    """Return the code that computes tilegen's calls: kernels, or the reason why PyTorch does."""
    from tilegen import cpu

    if has_gpu():
        return "kernels"
    return cpu.why_not() or f"kernels, {target.host().name}"


def command_line() -> str:
    """Return the command that started this process, with `python -m` spelled out."""
    main = sys.modules["__main__"].__spec__
    program = f"python -m {main.name}" if main and main.name else f"python {sys.argv[0]}"
    return " ".join([program, *sys.argv[1:]])


def output(*command: str) -> str:
    """Return the output of a command, or its name and the reason why there is no output."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return result.stdout.strip()


def _commit() -> str:
    """Return the checkout's commit, or `unknown` where git or the repository is missing."""
    described = output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return "unknown" if described.startswith("git: ") else described
