"""Results of the pipeline's steps: the ranked configs of a task, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Backend
from tilegen.task import KernelTask, Tiled

if TYPE_CHECKING:
    from tilegen.model.estimate import Candidate
    from tilegen.model.resources import Resources


Origin = Literal["agreement", "record", "tuning", "model"]
"""Sources of configs."""


@dataclass(frozen=True)
class Shortlist:
    """The configs to try for a task, in order, and their source."""

    task: KernelTask
    configs: tuple[TileConfig, ...]
    origin: Origin
    source: str
    """The file of a record, or another source of the configs, for display."""
    candidates: tuple[Candidate, ...] = ()
    """The model's candidates with their reasons, if the configs are the model's."""

    @property
    def kernel(self) -> Kernel:
        """The name of the kernel."""
        return self.task.kernel


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The config to use for a task."""

    config: TileConfig
    ranked: Shortlist
    tried: Mapping[TileConfig, Resources | BuildFailed] = field(default_factory=dict)
    """The result of compiling each config that was compiled."""
    seconds: Mapping[TileConfig, float] = field(default_factory=dict)
    """Predicted time [s] of the model's usable configs, with the resources that the compiler
    reported."""
    library: Backend | None = None
    """The library of the kernel's family; see `FamilySpec.library`."""

    @property
    def tiled(self) -> Tiled:
        """The task with the config."""
        return self.ranked.task.tiled(self.config)

    @property
    def source(self) -> str:
        """The source of the config, for display."""
        return self.ranked.source
