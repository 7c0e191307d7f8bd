"""Compile a sample of configs for every architecture, and fit the register model to the reports.

    python -m benchmarks.calibrate_footprint              # compile what is missing, then fit
    python -m benchmarks.calibrate_footprint --fit-only   # fit the samples that are there

First random configs; then what the model proposes for each problem of the catalogue. Samples go to
benchmarks/results/footprint.csv as they are made: a stopped run resumes, and a changed kernel is
compiled again. Needs no GPU.
"""

from __future__ import annotations

import ast
import hashlib
import random
import subprocess
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, fields
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import typer

import tilegen.model.footprint as model
from benchmarks.quantile_fit import quantile_fit
from benchmarks.rows import append, read, table, write
from benchmarks.workloads import CATALOGUE, LARGE_FP32_DIMS, LARGE_HEAD_DIMS, SHAPES
from tilegen.choose.ranker import best_of, propose
from tilegen.choose.search_space import all_configs
from tilegen.compiling.acceptable import FEWEST_REGISTERS
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import compile_many
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render, representative
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model import on_chip
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

SAMPLES = Path(__file__).parent / "results" / "footprint.csv"
FITS = Path(model.__file__).parent / "registers.toml"
GPUS = {  # the one of each architecture whose proposals are compiled
    "sm_90": "h200",
    "sm_80": "a100",
    "sm_100": "b200",
    "sm_120": "rtx5090",
    "gfx942": "mi300x",
}
HEAD_DIMS = ("32", "64", "72", "80", "96", "128", "160", "192/128", "256")
DTYPES = ("bf16", "bf16", "bf16", "fp32")  # fp16 compiles to the same sizes as bf16
MASKS = ("causal", "causal", "full", "window(1023,0)")
GROUPS = ("hq1 hkv1", "hq4 hkv1")
SEED = 20240229
FP32_DIMS = (64, 128, 256)  # asked for besides the catalogue, which holds none in fp32
SLICED_FROM = 256  # head dims that kernels of slices are asked for

FEW_BYTES = 64  # of local memory, for values that live around the loop
MARGIN = 15  # registers that even a small spill is taken for


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the compiler reports for one kernel; the field order is the column order."""

    arch: str
    triton: str
    code: str
    """Digest of the kernel function and its constants, without comments and launch code."""
    kernel: Kernel
    problem: str
    config: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    serialized: str
    """`yes` if a loop waits for each of its products, else `no`; empty if nothing spills."""
    error: str

    @property
    def parsed(self) -> tuple[AttentionProblem, TileConfig]:
        """The problem and the config as records."""
        return AttentionProblem.parse(self.problem), TileConfig.parse(self.config)


# --------------------------------------------------------------------------------------------------
# Samples


def random_kernels(kernel: Kernel, count: int) -> Iterator[RenderedKernel]:
    """Yield `count` random kernels, the same in each run, none hopelessly large.

    Of the first two, one is in fp32: each dtype has its own fit.
    """
    choice = random.Random(f"{SEED} {kernel}").choice
    first: list[str] = [DTYPES[0], "fp32"]
    while count:
        widths = LARGE_HEAD_DIMS if KERNELS[kernel].sliced else HEAD_DIMS
        dims, dtype, mask, heads = map(choice, (widths, first or DTYPES, MASKS, GROUPS))
        if dtype == "fp32" and KERNELS[kernel].sliced and dims not in LARGE_FP32_DIMS:
            continue
        problem = AttentionProblem.parse(f"b1 {heads} q1024 kv1024 d{dims} {dtype} {mask}")
        config = choice(all_configs(KernelTask.of(kernel, problem, gpu("h200"))))
        if is_sensible(problem, config, kernel):
            count -= 1
            if dtype in first:
                first.remove(dtype)
            yield render(problem, config, kernel)


def is_sensible(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> bool:
    """Return True if a config nearly fits the registers and the shared memory of some GPU."""
    work, threads = KERNELS[kernel].step(problem, config), 32 * config.num_warps
    size, spec = problem.element_bytes, KERNELS[kernel]
    largest = max((one.multiply_adds for one in work.products), default=0)
    if spec.sliced and size == 4 and largest > on_chip.MAX_UNROLLED * threads:
        return False  # the compiler takes minutes, and spills thousands of bytes
    words = work.result_words + work.score_tiles * work.scores
    stored = (work.kept + work.loaded * max(1, config.num_stages - 1)) * size
    return 8 <= words / threads <= 256 and stored <= 240_000


def promising_kernels(arch: str, top: int) -> Iterator[RenderedKernel]:
    """Yield the `top` proposals for each problem of the catalogue."""
    problems = [workload.problem for workload in CATALOGUE]
    problems += [
        AttentionProblem.parse(f"b4 hq16 hkv16 q4096 d{dim} fp32 causal") for dim in FP32_DIMS
    ]
    large = [
        candidate
        for candidate in (*problems, *SHAPES)
        if min(candidate.head_dim_qk, candidate.head_dim_v) >= SLICED_FROM
    ]
    for kernel, spec in KERNELS.items():
        for problem in large if spec.sliced else problems:
            for candidate in propose(KernelTask.of(kernel, problem, gpu(GPUS[arch])), top=top):
                yield render(representative(problem), candidate.config, kernel)


def collect(count: int, top: int, workers: int | None, architectures: Collection[str]) -> None:
    """Compile kernels that the samples lack, or whose text has changed. Samples of other
    architectures stay unchanged."""
    samples = read_samples()
    changed = {one for one in samples if one.arch in architectures and not is_current(one)}
    kept = [sample for sample in samples if sample not in changed]
    write(SAMPLES, kept)
    have = {(sample.arch, sample.code, sample.config) for sample in kept}
    for arch in architectures:
        wanted = chain(
            (
                render(*one.parsed, one.kernel)
                for one in samples
                if one in changed and one.arch == arch
            ),
            (sampled for kernel in KERNELS for sampled in random_kernels(kernel, count)),
            promising_kernels(arch, top),
        )
        missing = {
            code: sampled
            for sampled in wanted
            if (arch, code := code_digest(sampled), sampled.config.key) not in have
        }
        started = time.perf_counter()
        results = compile_many(list(missing.values()), arch, workers=workers) if missing else ()
        for done, (sampled, result) in enumerate(results, start=1):
            append(SAMPLES, sample_of(sampled, arch, result))
            seconds = time.perf_counter() - started
            said = f"[{seconds:5.0f}s] {arch} {done}/{len(missing)} {sampled.function}"
            print(said, flush=True)


def sample_of(kernel: RenderedKernel, arch: str, result: object) -> Sample:
    """Return the row of a kernel that was compiled, or failed to."""
    compiled = result if isinstance(result, CompiledKernel) else None
    used = compiled.reported if compiled else None
    return Sample(
        arch=arch,
        triton=version("triton"),
        code=code_digest(kernel),
        kernel=kernel.kernel,
        problem=kernel.problem.key,
        config=kernel.config.key,
        shared_bytes=used.shared_bytes if used else 0,
        registers=used.registers if used else 0,
        spill_bytes=used.spill_bytes if used else 0,
        serialized=serialized(compiled) if compiled and used and used.spill_bytes else "",
        error="" if compiled else str(result)[:200],
    )


def serialized(compiled: CompiledKernel) -> str:
    """Return `yes` if a loop waits for each matrix product, else `no`; empty if the code cannot be
    read."""
    try:
        return "yes" if any(loop.serialized for loop in compiled.code.loops) else "no"
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""


def code_digest(kernel: RenderedKernel) -> str:
    """Return a digest of the compiler's input: the kernel function and its constants."""
    body = ast.parse(kernel.source).body
    seen = [
        node
        for node in body
        if isinstance(node, ast.Assign)
        or (isinstance(node, ast.FunctionDef) and node.name == kernel.function)
    ]
    return hashlib.sha256("\n".join(map(ast.dump, seen)).encode()).hexdigest()[:12]


def is_current(sample: Sample) -> bool:
    """Return True if the present template and Triton would give the same kernel."""
    if sample.triton != version("triton"):
        return False
    problem, config = sample.parsed
    return code_digest(render(problem, config, sample.kernel)) == sample.code


def read_samples() -> list[Sample]:
    """Return the samples on disk, or none."""
    numbers = {"shared_bytes", "registers", "spill_bytes"}
    return [
        Sample(**{k: cast("Any", int(v) if k in numbers else v) for k, v in row.items()})
        for row in read(SAMPLES)
    ]


# --------------------------------------------------------------------------------------------------
# Fit


def spills(sample: Sample) -> bool:
    """Return True if values were spilled for lack of registers.

    Below the limit the compiler stores a few values around the loop for other reasons, to let more
    programs share an SM; that costs nothing and follows no rule.
    """
    few = sample.registers < register_limit(sample) and sample.spill_bytes <= FEW_BYTES
    return sample.spill_bytes > 0 and not few


def register_limit(sample: Sample) -> int:
    """Return the most registers that one thread may have."""
    return on_chip.max_registers(sample.arch, TileConfig.parse(sample.config).num_warps)


def demand(sample: Sample) -> tuple[float, bool]:
    """Return the registers that a thread would use without a limit, and whether that is a lower
    bound."""
    if not spills(sample):
        return sample.registers, False
    limit = register_limit(sample)
    return limit + min(MARGIN + sample.spill_bytes / 4, limit / 4), True


def fit_registers(samples: Iterable[Sample]) -> dict[str, dict[str, list[float]]]:
    """Return coefficients of the register features per architecture and width of operands.

    A quantile fit, so that configs near the limit count as spilling; coefficients are not
    negative, since nothing that a thread holds gives it registers back.
    """
    cells: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.registers >= FEWEST_REGISTERS and KERNELS[sample.kernel].products:
            dtype = "fp32" if " fp32 " in sample.problem else "16"
            cells.setdefault((sample.arch, dtype), []).append(sample)
    fits: dict[str, dict[str, list[float]]] = {}
    for (arch, dtype), cell in sorted(cells.items()):
        features = np.array([features_of(one) for one in cell], dtype=np.float64)
        values, at_least = map(np.array, zip(*map(demand, cell), strict=True))
        fits.setdefault(arch, {})[dtype] = quantile_fit(features, values, at_least)
    return fits


def features_of(sample: Sample) -> tuple[float, ...]:
    """Return the factors that the fit multiplies by coefficients."""
    problem, config = sample.parsed
    work = KERNELS[sample.kernel].step(problem, config)
    return model.register_features(
        work, problem.element_bytes, config.num_warps, sample.arch, config.descriptors
    )


def write_fits(samples: list[Sample]) -> None:
    """Write registers.toml, and let the model read it again."""
    lines = [
        "# Registers of one thread: coefficients of footprint.register_features, fitted to what",
        f"# the compiler of Triton {version('triton')} reports for {len(samples)} kernels of all",
        "# families (benchmarks/results/footprint.csv). Do not edit: this comes from",
        "#     python -m benchmarks.calibrate_footprint",
        f"# Order of the coefficients: {', '.join(model.REGISTER_FEATURES)}",
    ]
    for arch, rows in fit_registers(samples).items():
        lines += ["", f"[architecture.{arch}]", *(f"{name} = {row}" for name, row in rows.items())]
    FITS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for cached in (on_chip.family, best_of):
        cached.cache_clear()


@dataclass(frozen=True, kw_only=True)
class Reported:
    """Predictions beside the samples of a kernel on an architecture."""

    arch: str
    kernel: str
    samples: int
    over: float
    """Most that shared memory is predicted above the reported, as a part of it."""
    under: float
    spilling: int
    """Number of kernels that spill."""
    missed: int
    """Number of these that are predicted not to."""
    feared: int
    """Number of kernels that are predicted to spill and do not."""


def report(samples: Iterable[Sample]) -> None:
    """Print how the predictions compare with the samples, per architecture and kernel."""
    cells: dict[tuple[str, Kernel], list[tuple[Sample, on_chip.Footprint]]] = {}
    for sample in samples:
        if sample.registers >= FEWEST_REGISTERS:
            problem, config = sample.parsed
            needs = model.footprint(
                Tiled.of(sample.kernel, problem, gpu(GPUS[sample.arch]), config)
            )
            cells.setdefault((sample.arch, sample.kernel), []).append((sample, needs))
    lines: list[Reported] = []
    for (arch, kernel), cell in sorted(cells.items()):
        ratios = [n.smem_bytes / s.shared_bytes for s, n in cell if s.shared_bytes] + [1.0]
        spilled = [(sample.spill_bytes > 0, needs.spill_bytes > 0) for sample, needs in cell]
        lines.append(
            Reported(
                arch=arch,
                kernel=kernel,
                samples=len(cell),
                over=max(ratios) - 1,
                under=1 - min(ratios),
                spilling=sum(real for real, _ in spilled),
                missed=sum(real and not predicted for real, predicted in spilled),
                feared=sum(predicted and not real for real, predicted in spilled),
            )
        )
    print(table(lines, [field.name for field in fields(Reported)]))


def main(
    count: Annotated[int, typer.Option(help="Random samples of each kernel.")] = 40,
    top: Annotated[int, typer.Option(help="Proposals of each kernel for a problem.")] = 5,
    workers: Annotated[int | None, typer.Option(help="Default: one for each core.")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(GPUS)}; may be repeated. Default: all.")
    ] = None,
    fit_only: Annotated[bool, typer.Option("--fit-only", help="Compile nothing.")] = False,
) -> None:
    """Compile what is missing, then fit the registers.

    Example: python -m benchmarks.calibrate_footprint --arch sm_90
    """
    if unknown := set(arch or ()) - GPUS.keys():
        raise typer.BadParameter(f"arch must be one of {', '.join(GPUS)}; got {unknown.pop()}")
    if not fit_only:
        collect(count, top, workers, arch or GPUS)
    samples = read_samples()
    write_fits(samples)
    report(samples)


if __name__ == "__main__":
    typer.run(main)
