"""What one program of a kernel that takes head dims in slices holds on chip."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Sliced
from tilegen.model.known import reported_spill, spilled_bytes
from tilegen.model.on_chip import (
    MAX_UNROLLED,
    ROWS_PER_WARP,
    Family,
    Footprint,
    chunks,
    corrected,
    family,
    max_registers,
)
from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a kernel's inner loop: rows x depth times depth x columns."""

    rows: int
    columns: int
    depth: int
    loaded: int
    """Words that come in."""
    staged: int
    """Words of an operand that changes in registers before the product."""
    accumulators: int
    """fp32 words that the program keeps, results and score tiles."""


def step(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> Step:
    """Return what one step of a sliced kernel works on."""
    loop = loop_of(kernel)
    rows, columns, depth = (getattr(config, one) for one in (loop.rows, loop.columns, loop.depth))
    accumulators = loop.results * rows * columns
    if not loop.panel:  # a step is all slices of one key tile, and the product with V
        accumulators += rows * sum(chunks(problem.head_dim_v))
    return Step(
        rows=rows,
        columns=columns,
        depth=depth,
        loaded=(rows + columns) * depth,
        staged=rows * depth if loop.panel == "reads" else 0,
        accumulators=accumulators,
    )


def loop_of(kernel: Kernel) -> Sliced:
    loop = KERNELS[kernel].sliced
    assert loop is not None, kernel
    return loop


def footprint(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> Footprint:
    """Return what one program of a sliced kernel needs on `arch`."""
    rules, work, loop = family(arch), step(problem, config, kernel), loop_of(kernel)
    exact, size = problem.element_bytes == 4, problem.element_bytes
    in_place = _in_place(rules, work, size)
    pipelined = config.num_stages > 1 and rules.pipelines
    buffers = (config.num_stages if in_place else config.num_stages - 1) if pipelined else 1
    smem = buffers * work.loaded * size
    if not loop.panel:
        tile = config.block_n * sum(chunks(problem.head_dim_v)) + config.block_m * config.block_n
        smem = max(smem, tile * size)
    elif work.staged and not in_place:
        smem += work.staged * size
    elif "maxima" in KERNELS[kernel].given and pipelined and rules.tensor_memory:
        smem -= work.staged * size  # weights go on to tensor memory: one buffer less
    smem += 8 * config.block_m  # maxima in flight, and the scratch of reductions over rows
    smem = max(smem, _leaving(work, kernel, size))
    limit = max_registers(arch, config.num_warps)
    fit = rules.registers[f"{KERNELS[kernel].fitted_as}_{'fp32' if exact else '16'}"]
    features = register_features(problem, config, kernel, arch)
    registers = math.ceil(sum(a * b for a, b in zip(fit, features, strict=True)))
    if exact and unrolled(problem, config, kernel, arch) > MAX_UNROLLED:
        registers = max(registers, 2 * limit)
    spilled = spilled_bytes(problem, config, kernel, arch)
    return Footprint(
        smem_bytes=smem,
        registers=corrected(registers, limit, spilled),
        columns=_columns(rules, work, exact),
        max_registers=limit,
        reported_spill=reported_spill(problem, config, kernel, arch),
    )


def _leaving(work: Step, kernel: Kernel, element_bytes: int) -> int:
    """Return the bytes that a result needs to be laid out for its stores."""
    if loop_of(kernel).panel == "writes":
        return work.rows * work.columns * element_bytes
    return 4 * work.accumulators if KERNELS[kernel].stays == "columns" else 0


REGISTER_FEATURES = (
    "constant",
    "results",
    "scores",
    "changed",
    "operands",
    "vectors",
    "rows",
)
"""What registers of one thread hold, in this order: addresses and counters; fp32 results; fp32
score tiles beside them; an operand that changes before its product; operands of one matrix
instruction (in IEEE fp32: of a step's multiply-adds, all unrolled); 16-byte vectors of what a step
loads; rows, whose maxima and sums are kept by each thread."""


def register_features(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> tuple[float, ...]:
    """Return what the register fit multiplies, in the order of REGISTER_FEATURES."""
    rules, work = family(arch), step(problem, config, kernel)
    threads, size = rules.warp_threads * config.num_warps, problem.element_bytes
    scores = 0 if loop_of(kernel).panel else config.block_m * config.block_n
    if size == 4:
        operands = 2 * work.depth * math.sqrt(work.rows * work.columns / threads)
    else:
        along = min(config.num_warps, max(1, work.rows // ROWS_PER_WARP))
        held = 0 if _in_place(rules, work, size) else work.rows / along
        held += work.columns * along / config.num_warps
        operands = held * MATRIX_DEPTH * size / 4 / rules.warp_threads
    return (
        1.0,
        (work.accumulators - scores) / threads,
        scores / threads,
        work.staged * size / 4 / threads,
        operands,
        work.loaded * size / 16 / threads,
        work.rows / threads,
    )


def unrolled(problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str) -> float:
    """Return the multiply-adds of the largest product in a thread, if in IEEE fp32."""
    work, threads = step(problem, config, kernel), family(arch).warp_threads * config.num_warps
    values = 0
    if not loop_of(kernel).panel:
        values = work.rows * sum(chunks(problem.head_dim_v)) * config.block_n
    return max(work.rows * work.columns * work.depth, values) / threads


def _in_place(rules: Family, work: Step, element_bytes: int) -> bool:
    """Whether matrix instructions read both operands in shared memory."""
    return 0 < rules.rows_in_place <= work.rows and element_bytes < 4


MATRIX_DEPTH = 16
"""Words of a row that one matrix instruction takes."""


def _columns(rules: Family, work: Step, exact: bool) -> int:
    """Return columns of tensor memory."""
    if not rules.tensor_memory or exact or work.rows < rules.rows_in_place:
        return 0
    return math.ceil(work.accumulators / 128)
