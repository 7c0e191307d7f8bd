"""Compile the model's proposals for the whole catalogue, and see how many are legal.

    python -m benchmarks.proposals --top 5

For every workload, kernel and architecture: do the proposals compile to what may be used, within
shared memory and with few spills? Besides the catalogue, the small-cache kernels are asked for
large head dims of no model, in bf16 and fp32. Needs no GPU. Rows go to
benchmarks/results/cpu/proposals.csv. What to do about a proposal that is not legal:
`python -m benchmarks.calibrate_footprint`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, Environment, environment
from benchmarks.rows import append, with_environment
from benchmarks.workloads import CATALOGUE, SHAPES
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import compile_many
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import GpuSpec, gpu_for
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import SMALL_CACHE
from tilegen.model.estimate import Candidate
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

LARGE = "large head dims"
"""Name of the rows of problems that are no model's."""
ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
OUT = RESULTS / "cpu" / "proposals.csv"


@dataclass(frozen=True, kw_only=True)
class ProposalRow(Environment):
    """The proposals of one kernel of one workload on one architecture."""

    workload: str
    problem: str
    kernel: str
    arch: str
    configs: str
    """Keys of the configs, the best first."""
    spill_bytes: str
    """Size of spilled registers of each config [bytes]; `-` does not compile, or does not fit."""
    smem_error: int
    """Largest difference between predicted and reported shared memory [bytes]."""
    first_legal: bool
    all_legal: bool


@dataclass(frozen=True)
class Asked:
    """One line of the result, before compiling."""

    workload: str
    problem: AttentionProblem
    kernel: Kernel
    gpu: GpuSpec
    ranked: tuple[tuple[Candidate, RenderedKernel], ...]


def asked(arch: str, top: int) -> Iterable[Asked]:
    """Return the catalogue's lines for one architecture."""
    spec = gpu_for(arch)
    wanted: list[tuple[str, AttentionProblem, tuple[Kernel, ...]]] = [
        (one.name, one.problem, kernels_of(one.problem, spec)) for one in CATALOGUE
    ]
    wanted += [(LARGE, problem, SMALL_CACHE) for problem in SHAPES]
    for name, problem, kernels in wanted:
        for kernel in kernels:
            ranked = propose(KernelTask.of(kernel, problem, spec), top=top)
            rendered = tuple((c, render(problem, c.config, kernel)) for c in ranked)
            yield Asked(name, problem, kernel, spec, rendered)


def judge(line: Asked, outcome: dict[str, CompiledKernel | BuildFailed]) -> ProposalRow:
    """Return the row of compiled proposals; `outcome` is by digest."""
    spills, errors, taken = list[int | None](), [0], list[bool]()
    for candidate, rendered in line.ranked:
        result = outcome[rendered.digest]
        if isinstance(result, BuildFailed):
            spills.append(None)
            taken.append(False)
            continue
        used = result.resources
        fits = used.shared_bytes <= line.gpu.smem_per_block
        spills.append(used.spill_bytes if fits else None)
        taken.append(acceptable(used, line.gpu))
        errors.append(abs(used.shared_bytes - candidate.estimate.smem_bytes))
    return with_environment(
        ProposalRow,
        environment(),
        workload=line.workload,
        problem=line.problem.key,
        kernel=line.kernel,
        arch=line.gpu.arch,
        configs=" ".join(candidate.config.key for candidate, _ in line.ranked),
        spill_bytes=" ".join("-" if spill is None else str(spill) for spill in spills),
        smem_error=max(errors),
        first_legal=taken[0],
        all_legal=all(taken),
    )


def main(
    top: Annotated[int, typer.Option(help="proposals per kernel")] = 5,
    arch: Annotated[list[str] | None, typer.Option(help="repeatable")] = None,
    out: Annotated[Path, typer.Option(help="result file; replaced")] = OUT,
) -> None:
    """Compile the proposals and print what is not legal."""
    rows: list[ProposalRow] = []
    for name in arch or ARCHITECTURES:
        lines = list(asked(name, top))
        distinct = {r.digest: r for line in lines for _, r in line.ranked}
        results = compile_many(list(distinct.values()), name)
        outcome = {rendered.digest: result for rendered, result in results}
        rows += [judge(line, outcome) for line in lines]
        here = [row for row in rows if row.arch == name]
        print(
            f"{name}: {len(distinct)} kernels compiled for {len(here)} requests; "
            f"first proposal legal in {sum(row.first_legal for row in here)}, "
            f"all {top} in {sum(row.all_legal for row in here)}"
        )
    out.unlink(missing_ok=True)
    for row in rows:
        append(out, row)
    for row in rows:
        if not row.first_legal:
            print(
                f"  {row.arch} {row.kernel} {row.workload}: {row.configs} spill {row.spill_bytes}"
            )


if __name__ == "__main__":
    typer.run(main)
