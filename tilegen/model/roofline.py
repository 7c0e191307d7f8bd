"""Predicted time: what each step of a kernel asks of each unit, then steps, programs and waves.

A step is one stationary tile against one streamed tile. Its units work side by side, except that
softmax and matrix products of one program wait for each other (`exposed`). Clocks are clocks of one
SM with all its resident programs; the rates and their sources are in rates.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from tilegen.gpus.nearest import nearest, on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import WIDTHS
from tilegen.model.footprint import repetition
from tilegen.model.hierarchy import dram_bytes, streamed_bytes
from tilegen.model.on_chip import Footprint, chunks, residents
from tilegen.model.traffic import Traffic, Visits
from tilegen.problem import AttentionProblem

ISSUE_PER_CLK = 128
"""Instructions of single threads that an SM's four schedulers issue each clock."""
SMEM_BYTES_PER_CLK = 128
PORT_BYTES_PER_CLK = 64
"""Bytes that one SM takes from L2 each clock."""
WARP_THREADS = {"sm_": 32, "gfx": 64}
OVERLAP_NORM = 4
"""How sharply units hide each other: infinity would be the maximum, 1 the sum."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """One family of rates.toml; the fields are described there."""

    tensor_efficiency: float
    vector_efficiency: float
    exposed: float
    full_rate_rows: int
    narrow_rate: float
    operand_rows: int
    l2_efficiency: float
    dram_efficiency: float
    latency_seconds: float
    step_clk: float
    launch_seconds: float


@dataclass(frozen=True, kw_only=True)
class Instructions:
    """Instructions of one thread per unit of work, from rates.toml."""

    score: float
    masked_score: float
    accumulator: float
    step: float
    stage: float


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one step works on."""

    stationary: int
    """Rows that stay on chip."""
    streamed: int
    """Rows that pass by."""
    kept_width: int
    """Words of one stationary row that matrix products read."""
    accumulator_width: int
    """Accumulated words of one stationary row."""
    product_width: int
    """Widths of all matrix products of a step, added up: each is stationary x streamed x width, and
    reads as many words of each streamed row."""

    @property
    def scores(self) -> int:
        """Entries of the score tile."""
        return self.stationary * self.streamed

    @property
    def flops(self) -> int:
        """Of all matrix products of a step."""
        return 2 * self.scores * self.product_width


def padded_widths(problem: AttentionProblem) -> tuple[int, int]:
    """Return (head_dim_qk, head_dim_v) as tiles hold them."""
    return sum(chunks(problem.head_dim_qk)), sum(chunks(problem.head_dim_v))


def tile(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> Tile:
    """Return what one step of `kernel` works on."""
    qk, v = padded_widths(problem)
    return _tile(qk, v, config.block_m, config.block_n, kernel)


@lru_cache(maxsize=4096)
def _tile(qk: int, v: int, m: int, n: int, kernel: Kernel) -> Tile:
    spec, width = KERNELS[kernel], {"qk": qk, "v": v}
    if spec.whole is None:  # one step: what is read is worked on once
        read = sum(width[WIDTHS[one]] for one in spec.given if one in WIDTHS)
        return Tile(stationary=m, streamed=0, kept_width=0, accumulator_width=read, product_width=0)
    stays, passes = (n, m) if spec.stays == "columns" else (m, n)
    return Tile(
        stationary=stays,
        streamed=passes,
        kept_width=sum(width[WIDTHS[one]] for one in spec.whole.keeps),
        accumulator_width=sum(width[WIDTHS[one]] for one in spec.whole.accumulates),
        product_width=sum(width[one] for one in spec.whole.products),
    )


@dataclass(frozen=True, kw_only=True)
class StepClocks:
    """Clocks that one step keeps each unit of an SM busy, whoever else runs there."""

    tensor: float
    exp: float
    issue: float
    masking: float
    """More issue slots, in a partial tile."""
    smem: float
    port: float


def step_clocks(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel
) -> StepClocks:
    """Return how long one step keeps each unit busy."""
    rates, per = family(gpu.arch), instructions(kernel)
    work = tile(problem, config, kernel)
    vector = not on_tensor_cores(problem.dtype, gpu.arch)
    peak = peak_flops_per_clk(gpu, vector)
    if not vector and work.stationary < rates.full_rate_rows:
        peak *= rates.narrow_rate
    repeated = repetition(problem, config, kernel, gpu.arch)
    threads = WARP_THREADS[gpu.arch[:3]] * config.num_warps
    if rates.operand_rows and work.stationary >= 64 and not vector:
        reads, kept = work.stationary / rates.operand_rows, work.stationary * work.kept_width
    else:  # each warp reads the streamed tile for its own rows, and keeps those in registers
        reads, kept = min(config.num_warps, work.stationary / 16), 0
    operands = max(1.0, reads) * work.streamed * work.product_width + kept
    return StepClocks(
        tensor=repeated * work.flops / peak,
        exp=repeated * work.scores / gpu.exp_per_clk_per_sm,
        issue=(
            repeated * per.score * work.scores
            + per.accumulator * work.stationary * work.accumulator_width
            + (per.step + per.stage * config.num_stages) * threads
        )
        / ISSUE_PER_CLK,
        masking=repeated * per.masked_score * work.scores / ISSUE_PER_CLK,
        smem=operands * problem.element_bytes / SMEM_BYTES_PER_CLK,
        port=streamed_bytes(problem, kernel) * work.streamed / PORT_BYTES_PER_CLK,
    )


def local_clocks(needs: Footprint, gpu: GpuSpec, config: TileConfig) -> float:
    """Return how much longer a step takes for what it spills, at the rate of L1.

    Local memory is cached there, behind the port of shared memory. A spilled byte counts as moved
    once a step: inner loops compiled for sm_90 that spill 120 bytes, 30 words, have 17 to 26 loads
    and stores of them, since some words live around the loop. Nothing is taken to hide
    them: what was spilled is wanted by the next instruction.
    """
    threads = WARP_THREADS[gpu.arch[:3]] * config.num_warps
    return needs.spill_bytes * threads / SMEM_BYTES_PER_CLK


def peak_flops_per_clk(gpu: GpuSpec, vector: bool) -> float:
    """Return what a good kernel's matrix products reach on one SM; outside of the tensor cores if
    `vector`."""
    rates = family(gpu.arch)
    peak = (
        gpu.vector_flops_32 * rates.vector_efficiency
        if vector
        else gpu.tensor_flops_16 * rates.tensor_efficiency
    )
    return peak / (gpu.num_sms * gpu.clock_hz)


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds of one launch."""

    seconds: float
    terms: tuple[tuple[str, float], ...]
    """Seconds each unit needs if nothing else mattered, the largest first."""
    waves: float
    dram_bytes: int


def time(
    problem: AttentionProblem,
    gpu: GpuSpec,
    config: TileConfig,
    kernel: Kernel,
    *,
    moved: Traffic,
    counts: Visits,
    needs: Footprint,
) -> Time:
    """Return the predicted time of one launch."""
    rates = family(gpu.arch)
    heads = problem.batch * problem.num_heads_q
    spec = KERNELS[kernel]
    group = problem.group_size if spec.stays == "columns" else 1
    programs = heads // group * counts.programs
    steps, partial = heads * counts.tiles, heads * counts.partial_tiles
    longest = group * counts.longest

    fits = residents(needs, gpu, config)
    waves = programs / (gpu.num_sms * fits)
    together = min(fits, -(-programs // gpu.num_sms))  # programs that share an SM
    latency = rates.latency_seconds * gpu.clock_hz
    clk = step_clocks(problem, gpu, config, kernel)
    masked = partial / steps if steps else 0.0
    softmax = max(clk.issue + masked * clk.masking, clk.exp)
    ahead = config.num_stages - 1 if spec.masked else 0
    work = clk.tensor + rates.exposed * softmax + rates.step_clk / together
    wait = latency / (together * max(ahead, 1))
    local = local_clocks(needs, gpu, config)
    if not ahead:  # nothing loads while a program computes
        work += wait
    step = overlapped(work, clk.smem, clk.port, wait) + local

    # A program's beginning and end: its own tile comes in, the pipeline fills, the result goes out.
    own_bytes = (moved.read_bytes + moved.write_bytes) / max(programs, 1)
    own_bytes -= streamed_bytes(problem, kernel) * heads * counts.rows / max(programs, 1)
    overhead = 2 * latency / together + own_bytes / PORT_BYTES_PER_CLK
    mean = step * steps / programs + overhead
    busiest = step * longest + overhead
    if longest * programs == steps:  # equal programs run in waves
        clocks = -(-programs // gpu.num_sms) * mean
    else:  # long ones start first, so short ones fill the last wave
        clocks = max(busiest, mean * programs / gpu.num_sms + (mean / 2 if waves > 1 else 0.0))

    dram = dram_bytes(problem, gpu, kernel, moved, counts, in_flight=gpu.num_sms * fits)
    l2_seconds = (moved.read_bytes + moved.write_bytes) / (gpu.l2_bandwidth * rates.l2_efficiency)
    dram_seconds = dram / (gpu.dram_bandwidth * rates.dram_efficiency)
    per_step = steps / (gpu.num_sms * gpu.clock_hz)
    terms = {
        "tensor": clk.tensor * per_step,
        "exp": clk.exp * per_step,
        "issue": (clk.issue + masked * clk.masking) * per_step,
        "smem": (clk.smem + local) * per_step,
        "l2": max(l2_seconds, clk.port * per_step),
        "dram": dram_seconds,
        "latency": wait * per_step + overhead * programs / (gpu.num_sms * gpu.clock_hz),
    }
    return Time(
        seconds=max(clocks / gpu.clock_hz, l2_seconds, dram_seconds) + rates.launch_seconds,
        terms=tuple(sorted(terms.items(), key=lambda item: -item[1])),
        waves=waves,
        dram_bytes=dram,
    )


def least_seconds(gpu: GpuSpec, moved: Traffic) -> float:
    """Return the time that L2 alone takes: `time` is never below, whatever else a config does."""
    rates = family(gpu.arch)
    l2_seconds = (moved.read_bytes + moved.write_bytes) / (gpu.l2_bandwidth * rates.l2_efficiency)
    return l2_seconds + rates.launch_seconds


def overlapped(*busy: float) -> float:
    """Return the clocks of units that work side by side: a little more than the busiest alone."""
    return sum(clocks**OVERLAP_NORM for clocks in busy) ** (1 / OVERLAP_NORM)


@cache
def family(arch: str) -> Rates:
    """Return the rates of an architecture, or of the nearest older one."""
    families: dict[str, Any] = {
        name: row for row in _table()["family"] for name in row["architectures"]
    }
    row = families[nearest(arch, families)]
    return Rates(**{field: row[field] for field in Rates.__dataclass_fields__})


@cache
def instructions(kernel: Kernel) -> Instructions:
    """Return the instruction counts of a kernel's inner loop."""
    return Instructions(**_table()["instructions"][KERNELS[kernel].fitted_as])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("tilegen.model") / "rates.toml").read_text(encoding="utf-8"))
