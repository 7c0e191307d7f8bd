"""Records about a config: the model's estimate, a compiler's results, and the candidate that holds
both with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.resources import Resources


@dataclass(frozen=True, kw_only=True)
class CostEstimate:
    """Predicted cost of one kernel launch over all batches and heads."""

    kernel: Kernel
    config: TileConfig
    read_bytes: int
    """Bytes that SMs load from L2. Exact."""
    write_bytes: int
    """Bytes that SMs store to L2. Exact."""
    dram_bytes: int
    """Bytes between L2 and DRAM in both directions, by a model of L2. 0 on a processor."""
    lower_bound_bytes: int
    """Bytes that any algorithm must move with this GPU's on-chip memory."""
    smem_bytes: int
    """Shared memory of one program [bytes]; 0 on a processor."""
    registers: int
    """32-bit registers of one thread; over 255 the compiler spills. 0 on a processor."""
    flops: int
    """Tensor flops executed: whole tiles at padded head dims."""
    seconds: float
    """Predicted time of the launch [s]."""
    limit: str
    """The largest of `terms`, which limits the kernel."""
    terms: tuple[tuple[str, float], ...]
    """(name, seconds) of every roofline term."""
    waves: float
    """Programs divided by the programs resident at once."""
    cost: float
    """Seconds by which configs are ranked; see `time.Time`."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Results of compiling a config, in this process or an earlier one. The kernel has not run."""

    triton: str
    """Version of Triton that compiled the config."""
    resources: Resources | None = None
    """Resources of the kernel; None if the config did not compile."""
    seconds: float | None = None
    """Predicted time [s] with these resources and the instructions of the machine code; None if the
    config did not compile."""
    why_not_used: str
    """The reason why calls do not use the config; empty if they may."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A proposed config."""

    kernel: Kernel
    """Name of the kernel."""
    config: TileConfig
    """The proposed tiles and launch options."""
    estimate: CostEstimate
    """Predicted time, traffic and footprint, by the model alone."""
    reason: str
    """The reason for this tile in a sentence, by the model alone."""
    compiled: Compiled | None = None
    """Results of compiling the config; None if it was not compiled here."""
