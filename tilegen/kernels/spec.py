"""Records of a kernel (`KernelSpec`) and of the kernels of a pass (`FamilySpec`).

A kernel's record holds everything the compiler needs to know: names and sizes for the template,
knobs for the tuner, traffic for the model. Templates hold the rest, the arithmetic. Records import
neither PyTorch nor SymPy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from tilegen.kernels.arguments import Argument, Line, names_of, places, usual_sizes
from tilegen.kernels.config import BLOCK_SIZES, NUM_STAGES, NUM_WARPS, Dim
from tilegen.kernels.loops import Knob, Loop, Sliced, Step, Whole
from tilegen.kernels.moved import Moved, least_words, read, words, words_of_visits, write
from tilegen.kernels.tensors import Number, Tensor

if TYPE_CHECKING:
    from tilegen.kernels.config import TileConfig
    from tilegen.masks.mask import Side
    from tilegen.problem import AttentionProblem

Direction = Literal["forward", "backward"]
Backend = Literal["cudnn", "flash", "efficient"]
"""PyTorch's own kernels of a pass: its cuDNN, FlashAttention and memory-efficient back ends."""
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The tiles and launch options that a kernel may be tuned over."""

    block_m: tuple[int, ...] = BLOCK_SIZES
    """Rows of a tile: query rows, times the number of heads if a tile holds several."""
    block_n: tuple[int, ...] = BLOCK_SIZES
    block_d: tuple[int, ...] = (0,)
    split_kv: tuple[int, ...] = (0,)
    num_warps: tuple[int, ...] = NUM_WARPS
    num_stages: tuple[int, ...] = NUM_STAGES


Feature = Literal["scores", "dropout", "training", "sinks", "order", "pages", "aliases"]
"""Features of kernels: scores that a problem changes; dropout, of weights or their gradients;
the gradients of tensors that a score reads; rows that start from their head's sink; sums over keys
in an order that depends on the row's keys alone; keys and values in pages of a cache; tensors that
are columns of another, which are not loaded again."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One emitted kernel. templates/README.md is the legend of the names."""

    name: str
    template: str
    """The file of its template, relative to `folder`."""
    title: str
    """First line of the emitted file."""
    inputs: tuple[Tensor | Line | Number, ...]
    """Parameters of `launch`, in order: tensors, and numbers, in the lines in which a kernel takes
    them. Tensors of masks and scores follow by name."""
    outputs: tuple[Tensor, ...]
    """Tensors that the kernel writes. A launch allocates and returns those that it is not given."""
    returns: Knob | None = None
    """A knob that a launch returns after the tensors, for the next kernel."""
    grid: tuple[
        tuple[str, Knob | Literal["group_size", "tile_heads", "split_kv", "split_q"] | int], ...
    ]
    """The size of the grid: the product of ceil(size / divisor) over these pairs."""
    loop: Loop
    own_sizes: Line | None = None
    """The sizes that the kernel takes, if not heads and the lengths of its tensors."""
    own_traffic: tuple[Moved, ...] = ()
    """The traffic of a kernel for which `moved.traffic` is wrong."""
    own_floor: tuple[Moved, ...] = ()
    """The least traffic of a kernel for which `moved.floor` is wrong."""
    checked_by: tuple[str, ...]
    """Outputs of the pass that check this kernel; `dt` stands for the gradients of a score's
    tensors."""
    described: tuple[str, ...] = ()
    """Streamed tensors whose tiles may be loaded through tensor descriptors."""
    knobs: Knobs = Knobs()
    supports: frozenset[Feature] = frozenset()
    """The features beyond plain attention under a mask."""
    unpaged: KernelSpec | None = None
    """The same kernel for keys outside of pages, if this kernel reads pages."""
    like: str = ""
    """The kernel whose fitted constants (instructions, buffers) to use; empty: its own."""
    requires: tuple[str, ...] = ()
    """Architectures that the kernel needs, such as sm_90; empty: any architecture."""
    specialised: bool = False
    """True for a kernel in Gluon whose warpgroups have roles: one loads all tiles through tensor
    descriptors, each other one computes ROWS_OF_GROUP stationary rows."""
    persists: bool = False
    """True if a program may compute several tiles, and its computing warpgroups may take turns."""
    head_dims: tuple[tuple[int, int], ...] = ()
    """The head dims (of q and k, of v) that the kernel serves; empty: any."""
    head_dims_of_slopes: tuple[tuple[int, int], ...] = ()
    """Those at which registers hold a score's derivative besides, where it is not 1; empty: any."""
    folder: Path | None = None
    """The folder of the kernel's template; None: tilegen's templates."""

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a launch by name, inputs first."""
        return {x.name: x for x in (*self.inputs, *self.outputs) if isinstance(x, Tensor)}

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters of `launch`, in order."""
        return tuple(dict.fromkeys(name for one in self.inputs for name in names_of(one)))

    @cached_property
    def allocated(self) -> tuple[str, ...]:
        """The names of the tensors that a launch allocates and returns."""
        return tuple(one.name for one in self.outputs if one.name not in self.parameters)

    @cached_property
    def reads(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel reads, except tables of pages."""
        tensors = self.tensors.values()
        return tuple(one for one in tensors if one not in self.outputs and one.dtype != "i32")

    @cached_property
    def streamed(self) -> tuple[Tensor, ...]:
        """The tensors that the kernel reads tile by tile."""
        return tuple(one for one in self.reads if one.side != self.stationary)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The function's arguments, without those that masks and scores add."""
        tensors = self.tensors.values()
        return (
            *places(tensors),
            self.own_sizes or usual_sizes(tensors, self.stationary, splits=self.joins),
            *(one for one in self.inputs if isinstance(one, Line)),
        )

    @cached_property
    def traffic(self) -> tuple[Moved, ...]:
        """Words that a launch moves, as counted by a counting build: stationary tensors move once,
        streamed tensors at each visit."""
        # Queries move again for each split, or each tile of scores, in which they are visited.
        rows = "W_s" if self.splits else "W_q" if self.sliced else ""
        visits = "g_t*V" if self.packs else "g*V"
        stationary = (one for one in self.reads if one not in self.streamed)
        return self.own_traffic or (
            *(read(one, words(one, rows)) for one in stationary),
            *(read(one, words_of_visits(one, visits)) for one in self.streamed),
            *(write(one, words(one)) for one in self.outputs),
        )

    @cached_property
    def floor(self) -> tuple[Moved, ...]:
        """Tensors that must move under any schedule: inputs that matter, and all outputs. Partial
        results of a split in which nothing is visited need not move."""
        rows = "n" if self.masked else "N"
        needed = (one for one in self.reads if not (one.in_parts or one.of_tiles))
        return self.own_floor or (
            *(read(one, least_words(one, rows)) for one in needed),
            *(
                write(one, least_words(one, "N"))
                for one in self.outputs
                if not (one.of_tiles or (one.in_parts and one.head_dim))
            ),
        )

    @property
    def parts(self) -> bool:
        """True if results are parts, in fp32, one for each split or share."""
        return self.splits or self.shares

    @property
    def fitted_as(self) -> str:
        """The kernel whose fitted constants to use."""
        return self.like or self.name

    @property
    def sliced(self) -> Sliced | None:
        """The inner loop, if the kernel takes head dims in slices; otherwise None."""
        return self.loop if isinstance(self.loop, Sliced) else None

    @property
    def whole(self) -> Whole | None:
        """The inner loop, if the kernel holds head dims whole; otherwise None."""
        return self.loop if isinstance(self.loop, Whole) else None

    @property
    def stationary(self) -> Side:
        """The stationary side of the scores; tiles of the other side are streamed."""
        return self.loop.stationary

    @property
    def masked(self) -> bool:
        """True if the kernel visits only tiles that a mask leaves."""
        return self.loop.masked

    @property
    def is_fused(self) -> bool:
        """True if scores never leave the chip, as the lower bound on traffic assumes."""
        return self.loop.is_fused

    @property
    def splits(self) -> bool:
        """True if streamed rows are split over programs."""
        return self.loop.splits

    @property
    def shares(self) -> bool:
        """True if a program works on a share of the stationary tiles."""
        return self.loop.shares

    @property
    def split_name(self) -> str:
        """The name of the rows of a split: `split_q` if queries are split, otherwise `split_kv`."""
        return "split_q" if self.splits and self.stationary == "columns" else "split_kv"

    @property
    def joins(self) -> bool:
        """True if the kernel joins the results of splits."""
        return self.loop.joins

    @property
    def packs(self) -> bool:
        """True if a tile may hold the query rows of several heads."""
        return any(by == "tile_heads" for _, by in self.grid)

    @property
    def panel(self) -> str:
        """The kernel's use of a panel of scores: `writes`, `reads`, or empty."""
        return self.loop.panel

    @property
    def products(self) -> tuple[Dim, ...]:
        """The matrix products of a step, each of query rows, key-value rows and a head dim."""
        return self.loop.products

    @property
    def score_tiles(self) -> int:
        """Score tiles that are live together, at least 1."""
        return self.loop.score_tiles

    def why_not(self, problem: AttentionProblem) -> str:
        """Return the reason why the kernel does not serve head dims, dtype or mask of a problem;
        empty if it does."""
        dims, score = (problem.head_dim_qk, problem.head_dim_v), problem.score
        if self.head_dims and dims not in self.head_dims:
            served = ", ".join(f"{qk}/{v}" for qk, v in self.head_dims)
            return f"{self.name} serves head dims {served}, not {dims[0]}/{dims[1]}"
        if self.specialised and problem.dtype == "fp32":
            return f"{self.name} needs fp16 or bf16: tensor cores do not compute IEEE fp32"
        if self.specialised and problem.mask.apart == "pairs":
            return f"{self.name} does not keep NaN of other documents from rows"
        if self.specialised and problem.dropout:
            return f"{self.name} does not drop weights"
        if self.specialised and score and score.trained and "dt" in self.checked_by:
            return f"{self.name} computes no gradients of tensors that a score reads"
        slopes = self.head_dims_of_slopes
        if slopes and dims not in slopes and score and score.has_slope:
            return f"{self.name} lacks registers for {score.notation} at head dim {dims[0]}"
        return ""

    def step(self, problem: AttentionProblem, config: TileConfig) -> Step:
        """Return the work of one step of the inner loop."""
        return self.loop.step(problem, config, self.loaded(problem), self.outputs)

    def streamed_bytes(self, problem: AttentionProblem) -> int:
        """Return the bytes of one streamed row: K and V, or Q, dO, lse (perhaps in pairs) and
        delta. It is 0 if head dims are not held whole."""
        if not self.whole:
            return 0
        streamed = [one for one in self.loaded(problem) if one.side != self.stationary]
        numbers = [1 + (one.paired and problem.pair_lse) for one in streamed if not one.head_dim]
        dims: list[Dim] = [one.head_dim for one in streamed if one.head_dim]
        return problem.element_bytes * sum(problem.head_dims[dim] for dim in dims) + 4 * sum(
            numbers
        )

    def loaded(self, problem: AttentionProblem) -> tuple[Tensor, ...]:
        """Return the tensors that the kernel reads for a problem: not values that are in keys."""
        in_keys = self.values_in_keys(problem)
        return tuple(one for one in self.reads if not (in_keys and one.alias))

    def returned(self, config: TileConfig) -> int:
        """Return the value of the knob that a launch returns; 0 if it returns none."""
        return getattr(config, self.returns) if self.returns else 0

    def values_in_keys(self, problem: AttentionProblem) -> bool:
        """Return True if the kernel reads a problem's values from keys that it has loaded."""
        return problem.latent and "aliases" in self.supports

    def draws(self, problem: AttentionProblem) -> bool:
        """Return True if the kernel draws random numbers for the dropout of a problem."""
        return problem.dropout and "dropout" in self.supports

    def divides(self, problem: AttentionProblem) -> bool:
        """Return True if a request's keys are divided over the request's programs. The kernel then
        computes the keys per split at run time."""
        return "pages" in self.supports and problem.page > 0 and not problem.invariant

    def keeps_order(self, problem: AttentionProblem) -> bool:
        """Return True if the kernel sums a row's keys in an order that does not depend on the
        problem."""
        return problem.invariant and "order" in self.supports

    @cached_property
    def by_name(self) -> dict[str, Argument]:
        """The kernel's arguments by name, without those that masks and scores add."""
        return {one.name: one for line in self.lines for one in line.arguments}


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One way to compute a pass: its kernels and their order."""

    name: str
    direction: Direction
    kernels: tuple[KernelSpec, ...]
    run: Callable[..., Any]
    """Launches the kernels. Forward: `run(launch, q, k, v, scale, panel_rows=, pairs=)` returns
    (out, lse), with `pairs` (batch, heads, 2, seqlen_q) for lse: see `Tensor.paired`. If it takes
    `laid`, the shapes and then the strides of q, k and v, it is given them where they are known.
    Backward: `run(launch, q, k, v, dout, lse, delta, scale, panel_rows=, wants_dq=, wants_dkdv=)`
    returns (dq, dk, dv), None for gradients that are not wanted."""

    margin: float = 1.0
    """Factor in predicted time by which the family must beat the families without a margin."""
    large_heads_only: bool = False
    """True if the family can win only if on-chip memory holds few rows of a head dim."""
    for_cpus: bool = False
    """True if nobody has timed the family on a GPU. Such a family is neither ranked nor proposed
    for GPUs."""
    by_record: bool = False
    """True if the family is used only where measured times say so, or if TILEGEN_HOPPER=1 is set.
    It is neither ranked nor proposed: a kernel that waits for ever would stop a GPU."""
    library: Backend | None = None
    """A library that was measured to be faster. It computes the calls that it supports; the kernels
    compute the others."""
    few_programs_only: bool = False
    """True if the family can win only if one program per stationary tile would leave SMs idle, or,
    in the forward, if heads have fewer query rows than a tile."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the family's kernels, in launch order."""
        return tuple(kernel.name for kernel in self.kernels)

    @cached_property
    def supports(self) -> frozenset[Feature]:
        """The features of any of its kernels, but the order of sums only if all
        keep it."""
        each = [kernel.supports for kernel in self.kernels]
        return frozenset[Feature]().union(*each) - (_BY_ALL - frozenset.intersection(*each))

    def why_not(self, problem: AttentionProblem, arch: str) -> str:
        """Return the reason why the family cannot compute a problem on an architecture; empty if it
        can."""
        for kernel in self.kernels:
            if kernel.requires and arch not in kernel.requires:
                return f"{kernel.name} needs {' or '.join(kernel.requires)}, not {arch}"
            if reason := kernel.why_not(problem):
                return reason
        needs = _needs(problem, self.direction)
        if missing := needs - self.supports:
            return f"{self.name} {_LACKS[min(missing)]}"
        if "pages" in self.supports - needs:
            return f"{self.name} reads pages of a cache only"
        return ""


def _needs(problem: AttentionProblem, direction: Direction) -> frozenset[Feature]:
    """Return the features that a pass of a problem needs. Sinks and the order of sums belong to
    the forward; gradients of what a score reads may come from PyTorch."""
    score, is_forward = problem.score, direction == "forward"
    needed: dict[Feature, bool] = {
        "scores": score is not None and score.changes,
        "dropout": problem.dropout,
        "sinks": is_forward and score is not None and score.sinks,
        "order": is_forward and problem.invariant,
        "pages": problem.page > 0,
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)


_LACKS: dict[Feature, str] = {
    "scores": "does not change scores",
    "dropout": "does not drop weights",
    "sinks": "has no sinks",
    "order": "sums keys in a tile-dependent order",
    "pages": "does not read pages of a cache",
}
_BY_ALL: frozenset[Feature] = frozenset({"order"})
