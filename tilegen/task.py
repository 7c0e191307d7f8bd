"""The objects that the model and the choice work on: `KernelTask`, a kernel for a problem on a
device; `Tiled`, a task with a config; and `PassTask`, a whole pass."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilegen.device import Device
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.loops import Step
from tilegen.kernels.panels import PANEL_STEP, rows_for
from tilegen.kernels.registry import KERNELS, family_with
from tilegen.kernels.spec import Direction, FamilySpec, KernelSpec
from tilegen.problem import AttentionProblem


@dataclass(frozen=True)
class PassTask:
    """A pass of a problem in normal form, on a GPU."""

    direction: Direction
    problem: AttentionProblem
    device: GpuSpec

    @classmethod
    def of(cls, direction: Direction, problem: AttentionProblem, device: GpuSpec) -> PassTask:
        """Create the task of a pass, for a problem's normal form."""
        return cls(direction, problem.normal(), device)

    def kernel(self, spec: KernelSpec) -> KernelTask:
        """Return the task of one of the pass's kernels."""
        return KernelTask(spec, self.problem, self.device)


@dataclass(frozen=True)
class KernelTask:
    """A kernel that computes its part of a problem, in normal form, on a device."""

    spec: KernelSpec
    problem: AttentionProblem
    device: Device
    joined: TileConfig | None = None
    """The config of the splits that the kernel joins, once it is chosen."""
    follows: KernelSpec | None = None
    """The kernel that makes the splits, if it is not in this kernel's first family."""

    @classmethod
    def of(cls, kernel: Kernel, problem: AttentionProblem, device: Device) -> KernelTask:
        """Create the task of a named kernel, for a problem's normal form."""
        return cls(KERNELS[kernel], problem.normal(), device)

    @property
    def gpu(self) -> GpuSpec:
        """The device, which must be a GPU."""
        assert isinstance(self.device, GpuSpec), self.device
        return self.device

    @property
    def kernel(self) -> Kernel:
        """The name of the kernel."""
        return self.spec.name

    @cached_property
    def family(self) -> FamilySpec:
        """The family of the kernel. It depends on kernel and problem only, so values cached by
        kernel may depend on it."""
        return family_with(self.kernel, self.problem)

    @property
    def direction(self) -> Direction:
        """The pass that the kernel belongs to."""
        return self.family.direction

    @property
    def heads_q(self) -> int:
        """Query heads of all sequences together."""
        return self.problem.batch * self.problem.num_heads_q

    @property
    def heads_kv(self) -> int:
        """Key-value heads of all sequences together."""
        return self.problem.batch * self.problem.num_heads_kv

    @cached_property
    def values_in_keys(self) -> bool:
        """True if the kernel reads values from keys that are already loaded."""
        return self.spec.values_in_keys(self.problem)

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows of the stationary side, and of the streamed side."""
        return self.spec.loop.sides(self.problem.seqlen_q, self.problem.seqlen_kv)

    @property
    def heads_of_group(self) -> int:
        """Number of heads on the stationary side for each key-value head."""
        return self.spec.loop.sides(self.problem.group_size, 1)[0]

    @property
    def draws(self) -> bool:
        """True if the kernel draws random numbers for dropout."""
        return self.spec.draws(self.problem)

    @property
    def in_order(self) -> bool:
        """True if the kernel sums a row's keys in an order that does not depend on the problem."""
        return self.spec.keeps_order(self.problem)

    @property
    def divided(self) -> bool:
        """True if the kernel divides the keys of a request over the available programs."""
        return self.spec.divides(self.problem)

    @cached_property
    def panel_rows(self) -> int:
        """Query rows of a panel on this device. Families for processors have no panels."""
        if not isinstance(self.device, GpuSpec):
            return PANEL_STEP
        return rows_for(self.problem, self.device, self.direction)

    @property
    def before(self) -> KernelTask | None:
        """The task of the kernel whose splits this kernel joins; None if it joins none."""
        if self.follows:
            return self.by(self.follows)
        if not self.spec.joins:
            return None
        on_cpu = not isinstance(self.device, GpuSpec)
        kernels = family_with(self.kernel, self.problem, for_cpus=on_cpu).kernels
        return self.by(kernels[kernels.index(self.spec) - 1])

    def tiled(self, config: TileConfig) -> Tiled:
        """Combine the task with a config."""
        return Tiled(self, config)

    def by(self, spec: KernelSpec) -> KernelTask:
        """Return the task of another kernel for the same problem and device."""
        return KernelTask(spec, self.problem, self.device)


@dataclass(frozen=True)
class Tiled:
    """A task with the config that computes it."""

    task: KernelTask
    config: TileConfig

    @classmethod
    def of(
        cls, kernel: Kernel, problem: AttentionProblem, device: Device, config: TileConfig
    ) -> Tiled:
        """Create the task of a named kernel with a config, for a problem's normal form."""
        return cls(KernelTask.of(kernel, problem, device), config)

    @property
    def spec(self) -> KernelSpec:
        """The kernel."""
        return self.task.spec

    @property
    def problem(self) -> AttentionProblem:
        """The problem, in normal form."""
        return self.task.problem

    @property
    def device(self) -> Device:
        """The device."""
        return self.task.device

    @property
    def gpu(self) -> GpuSpec:
        """The device, a GPU."""
        return self.task.gpu

    @cached_property
    def step(self) -> Step:
        """One step of the inner loop."""
        return self.spec.step(self.problem, self.config)
