"""Predict the time of a kernel: from clocks of a step on each unit to steps, programs and waves.

The units of an SM work in parallel, except that softmax and matrix products of a program wait for
each other: by a given part (`exposed`), or as far as warps queue for the units. Clocks are those of
an SM with all its resident programs. The rates and their sources are in rates.toml; README.md lists
every constant with its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import threads_of
from tilegen.kernels.launch_order import heads_together, heavy_end
from tilegen.model.dram import dram_bytes
from tilegen.model.footprint import executed, reads_shared, repetition
from tilegen.model.launches import Launches, launches
from tilegen.model.on_chip import Footprint, family, residents
from tilegen.model.operands import shared_words
from tilegen.model.rates import instructions, peak_flops_per_clk, rates_of
from tilegen.model.traffic import Traffic, traffic
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


@dataclass(frozen=True, kw_only=True)
class StepClocks:
    """Clocks for which a step keeps each unit of an SM busy, beside other programs."""

    tensor: float
    exp: float
    issue: float
    masking: float
    """Additional issue slots for a partial tile."""
    smem: float
    exposed: float
    """Part of issue or exponentials, whichever is longer, that matrix products do not hide."""
    asynchronous: bool
    """True if a warp continues while its matrix products run, which read their operands
    themselves."""
    local: float = 0.0
    """Loads and stores of local memory, which nothing hides."""
    local_once: float = 0.0
    """Loads and stores of local memory outside of the loop, once per program [clocks]."""

    @property
    def bound(self) -> float:
        """Lower bound on the clocks of a step on a full tile, without local memory."""
        softmax = max(self.issue, self.exp)
        return max(self.tensor + self.exposed * softmax, softmax, self.smem)


def step_clocks(tiled: Tiled) -> StepClocks:
    """Predict the clocks for which a step keeps each unit busy; the same for all lengths."""
    return tiled.by_config("clocks of a step", lambda: _step_clocks(tiled))


def _step_clocks(tiled: Tiled) -> StepClocks:
    spec, problem, config, gpu = tiled.spec, tiled.problem, tiled.config, tiled.gpu
    rates, per, drawn = rates_of(gpu.arch), instructions(spec), drawn_of(tiled.task)
    work, size = tiled.step, problem.element_bytes
    vector = not on_tensor_cores(problem.dtype, gpu.arch)
    peak = peak_flops_per_clk(gpu, vector=vector)
    if not vector and work.rows < rates.full_rate_rows:
        peak *= rates.narrow_rate
    repeated = repetition(work, size, config.num_warps, gpu.arch)
    threads = threads_of(gpu.arch, config.num_warps)
    issue = repeated * (per.score + drawn) * work.scores
    issue += (per.step + per.stage * config.num_stages) * threads
    if work.rescales:
        issue += per.accumulator * work.result_words
    elif work.changed:
        issue += CHANGED_INSTRUCTIONS * work.changed
    if vector:  # each thread reads both operands for its own square of a product
        of_thread = sum(product.operands_of_thread(threads) for product in work.products)
        operands = of_thread * threads / SHARED_READS
    else:
        of = work, size, config.num_warps, gpu.arch
        operands = shared_words(*of, rows_per_read=rates.operand_rows)
    return StepClocks(
        tensor=2 * executed(work, size, config.num_warps, gpu.arch) / peak,
        exp=repeated * work.scores / gpu.exp_per_clk_per_sm,
        issue=issue / ISSUE_PER_CLK,
        masking=repeated * per.masked_score * work.scores / ISSUE_PER_CLK,
        smem=operands * size / SMEM_BYTES_PER_CLK,
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

    seconds: float
    terms: tuple[tuple[str, float], ...]
    """Seconds that each unit would need by itself, the largest first."""
    limit: str
    """The unit that decides: `l2` or `dram` if all SMs wait for that memory, otherwise the unit of
    an SM that is busy longest."""
    waves: float
    dram_bytes: int
    flops: int
    """Tensor flops executed: whole tiles and slices at padded head dims."""
    busy_seconds: float
    """Seconds in which SMs are busy, in a kernel with a loop. If configs wait for memory equally
    long, the one with the fewest leaves most room for effects that the model does not know."""
    left_seconds: float = 0.0
    """Seconds in which the next kernel reads the results that this kernel leaves for it."""
    idle: float = 0.0
    """Part of the SMs without a program, in kernels that could have more programs."""

    @property
    def cost(self) -> float:
        """Seconds by which configs are ranked: the kernel's own time, with a penalty of IDLE for
        SMs without a program, and the time that it leaves to the next kernel."""
        return (1 + IDLE * self.idle) * self.seconds + self.left_seconds


def time(tiled: Tiled, needs: Footprint, code: StepClocks | None = None) -> Time:
    """Predict the time of a config, over all panels if the kernel works on panels.

    `needs` are the resources of a program, predicted or as compiled. `code` are the clocks of a
    step counted in machine code; None predicts them.
    """
    gpu, run, moved = tiled.gpu, launches(tiled), traffic(tiled)
    work, clk = tiled.step, code or step_clocks(tiled)
    local = code.local if code else local_clocks(tiled, needs)
    per_launch = run.programs / run.count

    fits = residents(needs, gpu, tiled.config)
    slots = gpu.num_sms * fits

    def shared(together: int) -> ProgramClocks:
        return _program_clocks(tiled, clk, local, together=together)

    waves = per_launch / slots
    last = math.ceil(per_launch % slots / gpu.num_sms)  # programs of an SM in the last wave
    full = shared(fits if waves >= 1 else last)
    mean = full.step * run.steps / run.programs + full.ends
    if run.longest * run.programs == run.steps:  # equal programs run in waves
        alone = shared(last) if last else full
        total = int(waves) * fits * mean + last * (alone.step * run.longest + alone.ends)
        total *= run.count
    else:  # long programs start first, so short ones fill the last wave
        tail = 0.0
        if waves > 1:
            tail = tail_of(tiled.task, run, slots, one_step=full.step, overhead=full.ends)
        total = max(full.step * run.longest + full.ends, mean * run.programs / gpu.num_sms + tail)

    dram = dram_bytes(tiled, in_flight=slots)
    on_l2 = l2_seconds(gpu, moved, per_launch)
    on_dram = dram_seconds(gpu, dram)
    per_step, per_program = (
        number / (gpu.num_sms * gpu.clock_hz) for number in (run.steps, run.programs)
    )
    terms = {
        "tensor": clk.tensor * per_step,
        "exp": clk.exp * per_step + full.exp_after * per_program,
        "issue": (clk.issue + run.masked * clk.masking) * per_step + full.issue_after * per_program,
        "smem": (clk.smem + local) * per_step + clk.local_once * per_program,
        "l2": on_l2,
        "dram": on_dram,
        "latency": full.wait * per_step + 2 * full.latency * per_program,
    }
    programs = total / gpu.clock_hz
    of_memory = {"l2": on_l2, "dram": on_dram}
    limit = max(of_memory, key=of_memory.__getitem__)
    if of_memory[limit] < programs:
        limit = max(terms.keys() - of_memory.keys(), key=terms.__getitem__)
    left = idle = 0.0
    if tiled.spec.parts:
        left = l2_seconds(gpu, replace(moved, read_bytes=0))
        idle = max(0.0, 1 - per_launch / gpu.num_sms)
    return Time(
        seconds=max(programs, on_l2, on_dram) + launch_seconds(tiled.task, run.count),
        terms=tuple(sorted(terms.items(), key=lambda item: -item[1])),
        limit=limit,
        waves=waves,
        dram_bytes=dram,
        flops=int(2 * run.steps * work.multiply_adds),
        busy_seconds=programs if work.streamed else 0.0,
        left_seconds=left,
        idle=idle,
    )


@dataclass(frozen=True, slots=True)
class ProgramClocks:
    """Clocks of a program on an SM that several programs share. The sum over these programs is the
    time of all of them together."""

    step: float
    """Clocks of one step."""
    latency: float
    """Clocks from issuing a load to its data; other programs work in the meantime."""
    epilogue: float
    """Clocks in which results are rounded and stored."""
    wait: float
    """Clocks of a step that wait for its loads."""
    exp_after: float
    """Clocks of exponentials after the last step."""
    issue_after: float
    """Issue slots after the last step [clocks]."""
    local_once: float
    """Loads and stores of local memory before the first step and after the last."""

    @property
    def ends(self) -> float:
        """Clocks before the first step and after the last: loading the stationary tile, filling the
        pipeline, storing the result."""
        after = max(self.exp_after, self.issue_after)
        return 2 * self.latency + self.epilogue + after + self.local_once


def _program_clocks(tiled: Tiled, clk: StepClocks, local: float, *, together: int) -> ProgramClocks:
    gpu, config, run = tiled.gpu, tiled.config, launches(tiled)
    rates, work = rates_of(gpu.arch), tiled.step
    latency = rates.latency_seconds * gpu.clock_hz / together
    softmax = max(clk.issue + run.masked * clk.masking, clk.exp)
    ahead = config.num_stages - 1 if work.streamed else 0
    wait = latency / max(ahead, 1)
    if rates.exposed:
        warps = config.num_warps * together
        alone = warps <= SCHEDULERS or (rates.lockstep > 0 and together == 1)
        busy, smem = busy_clocks(clk, softmax, alone=alone, lockstep=rates.lockstep), clk.smem
        busy += rates.step_clk / together
    else:
        units = clk.tensor, softmax, clk.smem
        busy, smem = queued(config.num_warps, together, units, idle=rates.step_clk), 0.0
    if not ahead:  # nothing is loaded while a program computes
        busy += wait
    if work.loads > 1:  # every key tile restarts the pipeline of slices
        busy += 2 * latency
    after = instructions(tiled.spec).score * len(work.results) + drawn_of(tiled.task)
    return ProgramClocks(
        step=_overlapped(busy, smem, wait * work.loads) + local,
        latency=latency,
        epilogue=rates.epilogue * work.result_words / together if work.streamed else 0.0,
        wait=wait * work.loads,
        exp_after=work.scores_after / gpu.exp_per_clk_per_sm,
        issue_after=after * work.scores_after / ISSUE_PER_CLK,
        local_once=clk.local_once,
    )


def tail_of(
    task: KernelTask,
    run: Launches,
    in_flight: int,
    *,
    one_step: float,
    overhead: float,
) -> float:
    """Return the idle tail of an unbalanced launch [clocks].

    The end takes half a program: half a mean program or, if heavy tiles start first, half of one of
    the `in_flight` lightest of the heads that start together. Lengths are assumed to rise evenly to
    the longest.
    """
    mean = float(run.steps / run.programs)
    if not heavy_end(task.problem.mask, task.spec):
        return (mean * one_step + overhead) / 2
    sections = -(-task.heads_kv // heads_together(task.problem, task.spec))
    shortest = max(0.0, 2 * mean - run.longest)
    part = min(1.0, in_flight * sections / run.programs)
    return ((shortest + part / 2 * (run.longest - shortest)) * one_step + overhead) / 2


def least_seconds(gpu: GpuSpec, clocks: StepClocks, steps: float, *, masked: float = 0.0) -> float:
    """Compute a lower bound on the seconds of so many steps, a part of them `masked`, for any
    config: the time of SMs that never wait."""
    softmax = max(clocks.issue + masked * clocks.masking, clocks.exp)
    busy = max(clocks.tensor + clocks.exposed * softmax, softmax)
    of_step = _overlapped if rates_of(gpu.arch).exposed else max
    return of_step(busy, clocks.smem) * steps / (gpu.num_sms * gpu.clock_hz)


def launch_seconds(task: KernelTask, count: int) -> float:
    """Compute the time of `count` launches of a kernel in addition to the work of programs.

    The first launch of a pass is prepared while no kernel runs, each following launch on the stream
    while the one before still runs.
    """
    rates = rates_of(task.gpu.arch)
    first = task.kernel == task.family.names[0]
    return (count - first) * rates.following_seconds + first * rates.launch_seconds


def dram_seconds(gpu: GpuSpec, moved: int) -> float:
    """Compute the time in which bytes move between L2 and DRAM, from a cold L2.

    Arriving bytes evict data that other kernels wrote to L2, which moves to DRAM as well, until as
    many have arrived as L2 holds. This is the state after any large kernel, and in every
    measurement, where L2 is cleared by writing zeros. A latency passes before the first bytes and
    after the last, as at the beginning and end of a program.
    """
    rates = rates_of(gpu.arch)
    pushed_out = rates.pushed_out * min(moved, gpu.l2_bytes)
    bandwidth = gpu.dram_bandwidth * rates.dram_efficiency
    return 2 * rates.latency_seconds + (moved + pushed_out) / bandwidth


def l2_seconds(gpu: GpuSpec, moved: Traffic, programs: float = math.inf) -> float:
    """Compute the time in which bytes move between SMs and L2 in launches of so many programs. An
    SM has no more than its share of the bandwidth, even if others are idle."""
    moved_bytes = moved.read_bytes + moved.write_bytes
    busy = min(1.0, programs / gpu.num_sms)
    return moved_bytes / (busy * gpu.l2_bandwidth * rates_of(gpu.arch).l2_efficiency)


SCHEDULERS = 4
"""Parts of an SM that issue for their own warps, each with a share of every unit."""


def busy_clocks(clk: StepClocks, softmax: float, *, alone: bool, lockstep: float = 0.0) -> float:
    """Compute the clocks for which a step keeps an SM busy, `softmax` of them with work other than
    matrix products. `alone`: all warps of the SM start the same products together.

    Asynchronous products read their operands from shared memory themselves. Alone, they take the
    longer of reading and multiplying. The softmax follows, except for the part that the machine
    code issues beside products (1 - `exposed`), of which `lockstep` is not hidden either: no other
    warp fills the time. Published times of synchronous products do not support such a rule
    (benchmarks/results/published/README.md).
    """
    products, exposed = clk.tensor, clk.exposed
    if clk.asynchronous and alone:
        products = max(clk.tensor, clk.smem)
        exposed += lockstep * (1 - exposed)
    return max(products + exposed * softmax, softmax)


def queued(warps: int, together: int, units: tuple[float, ...], *, idle: float) -> float:
    """Compute the clocks of a step of a program if each warp waits for its own results. Units then
    work in parallel only as far as there are other warps.

    `units` are the clocks for which a step keeps each unit busy, `idle` those that a warp spends at
    no unit. Warps that share a scheduler queue for its units, in mean-value analysis (Reiser and
    Lavenberg, 1980): an arriving warp finds as many as there are on average with one warp less. A
    single warp takes the sum of all units; many warps take the clocks of the busiest unit.
    """
    used = min(SCHEDULERS, warps * together)
    per_scheduler = warps * together / used
    of_warp = [clocks * SCHEDULERS / warps for clocks in units]
    waiting = [0.0] * len(units)
    apart = before = 0.0
    for present in range(1, math.ceil(per_scheduler) + 1):
        there = [clocks * (1 + others) for clocks, others in zip(of_warp, waiting, strict=True)]
        before, apart = apart, (idle + sum(there)) / present
        waiting = [clocks / apart for clocks in there]
    if (part := per_scheduler % 1) and before:
        apart = before + part * (apart - before)
    return apart * warps / used


def _overlapped(*busy: float) -> float:
    """Combine the clocks of units that work in parallel: a little more than those of the
    busiest."""
    return sum(clocks**OVERLAP_NORM for clocks in busy) ** (1 / OVERLAP_NORM)
