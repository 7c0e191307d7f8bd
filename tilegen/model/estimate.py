"""Records about a config: `CostEstimate` is the model's, `Compiled` a compiler's, and `Candidate`
has the config with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.resources import Resources


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
    """Bytes that any algorithm moves at least, with this GPU's on-chip memory."""
    smem_bytes: int
    """Shared memory of one program [bytes]."""
    registers: int
    """32-bit registers of one thread; over 255 the compiler spills."""
    flops: int
    """Tensor flops executed: whole tiles at padded head dims."""
    seconds: float
    """Predicted time of the launch [s]."""
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
    """Resources that compiling a config found, in this process or in an earlier one. Nothing has
    run."""

    triton: str
    """Version of Triton that compiled the config."""
    resources: Resources | None = None
    """Resources of the kernel; None where the config did not compile."""
    seconds: float | None = None
    """Predicted time [s] with these resources, and with what the machine code issues; None where
    the config did not compile."""
    objection: str
    """Reason for which no call uses the config; empty where calls may."""


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
    """Resources that a compiler found; None where no compiler was asked here."""
