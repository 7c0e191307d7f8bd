"""What the model says about a config: `CostEstimate`; what a compiler made of it: `Compiled`; and
`Candidate`, a config with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.kernels.config import Kernel, TileConfig


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Predicted cost of one kernel launch: all batches and heads."""

    kernel: Kernel
    config: TileConfig
    read_bytes: int
    """Bytes the SMs load from L2. Exact."""
    write_bytes: int
    """Bytes the SMs store to L2. Exact."""
    dram_bytes: int
    """Bytes between L2 and DRAM, both directions: a model of what L2 keeps."""
    lower_bound_bytes: int
    """What no algorithm can go below with this GPU's on-chip memory."""
    smem_bytes: int
    """Shared memory of one program."""
    registers: int
    """32-bit registers of one thread; over 255 the compiler spills."""
    flops: int
    """Tensor flops executed: whole tiles at padded head dims."""
    seconds: float
    limit: str
    """The largest of `terms`: what the kernel waits for."""
    terms: tuple[tuple[str, float], ...]
    """(name, seconds) of every roofline term."""
    waves: float
    """Programs over programs resident at once."""
    cost: float
    """Seconds by which configs are ranked: see `time.Time`."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What compiling a config gave, in this process or in an earlier one. Nobody has run it."""

    triton: str
    """Version of Triton that compiled it."""
    registers: int | None = None
    """32-bit registers of one thread; None where it did not compile."""
    spill_bytes: int | None = None
    """Bytes of registers that one thread spills; None where it did not compile."""
    shared_bytes: int | None = None
    """Shared memory of one program; None where it did not compile."""
    seconds: float | None = None
    """Predicted time with these, and with what its machine code issues; None as above."""
    objection: str
    """Why no call uses it; empty where calls may."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One proposed config."""

    kernel: Kernel
    """Name of the kernel."""
    config: TileConfig
    """The tiles and launch options proposed."""
    estimate: CostEstimate
    """Predicted time, traffic and use of the chip, by the model alone."""
    reason: str
    """One sentence: why this tile, by the model alone."""
    compiled: Compiled | None = None
    """What a compiler made of it; None where nobody here has asked one."""
