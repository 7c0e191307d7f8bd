"""Configs known without the model: agreements of all ranks, records, and tuning in a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tilegen.disk import say_once
from tilegen.emit.identity import template_digest
from tilegen.environment import current
from tilegen.errors import TilegenError
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem
from tilegen.store import TuningRecord, look_up
from tilegen.store.versions import versions_for
from tilegen.task import KernelTask
from tilegen.tuning.measure import DeviceLost

if TYPE_CHECKING:
    from tilegen.device import Device
    from tilegen.store import Found

TUNE_SECONDS, TUNE_SECONDS_ON_CPU = 30.0, 20.0
"""Time budget per kernel, if TILEGEN_TUNE=1 makes a call tune [s]."""


_agreed: dict[tuple[str, Kernel, str], TileConfig] = {}
"""Configs that all ranks of a job agreed on; they have priority over records."""


def remember(device: Device, kernel: Kernel, bucket: str, config: TileConfig) -> None:
    """Remember the config that all ranks agreed on for a kernel of a problem's bucket."""
    _agreed[device.name, kernel, bucket] = config


class Records:
    """Agreements, records and tuning for one problem on one device; each record is read once.

    With `deterministic` (default: TILEGEN_DETERMINISTIC) nothing is tuned, and a shared location
    that does not answer raises Unreachable. Equal records then give equal choices.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: Device,
        *,
        deterministic: bool | None = None,
        roles: bool = True,
    ) -> None:
        self.problem, self.device = problem.normal(), device
        self.deterministic = current().deterministic if deterministic is None else deterministic
        """True if nothing is tuned, so that equal records give equal choices."""
        self.roles = roles
        """False if kernels whose warpgroups have roles are left out: for bundles, which load tiles
        by addresses, and for tensors that no descriptor holds."""
        self._own: dict[Kernel, Found | None] = {}

    def agreed(self, kernel: Kernel) -> TileConfig | None:
        """Return the config that all ranks agreed on; None if there is none."""
        return _agreed.get((self.device.name, kernel, self.problem.bucket.key)) if _agreed else None

    def task(self, kernel: Kernel) -> KernelTask:
        """Return the task of a kernel for this problem and device."""
        return KernelTask(KERNELS[kernel], self.problem, self.device)

    def own(self, kernel: Kernel) -> Found | None:
        """Return the record of the same GPU model."""
        if kernel not in self._own:
            self._own[kernel] = self._look(kernel, borrow=False)
        return self._own[kernel]

    def borrowed(self, kernel: Kernel) -> Found | None:
        """Return the record of the nearest other GPU model of the same architecture."""
        return self._look(kernel, borrow="only")

    def seconds(self, kernel: Kernel) -> float | None:
        """Return the measured time on this GPU model [s]; None if there is none."""
        entry = self.own(kernel)
        median = entry and entry.record.measurement.median_us
        return None if median is None else 1e-6 * median

    def tuned(self, kernel: Kernel) -> TileConfig | None:
        """Tune a kernel now; None without TILEGEN_TUNE=1, or if tuning fails."""
        if self.deterministic or not current().tune:
            return None
        task, seconds = self.task(kernel), TUNE_SECONDS
        if not isinstance(self.device, GpuSpec):
            seconds = TUNE_SECONDS_ON_CPU
            from tilegen.choose.on_cpu import may_tune  # loads the model

            if not may_tune(task):
                return None
        from tilegen.tuning.tuner import tune_once

        def known() -> TuningRecord | None:
            return (entry := self._look(kernel, borrow=False)) and entry.record

        try:
            return tune_once(task, seconds=seconds, known=known).config
        except DeviceLost:
            raise
        except (TilegenError, OSError) as error:  # a call is computed even if it cannot be tuned
            say_once(f"tuning failed, using the best known config: {error}")
            return None

    def _look(self, kernel: Kernel, *, borrow: bool | Literal["only"]) -> Found | None:
        return look_up(
            self.task(kernel),
            versions=versions_for(self.device),
            template_digest=template_digest(kernel),
            borrow=borrow,
            strict=self.deterministic,
        )
