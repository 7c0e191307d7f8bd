"""Predict the on-chip footprint of one program of an emitted kernel, as Triton compiles it.

There are two pools, not one M: shared memory, by rules about Triton's placement of operands, and
registers, by a fit over all kernels. on_chip.py reads both from tables. The footprint is not the
last word: a config is used only if it compiles to a usable kernel
(`tilegen.compiling.acceptable`).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np

from tilegen.kernels.config import TileConfig, threads_of
from tilegen.kernels.loops import Step, chunks
from tilegen.model.columns import Number, in_columns
from tilegen.model.lists_and_tables import lists_and_tables
from tilegen.model.on_chip import (
    COLUMNS_PER_WARP,
    MAX_UNROLLED,
    ROWS_PER_WARP,
    TENSOR_MEMORY_LANES,
    Footprint,
    UnitsOfFamily,
    family,
    max_registers,
)
from tilegen.task import Tiled


@in_columns
def footprint(tiled: Tiled) -> Footprint:
    """Predict the resources of one program of an emitted kernel; the same for all lengths."""
    problem, config, arch = tiled.problem, tiled.config, tiled.device.arch
    rules, work = family(arch), tiled.step
    smem, registers = lists_and_tables(tiled)
    if not work.products:
        smem += 4 * work.summed * config.num_warps
    elif tiled.spec.whole:
        smem += _shared_whole(rules, work, tiled)
    else:
        smem += _shared_sliced(rules, work, tiled)
    aligned = reads_shared(rules, work, problem.element_bytes)
    barriers = np.where(aligned, max(0, ALIGNED_BARRIERS - rules.smem_overhead), BARRIERS)
    return Footprint(
        smem_bytes=smem + config.descriptors * barriers,
        registers=_ceil(registers + _registers(rules, work, tiled)),
        columns=_columns(rules, work, problem.element_bytes),
        max_registers=max_registers(arch, config.num_warps),
        more_doubt=rules.more_doubt,
    )


def _shared_whole(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> Number:
    """Compute the shared memory of a kernel that holds head dims whole [bytes].

    Stationary operands pass through it, and stay there if matrix instructions read them in place;
    the pipeline keeps whole streamed tiles. Otherwise operands live in registers, and the score
    tile goes through shared memory only if its layout does not suit the second product.
    """
    problem, config = tiled.problem, tiled.config
    size = problem.element_bytes
    exact, in_place = size == 4, reads_shared(rules, work, size)
    width = sum(work.streamed)
    if rules.kept_leave:
        chunk = max(work.streamed)
        buffered = np.where(config.num_stages > 1, width * (config.num_stages - 1), chunk)
        return np.maximum(work.rows * chunk, work.columns * (buffered + work.rows)) * size
    buffers = _buffers(rules, config, in_place=in_place)
    # Without a pipeline one tile at a time; a backward needs each tile twice, the second time in
    # another layout.
    again = np.where(in_place | exact | (work.reads != 2), 1.0, 1.5)
    widest = max(sum(chunks(dim)) for dim in problem.head_dims.values())
    single = widest if work.reads == 1 else width * again
    split = len(work.streamed) > 2  # then the wider chunks are kept once more
    copied = width + 2 * max(work.streamed) * split
    copies = rules.once_more.get(tiled.spec.fitted_as, 0.0) * copied
    if rules.tensor_memory and tiled.task.values_in_keys:
        copies += 2 * problem.head_dim_v  # columns of keys, in another layout, twice
    buffered = np.where(buffers > 0, buffers * width + in_place * copies, single)
    vectors = 4 * work.numbers * buffers * work.columns
    staged = exact | (~in_place & (work.rows < min(work.results)))
    words = work.kept + work.columns * buffered + work.scores * staged
    # Without a pipeline sums of rows across warps cannot reuse the memory of tiles.
    sums = 4 * np.minimum(work.rows, TENSOR_MEMORY_LANES) * config.num_warps
    overhead = in_place * np.maximum(
        rules.smem_overhead, sums * (buffers == 0) * (rules.smem_overhead > 0)
    )
    smem = _ceil(words * size) + vectors + overhead
    # fp32 results are laid out for their stores in the same memory, after everything else.
    stored = np.maximum(smem, work.stored_bytes)
    return np.where(in_place & rules.tensor_memory, smem, stored)


def _shared_sliced(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> Number:
    """Compute the shared memory of a kernel that takes head dims in slices [bytes]: slices in
    flight, or more if it needs more before or after the loop."""
    config, size = tiled.config, tiled.problem.element_bytes
    in_place = reads_shared(rules, work, size)
    buffers = _buffers(rules, config, in_place=in_place)
    smem: Any = np.maximum(1, buffers) * work.loaded * size
    if not tiled.spec.panel:  # values come whole, and weights are laid out for their product
        smem = np.maximum(smem, (work.columns * sum(work.results) + work.scores) * size)
    else:
        smem = smem + work.changed * size * ~in_place
        if work.weighted and rules.tensor_memory:  # weights move there: one buffer less
            smem = smem - work.changed * size * (in_place & (buffers > 0))
    smem = smem + 8 * config.block_m  # maxima in flight, and the scratch of reductions over rows
    return np.maximum(smem, work.stored_bytes)


def _buffers(rules: UnitsOfFamily, config: TileConfig, *, in_place: Number) -> Number:
    """Count the streamed tiles that the pipeline holds; 0 without a pipeline."""
    in_pipeline = np.where(in_place, config.num_stages, config.num_stages - 1)
    return in_pipeline * (config.num_stages > 1) * rules.pipelines


def _columns(rules: UnitsOfFamily, work: Step, element_bytes: int) -> Number:
    """Count columns of tensor memory: results and scores, and one score tile in 16 bits."""
    if not rules.tensor_memory or not work.products:
        return 0
    tiles = work.score_tiles + 0.5 * (work.kept > 0)
    columns = _ceil((work.result_words + tiles * work.scores) / TENSOR_MEMORY_LANES)
    return columns * reads_shared(rules, work, element_bytes)


def _ceil(number: Number) -> Number:
    return np.ceil(number).astype(np.int64)


BARRIERS, ALIGNED_BARRIERS = 128, 1024
"""Most memory for the barriers that signal tiles loaded through descriptors [bytes]. The second is
for tiles that matrix instructions read in place, which are aligned to 1024. The overhead of such
tiles without descriptors already includes barriers."""

REGISTER_FEATURES = (
    "constant",
    "results",
    "scores",
    "changed",
    "operands",
    "vectors",
    "slices",
)
"""Contents of a thread's registers, in this order: addresses and counters; fp32 results; fp32 score
tiles; an operand that changes before its product (16-bit operands only); operands that stay in
registers (in IEEE fp32: those of a product's multiply-adds, all unrolled); 16-byte vectors that a
step loads (their addresses, and data in flight); 1 if a step loads several slices."""


REGISTERS_OF_ROLES = 5, 1.25, 2.1
"""Registers of a thread that computes in a kernel whose warpgroups have roles: some, and so many
for each fp32 word of its results and of one score tile. A fit to compiler reports of 11 kernels for
sm_90 (Triton 3.7.1), of which one is 15 % above it and the others within 6 %."""


def register_features(
    work: Step, element_bytes: int, warps: Number, arch: str, descriptors: Number = False
) -> tuple[Number, ...]:
    """Compute the factors of the register fit, in the order of REGISTER_FEATURES. Tiles streamed
    through descriptors need no registers for addresses or for data in flight."""
    rules = family(arch)
    threads = threads_of(arch, warps)
    exact, in_place = element_bytes == 4, reads_shared(rules, work, element_bytes)
    repeated = repetition(work, element_bytes, warps, arch)
    if exact:
        each = (product.operands_of_thread(threads) for product in work.products)
        operands = reduce(np.maximum, each)
    else:
        operands = np.where(in_place, 0, work.kept * element_bytes / 4 / threads)
    return (
        1.0,
        result_repetition(work, element_bytes, warps, arch) * work.result_words / threads,
        repeated * work.score_tiles * work.scores / threads,
        0.0 if exact else repeated * work.changed * element_bytes / 4 / threads,
        operands,
        np.where(descriptors, 0, work.loaded * element_bytes / 16 / threads),
        1.0 * (work.loads > 1),
    )


def _registers(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> Number:
    """Predict the registers of a thread without a limit."""
    config, arch, size = tiled.config, tiled.device.arch, tiled.problem.element_bytes
    threads = threads_of(arch, config.num_warps)
    if not work.products:
        return 32 + _ceil(work.held_bytes / 4 / threads)
    if tiled.spec.specialised:
        once, results, scores = REGISTERS_OF_ROLES
        return _ceil(once + (results * work.result_words + scores * work.scores) / threads)
    features = register_features(work, size, config.num_warps, arch, config.descriptors)
    fit = rules.registers["fp32" if size == 4 else "16"]
    registers = _ceil(sum(a * b for a, b in zip(fit, features, strict=True)))
    unrolled = reduce(np.maximum, (product.multiply_adds for product in work.products)) / threads
    many = 2 * max_registers(arch, config.num_warps)
    return np.where((size == 4) & (unrolled > MAX_UNROLLED), np.maximum(registers, many), registers)


def repetition(work: Step, element_bytes: int, warps: Number, arch: str) -> Number:
    """Compute how often a score tile is computed. It is repeated if warps outnumber its parts, but
    not with tensor memory, where one instruction of the program computes it."""
    rules = family(arch)
    in_place = reads_shared(rules, work, element_bytes)
    if element_bytes == 4 or not np.any(work.scores):
        return 1.0
    by_rows = divides_rows(work, element_bytes, arch)
    along, across = np.where(by_rows, warps, 1), np.where(by_rows, 1, warps)
    rows = np.maximum(1.0, ROWS_PER_WARP * along / work.rows)
    times = rows * np.maximum(1.0, COLUMNS_PER_WARP * across / work.columns)
    return np.where(in_place & rules.tensor_memory, 1.0, times)


def divides_rows(work: Step, element_bytes: int, arch: str) -> Number:
    """Check whether warps divide a score tile along its rows. They divide a wide and low tile along
    its columns."""
    narrowest = reduce(np.minimum, work.results)
    return reads_shared(family(arch), work, element_bytes) | (work.rows >= narrowest)


def result_repetition(work: Step, element_bytes: int, warps: Number, arch: str) -> Number:
    """Compute how often an accumulated result is computed: as often as scores if surplus warps
    share its rows, once if they divide it by columns."""
    in_place = reads_shared(family(arch), work, element_bytes)
    alone = in_place | ~divides_rows(work, element_bytes, arch)
    return np.where(alone, 1.0, repetition(work, element_bytes, warps, arch))


def executed(work: Step, element_bytes: int, warps: Number, arch: str) -> Number:
    """Count the multiply-adds that matrix instructions do in a step, including repeated ones."""
    of = work, element_bytes, warps, arch
    times = {True: repetition(*of), False: result_repetition(*of)}
    return sum(times[x.scores] * x.times * x.multiply_adds for x in work.products)


def reads_shared(rules: UnitsOfFamily, work: Step, element_bytes: int) -> Number:
    """Check whether matrix instructions (wgmma, tcgen05) read operands from shared memory."""
    can = rules.rows_in_place > 0 and element_bytes < 4
    return np.logical_and(can, rules.rows_in_place <= work.rows)
