"""The cost of each layout of a paged cache for a decoding step: counted, predicted, and by machine
code; on an H200 also measured.

python -m benchmarks.layouts

There is a row for each page size and layout. Strides are run-time arguments, so all layouts of a
page size have one binary and one predicted time. Rows differ in contiguous bytes, counted here from
the strides, and in the measured time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tilegen
from benchmarks.environment import RESULTS, Environment, environment, has_gpu
from benchmarks.rows import with_environment, write
from tilegen.check.reference import TORCH_DTYPES
from tilegen.choose.ranker import best_of, joining, time_as_compiled
from tilegen.compiling.verdicts import verdict
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import detect, gpu
from tilegen.kernels.registry import FORWARD
from tilegen.model.traffic import table_bytes, traffic
from tilegen.problem import PAGES, AttentionProblem
from tilegen.task import KernelTask, Tiled
from tilegen.tuning.measure import measure

GPU = "h200"
OUT = RESULTS / "paged_layouts.csv"
STEP = "b32 hq64 hkv8 q1 kv8192 d128 bf16"
"""Problem of the step: 32 requests of 8k keys, a layer of Llama 3 70B."""
SECTOR = 32
"""Size of a sector, the least that L2 and DRAM of NVIDIA's GPUs move [bytes]."""
LAYOUTS = {
    "NHD": "(pages, page, heads, dim)",
    "HND": "(pages, heads, page, dim)",
    "vLLM LBNHC": "(pages, page, heads, 2 * dim), keys before values",
    "vLLM LBHNC": "(pages, heads, page, 2 * dim), keys before values",
}
"""Layouts, and the order of a layer's cache in memory; NHD and HND are of keys or of values."""


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One layout with one size of page; times are of all kernels of a call, launches counted."""

    problem: str
    predicted_for: str
    """Catalogue key of the GPU that rows are of."""
    page: int
    layout: str
    row_bytes: int
    """Size of one key of one head, which is contiguous in every layout [bytes]."""
    row_stride_bytes: int
    """Distance from a key of a head to its next [bytes]."""
    run_bytes: int
    """Size of what is contiguous of the keys of one head and page [bytes]."""
    sectors_per_key: float
    """Number of 32-byte sectors that hold keys of one head and page, over the number of keys."""
    tables_bytes: int
    """Traffic of block table and lengths, counted [bytes]."""
    moved_bytes: int
    """Traffic of all kernels of a call, counted [bytes]."""
    predicted_us: float
    config: str
    registers: int
    spill_bytes: int
    instructions: int
    """Number of instructions of a step over one tile of keys, of all warps, in the machine code."""
    compiled_us: float
    """Time by the model with what the machine code issues [us]."""
    measured_us: float | None


def cache_of(
    layout: str, page: int, pages: int, problem: AttentionProblem, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of a cache, views (pages, page, heads, dim)."""
    heads, dims = problem.num_heads_kv, (problem.head_dim_qk, problem.head_dim_v)
    dtype = TORCH_DTYPES[problem.dtype]

    def made(dim: int) -> torch.Tensor:
        if layout in ("HND", "vLLM LBHNC"):
            return torch.empty(pages, heads, page, dim, dtype=dtype, device=device).transpose(1, 2)
        return torch.empty(pages, page, heads, dim, dtype=dtype, device=device)

    if not layout.startswith("vLLM"):
        return made(dims[0]), made(dims[1])
    whole = made(sum(dims))
    return whole[..., : dims[0]], whole[..., dims[0] :]


def contiguous(k: torch.Tensor) -> dict[str, Any]:
    """Return the row's fields about contiguity of keys (pages, page, heads, dim), for the first
    head and page, which starts a sector."""
    size, (_, page, _, dim) = k.element_size(), k.shape
    row, stride = dim * size, k.stride(1) * size
    rows = (range(at * stride // SECTOR, -(-(at * stride + row) // SECTOR)) for at in range(page))
    sectors = {sector for one in rows for sector in one}
    return {
        "row_bytes": row,
        "row_stride_bytes": stride,
        "run_bytes": row * page if stride == row else row,
        "sectors_per_key": len(sectors) / page,
    }


@cache
def predicted(problem: AttentionProblem) -> dict[str, Any]:
    """Return the row's fields that are counted and predicted by the model, and the configs."""
    spec = gpu(GPU)
    names = FORWARD["paged"].names
    best = {name: best_of(KernelTask.of(name, problem, spec)) for name in names}
    split = best[names[0]].config
    tasks = [joining(KernelTask.of(name, problem, spec)) for name in names]
    moved = [traffic(task.tiled(best[task.kernel].config)) for task in tasks]
    return {
        "tables_bytes": table_bytes(tasks[0].tiled(split)),
        "moved_bytes": sum(one.read_bytes + one.write_bytes for one in moved),
        "predicted_us": 1e6 * sum(one.estimate.seconds for one in best.values()),
        "config": " ".join(one.config.key for one in best.values()),
    }


@cache
def compiled(problem: AttentionProblem) -> dict[str, Any]:
    """Return the row's fields from the compiler, for the kernel that reads pages; times are of all
    kernels."""
    spec = gpu(GPU)
    first: dict[str, Any] = {}
    seconds = 0.0
    for name in FORWARD["paged"].names:
        config = best_of(KernelTask.of(name, problem, spec)).config
        tiled = Tiled.of(name, problem, spec, config)
        build = _compiled(tiled)
        seconds += time_as_compiled(tiled, build).seconds
        code = build.step_code
        first = first or {
            "registers": build.registers,
            "spill_bytes": build.spill_bytes,
            "instructions": code.instructions if code else 0,
        }
    return {**first, "compiled_us": 1e6 * seconds}


def _compiled(tiled: Tiled) -> Any:
    verdicts = verdict(tiled, aligned=True)
    if isinstance(verdicts, BuildFailed):
        raise verdicts
    return verdicts


def measured(problem: AttentionProblem, layout: str, device: str = "cuda") -> float | None:
    """Return the microseconds of a call over a cache whose pages are in no order; None if the call
    fails."""
    each = math.ceil(problem.seqlen_kv / problem.page)
    k, v = cache_of(layout, problem.page, problem.batch * each, problem, device)
    k.normal_()
    v.normal_()
    q = torch.randn(problem.batch, problem.num_heads_q, 1, problem.head_dim_qk).to(k)
    table = torch.randperm(problem.batch * each).view(problem.batch, each).int().to(k.device)
    lengths = torch.full((problem.batch,), problem.seqlen_kv, dtype=torch.int32, device=k.device)
    return measure(lambda: tilegen.attention_paged(q, k, v, table, lengths)).median_us


def is_here() -> bool:
    """Return True if the rows' GPU is at hand: no other GPU's times may be in them."""
    here = detect() if has_gpu() else None
    return here is not None and here.name == GPU


def rows(step: str = STEP) -> Iterator[Row]:
    """Yield a row for each size of page and layout."""
    for page in PAGES:
        problem = replace(AttentionProblem.parse(step), page=page)
        for layout in LAYOUTS:
            k, _ = cache_of(layout, page, 1, problem, "meta")
            yield with_environment(
                Row,
                environment(),
                problem=problem.key,
                predicted_for=GPU,
                page=page,
                layout=layout,
                **contiguous(k),
                **predicted(problem),
                **compiled(problem),
                measured_us=measured(problem, layout) if is_here() else None,
            )


def line(row: Row) -> str:
    """Return a row as a terminal shows it."""
    time = "" if row.measured_us is None else f"  measured {row.measured_us:.1f} us"
    return (
        f"page {row.page:3} {row.layout:10} run {row.run_bytes:6} bytes, stride "
        f"{row.row_stride_bytes:5}  tables {row.tables_bytes / 2**20:5.2f} MiB  predicted "
        f"{row.predicted_us:.1f} us  {row.registers} registers, {row.instructions} instructions "
        f"a step{time}"
    )


def main(out: Annotated[Path, typer.Option(help="File for the table; replaced.")] = OUT) -> None:
    """Print what each layout costs, and write it after every row.

    Example: python -m benchmarks.layouts
    """
    lines: list[Row] = []
    for row in rows():
        lines.append(row)
        print(line(row), flush=True)
        write(out, lines)


if __name__ == "__main__":
    typer.run(main)
