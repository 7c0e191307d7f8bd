"""Print the plan of `--dry-run` for commands that tune: configs, and how many are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tilegen.cli.options import console, print_json

if TYPE_CHECKING:
    from tilegen.fleet.jobs import Job
    from tilegen.kernels.config import TileConfig


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """The configs that tuning a kernel would try."""

    gpu: str
    kernel: str
    problem: str
    configs: int
    """Number of configs."""
    measured: int
    """Number of configs with trials in some location, under the present conditions."""

    def __str__(self) -> str:
        return (
            f"would tune {self.kernel:15}{self.configs:4} configs, {self.measured} of them "
            f"measured already  {self.gpu}  '{self.problem}'"
        )


def plan_of(job: Job, space: Sequence[TileConfig]) -> TuningPlan:
    """Plan to tune a search space, without changing anything."""
    from tilegen.tuning.trials import trials_of

    known = trials_of(job.gpu.name, job.kernel, job.problem, job.conditions).read()
    return TuningPlan(
        **{name: value for name, value in job.attributes.items() if name != "policy"},
        configs=len(space),
        measured=sum(config in known and known[config].is_final for config in space),
    )


def print_plans(plans: Sequence[TuningPlan], as_json: bool) -> None:
    """Print plans, as JSON or one a line."""
    if as_json:
        print_json([asdict(plan) for plan in plans])
        return
    for plan in plans:
        console.print(str(plan))
