"""Programs and steps of a kernel over a whole problem, in one launch or in one for each panel."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import panels, rows_for
from tilegen.kernels.registry import KERNELS, direction_of
from tilegen.kernels.spec import Sliced
from tilegen.model.mask_size import mask_size
from tilegen.model.traffic import Visits, splits_of
from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Launches, programs and steps of a kernel for a problem."""

    count: int
    """Launches, one after the other and alike."""
    programs: int
    """Programs of all launches."""
    steps: int | Fraction
    """Steps of all programs."""
    partial: int | Fraction
    """Steps on tiles that need mask code."""
    longest: float
    """Steps of the program that has most."""

    @property
    def masked(self) -> float:
        """Part of the steps that need mask code."""
        return float(self.partial / self.steps) if self.steps else 0.0


def launches(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel, counts: Visits
) -> Launches:
    """Return what a kernel runs for a problem; programs of a panel are taken to be equally long."""
    spec, heads = KERNELS[kernel], problem.batch * problem.num_heads_q
    steps, partial = heads * counts.tiles, heads * counts.partial_tiles
    columns = spec.stays == "columns"
    group = problem.group_size if columns else 1
    if not spec.masked:
        each = heads // group
        return Launches(
            count=1,
            programs=each * counts.programs,
            steps=each * counts.tiles,
            partial=0,
            longest=counts.longest,
        )
    if spec.splits:  # programs of splits that the mask leaves nothing end at once
        splits = splits_of(problem, config, kernel)
        tiles = heads // problem.group_size * splits.tiles_of_group
        return Launches(
            count=1,
            programs=max(1, int(tiles * splits.programs)),
            steps=tiles * group * counts.tiles,
            partial=tiles * group * counts.partial_tiles,
            longest=group * min(counts.longest, splits.longest),
        )
    if not spec.panel:
        return Launches(
            count=1,
            programs=heads // group * counts.programs,
            steps=steps,
            partial=partial,
            longest=group * counts.longest,
        )
    loop = spec.sliced
    assert loop is not None
    of_panels, groups = _panels(
        heads, problem.group_size, problem.seqlen_q, rows_of_panels(problem, gpu, kernel)
    )
    slices = sum(-(-width // config.block_d) for width in sliced_dims(problem, loop))
    if spec.panel == "writes":  # a program for each tile of scores
        programs = max(1, int(steps))
    else:
        programs = (groups if columns else heads) * counts.programs * slices
    steps = int(steps) * slices
    return Launches(
        count=spec.launches_per_panel * of_panels,
        programs=programs,
        steps=steps,
        partial=0,
        longest=steps / programs,
    )


def kept_entries(problem: AttentionProblem, kernel: Kernel) -> int:
    """Return the scores of all heads that the mask keeps: programs take a step, at least, for each
    tile that they would fill; 0 where a step is no tile of scores."""
    if not KERNELS[kernel].masked or KERNELS[kernel].panel:
        return 0
    kept = mask_size(problem.mask, problem.seqlen_q, problem.seqlen_kv).entries
    return problem.batch * problem.num_heads_q * kept


def sliced_dims(problem: AttentionProblem, loop: Sliced) -> list[int]:
    """Return the head dims that are taken in slices."""
    return [problem.head_dims[one] for one in loop.slices]


@lru_cache(maxsize=1024)
def _panels(heads: int, group_size: int, seqlen_q: int, rows: int) -> tuple[int, int]:
    """Return the number of panels, and of their key-value heads, added up."""
    of_one_head = rows < 2 * seqlen_q
    alike = list(
        panels(1, 1, seqlen_q, rows) if of_one_head else panels(heads, group_size, seqlen_q, rows)
    )
    times = heads if of_one_head else 1
    return times * len(alike), times * sum(-(-panel.num_heads // group_size) for panel in alike)


@lru_cache(maxsize=256)
def rows_of_panels(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> int:
    """Return the query rows that a panel of this kernel's pass holds on this GPU."""
    return rows_for(problem, gpu, direction_of(kernel))
