"""Predict the on-chip footprint of one program of an emitted kernel, as Triton compiles it.

There are two pools, not one M: shared memory, by rules about Triton's placement of operands, and
registers, by a fit over all kernels. on_chip.py reads both from tables. The footprint is not the
last word: a config is used only if it compiles to a usable kernel
(`tilegen.compiling.acceptable`).
"""

from __future__ import annotations

import math

from tilegen.kernels.config import TileConfig, threads_of
from tilegen.kernels.loops import Step, chunks
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


def footprint(tiled: Tiled) -> Footprint:
    """Predict the resources of one program of an emitted kernel; the same for all lengths."""
    return tiled.by_config("footprint", lambda: _footprint(tiled))


def _footprint(tiled: Tiled) -> Footprint:
    problem, config, arch = tiled.problem, tiled.config, tiled.device.arch
    rules, work = family(arch), tiled.step
    smem, registers = lists_and_tables(tiled)
    if not work.products:
        smem += 4 * work.summed * config.num_warps
    elif work.kept:
        smem += _shared_whole(rules, work, tiled)
    else:
        smem += _shared_sliced(rules, work, tiled)
    if config.descriptors:
        aligned = reads_shared(rules, work, problem.element_bytes)
        smem += max(0, ALIGNED_BARRIERS - rules.smem_overhead) if aligned else BARRIERS
    return Footprint(
        smem_bytes=smem,
        registers=registers + _registers(rules, work, tiled),
        columns=_columns(rules, work, problem.element_bytes),
        max_registers=max_registers(arch, config.num_warps),
        more_doubt=rules.more_doubt,
    )


def _shared_whole(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> int:
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
        buffered = width * (config.num_stages - 1) or chunk
        return max(work.rows * chunk, work.columns * (buffered + work.rows)) * size
    vectors, buffers = 0, _buffers(rules, config, in_place=in_place)
    if not buffers:
        # One tile at a time; a backward needs each tile twice, the second time in another layout.
        again = 1.5 if work.reads == 2 and not (in_place or exact) else 1.0
        widest = max(sum(chunks(dim)) for dim in problem.head_dims.values())
        buffered = widest if work.reads == 1 else width * again
    else:
        buffered = buffers * width
        vectors = 4 * work.numbers * buffers * work.columns
        if in_place:
            split = len(work.streamed) > 2  # then the wider chunks are kept once more
            copied = width + 2 * max(work.streamed) * split
            buffered += rules.once_more.get(tiled.spec.fitted_as, 0.0) * copied
            if rules.tensor_memory and tiled.task.values_in_keys:
                buffered += 2 * problem.head_dim_v  # columns of keys, in another layout, twice
    staged = exact or (not in_place and work.rows < min(work.results))
    words = work.kept + work.columns * buffered + work.scores * staged
    overhead = rules.smem_overhead if in_place else 0
    if overhead and not buffers:  # sums of rows across warps cannot reuse the memory of tiles
        overhead = max(overhead, 4 * min(work.rows, TENSOR_MEMORY_LANES) * config.num_warps)
    smem = math.ceil(words * size) + vectors + overhead
    if in_place and rules.tensor_memory:
        return smem
    # fp32 results are laid out for their stores in the same memory, after everything else.
    return max(smem, work.stored_bytes)


def _shared_sliced(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> int:
    """Compute the shared memory of a kernel that takes head dims in slices [bytes]: slices in
    flight, or more if it needs more before or after the loop."""
    config, size = tiled.config, tiled.problem.element_bytes
    in_place = reads_shared(rules, work, size)
    buffers = _buffers(rules, config, in_place=in_place)
    smem = max(1, buffers) * work.loaded * size
    if work.scores:  # values come whole, and weights are laid out for their product
        smem = max(smem, (work.columns * sum(work.results) + work.scores) * size)
    elif work.changed and not in_place:
        smem += work.changed * size
    elif work.weighted and buffers and rules.tensor_memory:
        smem -= work.changed * size  # weights move to tensor memory: one buffer less
    smem += 8 * config.block_m  # maxima in flight, and the scratch of reductions over rows
    return max(smem, work.stored_bytes)


def _buffers(rules: UnitsOfFamily, config: TileConfig, *, in_place: bool) -> int:
    """Count the streamed tiles that the pipeline holds; 0 without a pipeline."""
    if config.num_stages == 1 or not rules.pipelines:
        return 0
    return config.num_stages if in_place else config.num_stages - 1


def _columns(rules: UnitsOfFamily, work: Step, element_bytes: int) -> int:
    """Count columns of tensor memory: results and scores, and one score tile in 16 bits."""
    if not rules.tensor_memory or not work.products or not reads_shared(rules, work, element_bytes):
        return 0
    tiles = work.score_tiles + 0.5 if work.kept else work.score_tiles
    return math.ceil((work.result_words + tiles * work.scores) / TENSOR_MEMORY_LANES)


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


def register_features(
    work: Step, element_bytes: int, warps: int, arch: str, descriptors: bool = False
) -> tuple[float, ...]:
    """Compute the factors of the register fit, in the order of REGISTER_FEATURES. Tiles streamed
    through descriptors need no registers for addresses or for data in flight."""
    rules = family(arch)
    threads = threads_of(arch, warps)
    exact, in_place = element_bytes == 4, reads_shared(rules, work, element_bytes)
    repeated = repetition(work, element_bytes, warps, arch)
    if exact:
        operands = max(product.operands_of_thread(threads) for product in work.products)
    else:
        operands = 0 if in_place else work.kept * element_bytes / 4 / threads
    return (
        1.0,
        result_repetition(work, element_bytes, warps, arch) * work.result_words / threads,
        repeated * work.score_tiles * work.scores / threads,
        0.0 if exact else repeated * work.changed * element_bytes / 4 / threads,
        operands,
        0.0 if descriptors else work.loaded * element_bytes / 16 / threads,
        float(work.loads > 1),
    )


def _registers(rules: UnitsOfFamily, work: Step, tiled: Tiled) -> int:
    """Predict the registers of a thread without a limit."""
    config, arch, size = tiled.config, tiled.device.arch, tiled.problem.element_bytes
    threads = threads_of(arch, config.num_warps)
    if not work.products:
        return 32 + math.ceil(work.held_bytes / 4 / threads)
    features = register_features(work, size, config.num_warps, arch, config.descriptors)
    fit = rules.registers["fp32" if size == 4 else "16"]
    registers = math.ceil(sum(a * b for a, b in zip(fit, features, strict=True)))
    unrolled = max(product.multiply_adds for product in work.products) / threads
    if size == 4 and unrolled > MAX_UNROLLED:
        registers = max(registers, 2 * max_registers(arch, config.num_warps))
    return registers


def repetition(work: Step, element_bytes: int, warps: int, arch: str) -> float:
    """Compute how often a score tile is computed. It is repeated if warps outnumber its parts, but
    not with tensor memory, where one instruction of the program computes it."""
    rules = family(arch)
    in_place = reads_shared(rules, work, element_bytes)
    if element_bytes == 4 or not work.scores or (in_place and rules.tensor_memory):
        return 1.0
    along, across = (warps, 1) if divides_rows(work, element_bytes, arch) else (1, warps)
    rows = max(1.0, ROWS_PER_WARP * along / work.rows)
    return rows * max(1.0, COLUMNS_PER_WARP * across / work.columns)


def divides_rows(work: Step, element_bytes: int, arch: str) -> bool:
    """Check whether warps divide a score tile along its rows. They divide a wide and low tile along
    its columns."""
    return reads_shared(family(arch), work, element_bytes) or work.rows >= min(work.results)


def result_repetition(work: Step, element_bytes: int, warps: int, arch: str) -> float:
    """Compute how often an accumulated result is computed: as often as scores if surplus warps
    share its rows, once if they divide it by columns."""
    in_place = reads_shared(family(arch), work, element_bytes)
    if in_place or not divides_rows(work, element_bytes, arch):
        return 1.0
    return repetition(work, element_bytes, warps, arch)


def executed(work: Step, element_bytes: int, warps: int, arch: str) -> float:
    """Count the multiply-adds that matrix instructions do in a step, including repeated ones."""
    of = work, element_bytes, warps, arch
    times = {True: repetition(*of), False: result_repetition(*of)}
    return sum(times[x.scores] * x.multiply_adds for x in work.products)


def reads_shared(rules: UnitsOfFamily, work: Step, element_bytes: int) -> bool:
    """Check whether matrix instructions (wgmma, tcgen05) read operands from shared memory."""
    return 0 < rules.rows_in_place <= work.rows and element_bytes < 4
