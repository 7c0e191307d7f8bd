"""Records of a kernel, `KernelSpec`, and of the kernels of a pass, `FamilySpec`.

A kernel's record holds everything that the compiler needs to know: the names and sizes that the
template prints, the knobs that the tuner may turn, the traffic that the model counts. Templates
hold the rest: the arithmetic. Records need neither PyTorch nor SymPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilegen.kernels.arguments import Argument, Line
from tilegen.kernels.config import BLOCK_SIZES, NUM_STAGES, NUM_WARPS, Dim
from tilegen.kernels.loops import Knob, Loop, Sliced, Whole

if TYPE_CHECKING:
    from tilegen.kernels.config import TileConfig
    from tilegen.masks.mask import Side
    from tilegen.problem import AttentionProblem

Direction = Literal["forward", "backward"]
Backend = Literal["cudnn", "flash", "efficient"]
"""PyTorch's own kernels of a pass: its cuDNN, FlashAttention and memory-efficient back ends."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True)
class Moved:
    """Words of one tensor that a kernel moves one way, for one key-value head."""

    tensor: str
    direction: Literal["read", "write"]
    words: str
    """A formula in the symbols of model/symbols.py."""
    fp32: bool = False
    """True: words are fp32, whatever the dtype of the problem."""


def read(tensor: str, words: str, *, fp32: bool = False) -> Moved:
    """Return words that are loaded."""
    return Moved(tensor, "read", words, fp32)


def write(tensor: str, words: str, *, fp32: bool = False) -> Moved:
    """Return words that are stored."""
    return Moved(tensor, "write", words, fp32)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The tiles and launch options that a kernel may be tuned over."""

    block_m: tuple[int, ...] = BLOCK_SIZES
    """Rows of a tile: query rows, times the heads where a tile holds those of several."""
    block_n: tuple[int, ...] = BLOCK_SIZES
    block_d: tuple[int, ...] = (0,)
    split_kv: tuple[int, ...] = (0,)
    num_warps: tuple[int, ...] = NUM_WARPS
    num_stages: tuple[int, ...] = NUM_STAGES


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One emitted kernel. templates/README.md is the legend of the names."""

    name: str
    template: str
    """The file of its template, relative to `folder`."""
    title: str
    """First line of the emitted file."""
    given: tuple[str, ...]
    """Parameters of `launch`, in order; tensors of masks and scores follow by name."""
    made: tuple[str, ...]
    """Tensors that a launch allocates and returns."""
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Tensors of fp32 that a launch makes for each split. For each: the tensor with the stationary
    rows, the tensor whose rows are split, and a tensor with the same head dim."""
    notes: dict[str, str] = field(default_factory=dict, hash=False)
    """Shapes and meaning of tensors that no other family has, in words."""
    tells: Knob | None = None
    """A knob that a launch returns after its tensors, for the next kernel."""
    lines: tuple[Line, ...]
    """The function's arguments, without those that masks and scores add."""
    grid: tuple[
        tuple[str, Knob | Literal["group_size", "tile_heads", "split_kv", "split_q"] | int], ...
    ]
    """The size of the grid: the product of ceil(size / divisor) over these pairs."""
    loop: Loop
    traffic: tuple[Moved, ...]
    """Words that a launch moves, exactly: as many as a counting build counts."""
    floor: tuple[Moved, ...]
    """Tensors that must move under any schedule: inputs that matter, and all outputs."""
    shows: tuple[str, ...]
    """Outputs of the pass that check this kernel; `dt` stands for the gradients of a score's
    tensors."""
    described: tuple[str, ...] = ()
    """Streamed tensors whose tiles may be loaded through tensor descriptors."""
    knobs: Knobs = Knobs()
    computes_scores: bool = False
    """True: the kernel changes scores as a problem asks."""
    drops: bool = False
    """True: the kernel drops weights, or their gradients, for problems with dropout."""
    trains: bool = False
    """True: the kernel adds up the gradients of the tensors that a score reads."""
    has_sinks: bool = False
    """True: a row starts from the logit of its head's sink."""
    in_order: bool = False
    """True: for batch-invariant problems the kernel adds up the keys of a row in an order that
    depends on the row's keys alone."""
    pages: bool = False
    """True: keys and values are read from the pages of a cache, for requests of any lengths."""
    unpaged: KernelSpec | None = None
    """The same kernel for keys outside of pages, where this kernel reads pages."""
    like: str = ""
    """The kernel to take counted numbers (instructions, buffers) from; empty: this kernel."""
    requires: tuple[str, ...] = ()
    """Architectures that the kernel needs, such as sm_90; empty: any will do."""
    folder: Path | None = None
    """The folder of the kernel's template; None: that of tilegen's templates."""

    @property
    def fitted_as(self) -> str:
        """The kernel to take counted numbers from."""
        return self.like or self.name

    @property
    def sliced(self) -> Sliced | None:
        """The inner loop of a kernel that takes head dims in slices; None for others."""
        return self.loop if isinstance(self.loop, Sliced) else None

    @property
    def whole(self) -> Whole | None:
        """The inner loop of a kernel that holds head dims whole; None for others."""
        return self.loop if isinstance(self.loop, Whole) else None

    @property
    def stays(self) -> Side:
        """The side of the scores whose tiles stay; tiles of the other side pass."""
        return self.loop.stays

    @property
    def masked(self) -> bool:
        """True: the kernel visits the tiles that a mask leaves."""
        return self.loop.masked

    @property
    def is_fused(self) -> bool:
        """True: scores are formed and used up on chip, as a lower bound on traffic assumes."""
        return self.loop.is_fused

    @property
    def splits(self) -> bool:
        """True: streamed rows are split over programs."""
        return self.loop.splits

    @property
    def shares(self) -> bool:
        """True: a program goes through a share of the tiles that stay."""
        return self.loop.shares

    @property
    def split_name(self) -> str:
        """The name of the rows of a split: queries where keys stay, and keys otherwise; of a share
        keys where keys stay."""
        return "split_q" if self.splits and self.stays == "columns" else "split_kv"

    @property
    def joins(self) -> bool:
        """True: the kernel joins the results of splits."""
        return self.loop.joins

    @property
    def packs(self) -> bool:
        """True: a tile may hold the query rows of several heads."""
        return any(by == "tile_heads" for _, by in self.grid)

    @property
    def panel(self) -> str:
        """The kernel's part in a panel of scores: `writes`, `reads`, or nothing."""
        return self.loop.panel

    @property
    def products(self) -> tuple[Dim, ...]:
        """The matrix products of a step, each of query rows, key-value rows and a head dim."""
        return self.loop.products

    @property
    def score_tiles(self) -> int:
        """Score tiles that are alive together, at least 1."""
        return self.loop.score_tiles

    def told(self, config: TileConfig) -> int:
        """Return the knob that a launch returns; 0 where it returns none."""
        return getattr(config, self.tells) if self.tells else 0

    def values_in_keys(self, problem: AttentionProblem) -> bool:
        """Whether the kernel takes a problem's values from the keys that it has loaded."""
        return self.loop.values_in_keys(problem)

    def draws(self, problem: AttentionProblem) -> bool:
        """Whether the kernel draws random numbers, for the dropout of a problem."""
        return problem.dropout and self.drops

    def divides(self, problem: AttentionProblem) -> bool:
        """Whether the keys of a request are divided over the request's programs: the kernel
        computes the number of keys of a split when it runs."""
        return self.pages and problem.page > 0 and not problem.invariant

    def keeps_order(self, problem: AttentionProblem) -> bool:
        """Whether the kernel adds up a row's keys in an order that other problems share."""
        return problem.invariant and self.in_order

    @cached_property
    def by_name(self) -> dict[str, Argument]:
        """The kernel's arguments by their names, without those that masks and scores add."""
        return {one.name: one for line in self.lines for one in line.arguments}


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One way to compute a pass: its kernels, and how they follow each other."""

    name: str
    direction: Direction
    kernels: tuple[KernelSpec, ...]
    run: Callable[..., Any]
    """Launches the kernels. Forward: `run(launch, q, k, v, scale, panel_rows=, pairs=)` returns
    (out, lse), with `pairs` (batch, heads, 2, seqlen_q) for lse: see `PAIRED` in layout.py.
    Backward: `run(launch, q, k, v, dout, lse, delta, scale, panel_rows=, wants_dq=, wants_dkdv=)`
    returns (dq, dk, dv), None for gradients that are not wanted."""

    margin: float = 1.0
    """Factor in predicted time by which the family must be faster than the families without a
    margin, to be taken."""
    large_heads_only: bool = False
    """True: the family can win only where on-chip memory holds few rows of a head dim."""
    for_cpus: bool = False
    """True: nobody has timed the family on a GPU, so it is neither ranked nor proposed for one."""
    library: Backend | None = None
    """A library that was measured to be faster. It computes the pass of each call that it supports;
    the kernels compute the others."""
    few_programs_only: bool = False
    """True: the family can win only where a program for each tile that stays leaves SMs idle, or in
    the forward, where heads have too few query rows for a tile each."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the family's kernels, in the order of their launches."""
        return tuple(kernel.name for kernel in self.kernels)

    @cached_property
    def pages(self) -> bool:
        """True: the family reads keys and values from the pages of a cache."""
        return any(kernel.pages for kernel in self.kernels)

    @cached_property
    def drops(self) -> bool:
        """True: the family drops weights where a problem asks for it."""
        return any(kernel.drops for kernel in self.kernels)

    def why_not(self, problem: AttentionProblem, arch: str) -> str:
        """Return why the family cannot compute a problem on an architecture; empty if it can."""
        for kernel in self.kernels:
            if kernel.requires and arch not in kernel.requires:
                return f"{kernel.name} needs {' or '.join(kernel.requires)}, not {arch}"
        if problem.page and not self.pages:
            return f"{self.name} does not read pages of a cache"
        if not problem.page and self.pages:
            return f"{self.name} reads pages of a cache only"
        is_forward = self.direction == "forward"
        if problem.invariant and is_forward and not all(one.in_order for one in self.kernels):
            return f"{self.name} sums keys in a tile-dependent order"
        score = problem.score
        if score and score.changes and not any(one.computes_scores for one in self.kernels):
            return f"{self.name} does not change scores"
        sinks = score and score.sinks and self.direction == "forward"
        if sinks and not any(one.has_sinks for one in self.kernels):
            return f"{self.name} has no sinks"
        if problem.dropout and not self.drops:
            return f"{self.name} does not drop weights"
        return ""
