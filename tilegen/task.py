"""The nouns that the model and the choice work on: a kernel for a problem on a device,
`KernelTask`, the same with a config, `Tiled`, and a whole pass, `PassTask`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

from tilegen.device import Device
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.loops import Step
from tilegen.kernels.panels import PANEL_STEP, rows_for
from tilegen.kernels.registry import KERNELS, family_with
from tilegen.kernels.spec import Direction, FamilySpec, KernelSpec
from tilegen.problem import AttentionProblem

T = TypeVar("T")


class Memo:
    """Values computed for one problem, each once; its kernels, configs and devices share them."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of a key, computed at the first request."""
        try:
            return self._values[key]
        except KeyError:
            value = self._values[key] = compute()
            return value


@lru_cache(maxsize=64)
def memo_of(problem: AttentionProblem) -> Memo:
    """Return the memo of a problem: the only cache of the model that depends on problems.

    Values that do not depend on lengths belong to the problem with lengths of 1
    (`KernelTask.lengthless`), so that a new length finds them.
    """
    return Memo()


@dataclass(frozen=True)
class PassTask:
    """A pass of a problem in normal form, on a GPU."""

    direction: Direction
    problem: AttentionProblem
    device: GpuSpec

    @classmethod
    def of(cls, direction: Direction, problem: AttentionProblem, device: GpuSpec) -> PassTask:
        """Return the pass of a problem's normal form."""
        return cls(direction, problem.normal(), device)

    def kernel(self, spec: KernelSpec) -> KernelTask:
        """Return a kernel's part of the pass."""
        return KernelTask(spec, self.problem, self.device)

    @cached_property
    def memo(self) -> Memo:
        """The memo of the problem."""
        return memo_of(self.problem)


@dataclass(frozen=True)
class KernelTask:
    """A kernel that computes its part of a problem, in normal form, on a device."""

    spec: KernelSpec
    problem: AttentionProblem
    device: Device
    joined: TileConfig | None = None
    """The config whose splits the kernel joins, where that is settled."""
    follows: KernelSpec | None = None
    """The kernel whose splits are joined, where it is not of the first family of this kernel."""

    @classmethod
    def of(cls, kernel: Kernel, problem: AttentionProblem, device: Device) -> KernelTask:
        """Return the task of a kernel by its name, for the normal form of a problem."""
        return cls(KERNELS[kernel], problem.normal(), device)

    @property
    def gpu(self) -> GpuSpec:
        """The device, where it is a GPU: what the model of GPUs counts follows from it."""
        assert isinstance(self.device, GpuSpec), self.device
        return self.device

    @property
    def kernel(self) -> Kernel:
        """The name of the kernel."""
        return self.spec.name

    @cached_property
    def family(self) -> FamilySpec:
        """The family of the kernel. It follows from kernel and problem, so that values that are
        cached by the kernel may depend on it."""
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
    def memo(self) -> Memo:
        """The memo of the problem."""
        return memo_of(self.problem)

    @cached_property
    def lengthless(self) -> KernelTask:
        """The same kernel for a problem with lengths of 1, which all lengths share."""
        alike = replace(self.problem, batch=1, seqlen_q=1, seqlen_kv=1)
        return self if alike == self.problem else replace(self, problem=alike)

    @cached_property
    def tiles(self) -> Memo:
        """Values of tiles, whatever the warps and stages."""
        # Panels are sized for the L2 of the device; no other tile depends on the device.
        device = self.device if self.spec.panel else None
        return self.memo.once(("tiles", self.kernel, self.joined, self.follows, device), Memo)

    @cached_property
    def configs(self) -> Memo:
        """Values of configs that do not depend on lengths."""
        return self.lengthless.memo.once(("configs", self.kernel, self.device), Memo)

    @cached_property
    def values_in_keys(self) -> bool:
        """Whether the kernel takes values from the keys that it has loaded."""
        return self.spec.values_in_keys(self.problem)

    @property
    def lengths(self) -> tuple[int, int]:
        """Rows of the side that stays, and of the side that is streamed."""
        return self.spec.loop.sides(self.problem.seqlen_q, self.problem.seqlen_kv)

    @property
    def heads_of_group(self) -> int:
        """Heads of the side that stays, for each key-value head."""
        return self.spec.loop.sides(self.problem.group_size, 1)[0]

    @property
    def draws(self) -> bool:
        """Whether the kernel draws random numbers, for dropout."""
        return self.spec.draws(self.problem)

    @property
    def in_order(self) -> bool:
        """Whether the kernel adds up a row's keys in an order that other problems share."""
        return self.spec.keeps_order(self.problem)

    @property
    def divided(self) -> bool:
        """Whether the kernel divides the keys of a request over the programs that it has."""
        return self.spec.divides(self.problem)

    @cached_property
    def panel_rows(self) -> int:
        """Query rows that a panel of the kernel's pass holds on the device. No family that is used
        on processors has panels."""
        if not isinstance(self.device, GpuSpec):
            return PANEL_STEP
        return rows_for(self.problem, self.device, self.direction)

    @property
    def before(self) -> KernelTask | None:
        """The task of the kernel whose splits this kernel joins; None where it joins none."""
        if self.follows:
            return self.by(self.follows)
        if not self.spec.joins:
            return None
        kernels = self.family.kernels
        return self.by(kernels[kernels.index(self.spec) - 1])

    def tiled(self, config: TileConfig) -> Tiled:
        """Return the task with a config."""
        return Tiled(self, config)

    def by(self, spec: KernelSpec) -> KernelTask:
        """Return another kernel for the same problem and device."""
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
        """Return a kernel by its name, for the normal form of a problem, with a config."""
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

    @property
    def step(self) -> Step:
        """One step of the inner loop; configs that differ in warps and stages share it."""
        task, config = self.task, self.config
        key = "step", task.kernel, config.rows, config.block_n, config.block_d
        return task.lengthless.memo.once(key, lambda: task.spec.loop.step(task.problem, config))

    def by_tile(self, name: str, compute: Callable[[], T]) -> T:
        """Return a value that depends on the tile alone, whatever the warps and stages."""
        config = self.config
        tile = config.block_m, config.block_n, config.block_d, config.heads, config.split_kv
        return self.task.tiles.once((name, tile), compute)

    def by_config(self, name: str, compute: Callable[[], T]) -> T:
        """Return a value of the config that does not depend on lengths."""
        return self.task.configs.once((name, self.config), compute)
