"""The cost of a grid for the longest requests to short requests, as in CUDA graphs of decoding:
predicted with splits of a fixed number of keys, and with keys divided over the splits.

python -m benchmarks.capacity

Times are of the kernel that reads the keys, with its launch. Programs of splits without keys end
after three loads and are not counted. Nothing is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.environment import RESULTS, Environment, environment
from benchmarks.rows import with_environment, write
from tilegen.choose.ranker import best_of, estimate
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.model.splits import divided_splits, splits_of
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

GPU = "h200"
OUT = RESULTS / "paged_capacity.csv"
CAPACITY, KEYS = 131072, 4096
"""Keys that the grid is made for, and keys of each request."""
KINDS = {
    "Llama 3 70B": "hq64 hkv8 q1 kv{keys} d128 bf16 full page16",
    "DeepSeek V3": "hq128 hkv1 q1 kv{keys} d576/512 bf16 full page64 latent",
}
BATCHES = (1, 8, 32, 256)
KERNEL = "fwd_paged"


@dataclass(frozen=True, kw_only=True)
class Row(Environment):
    """One batch of requests of KEYS keys, in a grid for CAPACITY."""

    model: str
    problem: str
    config: str
    """The model's choice for requests of CAPACITY keys."""
    splits: int
    partials_mib: float
    """Size of partial results, one for each split of the grid [MiB]."""
    fixed_programs: int
    """Number of programs with keys, where each split is a fixed number of keys."""
    fixed_us: float
    """Predicted time there [us]."""
    divided_programs: int
    """Number of programs with keys, where a request divides its keys over the splits."""
    divided_us: float
    """Predicted time there [us]."""


def row(model: str, batch: int) -> Row:
    """Return the row of a batch of requests of one model."""
    problem, short = (
        AttentionProblem.parse(f"b{batch} {KINDS[model].format(keys=keys)}")
        for keys in (CAPACITY, KEYS)
    )
    config = best_of(KernelTask.of(KERNEL, problem, gpu(GPU))).config
    splits = splits_of(Tiled.of(KERNEL, problem, gpu(GPU), config)).count
    partials = batch * problem.num_heads_q * splits * problem.head_dim_v * 4
    fixed, divided = (_programs(short, one) for one in (config, as_divided(problem, short, config)))
    return with_environment(
        Row,
        environment(),
        model=model,
        problem=problem.key,
        config=config.key,
        splits=splits,
        partials_mib=partials / 2**20,
        fixed_programs=fixed[0],
        fixed_us=fixed[1],
        divided_programs=divided[0],
        divided_us=divided[1],
    )


def as_divided(
    problem: AttentionProblem, short: AttentionProblem, config: TileConfig
) -> TileConfig:
    """Return the config with which a grid for `short` has the splits that requests of as many keys
    have in the grid for `problem`; sizes of both are powers of two."""
    grid = splits_of(Tiled.of(KERNEL, problem, gpu(GPU), config))
    tiles = divided_splits(short, config, grid.count, grid.tiles_of_group).longest
    return replace(config, split_kv=tiles * config.block_n)


def _programs(problem: AttentionProblem, config: TileConfig) -> tuple[int, float]:
    """Return the programs with keys, and the predicted microseconds."""
    splits = splits_of(Tiled.of(KERNEL, problem, gpu(GPU), config))
    each = problem.batch * problem.num_heads_kv * splits.tiles_of_group
    seconds = estimate(Tiled.of(KERNEL, problem, gpu(GPU), config)).seconds
    return int(each * splits.programs), 1e6 * seconds


def rows() -> list[Row]:
    """Return a row for each model and batch."""
    return [row(model, batch) for model in KINDS for batch in BATCHES]


def main(out: Annotated[Path, typer.Option(help="File for the table; replaced.")] = OUT) -> None:
    """Print and write what is predicted for short requests in a grid for long ones.

    Example: python -m benchmarks.capacity
    """
    found_rows = rows()
    for line in found_rows:
        print(
            f"{line.model} {line.problem.split()[0]:5} {line.config:20} {line.splits:3} splits  "
            f"fixed {line.fixed_programs:5} programs, {line.fixed_us:6.1f} us  divided "
            f"{line.divided_programs:5} programs, {line.divided_us:6.1f} us  partial results "
            f"{line.partials_mib:.1f} MiB"
        )
    write(out, found_rows)


if __name__ == "__main__":
    typer.run(main)
