"""Agreement of all ranks of a job: a table of configs, which comes before all records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

_agreed: dict[tuple[str, Kernel, str], TileConfig] = {}


def agreed(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig | None:
    """Return the config that all ranks have agreed on, None if they have not."""
    return _agreed.get((gpu.name, kernel, problem.bucket.key)) if _agreed else None


def remember(gpu: GpuSpec, kernel: Kernel, bucket: str, config: TileConfig) -> None:
    """Have `agreed` return a config for a kernel of a problem's bucket."""
    _agreed[gpu.name, kernel, bucket] = config
