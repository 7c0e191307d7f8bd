"""Predict the time of a kernel: from clocks of a step on each unit to steps, programs and waves.

The units of an SM work in parallel, except that softmax and matrix products of a program wait for
each other: by a given part (`exposed`), or as far as warps queue for the units. Clocks are those of
an SM with all its resident programs. The formulas are in terms.py, the rates and their sources in
rates.toml; README.md lists every constant with its source.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import threads_of
from tilegen.kernels.launch_order import heads_together, heavy_end
from tilegen.model.columns import Number, floats, in_columns, picked
from tilegen.model.dram import dram_bytes
from tilegen.model.footprint import executed, reads_shared, repetition
from tilegen.model.formulas import computed
from tilegen.model.launches import launches
from tilegen.model.on_chip import Footprint, family, residents
from tilegen.model.operands import shared_words
from tilegen.model.rates import instructions, peak_flops_per_clk, rates_of
from tilegen.model.terms import KERNEL, MEMORY, PROGRAM, QUEUED, STEP, UNITS, WAVES
from tilegen.model.traffic import traffic
from tilegen.task import KernelTask, Tiled

ISSUE_PER_CLK = 128
"""Instructions of single threads that the four schedulers of an SM issue per clock."""
SMEM_BYTES_PER_CLK = 128
"""Bytes of shared memory or L1 that an SM moves per clock."""
OVERLAP_NORM = 4
"""Exponent of the norm that combines units: infinity is the maximum, 1 the sum."""
CHANGED_INSTRUCTIONS = 2.5
"""Instructions of a thread for each word of a panel, to scale or mask it and to round it again."""
DRAWN_INSTRUCTIONS = 13
"""Instructions of a thread that dropout adds to each score."""
IDLE = 0.04
"""Penalty for idle SMs in kernels with splits, as a part of a kernel's time if all SMs are idle.
Programs may reach less bandwidth than predicted, and in published times few splits cost more than
many."""
SHARED_READS = 2
"""Threads of a warp served by one read of an operand, in IEEE fp32."""


SCHEDULERS = 4
"""Parts of an SM that issue for their own warps, each with a share of every unit."""


@dataclass(frozen=True, kw_only=True)
class StepClocks:
    """Clocks for which a step keeps each unit of an SM busy, beside other programs."""

    tensor: Number
    exp: Number
    issue: Number
    masking: Number
    """Additional issue slots for a partial tile."""
    smem: Number
    exposed: float
    """Part of issue or exponentials, whichever is longer, that matrix products do not hide."""
    asynchronous: Number
    """True if a warp continues while its matrix products run, which read their operands
    themselves."""
    local: Number = 0.0
    """Loads and stores of local memory, which nothing hides."""
    local_once: float = 0.0
    """Loads and stores of local memory outside of the loop, once per program [clocks]."""

    @property
    def bound(self) -> float:
        """Lower bound on the clocks of a step on a full tile, without local memory."""
        softmax = max(self.issue, self.exp)
        return max(self.tensor + self.exposed * softmax, softmax, self.smem)


@in_columns
def step_clocks(tiled: Tiled) -> StepClocks:
    """Predict the clocks for which a step keeps each unit busy; the same for all lengths."""
    spec, problem, config, gpu = tiled.spec, tiled.problem, tiled.config, tiled.gpu
    rates, per, drawn = rates_of(gpu.arch), instructions(spec), drawn_of(tiled.task)
    work, size = tiled.step, problem.element_bytes
    vector = not on_tensor_cores(problem.dtype, gpu.arch)
    peak = peak_flops_per_clk(gpu, vector=vector)
    narrow = (not vector) & (work.rows < rates.full_rate_rows)
    threads = threads_of(gpu.arch, config.num_warps)
    of = work, size, config.num_warps, gpu.arch
    changing: Number = CHANGED_INSTRUCTIONS * work.changed
    if work.rescales:
        changing = per.accumulator * work.result_words
    if vector:  # each thread reads both operands for its own square of a product
        of_thread = sum(one.times * one.operands_of_thread(threads) for one in work.products)
        operands = of_thread * threads / SHARED_READS
    else:
        operands = shared_words(*of, rows_per_read=rates.operand_rows)
    facts = {
        "executed": executed(*of),
        "peak": peak * np.where(narrow, rates.narrow_rate, 1.0),
        "repeated": repetition(*of),
        "scores": work.scores,
        "exp_rate": gpu.exp_per_clk_per_sm,
        "per_score": per.score,
        "per_masked_score": per.masked_score,
        "drawn": drawn,
        "per_warps": per.step + per.stage * config.num_stages,
        "threads": threads,
        "changing": changing,
        "operands": operands,
        "element_bytes": size,
        "ISSUE_PER_CLK": ISSUE_PER_CLK,
        "SMEM_BYTES_PER_CLK": SMEM_BYTES_PER_CLK,
    }
    clocks = computed(STEP, facts)
    return StepClocks(
        **{unit: clocks[unit] for unit in STEP},
        exposed=rates.exposed_of(spec.fitted_as),
        asynchronous=reads_shared(family(gpu.arch), work, size),
    )


def drawn_of(task: KernelTask) -> int:
    """Return the instructions that dropout adds to each score."""
    return DRAWN_INSTRUCTIONS if task.draws else 0


def local_clocks(tiled: Tiled, needs: Footprint) -> float:
    """Compute the clocks that spilling adds to a step, at the rate of L1.

    Local memory is cached in L1, behind the port of shared memory. On sm_90 a spilled byte counts
    as moved once a step: compiled inner loops that spill 120 bytes, 30 words, have 17 to 26 loads
    and stores of them, since some words live around the loop. Measured times on sm_86 require more
    (`spilled`). Nothing hides these clocks, since the next instruction needs the spilled word.
    """
    arch = tiled.gpu.arch
    threads = threads_of(arch, tiled.config.num_warps)
    moved = rates_of(arch).spilled * needs.spill_bytes * threads
    return moved / SMEM_BYTES_PER_CLK


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of a kernel over a whole problem."""

    seconds: Number
    cost: Number
    """Seconds by which configs are ranked: the kernel's own time, with a penalty of IDLE for SMs
    without a program, and the time that it leaves to the next kernel."""
    units: dict[str, Number]
    """Seconds that each unit would need by itself."""
    on_sms: Number
    """Seconds in which SMs are busy."""
    waves: Number
    dram_bytes: Number
    flops: Number
    """Tensor flops executed: whole tiles and slices at padded head dims."""
    busy_seconds: Number
    """Seconds in which SMs are busy, in a kernel with a loop. If configs wait for memory equally
    long, the one with the fewest leaves most room for effects that the model does not know."""
    left_seconds: Number = 0.0
    """Seconds in which the next kernel reads the results that this kernel leaves for it."""
    idle: Number = 0.0
    """Part of the SMs without a program, in kernels that could have more programs."""

    @property
    def terms(self) -> tuple[tuple[str, float], ...]:
        """The units of one config with their seconds, the largest first."""
        return tuple(sorted(self.units.items(), key=lambda item: -item[1]))

    @property
    def limit(self) -> str:
        """The unit that decides about one config: `l2` or `dram` if all SMs wait for that memory,
        otherwise the unit of an SM that is busy longest."""
        memory = max(MEMORY, key=self.units.__getitem__)
        if self.units[memory] >= self.on_sms:
            return memory
        return max(self.units.keys() - MEMORY, key=self.units.__getitem__)


@in_columns
def time(tiled: Tiled, needs: Footprint, code: StepClocks | None = None) -> Time:
    """Predict the time of a config, over all panels if the kernel works on panels.

    `needs` are the resources of a program, predicted or as compiled. `code` are the clocks of a
    step counted in machine code; None predicts them.
    """
    gpu, config, run, moved = tiled.gpu, tiled.config, launches(tiled), traffic(tiled)
    task, work, clk, rates = tiled.task, tiled.step, code or step_clocks(tiled), rates_of(gpu.arch)
    steps, programs = floats(run.steps), floats(run.programs)
    fits = residents(needs, gpu, config)
    moved_bytes = floats(moved.read_bytes + moved.write_bytes)
    facts = facts_of(gpu) | {
        **asdict(clk),
        "local": clk.local if code else local_clocks(tiled, needs),
        "num_warps": config.num_warps,
        "ahead": config.num_stages - 1 if work.streamed else 0,
        "loads": work.loads,
        "scores_after": work.scores_after,
        "results": len(work.results),
        "result_words": work.result_words,
        "epilogue": rates.epilogue if work.streamed else 0.0,
        "per_score": instructions(tiled.spec).score,
        "drawn": drawn_of(task),
        "fits": fits,
        "count": floats(run.count),
        "programs": programs,
        "steps": steps,
        "longest": floats(run.longest),
        "masked": floats(run.partial) / np.where(steps > 0, steps, 1.0),
        "heavy_first": bool(heavy_end(task.problem.mask, task.spec)),
        "sections": -(-task.heads_kv // heads_together(task.problem, task.spec)),
        "moved_bytes": moved_bytes,
        "write_bytes": floats(moved.write_bytes),
        "launching": launch_seconds(task, floats(run.count)),
        "parts": tiled.spec.parts,
        "per_step": steps / (gpu.num_sms * gpu.clock_hz),
        "per_program": programs / (gpu.num_sms * gpu.clock_hz),
    }
    table = PROGRAM if rates.exposed else QUEUED
    waves = computed(WAVES, facts, **_FUNCTIONS)
    last, many = waves["last"], waves["waves"] >= 1

    def beside(together: Number) -> dict[str, Any]:
        return computed(table, facts | {"together": together}, **_FUNCTIONS)

    full, alone = beside(np.where(many, fits, last)), beside(np.where(last > 0, last, fits))
    ends = {"full_step": full["step"], "full_ends": full["ends"]}
    ends |= {"alone_step": alone["step"], "alone_ends": alone["ends"]}
    in_dram = dram_bytes(tiled, in_flight=gpu.num_sms * fits)
    values = computed(KERNEL, waves | ends | {"dram_bytes": in_dram}, **_FUNCTIONS)
    units = computed(UNITS, full)
    return Time(
        seconds=values["seconds"],
        cost=values["cost"],
        units={name: units[name] for name in UNITS} | {name: values[name] for name in MEMORY},
        on_sms=values["on_sms"],
        waves=values["waves"],
        dram_bytes=in_dram,
        flops=2 * run.steps * work.multiply_adds,
        busy_seconds=values["on_sms"] if work.streamed else 0.0,
        left_seconds=values["left"],
        idle=values["idle"],
    )


def facts_of(gpu: GpuSpec) -> dict[str, Any]:
    """Return the constants and the properties of a GPU that formulas name."""
    rates = rates_of(gpu.arch)
    return {
        "num_sms": gpu.num_sms,
        "clock_hz": gpu.clock_hz,
        "l2_bytes": gpu.l2_bytes,
        "exp_rate": gpu.exp_per_clk_per_sm,
        "l2_rate": gpu.l2_bandwidth * rates.l2_efficiency,
        "dram_rate": gpu.dram_bandwidth * rates.dram_efficiency,
        "pushed_out": rates.pushed_out,
        "latency_seconds": rates.latency_seconds,
        "step_clk": rates.step_clk,
        "lockstep": rates.lockstep,
        "ISSUE_PER_CLK": ISSUE_PER_CLK,
        "SCHEDULERS": SCHEDULERS,
        "IDLE": IDLE,
    }


def launch_seconds(task: KernelTask, count: Number) -> Number:
    """Compute the time of `count` launches of a kernel in addition to the work of programs.

    The first launch of a pass is prepared while no kernel runs, each following launch on the stream
    while the one before still runs.
    """
    rates = rates_of(task.gpu.arch)
    first = task.kernel == task.family.names[0]
    return (count - first) * rates.following_seconds + first * rates.launch_seconds


def queued(warps: Number, together: Number, units: tuple[Number, ...], idle: float) -> Number:
    """Compute the clocks of a step of a program if each warp waits for its own results. Units then
    work in parallel only as far as there are other warps.

    `units` are the clocks for which a step keeps each unit busy, `idle` those that a warp spends at
    no unit. Warps that share a scheduler queue for its units, in mean-value analysis (Reiser and
    Lavenberg, 1980): an arriving warp finds as many as there are on average with one warp less. A
    single warp takes the sum of all units; many warps take the clocks of the busiest unit.
    """
    used = np.minimum(SCHEDULERS, warps * together)
    per_scheduler = warps * together / used
    of_warp = [clocks * SCHEDULERS / warps for clocks in units]
    waiting: list[Number] = [0.0] * len(units)
    apart = before = 0.0
    for present in range(1, math.ceil(np.max(per_scheduler)) + 1):
        there = [clocks * (1 + others) for clocks, others in zip(of_warp, waiting, strict=True)]
        now, counts = (idle + sum(there)) / present, present < per_scheduler + 1
        before, apart = np.where(counts, apart, before), np.where(counts, now, apart)
        waiting = [clocks / now for clocks in there]
    part = np.where(before > 0, per_scheduler % 1, 0.0)
    apart = np.where(part > 0, before + part * (apart - before), apart)
    return picked(apart * warps / used, ...)


def _overlapped(*busy: Number) -> Number:
    """Combine the clocks of units that work in parallel: a little more than those of the
    busiest."""
    return sum(clocks**OVERLAP_NORM for clocks in busy) ** (1 / OVERLAP_NORM)


_FUNCTIONS = {"norm": _overlapped, "queued": queued, "ceiling": np.ceil, "floor": np.floor}
