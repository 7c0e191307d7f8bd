"""Records that the steps of the pipeline hand on: ranked configs, and the one chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig

if TYPE_CHECKING:
    from tilegen.model.estimate import Candidate
    from tilegen.model.resources import Resources


Origin = Literal["agreement", "record", "tuning", "model"]
"""Sources of configs."""


@dataclass(frozen=True)
class Ranked:
    """The configs to use for one kernel, best first, and where they come from."""

    kernel: Kernel
    configs: tuple[TileConfig, ...]
    origin: Origin
    source: str
    """The file of a record, or another source of the configs, for people."""
    candidates: tuple[Candidate, ...] = ()
    """The model's reasons, where the configs are its own."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The config to use for one kernel."""

    config: TileConfig
    ranked: Ranked
    tried: Mapping[TileConfig, Resources | BuildFailed] = field(default_factory=dict)
    """Result of compiling, for each config that was compiled."""
    seconds: Mapping[TileConfig, float] = field(default_factory=dict)
    """Predicted time [s] of configs of the model that compiled to what may be used, with what the
    compiler says that they use."""

    @property
    def source(self) -> str:
        """The source of the config, for people."""
        return self.ranked.source
