"""`--dry-run` of the commands that tune: how many configs there are, and how many are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tilegen.cli.options import console, print_json

if TYPE_CHECKING:
    from tilegen.fleet.jobs import Job
    from tilegen.kernels.config import TileConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The configs that tuning a kernel would try."""

    gpu: str
    kernel: str
    problem: str
    configs: int
    """Number of configs there are."""
    measured: int
    """Number of configs whose trials lie in a location already, under the present conditions."""

    def __str__(self) -> str:
        return (
            f"would tune {self.kernel:15}{self.configs:4} configs, {self.measured} of them "
            f"measured already  {self.gpu}  '{self.problem}'"
        )


def plan_of(job: Job, space: Sequence[TileConfig]) -> Plan:
    """Return the plan of tuning a search space. Changes nothing."""
    from tilegen.tuning.trials import trials_of

    known = trials_of(job.gpu.name, job.kernel, job.problem, job.conditions).read()
    return Plan(
        **{name: value for name, value in job.attributes.items() if name != "policy"},
        configs=len(space),
        measured=sum(config in known and known[config].is_final for config in space),
    )


def print_plans(plans: Sequence[Plan], as_json: bool) -> None:
    """Print what tuning would do."""
    if as_json:
        print_json([asdict(plan) for plan in plans])
        return
    for plan in plans:
        console.print(str(plan))
