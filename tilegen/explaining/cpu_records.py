"""Records of an explanation for a processor; units are those of records.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilegen.explaining.records import (
    NextPick,
    Pick,
    TileExplanation,
)
from tilegen.kernels.config import Family, Kernel
from tilegen.kernels.spec import Direction


@dataclass(frozen=True, kw_only=True)
class LevelFacts:
    """Bytes that cross one border of the caches, by the model: a head's streamed rows stay in the
    smallest cache of which they fill at most half."""

    level: str
    """`L2`, `L3` or `memory`: the slower side."""
    fast_bytes: int
    """Size of the next faster level [bytes]."""
    bytes: int
    bound_bytes: int
    """The least that any schedule moves with `fast_bytes` of fast memory."""
    bandwidth: float
    """Rate at which a core reads from the level [bytes/s]."""


@dataclass(frozen=True, kw_only=True)
class CpuTimeFacts:
    """The predicted time of a launch on one thread of a processor."""

    seconds: float
    limit: str
    flops: int
    programs: int
    terms: Mapping[str, float]
    """Time of each term of `model.cpu_time.TERMS` [s], weighted."""
    launch: float
    streams_from: str
    """The level that holds what a head streams."""
    stream_bytes: int
    idle: Mapping[int, float]
    """Part of the time that threads are idle, by their number, if programs are equally long."""
    rates: Mapping[str, float]
    """Rates of one core, by name [1/s]."""
    rates_measured: bool
    rates_source: str


@dataclass(frozen=True, kw_only=True)
class OnProcessor(Pick):
    """The model's config for another processor of the catalogue."""

    processor: str


@dataclass(frozen=True, kw_only=True)
class CpuNextBest(NextPick):
    """Another tile that was ranked for one thread."""

    cost_ratio: float
    """`slowdown` with idle threads counted, by which tiles are ranked."""
    programs: int


@dataclass(frozen=True, kw_only=True)
class CpuPassExplanation:
    """The family of a pass on a processor, which rules choose."""

    direction: Direction
    family: Family
    kernels: tuple[Kernel, ...]
    left_out: Mapping[Family, str]
    """Families that cannot compute the pass, with the reason."""


@dataclass(frozen=True, kw_only=True)
class CpuExplanation(TileExplanation):
    """Why a kernel has its tile, on a processor."""

    title: str
    levels: tuple[LevelFacts, ...]
    time: CpuTimeFacts
    ranked_for: str
    """The problem that tiles are ranked for: lengths are powers of two."""
    tried: int
    """Number of tiles that were ranked; 1 where rules leave no choice."""
    next_best: tuple[CpuNextBest, ...]
    pass_: CpuPassExplanation | None = None
    other_processors: tuple[OnProcessor, ...] | None = None
    """None until `with_alternatives` adds them."""
