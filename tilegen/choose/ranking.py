"""From problem and GPU to ranked configs, with the reason for each. Needs no GPU."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from tilegen.choose.configs import legal_configs
from tilegen.choose.reason import reason_of
from tilegen.disk import say_once
from tilegen.errors import Unsupported
from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import without
from tilegen.kernels.registry import KERNELS, family_with
from tilegen.kernels.split_kv import FWD_SPLIT
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.bounds import lower_bound_bytes
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.launches import rows_of_panels
from tilegen.model.on_chip import Footprint
from tilegen.model.time import StepClocks, Time, least_seconds, time
from tilegen.model.traffic import Traffic, Visits, traffic, visits
from tilegen.problem import AttentionProblem
from tilegen.sympy_lock import one_at_a_time

if TYPE_CHECKING:
    from tilegen.build.acceptable import Usage

SMEM_DOUBT, REGISTER_DOUBT = 1.1, 1.6
"""Factors of a limit up to which a prediction may go for a tuner to compile the config."""


@one_at_a_time
def propose(
    problem: AttentionProblem,
    gpu: GpuSpec,
    *,
    kernel: Kernel = "fwd",
    top: int = 10,
    describable: bool = True,
) -> list[Candidate]:
    """Return up to `top` candidates for a problem's normal form, best first, all predicted to fit.
    Raises Unsupported.

    A dtype that the tensor cores of the GPU do not take is ranked by its multiply-adds, which is
    said once. A config ranks by its time and the traffic of what it is predicted to spill; configs
    that surely spill more than a usable kernel come where there is nothing else. Tensor descriptors
    are proposed for tiles that would spill without, and not where tensors are not `describable`.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise Unsupported(f"top must be an int of at least 1, got {top!r}")
    return _best(_Model(problem.normal(), gpu, kernel, describable), top, spilling=True)


@lru_cache(maxsize=1024)
def best_of(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> Candidate:
    """Return the first candidate of `propose`. Raises Unsupported."""
    return propose(problem, gpu, kernel=kernel, top=1)[0]


@one_at_a_time
def invariant_config(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig:
    """Return the config by which a kernel computes all batch-invariant problems that differ in
    batch, lengths and pages only: kernels for whole and for paged keys add up alike. Raises
    Unsupported."""
    alike = FWD_SPLIT.name if KERNELS[kernel].splits else kernel
    one = replace(problem.rounded, page=0)
    return propose(one, gpu, kernel=alike, top=1, describable=False)[0].config


@one_at_a_time
def hopefuls(
    problem: AttentionProblem,
    gpu: GpuSpec,
    *,
    kernel: Kernel,
    top: int,
    describable: bool = True,
) -> list[Candidate]:
    """Return up to `top` candidates as `propose` does, but in the order of their times without
    spilling, which are their estimates: a compiler that is asked about one after the other has
    found the best as soon as what it found is no slower than the next can be."""
    return _best(_Model(problem.normal(), gpu, kernel, describable), top, spilling=False)


def _best(model: _Model, top: int, *, spilling: bool) -> list[Candidate]:
    problem, gpu = model.problem, model.gpu
    if problem.dtype == "bf16" and not on_tensor_cores("bf16", gpu.arch):
        say_once(
            f"{gpu.title} ({gpu.arch}) has no tensor cores for bf16: products run as fp32 "
            f"multiply-adds, at {gpu.vector_flops_32 / gpu.tensor_flops_16:.0%} of the speed of "
            "fp16; use fp16, or a GPU from sm_80 on"
        )
    best = model.fastest(top, spilling=spilling) or model.last_resort(top)
    if not best:
        raise Unsupported(_nothing_fits(problem, gpu, model.kernel))
    return [_candidate(problem, gpu, model.cost(*one)) for one in best]


@one_at_a_time
def time_as_compiled(
    problem: AttentionProblem,
    gpu: GpuSpec,
    config: TileConfig,
    kernel: Kernel,
    built: Usage,
    *,
    stages: int | None = None,
) -> Time:
    """Return the predicted time of a config with what the compiler says that it uses, and with what
    its machine code issues in a step, where that could be told.

    What was compiled may have another number of stages, `stages`: then shared memory, which alone
    hangs on it, is as predicted.
    """
    model = _Model(problem.normal(), gpu, kernel)
    needs = model.needs(config)
    shared = needs.smem_bytes if stages not in (None, config.num_stages) else built.shared_bytes
    used = needs.as_compiled(built.registers, built.spill_bytes, shared)
    code = built.step_code
    return model.time(config, used, clocks_as_compiled(code, gpu) if code else None)


def seconds_as_compiled(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel, built: Usage
) -> float:
    """Return the seconds of `time_as_compiled`."""
    return time_as_compiled(problem, gpu, config, kernel, built).seconds


def search_space(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> list[TileConfig]:
    """Return everything a tuner may try: what fits, and what only compiling can tell."""
    return [
        config
        for config, needs in _footprints(problem.normal(), gpu, kernel)
        if needs.fits(gpu, doubt=SMEM_DOUBT)
        and needs.registers <= REGISTER_DOUBT * needs.max_registers
    ]


def ranked_space(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    space: Sequence[TileConfig] | None = None,
) -> tuple[list[TileConfig], list[Candidate]]:
    """Return what a tuner tries, in the model's order, and the model's candidates among it.

    `space` defaults to all that fits, and to what the model proposes where nothing fits well.
    """
    candidates = propose(problem, gpu, kernel=kernel, top=2**16)
    if space is None:
        space = search_space(problem, gpu, kernel)
    else:
        legal = set(space)
        candidates = [one for one in candidates if one.config in legal]
    return list(dict.fromkeys([*(one.config for one in candidates), *space])), candidates


def estimate(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel = "fwd"
) -> CostEstimate:
    """Return what the model predicts for one config, legal or not."""
    model = _Model(problem.normal(), gpu, kernel)
    needs = model.needs(config)
    return model.cost(model.time(config, needs), config, needs)


def candidate_of(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel
) -> Candidate:
    """Return a config as `propose` would, wherever it ranks."""
    return _candidate(problem.normal(), gpu, estimate(problem, gpu, config, kernel))


Timed = tuple[Time, TileConfig, Footprint]


class _Model:
    """The cost model of one kernel of a problem; keeps the results that configs have in common."""

    def __init__(
        self, problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, describable: bool = True
    ) -> None:
        self.problem, self.gpu = problem, gpu
        self._joined = joined_splits(problem, gpu, kernel)
        self.kernel: Kernel = kernel
        self._configs = legal_configs(problem, gpu, kernel, describable=describable)
        self._alike = _without_lengths(problem)
        self._by_tile: dict[tuple[int, ...], tuple[Traffic, Visits, float]] = {}

    def fastest(self, top: int, *, spilling: bool) -> list[Timed]:
        """Return the `top` fastest configs that fit and do not surely spill much, timed with what
        they are predicted to spill or as if none was.

        Configs that L2 alone makes slower than what is found already are not looked at.
        """
        found: list[Timed] = []
        best: list[float] = []  # a heap of the `top` shortest times, negated
        configs = self._configs
        for least, config in sorted((self._tile(config)[2], config) for config in configs):
            if len(best) == top and least > -best[0]:
                break
            needs = self.needs(config)
            if needs.spills_much or not needs.fits(self.gpu) or self._needs_no(config):
                continue
            if not spilling and needs.spill_bytes:
                timed = self.time(config, replace(needs, registers=needs.max_registers))
            else:
                timed = self.time(config, needs)
            found.append((timed, config, needs))
            heapq.heappush(best, -timed.cost)
            if len(best) > top:
                heapq.heappop(best)
        return _ranked(found)[:top]

    def _needs_no(self, config: TileConfig) -> bool:
        """True for descriptors that a config can do without: they save registers, and little else
        (templates/README.md)."""
        return config.descriptors and not self.needs(without(config)).spill_bytes

    def last_resort(self, top: int) -> list[Timed]:
        """Return the `top` fastest configs that spill much, or that do not quite fit by
        prediction."""
        needed = [(config, self.needs(config)) for config in self._configs]
        fitting = [pair for pair in needed if pair[1].fits(self.gpu)]
        if not fitting:  # predictions err on the large side
            fitting = [pair for pair in needed if pair[1].fits(self.gpu, doubt=SMEM_DOUBT)]
        legal = [pair for pair in fitting if not pair[1].spills_much]
        # The configs that spill least, where every config spills much.
        least = sorted(fitting, key=lambda pair: (pair[1].registers, pair[0]))[: max(top, 20)]
        return _ranked(
            [(self.time(config, needs), config, needs) for config, needs in legal or least]
        )[:top]

    def needs(self, config: TileConfig) -> Footprint:
        """Return what a program holds on chip."""
        return footprint(self._alike, config, self.kernel, self.gpu.arch)

    def time(self, config: TileConfig, needs: Footprint, clocks: StepClocks | None = None) -> Time:
        """Return the predicted time: all that ranking needs."""
        moved, counts, _ = self._tile(config)
        of = self.problem, self.gpu, config, self.kernel
        return time(*of, moved=moved, counts=counts, needs=needs, clocks=clocks)

    def cost(self, time: Time, config: TileConfig, needs: Footprint) -> CostEstimate:
        """Return the estimate that a time belongs to."""
        moved, _, _ = self._tile(config)
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

    def _tile(self, config: TileConfig) -> tuple[Traffic, Visits, float]:
        """Return what is moved and visited, and the least time: warps and stages do not matter."""
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
            least = least_seconds(self.gpu, moved, self.kernel)
            found = self._by_tile[tile] = moved, counts, least
        return found


def joined_splits(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> TileConfig | None:
    """Return the model's config of the kernel whose splits a kernel joins, None for kernels that
    join none. Raises Unsupported."""
    if not KERNELS[kernel].joins:
        return None
    names = family_with(kernel, problem).names
    return best_of(problem, gpu, names[names.index(kernel) - 1]).config


def _ranked(times: list[Timed]) -> list[Timed]:
    # Configs of the same tile and time come in the order in which they are less likely to spill.
    return sorted(
        times, key=lambda one: (one[0].cost, one[0].busy_seconds, not one[1].descriptors, one[1])
    )


def spills_much(problem: AttentionProblem, gpu: GpuSpec, candidate: Candidate) -> bool:
    """True for a candidate that surely spills more registers than a usable kernel may."""
    return footprint(problem, candidate.config, candidate.kernel, gpu.arch).spills_much


def _footprints(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel
) -> list[tuple[TileConfig, Footprint]]:
    """Return every config and what it needs on chip."""
    alike = _without_lengths(problem)
    return [
        (config, footprint(alike, config, kernel, gpu.arch))
        for config in legal_configs(problem, gpu, kernel)
    ]


def _without_lengths(problem: AttentionProblem) -> AttentionProblem:
    """Return a problem with the same footprints, which are remembered for the next length too."""
    return replace(problem, batch=1, seqlen_q=1, seqlen_kv=1)


def _candidate(problem: AttentionProblem, gpu: GpuSpec, cost: CostEstimate) -> Candidate:
    return Candidate(
        kernel=cost.kernel, config=cost.config, estimate=cost, reason=reason_of(problem, gpu, cost)
    )


def _nothing_fits(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> str:
    smallest = min(needs.smem_bytes for _, needs in _footprints(problem, gpu, kernel))
    return (
        f"expected a {kernel} tile within {gpu.smem_per_block} bytes of shared memory on "
        f"{gpu.name}, found none for {problem.key}: the smallest needs {smallest}"
    )
