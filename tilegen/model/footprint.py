"""What one program of an emitted kernel holds on chip, as Triton compiles it.

Two pools, not one M: shared memory, by rules about where Triton keeps operands, and registers, by a
fit; on_chip.py reads both from tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import WIDTHS
from tilegen.model import sliced_footprint
from tilegen.model.beyond import beyond
from tilegen.model.known import reported_spill, spilled_bytes
from tilegen.model.on_chip import (
    COLUMNS_PER_WARP,
    MAX_UNROLLED,
    ROWS_PER_WARP,
    TENSOR_MEMORY_LANES,
    Family,
    Footprint,
    chunks,
    corrected,
    family,
    max_registers,
)
from tilegen.problem import AttentionProblem


@lru_cache(maxsize=8192)
def footprint(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> Footprint:
    """Return what one program of an emitted kernel needs on `arch`."""
    needs = _plain(problem, config, kernel, arch)
    smem, registers = beyond(problem, config, kernel)
    if not smem and not registers:
        return needs
    return replace(
        needs,
        smem_bytes=needs.smem_bytes + smem,
        registers=needs.registers + registers,
        reported_spill=needs.reported_spill and needs.reported_spill + 4 * registers,
    )


def _plain(problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str) -> Footprint:
    """Return what a program needs whose mask is closed-form, and whose scores stay as they are."""
    if KERNELS[kernel].sliced:
        return sliced_footprint.footprint(problem, config, kernel, arch)
    rules, shape = family(arch), _shape(problem, config, kernel)
    features = register_features(problem, config, kernel, arch)
    fit = rules.registers[f"{KERNELS[kernel].fitted_as}_{'fp32' if shape.exact else '16'}"]
    registers = sum(a * b for a, b in zip(fit, features, strict=True))
    if shape.exact and features[REGISTER_FEATURES.index("probabilities")] > MAX_UNROLLED:
        registers = max(registers, 2.0 * rules.max_registers)
    if KERNELS[kernel].whole is None:  # holds its rows of out and dout whole
        rows = 2 * shape.rows * sum(shape.accumulators) * problem.element_bytes / 4
        registers = max(registers, 32 + rows / (rules.warp_threads * config.num_warps))
    limit = max_registers(arch, config.num_warps)
    spilled = spilled_bytes(problem, config, kernel, arch)
    return Footprint(
        smem_bytes=_shared(rules, shape, config, kernel),
        registers=corrected(math.ceil(registers), limit, spilled),
        columns=_columns(shape) if rules.tensor_memory and not shape.exact else 0,
        max_registers=limit,
        reported_spill=reported_spill(problem, config, kernel, arch),
    )


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """The tile of one step as the compiler sees it."""

    rows: int
    """Stationary."""
    streamed: int
    kept_width: int
    """Words of one stationary row kept as operands."""
    accumulators: tuple[int, ...]
    """Widths of the accumulated tiles."""
    scores: int
    """Score tiles alive together."""
    streamed_chunks: tuple[int, ...]
    """Widths of the pieces of a streamed row, as it is loaded."""
    widest: int
    """Words of the wider of the two streamed rows: all that is buffered without a pipeline."""
    element_bytes: int

    @property
    def streamed_width(self) -> int:
        """Words of one streamed row."""
        return sum(self.streamed_chunks)

    @property
    def exact(self) -> bool:
        """Whether products run in IEEE fp32, outside the tensor cores."""
        return self.element_bytes == 4


def _shape(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> _Shape:
    return _shape_of(
        problem.head_dim_qk,
        problem.head_dim_v,
        problem.element_bytes,
        config.block_m,
        config.block_n,
        kernel,
    )


@lru_cache(maxsize=4096)
def _shape_of(
    head_dim_qk: int, head_dim_v: int, element_bytes: int, m: int, n: int, kernel: Kernel
) -> _Shape:
    """Return the shape of one tile size; configs that differ in warps and stages share it."""
    qk, v = chunks(head_dim_qk), chunks(head_dim_v)
    spec, widths = KERNELS[kernel], {"qk": qk, "v": v}
    loop = spec.whole
    if loop is None:
        rows, streamed, kept, accumulators = m, 0, (), widths[WIDTHS[spec.given[0]]]
    else:
        rows, streamed = (n, m) if spec.stays == "columns" else (m, n)
        kept = tuple(width for one in loop.keeps for width in widths[WIDTHS[one]])
        accumulators = tuple(width for one in loop.accumulates for width in widths[WIDTHS[one]])
    return _Shape(
        rows=rows,
        streamed=streamed,
        kept_width=sum(kept),
        accumulators=accumulators,
        scores=loop.score_tiles if loop else 0,
        streamed_chunks=qk + v,
        widest=max(sum(qk), sum(v)),
        element_bytes=element_bytes,
    )


def _shared(rules: Family, shape: _Shape, config: TileConfig, kernel: Kernel) -> int:
    """Return bytes of shared memory.

    Kept operands pass through it, and stay there where matrix instructions read them in place; the
    pipeline keeps whole streamed tiles. Otherwise operands live in registers, and the score tile
    goes through shared memory only where its layout does not suit the second product.
    """
    spec = KERNELS[kernel]
    if spec.whole is None:
        return 4 * shape.rows * config.num_warps
    in_place = _in_place(rules, shape)
    if rules.kept_leave:
        chunk = max(shape.streamed_chunks)
        buffered = shape.streamed_width * (config.num_stages - 1) or chunk
        words = max(shape.rows * chunk, shape.streamed * (buffered + shape.rows))
        return words * shape.element_bytes
    if config.num_stages == 1 or not rules.pipelines:
        # One tile at a time; the backward needs each twice, the second time in another layout.
        reads = len(spec.whole.products) / sum(one in WIDTHS for one in spec.whole.streams)
        again = 1.5 if reads == 2 and not (in_place or shape.exact) else 1.0
        buffered = shape.widest if reads == 1 else shape.streamed_width * again
        vectors = 0
    else:
        buffers = config.num_stages if in_place else config.num_stages - 1
        buffered = buffers * shape.streamed_width
        numbers = sum(one not in WIDTHS for one in spec.whole.streams)  # of a row: lse, delta
        vectors = 4 * numbers * buffers * shape.streamed
        if in_place:
            split = len(shape.streamed_chunks) > 2  # then the wider chunks are kept once more again
            copied = shape.streamed_width + 2 * max(shape.streamed_chunks) * split
            buffered += rules.once_more.get(spec.fitted_as, 0.0) * copied
    staged = shape.exact or (not in_place and shape.rows < min(shape.accumulators))
    words = shape.rows * shape.kept_width + shape.streamed * buffered
    words += shape.rows * shape.streamed * staged
    overhead = rules.smem_overhead if in_place else 0
    return math.ceil(words * shape.element_bytes) + vectors + overhead


def _columns(shape: _Shape) -> int:
    """Return columns of tensor memory: accumulators and scores, and one score tile in 16 bits."""
    if not shape.scores or shape.rows < 64:
        return 0
    scores = (shape.scores + 0.5) * shape.streamed
    lanes = shape.rows / TENSOR_MEMORY_LANES
    return math.ceil(lanes * (sum(shape.accumulators) + scores))


REGISTER_FEATURES = (
    "constant",
    "accumulators",
    "scores",
    "probabilities",
    "kept",
    "vectors",
    "pieces",
)
"""What registers of one thread hold, in this order: addresses and counters; fp32 accumulators; fp32
score tiles; a score tile rounded for the next product (in IEEE fp32: operands of its multiply-adds,
all unrolled); kept operands; 16-byte vectors of a streamed tile (their addresses, and data in
flight); what second chunks of the head dims add."""


def register_features(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> tuple[float, ...]:
    """Return what the register fit multiplies, in the order of REGISTER_FEATURES."""
    return _register_features(_shape(problem, config, kernel), config.num_warps, arch)


@lru_cache(maxsize=4096)
def _register_features(shape: _Shape, warps: int, arch: str) -> tuple[float, ...]:
    rules = family(arch)
    lanes = rules.warp_threads
    along, across = _warp_grid(rules, shape, warps)
    rows, columns = shape.rows / along, shape.streamed / across
    if not shape.exact:
        rows, columns = max(ROWS_PER_WARP, rows), max(COLUMNS_PER_WARP, columns)
    kept = 0 if _in_place(rules, shape) else rows * shape.kept_width * shape.element_bytes / 4
    vectors = sum(
        math.ceil(shape.streamed * width * shape.element_bytes / 16 / (warps * lanes))
        for width in shape.streamed_chunks
    )
    return (
        1.0,
        rows * sum(max(COLUMNS_PER_WARP, w / across) for w in shape.accumulators) / lanes,
        rows * columns * shape.scores / lanes,
        rows * shape.streamed * (shape.widest if shape.exact else shape.element_bytes / 4) / lanes,
        kept / lanes,
        float(vectors),
        float(len(shape.streamed_chunks) - 2),
    )


def repetition(problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str) -> float:
    """Return how often the score tile is computed: repeated where warps outnumber its parts."""
    rules, shape = family(arch), _shape(problem, config, kernel)
    if shape.exact or not shape.scores:
        return 1.0
    along, across = _warp_grid(rules, shape, config.num_warps)
    rows = max(1.0, ROWS_PER_WARP * along / shape.rows)
    return rows * max(1.0, COLUMNS_PER_WARP * across / shape.streamed)


def _warp_grid(rules: Family, shape: _Shape, warps: int) -> tuple[int, int]:
    """Return how warps divide the score tile: along its rows, or across a wide and low one."""
    in_place = _in_place(rules, shape)
    share_rows = shape.exact or in_place or shape.rows >= min(shape.accumulators)
    return (warps, 1) if share_rows else (1, warps)


def _in_place(rules: Family, shape: _Shape) -> bool:
    """Whether matrix instructions read kept and streamed operands in shared memory."""
    return 0 < rules.rows_in_place <= shape.rows and not shape.exact
