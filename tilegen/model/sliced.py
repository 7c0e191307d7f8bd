"""Kernels that take head dims in slices: what a program holds on chip, and how long a pass takes.

These are the small-cache kernels, each one matrix product with something done before or after, and
the forward that streams Q again with every key tile. Rates and sources as in roofline.py.
"""

from __future__ import annotations

import math
from functools import lru_cache

from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import panels, rows_for
from tilegen.kernels.registry import KERNELS, direction_of
from tilegen.kernels.spec import Sliced
from tilegen.model import roofline
from tilegen.model.bounds import mask_size
from tilegen.model.hierarchy import L2_SHARE
from tilegen.model.on_chip import (
    Footprint,
    chunks,
    family,
    residents,
)
from tilegen.model.sliced_footprint import loop_of, step
from tilegen.model.traffic import Traffic, Visits
from tilegen.problem import AttentionProblem

STAGED_INSTRUCTIONS = 2.5
"""Of one thread, for each staged word: scale or mask it, and round it again."""


SHARED_READS = 2
"""Threads of a warp that one read of an operand serves, in IEEE fp32; an estimate."""


def time(
    problem: AttentionProblem,
    gpu: GpuSpec,
    config: TileConfig,
    kernel: Kernel,
    *,
    moved: Traffic,
    counts: Visits,
    needs: Footprint,
) -> roofline.Time:
    """Return the predicted time of a kernel over all panels of a problem."""
    rates, work = roofline.family(gpu.arch), step(problem, config, kernel)
    panel = loop_of(kernel).panel
    programs, steps, launches = _grid(problem, gpu, config, kernel, counts)
    vector = not on_tensor_cores(problem.dtype, gpu.arch)
    peak = roofline.peak_flops_per_clk(gpu, vector)
    if not vector and work.rows < rates.full_rate_rows:
        peak *= rates.narrow_rate
    fits = residents(needs, gpu, config)
    together = min(fits, -(-programs // (launches * gpu.num_sms)))
    latency = rates.latency_seconds * gpu.clock_hz

    products = [(work.rows, work.columns, work.depth)]
    loaded = work.loaded
    slices = 1
    if not panel:
        slices = -(-problem.head_dim_qk // config.block_d)
        v = sum(chunks(problem.head_dim_v))
        products = products * slices + [(work.rows, v, config.block_n)]
        loaded = loaded * slices + config.block_n * v
    if vector:  # each thread reads both operands for its own square of the result
        threads = family(gpu.arch).warp_threads * config.num_warps
        operands = sum(2 * k * math.sqrt(r * c * threads) / SHARED_READS for r, c, k in products)
    elif rates.operand_rows and work.rows >= 64:
        operands = sum(max(1.0, r / rates.operand_rows) * c * k + r * k for r, c, k in products)
    else:  # each warp reads the other operand for its own rows, and keeps those in registers
        reads = max(1.0, min(config.num_warps, work.rows / 16))
        operands = sum(reads * c * k for _, c, k in products)
    tensor = sum(2.0 * r * c * k for r, c, k in products) / peak
    smem = operands * problem.element_bytes / roofline.SMEM_BYTES_PER_CLK
    local = roofline.local_clocks(needs, gpu, config)
    port = loaded * problem.element_bytes / roofline.PORT_BYTES_PER_CLK
    issue = STAGED_INSTRUCTIONS * work.staged / roofline.ISSUE_PER_CLK
    ahead = config.num_stages - 1
    wait = latency / (together * max(ahead, 1))
    busy = tensor + rates.exposed * issue + rates.step_clk / together
    if not ahead:
        busy += wait
    scores = config.block_m * config.block_n
    exp = scores / gpu.exp_per_clk_per_sm if panel == "writes" else 0.0
    if not panel:  # every key tile starts the pipeline of slices again
        softmax = roofline.instructions("fwd")
        exp = scores / gpu.exp_per_clk_per_sm
        issue = softmax.score * scores + softmax.accumulator * work.accumulators
        issue /= roofline.ISSUE_PER_CLK
        busy += rates.exposed * max(issue, exp) + 2 * latency / together
        step_clk, tail = roofline.overlapped(busy, smem, port, wait * slices) + local, 0.0
    else:
        per = roofline.instructions("fwd")
        entries = work.accumulators if panel == "writes" else 0
        tail = max(per.score * entries / roofline.ISSUE_PER_CLK, exp)
        step_clk = roofline.overlapped(busy, smem, port, wait) + local

    written = moved.write_bytes / max(programs, 1)
    overhead = 2 * latency / together + written / roofline.PORT_BYTES_PER_CLK + tail
    program = step_clk * steps / programs + overhead
    per_launch = -(-programs // launches)
    clocks = launches * -(-per_launch // gpu.num_sms) * program
    dram = dram_bytes(problem, gpu, kernel, moved)
    l2_seconds = (moved.read_bytes + moved.write_bytes) / (gpu.l2_bandwidth * rates.l2_efficiency)
    dram_seconds = dram / (gpu.dram_bandwidth * rates.dram_efficiency)
    per_sm = 1 / (gpu.num_sms * gpu.clock_hz)
    exps = exp * (programs if panel else steps)
    terms = {
        "tensor": tensor * steps * per_sm,
        "exp": exps * per_sm,
        "issue": (issue * steps + tail * programs) * per_sm,
        "smem": (smem + local) * steps * per_sm,
        "l2": max(l2_seconds, port * steps * per_sm),
        "dram": dram_seconds,
        "latency": (wait * steps + 2 * latency / together * programs) * per_sm,
    }
    return roofline.Time(
        seconds=max(clocks / gpu.clock_hz, l2_seconds, dram_seconds)
        + launches * rates.launch_seconds,
        terms=tuple(sorted(terms.items(), key=lambda item: -item[1])),
        waves=per_launch / (gpu.num_sms * fits),
        dram_bytes=dram,
    )


def flops(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel, counts: Visits
) -> int:
    """Return the tensor flops executed: whole tiles and slices."""
    work = step(problem, config, kernel)
    _, steps, _ = _grid(problem, gpu, config, kernel, counts)
    if not loop_of(kernel).panel:
        slices = -(-problem.head_dim_qk // config.block_d)
        width = slices * config.block_d + sum(chunks(problem.head_dim_v))
        return 2 * steps * config.block_m * config.block_n * width
    return 2 * steps * work.rows * work.columns * work.depth


def _grid(
    problem: AttentionProblem, gpu: GpuSpec, config: TileConfig, kernel: Kernel, counts: Visits
) -> tuple[int, int, int]:
    """Return (programs, steps, launches) of all panels."""
    heads = problem.batch * problem.num_heads_q
    tiles = int(heads * counts.tiles)
    loop = loop_of(kernel)
    if not loop.panel:
        return heads * counts.programs, tiles, 1
    rows = rows_of_panels(problem, gpu, kernel)
    panels, groups = _panels(heads, problem.group_size, problem.seqlen_q, rows)
    launches = KERNELS[kernel].launches_per_panel * panels
    slices = sum(-(-width // config.block_d) for width in _widths(problem, loop))
    if loop.panel == "writes":
        return max(1, tiles), tiles * slices, launches
    each = groups if KERNELS[kernel].stays == "columns" else heads
    return each * counts.programs * slices, tiles * slices, launches


def _widths(problem: AttentionProblem, loop: Sliced) -> list[int]:
    """Return the head dims that are taken in slices."""
    return [problem.head_dims[one] for one in loop.slices]


@lru_cache(maxsize=1024)
def _panels(heads: int, group_size: int, seqlen_q: int, rows: int) -> tuple[int, int]:
    """Return how many panels there are, and of how many key-value heads, added up."""
    of_one_head = rows < 2 * seqlen_q
    alike = list(
        panels(1, 1, seqlen_q, rows) if of_one_head else panels(heads, group_size, seqlen_q, rows)
    )
    times = heads if of_one_head else 1
    return times * len(alike), times * sum(-(-panel.num_heads // group_size) for panel in alike)


@lru_cache(maxsize=256)
def rows_of_panels(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> int:
    """Return the query rows that a panel of this kernel's pass holds on this GPU."""
    return rows_for(problem, gpu, direction_of(kernel))


def dram_bytes(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, moved: Traffic) -> int:
    """Return the bytes between L2 and DRAM; no more than a kernel of panels moves at all.

    Inputs and outputs move once, what streams again with every panel unless L2 holds it besides the
    panel. A panel that L2 does not hold is written and read back once.
    """
    most = _dram_bytes(problem, gpu, kernel)
    if not loop_of(kernel).panel or KERNELS[kernel].stays == "columns":
        return most
    return min(most, moved.read_bytes + moved.write_bytes)


@lru_cache(maxsize=256)
def _dram_bytes(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> int:
    size = problem.element_bytes
    mask = mask_size(problem.mask, problem.seqlen_q, problem.seqlen_kv)
    heads, kv_heads = problem.batch * problem.num_heads_q, problem.batch * problem.num_heads_kv
    qk, v = problem.head_dim_qk, problem.head_dim_v
    rows, columns = heads * mask.rows * size, kv_heads * mask.columns * size
    loop = loop_of(kernel)
    if not loop.panel:
        return rows * (qk + v) + columns * (qk + v) + 4 * heads * problem.seqlen_q
    held = rows_of_panels(problem, gpu, kernel) * problem.seqlen_kv * size
    held *= 1 if direction_of(kernel) == "forward" else 2
    kept = held <= L2_SHARE * gpu.l2_bytes
    panel = 0 if kept else heads * mask.entries * size
    width = sum(_widths(problem, loop))
    if KERNELS[kernel].stays == "columns":
        return 2 * panel + (rows + columns) * (qk + v)
    stream = problem.seqlen_kv * width * size
    group = problem.group_size * problem.seqlen_q
    sweeps = max(1, -(-group // rows_of_panels(problem, gpu, kernel)))
    if held + stream <= L2_SHARE * gpu.l2_bytes:
        sweeps = 1
    panels_moved = panel * loop.results
    return panels_moved + rows * width + sweeps * columns * width
