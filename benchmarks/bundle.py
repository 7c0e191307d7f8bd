"""Time, size and loading of a bundle of the whole catalogue.

    python -m benchmarks.bundle

Every workload, every form of a mask and the large head dims, forward and backward, with all caches
empty. Needs no GPU. How soon a first result is there on a GPU: `python -m benchmarks.first_result`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer
import yaml

from benchmarks.call_cost import BASELINE, microseconds, sdpa
from benchmarks.cpu import CALLS, TURNS, Number, write
from benchmarks.environment import RESULTS, ROOT
from benchmarks.workloads import CATALOGUE, MASKED, SHAPES
from tilegen import attention, bundles, cpu, pipeline
from tilegen.bounded_cache import BoundedCache
from tilegen.bundles.served import Bundle
from tilegen.check.reference import TORCH_DTYPES
from tilegen.gpus.spec import gpu_for
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
PROBLEMS: dict[str, AttentionProblem] = {
    **{one.name: one.problem for one in (*CATALOGUE, *MASKED)},
    **{f"large head dims {i}": problem for i, problem in enumerate(SHAPES)},
}
LOOKUPS = 200


def numbers(folder: Path, archs: tuple[str, ...]) -> Iterator[Number]:
    """Yield time, size and counts of generating a bundle for some architectures."""
    catalogue, out = folder / "models.yaml", folder / "dist"
    catalogue.write_text(yaml.safe_dump({name: one.key for name, one in PROBLEMS.items()}))
    where = f"{len(PROBLEMS)} problems, {', '.join(archs)}"
    made = generate(catalogue, archs, out, caches=folder)
    count = sum(made["binaries"].values())
    yield Number(benchmark=f"generate {where}", value=made["seconds"], unit="s")
    yield Number(benchmark="binaries", value=count, unit="")
    yield Number(benchmark="bundle with sources and manifest", value=made["bytes"] / 1e6, unit="MB")
    again = generate(catalogue, archs, out, caches=folder)
    yield Number(
        benchmark="generate what is there",
        value=again["seconds"],
        unit="s",
        baseline="the first time",
        baseline_value=made["seconds"],
    )
    started = time.perf_counter()
    bundle = Bundle(out)
    yield Number(
        benchmark="read and check the manifest",
        value=1e3 * (time.perf_counter() - started),
        unit="ms",
    )
    started = time.perf_counter()
    assert not bundle.damaged()
    yield Number(
        benchmark="check all digests", value=1e3 * (time.perf_counter() - started), unit="ms"
    )
    spec, problem = gpu_for(archs[0]), PROBLEMS["llama3-8b-8k"]
    started = time.perf_counter()
    for _ in range(LOOKUPS):
        assert bundle.find(problem, spec, "backward", aligned=True)
    elapsed = time.perf_counter() - started
    yield Number(benchmark="find the kernels of a pass", value=1e6 * elapsed / LOOKUPS, unit="us")
    if "sm_90" in archs:
        yield calling(bundle, problem)


def calling(bundle: Bundle, problem: AttentionProblem) -> Number:
    """Return the time of a call up to the driver, outputs allocated and arguments packed."""
    shape = (1, 1, 128, problem.head_dim_qk)
    k, v = (torch.zeros(shape, dtype=TORCH_DTYPES[problem.dtype]) for _ in "kv")
    q = k.repeat(1, problem.group_size, 1, 1)
    idle = SimpleNamespace(launch=lambda *_, **__: None)
    with (
        # CPU tensors take the path of GPU tensors.
        mock.patch.multiple(cpu, serves_calls=lambda: True, is_interpreting=lambda: True),
        mock.patch.object(plans, "by_call", BoundedCache(9)),
        mock.patch.object(bundles, "loaded", [bundle]),
        mock.patch.object(Bundle, "function", return_value=idle),
        # Compiling is not timed here.
        mock.patch.object(pipeline, "choose", side_effect=AssertionError("not from the bundle")),
    ):
        ours, theirs = microseconds(
            lambda: attention(q, k, v, mask=problem.mask),
            sdpa(gradients=False),
            calls=CALLS,
            repeats=TURNS,
        )
        return Number(
            benchmark="attention() from a bundle, up to the driver",
            value=ours,
            unit="us",
            baseline=BASELINE,
            baseline_value=theirs,
        )


def generate(catalogue: Path, archs: tuple[str, ...], out: Path, *, caches: Path) -> dict[str, Any]:
    """Run `tilegen generate`; return its summary."""
    arguments = ["generate", "--catalog", str(catalogue), "--arch", *archs, "--out", str(out)]
    environment = {
        "TILEGEN_CACHE_DIR": str(caches / "tilegen"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }
    said = subprocess.run(
        [sys.executable, "-m", "tilegen", *arguments, "--json"],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    return json.loads(said)


def main(
    arch: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: sm_80, sm_90 and sm_100.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Result file. Default: benchmarks/results/cpu/bundle.csv.")
    ] = None,
) -> None:
    """Generate a bundle of the whole catalogue, and load it.

    Example: python -m benchmarks.bundle
    """
    path = csv or RESULTS / "cpu" / "bundle.csv"
    with tempfile.TemporaryDirectory() as folder:
        write(numbers(Path(folder), tuple(arch or ARCHITECTURES)), path)


if __name__ == "__main__":
    typer.run(main)
