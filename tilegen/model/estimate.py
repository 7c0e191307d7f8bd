"""What the model says about a config: `CostEstimate`; and `Candidate`, a config with its reason."""

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
    left_seconds: float = 0.0
    """Seconds that the next kernel takes to read what this one leaves for it."""

    @property
    def cost(self) -> float:
        """Seconds by which configs are ranked: the kernel's own, and what it leaves to the next."""
        return self.seconds + self.left_seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One proposed config."""

    kernel: Kernel
    """Name of the kernel."""
    config: TileConfig
    """The tiles and launch options proposed."""
    estimate: CostEstimate
    """Predicted time, traffic and use of the chip."""
    reason: str
    """One sentence: why this tile."""
