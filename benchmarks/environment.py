"""Environment of a measurement: GPU, driver, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tilegen.cpu import target
from tilegen.store import current_versions

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
"""Folder of result files."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Columns that every row of a result file ends with; rows inherit them."""

    gpu: str
    """Name that the driver gives the GPU; the processor's if there is none."""
    driver: str
    cuda: str
    python: str
    torch: str
    triton: str
    commit: str
    """Commit of this checkout; ends in -dirty when files differ from it."""
    date: str
    command: str
    """Command line that makes the row again."""


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


@cache
def environment() -> Environment:
    """Return the GPU or processor, driver, versions and commit of this process."""
    import torch

    versions = current_versions()
    return Environment(
        gpu=torch.cuda.get_device_name() if has_gpu() else processor(),
        driver=versions.driver,
        cuda=versions.cuda,
        python=platform.python_version(),
        torch=versions.torch,
        triton=versions.triton,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=command_line(),
    )


def gpu_folder() -> str:
    """Return the name of the results folder: the GPU's catalogue key, or its name in short."""
    from tilegen.gpus.spec import detect

    if not has_gpu():
        return "cpu"
    spec = detect()
    return spec.name if spec else environment().gpu.lower().replace(" ", "-")


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


def main(
    out: Annotated[Path, typer.Option(help="File for what is found out.")],
) -> None:
    """Write down the GPU, driver, versions and commit, with what nvidia-smi and ncu say."""
    lines = [f"{name:8} {value}" for name, value in asdict(environment()).items()]
    lines += [f"cores    {processor()}", "", _output("nvidia-smi"), "", _output("ncu", "--version")]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(out.read_text(encoding="utf-8"))


def _commit() -> str:
    """Return the checkout's commit, or `unknown` where git or the repository is missing."""
    described = _output("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return "unknown" if described.startswith("git: ") else described


def _output(*command: str) -> str:
    """Return the output of a command, or its name and the reason why there is no output."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    return result.stdout.strip()


if __name__ == "__main__":
    typer.run(main)
