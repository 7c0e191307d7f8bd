"""Compile a sample of configs for every architecture and write down what the compiler reports.

    python -m benchmarks.calibrate_footprint              # compile what is missing, then fit
    python -m benchmarks.calibrate_footprint --fit-only   # fit the samples that are there

The samples go to benchmarks/results/footprint.csv, one row per kernel, as they are made: a stopped
run resumes, and after a change of a template its kernels alone are compiled again. Needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tilegen.model.footprint as footprint_module
from tilegen.build import CompiledKernel, compile_many
from tilegen.config import KERNELS, Kernel, TileConfig
from tilegen.model.footprint import (
    REGISTER_FEATURES,
    Footprint,
    footprint,
    max_registers,
    register_features,
)
from tilegen.model.roofline import padded_widths, tile
from tilegen.problem import AttentionProblem
from tilegen.propose import all_configs
from tilegen.render import render, template_digest

SAMPLES = Path(__file__).parent / "results" / "footprint.csv"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
HEAD_DIMS = ("32", "64", "72", "80", "96", "128", "160", "192/128", "256")
DTYPES = ("bf16", "bf16", "bf16", "fp32")  # fp16 compiles to the same sizes as bf16
MASKS = ("causal", "causal", "full", "window(1023,0)")
COMMON_DIMS = ("64", "80", "96", "128", "192/128", "256")
COMMON_TILES = {  # stationary rows, streamed rows, warps
    "bf16": (
        (256, 64, 8),
        (128, 128, 8),
        (128, 64, 8),
        (128, 32, 8),
        (128, 64, 4),
        (128, 32, 4),
        (64, 64, 4),
        (64, 32, 4),
    ),
    "fp32": ((64, 32, 8), (32, 16, 4), (16, 16, 4)),
}
GROUPS = ("hq1 hkv1", "hq4 hkv1")
SEED = 20240229
FITS = Path(footprint_module.__file__).parent / "registers.toml"
QUANTILE = 0.8  # of kernels whose registers the prediction covers
FEW_BYTES = 64  # of local memory, for values that live around the loop
MARGIN = 15  # registers that even a small spill is taken for
RIDGE = 1e-3  # decides between features that never vary apart
MIN_REGISTERS = 16  # below, the kernel is a trap: it asked for more tensor memory than there is

Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the compiler reports for one kernel; the field order is the column order."""

    arch: str
    triton: str
    template: str
    kernel: str
    problem: str
    config: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    error: str

    @property
    def identity(self) -> tuple[str, ...]:
        """What makes a second compilation pointless."""
        return (self.arch, self.triton, self.template, self.kernel, self.problem, self.config)


def wanted(kernel: Kernel, count: int) -> Iterator[tuple[AttentionProblem, TileConfig]]:
    """Yield common tiles at common head dims, then `count` random configs; always the same."""
    if kernel != "bwd_preprocess":
        for dtype, tiles in COMMON_TILES.items():
            for i, (dims, (rows, streamed, warps)) in enumerate(product(COMMON_DIMS, tiles)):
                m, n = (streamed, rows) if kernel == "bwd_dkdv" else (rows, streamed)
                config = TileConfig(block_m=m, block_n=n, num_warps=warps, num_stages=2 + i % 2)
                problem = AttentionProblem.parse(f"b1 hq1 hkv1 q1024 d{dims} {dtype} causal")
                if is_sensible(problem, config, kernel):
                    yield problem, config
    choice = random.Random(f"{SEED} {kernel}").choice
    while count:
        dims, dtype, mask, heads = map(choice, (HEAD_DIMS, DTYPES, MASKS, GROUPS))
        problem = AttentionProblem.parse(f"b1 {heads} q1024 kv1024 d{dims} {dtype} {mask}")
        config = choice(all_configs(problem, kernel))
        if is_sensible(problem, config, kernel):
            count -= 1
            yield problem, config


def is_sensible(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> bool:
    """Whether a config comes near fitting the registers and the shared memory of some GPU."""
    work = tile(problem, config, kernel)
    scores = work.scores * (1 if kernel == "fwd" else 2)
    per_thread = (work.stationary * work.accumulator_width + scores) / (32 * config.num_warps)
    buffered = work.stationary + work.streamed * max(1, config.num_stages - 1)
    stored = buffered * sum(padded_widths(problem)) * problem.element_bytes
    return 12 <= per_thread <= 224 and stored <= 240_000


def read_samples(path: Path = SAMPLES) -> list[Sample]:
    """Return the samples on disk, or none."""
    if not path.exists():
        return []
    types = {field.name: field.type for field in fields(Sample)}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Sample(**{k: int(v) if types[k] == "int" else v for k, v in row.items()})  # type: ignore[arg-type]
            for row in csv.DictReader(file)
        ]


def collect(count: int, workers: int | None, architectures: Iterable[str]) -> None:
    """Compile what the samples lack; rows of other templates and of this Triton are dropped."""
    triton = version("triton")
    templates = {kernel: template_digest(kernel) for kernel in KERNELS}
    kept = [
        sample
        for sample in read_samples()
        if sample.triton == triton and sample.template == templates.get(sample.kernel)  # type: ignore[call-overload]
    ]
    have = {sample.identity for sample in kept}
    SAMPLES.parent.mkdir(parents=True, exist_ok=True)
    with SAMPLES.open("w", newline="", encoding="utf-8", buffering=1) as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Sample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in kept)
        for arch in architectures:
            started = time.perf_counter()
            missing = [
                render(problem, config, kernel)
                for kernel in KERNELS
                for problem, config in wanted(kernel, count)
                if (arch, triton, templates[kernel], kernel, problem.key, config.key) not in have
            ]
            for done, (kernel, result) in enumerate(
                compile_many(missing, arch, workers=workers) if missing else (), start=1
            ):
                compiled = result if isinstance(result, CompiledKernel) else None
                sample = Sample(
                    arch=arch,
                    triton=triton,
                    template=templates[kernel.kernel],
                    kernel=kernel.kernel,
                    problem=kernel.problem.key,
                    config=kernel.config.key,
                    shared_bytes=compiled.shared_bytes if compiled else 0,
                    registers=compiled.registers if compiled else 0,
                    spill_bytes=compiled.spill_bytes if compiled else 0,
                    error="" if compiled else str(result)[:200],
                )
                writer.writerow(asdict(sample))
                seconds = time.perf_counter() - started
                print(f"[{seconds:5.0f}s] {arch} {done}/{len(missing)} {kernel.function}")


def fit_registers(samples: Iterable[Sample]) -> dict[str, dict[str, list[float]]]:
    """Return coefficients of REGISTER_FEATURES per architecture and kernel.

    A quantile fit, so that configs near the limit count as spilling; coefficients are not
    negative, since nothing that a thread holds gives it registers back.
    """
    cells: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        if sample.registers > MIN_REGISTERS:
            dtype = "fp32" if " fp32 " in sample.problem else "16"
            cells.setdefault((sample.arch, f"{sample.kernel}_{dtype}"), []).append(sample)
    fits: dict[str, dict[str, list[float]]] = {}
    for (arch, name), cell in sorted(cells.items()):
        features = np.array(
            [
                register_features(
                    AttentionProblem.parse(sample.problem),
                    TileConfig.parse(sample.config),
                    sample.kernel,  # type: ignore[arg-type]
                    arch,
                )
                for sample in cell
            ]
        )
        fits.setdefault(arch, {})[name] = quantile_fit(
            features, *map(np.array, zip(*map(demand, cell), strict=True))
        )
    return fits


def demand(sample: Sample) -> tuple[float, bool]:
    """Return the registers a thread would use without a limit, and whether it is more than that."""
    if not spills(sample):
        return sample.registers, False
    limit = register_limit(sample)
    return limit + min(MARGIN + sample.spill_bytes / 4, limit / 4), True


def spills(sample: Sample) -> bool:
    """Whether values were kept in memory for want of registers.

    Below the limit the compiler stores a few values around the loop for reasons of its own, to let
    more programs share an SM; that costs nothing and follows no rule.
    """
    few = sample.registers < register_limit(sample) and sample.spill_bytes <= FEW_BYTES
    return sample.spill_bytes > 0 and not few


def register_limit(sample: Sample) -> int:
    """Return the most registers that one thread may have."""
    return max_registers(sample.arch, TileConfig.parse(sample.config).num_warps)


def quantile_fit(features: Array, values: Array, at_least: Array) -> list[float]:
    """Return non-negative coefficients whose prediction lies above QUANTILE of the values.

    Least squares, reweighted until it minimises the pinball loss, one coordinate at a time. Where a
    value is only a least one, predicting more is no error.
    """
    scale = np.maximum(features.max(axis=0), 1e-9)
    columns = features / scale
    found = np.full(columns.shape[1], values.mean() / columns.shape[1])
    for _ in range(400):
        error = values - columns @ found
        weight = np.where(error > 0, QUANTILE, (1 - QUANTILE) * ~at_least)
        weight /= np.maximum(np.abs(error), 4.0)
        for i, column in enumerate(columns.T):
            rest = values - columns @ found + column * found[i]
            curvature = (weight * column * column).sum() + RIDGE
            found[i] = max(0.0, (weight * column * rest).sum() / curvature)
    return [round(float(value), 3) for value in found / scale]


def write_fits(fits: dict[str, dict[str, list[float]]]) -> None:
    """Write registers.toml."""
    lines = [
        "# Registers of one thread: coefficients of footprint.register_features, from what the",
        f"# compiler of Triton {version('triton')} reports. Do not edit: this comes from",
        "#     python -m benchmarks.calibrate_footprint",
        f"# Order: {', '.join(REGISTER_FEATURES)}",
    ]
    for arch, rows in fits.items():
        lines += ["", f"[architecture.{arch}]", *(f"{name} = {row}" for name, row in rows.items())]
    FITS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report(samples: Iterable[Sample]) -> None:
    """Print how the predictions compare with the samples, per architecture and kernel."""
    footprint_module.family.cache_clear()
    cells: dict[tuple[str, str], list[tuple[Sample, Footprint]]] = {}
    for sample in samples:
        if sample.registers > MIN_REGISTERS:
            problem = AttentionProblem.parse(sample.problem)
            config = TileConfig.parse(sample.config)
            needs = footprint(problem, config, sample.kernel, sample.arch)  # type: ignore[arg-type]
            cells.setdefault((sample.arch, sample.kernel), []).append((sample, needs))
    print("                                 shared memory         spilling kernels")
    print("arch    kernel          samples  over by  under by     all  missed  feared")
    for (arch, kernel), cell in sorted(cells.items()):
        ratios = [n.smem_bytes / s.shared_bytes for s, n in cell if s.shared_bytes] + [1.0]
        spilled = [(spills(sample), needs.spills) for sample, needs in cell]
        print(
            f"{arch:7s} {kernel:15s} {len(cell):7d} {max(ratios) - 1:8.0%} {1 - min(ratios):9.1%}"
            f" {sum(real for real, _ in spilled):7d}"
            f" {sum(real and not predicted for real, predicted in spilled):7d}"
            f" {sum(predicted and not real for real, predicted in spilled):7d}"
        )


def main() -> None:
    """Compile, then fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument(
        "--count", type=int, default=24, help="random samples of each kernel and architecture"
    )
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES)
    parser.add_argument("--fit-only", action="store_true", help="compile nothing")
    arguments = parser.parse_args()
    if not arguments.fit_only:
        collect(arguments.count, arguments.workers, arguments.arch or ARCHITECTURES)
    samples = read_samples()
    write_fits(fit_registers(samples))
    report(samples)


if __name__ == "__main__":
    main()
