"""Records that explanations for GPUs and for processors share.

Bytes and words are those of one launch, times are seconds. Every time is predicted, except in
`Measured`. `plain` turns a record into the values of `tilegen explain --json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Any, Literal

from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.visits import Visits


def plain(value: Any) -> Any:
    """Return a record as dictionaries, lists and numbers, which JSON can hold. The field `pass_`
    has the key `pass`."""
    if is_dataclass(value) and not isinstance(value, type):
        named = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name.removesuffix("_"): plain(part) for name, part in named}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return float(value) if isinstance(value, Fraction) else value


@dataclass(frozen=True, kw_only=True)
class Formula:
    """An equation: the name of its left side, and its right side as text and as LaTeX."""

    name: str
    text: str
    latex: str


@dataclass(frozen=True, kw_only=True)
class TrafficTerm:
    """The words of one tensor that move, for each key-value head."""

    tensor: str
    direction: str
    """`read` or `write`."""
    words: str
    latex: str
    size: str
    """`element` or `fp32`."""


@dataclass(frozen=True, kw_only=True)
class TrafficFacts:
    """Bytes that tiles move between fast memory and the next level."""

    formula: tuple[TrafficTerm, ...]
    bytes: Formula
    values: Mapping[str, float]
    """Values of the symbols."""
    seed_bytes: int
    """Part of the bytes that dropout reads."""
    table_bytes: int
    """Part of the bytes that tell where requests and pages lie."""
    read_bytes: int
    write_bytes: int
    dram_bytes: int
    """Bytes between L2 and DRAM of a GPU; 0 on a processor, which has `CpuExplanation.levels`."""

    @property
    def moved(self) -> int:
        """Bytes in both directions."""
        return self.read_bytes + self.write_bytes


@dataclass(frozen=True, kw_only=True)
class SubgridFacts:
    """The densest sub-grids of a mask."""

    per_row: float
    width: int
    formula: Formula | None
    """None where entries were counted."""


@dataclass(frozen=True, kw_only=True)
class BoundFacts:
    """Lower bounds on the bytes that any schedule moves."""

    bytes: int
    applies: str
    """Name of the largest bound."""
    each: Mapping[str, float]
    formulas: tuple[Formula, ...]
    values: Mapping[str, float]
    on_chip_bytes: int
    subgrids: SubgridFacts | None
    theorems_of: Literal["problem", "unmasked problem"]
    """The problem whose optimum and crossovers the theorems state; the bounds follow the mask."""
    ratio: float | None = None
    """Bytes of the tiles over the bound; None where nothing has to move."""


@dataclass(frozen=True, kw_only=True)
class KernelBound(BoundFacts):
    """The bounds of a kernel, and the theorems behind them."""

    complexity: str
    complexity_latex: str
    formula: str
    critical_head_dim: float | None
    """Head dim beyond which small-cache schedules move less; None on a processor."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The time in a record of this device. Everything else in an explanation is predicted."""

    config: str
    problem: str
    """The measured problem: lengths are powers of two."""
    seconds: float
    p20_seconds: float
    p80_seconds: float
    repeats: int
    policy: str
    """How times are measured."""
    trials: int
    """Number of configs that were tried."""
    date: str
    file: str
    predicted_seconds: float | None
    """The model's prediction when the record was made."""


@dataclass(frozen=True, kw_only=True)
class Pick:
    """A config in a line; `config` is None, with a reason, where nothing fits."""

    config: str | None
    seconds: float | None
    limit: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class NextPick(Pick):
    """Another config beside the config explained."""

    slowdown: float
    """Predicted time over the predicted time of the config explained."""
    traffic_ratio: float | None
    term: str
    """The term by which the config loses most, or where it is faster, wins most."""
    term_seconds: float
    differs: str
    """All differences, in words."""


@dataclass(frozen=True, kw_only=True)
class UnderMask(Pick):
    """The model's config for another mask."""

    mask: str


@dataclass(frozen=True, kw_only=True)
class DenseChoice:
    """The config that is best without a mask, under the mask of the problem."""

    config: str
    slowdown: float
    traffic_ratio: float
    scores_ratio: float


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """The tiles that a kernel visits under a mask."""

    keep: str
    stays: str
    streams: str
    form: str
    """`interval`, `several` (intervals) or `lists` (of tiles)."""
    live: tuple[tuple[str, str], ...]
    full: tuple[tuple[str, str], ...]
    dropped: tuple[tuple[str, str], ...]
    waste: float | None
    """Scores computed for each kept score."""
    dense_choice: DenseChoice | None
    """None if the config that is best without a mask is the config explained."""


@dataclass(frozen=True, kw_only=True)
class TileExplanation:
    """Why a kernel has its tile: what GPUs and processors have in common."""

    problem: str
    gpu: str
    """Name of the GPU, or of the processor."""
    kernel: Kernel
    config: TileConfig
    tile: str
    """The tile in words."""
    choice: str
    """Where the config comes from; empty for a config that was asked for."""
    model_config: str
    """The model's first config, with which alternatives are compared."""
    reason: str
    splits: str
    """The division of the streamed rows among programs. Empty if the kernel has no splits."""
    mask: MaskEffect
    tiles: Visits
    traffic: TrafficFacts
    bound: KernelBound
    waits_for: str
    """The limit in words."""
    measured: Measured | None = None
    rewriting: str = ""
    other_masks: tuple[UnderMask, ...] | None = None
    """None until `with_alternatives` adds them."""
