"""What one program of an emitted kernel holds on chip, as Triton compiles it.

Two pools, not one M: shared memory, by rules about where Triton keeps operands, and registers, by a
fit. Both are calibrated per family of architectures against what the compiler reports:
footprint.toml holds the rules, registers.toml the fit and compiled.toml what has been compiled;
`python -m benchmarks.calibrate_footprint` makes the latter two again.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from tilegen.gpus.nearest import nearest
from tilegen.gpus.spec import SMEM_RESERVED_PER_PROGRAM, GpuSpec
from tilegen.kernels.config import Kernel, TileConfig, head_dim_chunks
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import WIDTHS
from tilegen.model.beyond import beyond
from tilegen.model.known import reported_spill, spilled_bytes
from tilegen.problem import AttentionProblem

chunks = cache(head_dim_chunks)
"""Widths of the tiles that hold a head dim."""

TENSOR_MEMORY_COLUMNS = 512
TENSOR_MEMORY_LANES = 128
ROWS_PER_WARP, COLUMNS_PER_WARP = 16, 8
"""Smallest tile that one warp's matrix instructions make."""
MAX_PROGRAMS_PER_SM = 32
MOST_SPILLED = 128
"""Bytes of registers that a thread of a usable kernel may spill: 32 of 255.

Of kernels compiled for sm_90 that spill 120, inner loops have about 5 loads and stores of local
memory in 100 instructions, at 136 as many as 7; at 160 ptxas was seen to wait for each matrix
product before it issues the next.
"""
MAX_WARPS_PER_SM = {"sm_": 48, "gfx": 32}
"""Of 64 or 32 threads; some parts hold 64 warps, but registers end sooner."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one program needs, and what it may have."""

    smem_bytes: int
    registers: int
    """Of one thread, had it no limit."""
    columns: int
    """Of tensor memory; 0 where there is none."""
    max_registers: int
    reported_spill: int = 0
    """Bytes that the compiler spilled, where it was asked."""

    @property
    def spills(self) -> bool:
        """Whether registers are predicted to overflow into local memory."""
        return self.registers > self.max_registers

    @property
    def spill_bytes(self) -> int:
        """Bytes of local memory that a thread is predicted to spill into."""
        if not self.spills:
            return 0
        return self.reported_spill or 4 * (self.registers - self.max_registers)

    @property
    def spills_much(self) -> bool:
        """Whether it spills more than a usable kernel may, as far as is known.

        A fit cannot tell a few bytes from hundreds, so only the compiler's report clears a config.
        """
        return self.spills and not 0 < self.reported_spill <= MOST_SPILLED

    def fits(self, gpu: GpuSpec, *, doubt: float = 1.0) -> bool:
        """Whether a program can run at all, with shared memory up to `doubt` times the limit."""
        columns = self.columns <= TENSOR_MEMORY_COLUMNS
        return columns and self.smem_bytes <= doubt * gpu.smem_per_block


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of footprint.toml; the fields are described there."""

    warp_threads: int
    max_registers: int
    registers_per_sm: int
    rows_in_place: int
    kept_leave: bool
    tensor_memory: bool
    pipelines: bool
    smem_overhead: int
    once_more: dict[str, float]
    registers: dict[str, tuple[float, ...]]


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
        from tilegen.model import sliced  # which builds on this module

        return sliced.footprint(problem, config, kernel, arch)
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


def corrected(registers: int, limit: int, spilled: int | None) -> int:
    """Return predicted registers, as far as what the compiler `spilled` leaves them."""
    if spilled is None:
        return registers
    return max(registers, limit + 1) if spilled else min(registers, limit)


def max_registers(arch: str, num_warps: int) -> int:
    """Return the most registers that one thread of a program may have."""
    rules = family(arch)
    return min(rules.max_registers, rules.registers_per_sm // (rules.warp_threads * num_warps))


def residents(needs: Footprint, gpu: GpuSpec, config: TileConfig) -> int:
    """Return how many programs share an SM; at least 1."""
    rules = family(gpu.arch)
    registers = min(needs.registers, rules.max_registers) * rules.warp_threads * config.num_warps
    limits = [
        gpu.smem_per_sm // (needs.smem_bytes + SMEM_RESERVED_PER_PROGRAM),
        gpu.registers_per_sm // max(registers, 1),
        MAX_WARPS_PER_SM[gpu.arch[:3]] // config.num_warps,
        MAX_PROGRAMS_PER_SM,
    ]
    if needs.columns:  # allocated in powers of two, at least 32
        limits.append(TENSOR_MEMORY_COLUMNS // max(32, _power_of_two(needs.columns)))
    return max(1, min(limits))


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

MAX_UNROLLED = 1800
"""Multiply-adds of one fp32 product in a thread; beyond, the compiler spills thousands of bytes."""


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


@cache
def family(arch: str) -> Family:
    """Return the rules of an architecture; an unknown one takes those of the nearest older one."""
    rules: dict[str, dict[str, Any]] = {
        name: row for row in _table("footprint.toml")["family"] for name in row["architectures"]
    }
    row = rules[nearest(arch, rules)]
    fits: dict[str, dict[str, list[float]]] = _table("registers.toml")["architecture"]
    registers = {  # a kernel that was never compiled for an architecture takes another one's fit
        name: tuple(values)
        for fit in (*fits.values(), fits[nearest(arch, fits)])
        for name, values in fit.items()
    }
    fields = {name: row[name] for name in Family.__dataclass_fields__ if name != "registers"}
    return Family(**fields, registers=registers)


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((files("tilegen.model") / name).read_text(encoding="utf-8"))


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
