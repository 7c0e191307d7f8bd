"""The cost model of one kernel of a problem: which of its configs are fastest."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from tilegen.choose.configs import legal_configs
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import without
from tilegen.kernels.registry import KERNELS
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.estimate import CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import Launches, kept_entries, launches, rows_of_panels
from tilegen.model.on_chip import Footprint
from tilegen.model.time import (
    StepClocks,
    Time,
    l2_seconds,
    launch_seconds,
    least_seconds,
    local_clocks,
    step_clocks,
    time,
)
from tilegen.model.traffic import Traffic, Visits, traffic, visits
from tilegen.problem import AttentionProblem

SMEM_DOUBT, REGISTER_DOUBT = 1.1, 1.8
"""Factors of a limit up to which a prediction may go for a tuner to compile the config. Beside the
first choices of the catalogue on four GPUs, what is faster by its machine code lies below them, but
for fp32 slices that would be 3 % faster (benchmarks/results/machine_code.csv)."""

Timed = tuple[Time, TileConfig, Footprint]


class _Known(dict[TileConfig, tuple[Footprint, bool]]):
    """Facts about the configs of a kernel that hold for all lengths, found when first asked
    for: what each holds on chip, and whether it is promising, since it fits, does not surely spill
    much, and has no descriptors that it can do without: they save registers, and little else
    (templates/README.md)."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> None:
        super().__init__()
        self._of = problem, gpu, kernel
        self._clocks: dict[TileConfig, StepClocks] = {}

    def __missing__(self, config: TileConfig) -> tuple[Footprint, bool]:
        problem, gpu, kernel = self._of
        needs = footprint(problem, config, kernel, gpu.arch)
        promising = not needs.surely_spills and needs.fits(gpu)
        if promising and config.descriptors:
            promising = self[without(config)][0].spill_bytes > 0
        self[config] = found = needs, promising
        return found

    def clocks(self, config: TileConfig) -> StepClocks:
        """Return the clocks of a step. Stages only add to them, descriptors change nothing."""
        if (found := self._clocks.get(config)) is None:
            problem, gpu, kernel = self._of
            found = self._clocks[config] = step_clocks(problem, gpu, config, kernel)
        return found


@lru_cache(maxsize=8192)
def _plain(config: TileConfig) -> TileConfig:
    return replace(config, num_stages=1, descriptors=False)


known = lru_cache(maxsize=64)(_Known)
"""Facts about problems without their lengths, which the next length has in common."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Facts about a tile, whatever the warps and stages."""

    moved: Traffic
    counts: Visits
    run: Launches


class KernelModel:
    """The cost model of one kernel of a problem; keeps the results that configs have in common."""

    def __init__(
        self,
        problem: AttentionProblem,
        gpu: GpuSpec,
        kernel: Kernel,
        *,
        joined: TileConfig | None = None,
        describable: bool = True,
    ) -> None:
        """`joined` is the config of the kernel whose splits this one joins."""
        self.problem, self.gpu, self.kernel = problem, gpu, kernel
        self._joined = joined
        self._describable = describable
        self._launch = launch_seconds(gpu, kernel, 1)
        # The next length has in common what is known without lengths.
        alike = replace(problem, batch=1, seqlen_q=1, seqlen_kv=1)
        self._known = known(alike, gpu, kernel)
        self._by_tile: dict[tuple[int, ...], _Tile] = {}

    @cached_property
    def _configs(self) -> list[TileConfig]:
        return legal_configs(self.problem, self.gpu, self.kernel, describable=self._describable)

    @property
    def footprints(self) -> list[tuple[TileConfig, Footprint]]:
        """Every config, and what a program of it holds on chip."""
        return [(config, self.needs(config)) for config in self._configs]

    def fastest(self, top: int, *, spilling: bool) -> list[Timed]:
        """Return the `top` fastest configs that fit and do not surely spill much, timed with what
        they are predicted to spill or as if none was.

        Configs that the SMs' units, or L2, alone make slower than what is found already are not
        timed, and their tiles not counted.
        """
        found: list[Timed] = []
        best: list[float] = []  # a heap of the `top` shortest times, negated
        alike: dict[TileConfig, list[TileConfig]] = {}
        for config in self._configs:
            alike.setdefault(_plain(config), []).append(config)
        kept = kept_entries(self.problem, self.kernel)
        for least, plain in sorted((self._least_seconds(one, kept), one) for one in alike):
            if len(best) == top and least > -best[0]:
                break
            promising = [one for one in alike[plain] if self._known[one][1]]
            full = len(best) == top
            if not promising or (full and self._least_as_counted(plain) > -best[0]):
                continue
            for config in promising:
                needs = self.needs(config)
                if not spilling and needs.spill_bytes:
                    timed = self.time(config, replace(needs, registers=needs.max_registers))
                else:
                    timed = self.time(config, needs)
                found.append((timed, config, needs))
                heapq.heappush(best, -timed.cost)
                if len(best) > top:
                    heapq.heappop(best)
        return _ranked(found)[:top]

    def last_resort(self, top: int) -> list[Timed]:
        """Return the `top` fastest configs that spill much, or that do not quite fit by
        prediction."""
        needed = self.footprints
        fitting = [pair for pair in needed if pair[1].fits(self.gpu)]
        if not fitting:  # predictions err on the large side
            fitting = [pair for pair in needed if pair[1].fits(self.gpu, doubt=SMEM_DOUBT)]
        legal = [pair for pair in fitting if not pair[1].surely_spills]
        # The configs that spill least, where every config spills much.
        least = sorted(fitting, key=lambda pair: (pair[1].registers, pair[0]))[: max(top, 20)]
        return _ranked(
            [(self.time(config, needs), config, needs) for config, needs in legal or least]
        )[:top]

    def needs(self, config: TileConfig) -> Footprint:
        """Return what a program holds on chip."""
        return self._known[config][0]

    def time(self, config: TileConfig, needs: Footprint, code: StepClocks | None = None) -> Time:
        """Return the predicted time: all that ranking needs. `code` are the clocks of a step where
        its machine code is known."""
        tile = self._tile(config)
        return time(
            self.problem,
            self.gpu,
            config,
            self.kernel,
            moved=tile.moved,
            counts=tile.counts,
            run=tile.run,
            needs=needs,
            clocks=code or self._known.clocks(config),
            local=code.local if code else local_clocks(needs, self.gpu, config),
        )

    def _least_seconds(self, plain: TileConfig, kept: int) -> float:
        """Return seconds that no config of this tile and these warps is below, however many stages
        it has and however tiles are loaded: those of as many steps as `kept` scores would fill."""
        steps = kept / (plain.rows * plain.block_n)
        return self._launch + least_seconds(self.gpu, self._known.clocks(plain), steps)

    def _least_as_counted(self, plain: TileConfig) -> float:
        """Return such seconds from the tiles that are visited, which takes longer to tell."""
        clocks, tile = self._known.clocks(plain), self._tile(plain)
        steps = float(tile.run.steps)
        on_sms = least_seconds(self.gpu, clocks, steps, masked=tile.run.masked)
        return self._launch + max(on_sms, l2_seconds(self.gpu, tile.moved))

    def cost(self, time: Time, config: TileConfig, needs: Footprint) -> CostEstimate:
        """Return the estimate that a time belongs to."""
        moved = self._tile(config).moved
        return CostEstimate(
            kernel=self.kernel,
            config=config,
            read_bytes=moved.read_bytes,
            write_bytes=moved.write_bytes,
            dram_bytes=time.dram_bytes,
            lower_bound_bytes=lower_bound_bytes(self.problem, self.gpu, self.kernel),
            smem_bytes=needs.smem_bytes,
            registers=needs.registers,
            flops=time.flops,
            seconds=time.seconds,
            limit=time.terms[0][0],
            terms=time.terms,
            waves=time.waves,
            cost=time.cost,
        )

    def _tile(self, config: TileConfig) -> _Tile:
        tile = config.block_m, config.heads, config.block_n, config.block_d, config.split_kv
        if (found := self._by_tile.get(tile)) is None:
            rows = None
            if KERNELS[self.kernel].sliced:
                rows = rows_of_panels(self.problem, self.gpu, self.kernel)
            of = self.problem, config, self.kernel
            moved = traffic(*of, panel_rows=rows, before=self._joined)
            sides = config.block_m, config.block_n
            split = (self._joined or config).split_kv
            counts = visits(self.problem, *sides, self.kernel, split_kv=split)
            run = launches(self.problem, self.gpu, config, self.kernel, counts)
            found = self._by_tile[tile] = _Tile(moved, counts, run)
        return found


def _ranked(times: list[Timed]) -> list[Timed]:
    # Configs of the same tile and time come in the order in which they are less likely to spill.
    return sorted(
        times, key=lambda one: (one[0].cost, one[0].busy_seconds, not one[1].descriptors, one[1])
    )
