"""Records of an explanation for a GPU; units are those of records.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilegen.explaining.records import (
    BoundFacts,
    Formula,
    NextPick,
    Pick,
    TileExplanation,
)
from tilegen.kernels.config import Family, Kernel, TileConfig
from tilegen.kernels.spec import Direction


@dataclass(frozen=True, kw_only=True)
class Wave:
    """The programs that run at once, and the part of their rows that L2 holds."""

    programs: int
    heads: int
    heads_in_l2: float | None
    """Key-value heads whose streamed rows fit into L2; None for all."""
    part_of_head: float
    sweeps: float


@dataclass(frozen=True, kw_only=True)
class DramFacts:
    """Bytes between L2 and DRAM."""

    bytes: int
    bound_bytes: int | None
    """The least with L2 and all SMs as fast memory; None where panels stay in L2."""
    ratio: float | None
    formulas: tuple[Formula, ...]
    """Empty for sliced kernels, which have no closed form."""
    values: Mapping[str, float]
    wave: Wave | None


@dataclass(frozen=True, kw_only=True)
class NextBest(NextPick):
    """Another config on a GPU."""

    steps: int
    programs_per_sm: int
    waves: float


@dataclass(frozen=True, kw_only=True)
class OnMemory(Pick):
    """The model's config for another size of shared memory."""

    fast_memory: int


@dataclass(frozen=True, kw_only=True)
class FamilyPick:
    """A family of kernels for a pass; `family` is None, with a reason, where none fits."""

    family: Family | None
    seconds: float | None
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class FamilyOnMemory(FamilyPick):
    """The family for another size of shared memory."""

    fast_memory: int


@dataclass(frozen=True, kw_only=True)
class FamilyUnderMask(FamilyPick):
    """The family for another mask."""

    mask: str


@dataclass(frozen=True, kw_only=True)
class FootprintFacts:
    """Resources of an SM that a program uses."""

    smem_bytes: int
    registers: int
    programs_per_sm: int


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The parts of a predicted time: the largest of three, and the launches."""

    largest: str
    """`programs`, `l2` or `dram`."""
    programs: float | None
    """None where programs take less than the traffic."""
    l2: float
    dram: float
    launch: float
    launches: int
    equal_programs: bool
    overlap_norm: int


@dataclass(frozen=True, kw_only=True)
class TimeFacts:
    """The predicted time of a launch on a GPU."""

    seconds: float
    limit: str
    flops: int
    waves: float
    terms: Mapping[str, float]
    composition: Composition


@dataclass(frozen=True, kw_only=True)
class FamilyKernel:
    """A kernel of a family with the model's config."""

    kernel: Kernel
    config: TileConfig
    key: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """A family that can compute a pass."""

    family: Family
    seconds: float
    read_bytes: int
    write_bytes: int
    dram_bytes: int
    spills: bool
    kernels: tuple[FamilyKernel, ...]


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Fast memory M beside d^2, in words and in bytes: theorems count words."""

    regime: str
    dtype: str
    head_dim: int
    m_bytes: int
    m_words: float
    m_over_d2: float
    theorem_words: int
    theorem_bytes: int
    dividing: Formula
    values: Mapping[str, float]
    dividing_words: float
    dividing_bytes: float
    critical_head_dim: float


@dataclass(frozen=True, kw_only=True)
class PanelFacts:
    """The panels that kernels of a small-cache pass exchange through L2."""

    panels: int
    rows: int
    bytes: int
    l2_bytes: int


@dataclass(frozen=True, kw_only=True)
class PassExplanation:
    """Why a pass has its kernels, on a GPU."""

    direction: Direction
    family: Family
    because: str
    kernels: tuple[Kernel, ...]
    seconds: float
    read_bytes: int
    write_bytes: int
    families: tuple[FamilyFacts, ...]
    left_out: Mapping[Family, str]
    """Families that cannot compute the pass or cannot win, with the reason."""
    optimum: Formula
    bound: BoundFacts
    regime: Regime
    panel: PanelFacts | None
    other_fast_memory: tuple[FamilyOnMemory, ...] | None = None
    """None until `with_alternatives` adds them."""
    other_masks: tuple[FamilyUnderMask, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class KernelExplanation(TileExplanation):
    """Why a kernel has its tile, on a GPU."""

    fast_memory: int
    loads: str
    """How streamed tiles are loaded; empty for kernels that never use descriptors."""
    dram: DramFacts
    footprint: FootprintFacts
    time: TimeFacts
    next_best: tuple[NextBest, ...]
    pass_: PassExplanation | None = None
    other_fast_memory: tuple[OnMemory, ...] | None = None
    """None until `with_alternatives` adds them."""
