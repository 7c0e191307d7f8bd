"""The inner loops of kernels, of three kinds: `Whole`, `Sliced` and `OverRows`. A step of a loop
has matrix products, their operands and their accumulators.

Each kind computes the numbers of a step from the tensors named in a kernel's record. Footprint and
time depend on these numbers alone, for every kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from tilegen.kernels.config import Dim, TileConfig, head_dim_chunks
from tilegen.kernels.tensors import Tensor

if TYPE_CHECKING:
    from tilegen.masks.mask import Side
    from tilegen.problem import AttentionProblem

T = TypeVar("T")
Knob = Literal["block_m", "block_n", "block_d"]
chunks = cache(head_dim_chunks)
"""Widths of the tiles that cover a head dim."""


@dataclass(frozen=True)
class Product:
    """One matrix product: rows x depth times depth x columns."""

    rows: int
    columns: int
    depth: int
    rows_in_shared: bool = True
    """True if the first operand is read from shared memory. False if it is in registers, or was
    already read by another product of the step."""
    scores: bool = False
    """True if the result is a tile of scores, or of their gradients, that another product reads."""
    times: int = 1
    """Number of products like this one in a step."""

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one product."""
        return self.rows * self.columns * self.depth

    def operands_of_thread(self, threads: int) -> float:
        """Count the operand words of a thread whose part of the result is an equal square."""
        return 2 * self.depth * (self.rows * self.columns / threads) ** 0.5


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of one step; sizes in rows, columns and words of the problem's dtype. They are
    arrays if the knobs of the config are."""

    rows: int
    """Rows of the stationary tile."""
    columns: int = 0
    """Rows of the streamed tile; if head dims are sliced, columns of the result."""
    products: tuple[Product, ...] = ()
    kept: int = 0
    """Words of the operands that stay on chip for the whole loop."""
    results: tuple[int, ...]
    """Widths of the fp32 tiles of `rows` rows that the loop accumulates."""
    rescales: bool = True
    """True if each step rescales its results when the running maximum changes."""
    score_tiles: int = 0
    """fp32 score tiles that are live together, besides the results."""
    scores: int = 0
    """Entries of one score tile; 0 if a step has none."""
    scores_after: int = 0
    """Entries of the score tile that a program computes once, after its loop."""
    changed: int = 0
    """Words of an operand that are modified in registers before a product reads them."""
    weighted: bool = False
    """True if the modified words are weights, corrected by the maxima of score tiles."""
    streamed: tuple[int, ...] = ()
    """Widths of the pieces in which a row of the streamed tile is loaded; none if no tile is
    streamed."""
    numbers: int = 0
    """fp32 numbers that are loaded with a row of the streamed tile: lse, delta."""
    reads: float = 1.0
    """Average number of products that read a streamed tile."""
    loaded: int = 0
    """Words that a step loads."""
    loads: int = 1
    """Dependent loads of a step: each starts when the load before is done."""
    held_bytes: int = 0
    """Bytes of the rows that a step without products holds."""
    summed: int = 0
    """fp32 words that the warps of a program sum together, in a step without products."""
    stored_bytes: int = 0
    """Bytes of results that are rearranged in shared memory before they are stored; 0 if they are
    stored directly."""

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all products."""
        return sum(one.times * one.multiply_adds for one in self.products)

    @property
    def result_words(self) -> int:
        """fp32 words of all results."""
        return self.rows * sum(self.results)


@dataclass(frozen=True, kw_only=True)
class _Loop:
    """Fields and methods that all three kinds share."""

    stationary: Side = "rows"
    """The stationary side of the scores; tiles of the other side are streamed."""
    # Kinds whose kernels differ in one of these define a field or a property of the same name.
    masked = is_fused = True
    splits = shares = joins = in_part = False
    panel = ""

    def sides(self, queries: T, keys: T) -> tuple[T, T]:
        """Return the stationary side and the streamed side. The same call turns (stationary,
        streamed) back into (queries, keys)."""
        return (keys, queries) if self.stationary == "columns" else (queries, keys)

    def tile(self, config: TileConfig) -> str:
        """Describe the stationary and the streamed tile in a phrase."""
        rows = f"{config.block_m} query row{'s' * (config.block_m > 1)}"
        return f"{rows} stationary, tiles of {config.block_n} keys streamed"


def _widths(problem: AttentionProblem, tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Return the widths of the tiles that hold a row of each tensor with a head dim."""
    dims: list[Dim] = [one.head_dim for one in tensors if one.head_dim]
    return tuple(width for dim in dims for width in chunks(problem.head_dims[dim]))


@dataclass(frozen=True, kw_only=True)
class Whole(_Loop):
    """The loop of a kernel that holds head dims whole: one tile is stationary, tiles of rows are
    streamed."""

    products: tuple[Dim, ...]
    """Matrix products of a step, each stationary rows x streamed rows x a head dim."""
    score_tiles: int
    """Score tiles that are live together."""
    splits: bool = False
    """True if a program works on a split of the streamed rows, and stores its part of the results
    in fp32."""
    shares: bool = False
    """True if a program works on the stationary tiles of a share one by one, and adds to the
    share's partial result, which is in memory in fp32."""

    @property
    def in_part(self) -> bool:
        """True if the streamed tiles are those of a split."""
        return self.splits

    def tile(self, config: TileConfig) -> str:
        """Describe the stationary and the streamed tile in a phrase."""
        if self.stationary == "rows":
            return super().tile(config)
        rows = f"{config.block_n} key-value rows"
        return f"{rows} stationary, tiles of {config.block_m} queries streamed"

    def step(
        self,
        problem: AttentionProblem,
        config: TileConfig,
        reads: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Step:
        """Return one step: one stationary tile and one streamed tile."""
        rows, columns = self.sides(config.rows, config.block_n)
        kept = [one for one in reads if one.side == self.stationary]
        streamed = [one for one in reads if one.side != self.stationary]
        pairs = problem.pair_lse
        numbers = [1 + (one.paired and pairs) for one in streamed if one.head_dim is None]
        widths = _widths(problem, streamed)
        results = _widths(problem, (one for one in outputs if one.side == self.stationary))
        return Step(
            rows=rows,
            columns=columns,
            products=tuple(
                Product(
                    rows,
                    columns,
                    sum(chunks(problem.head_dims[dim])),
                    rows_in_shared=False,
                    scores=i < self.score_tiles,  # these products are read by the others
                )
                for i, dim in enumerate(self.products)
            ),
            kept=rows * sum(_widths(problem, kept)),
            results=results,
            score_tiles=self.score_tiles,
            scores=rows * columns,
            changed=rows * columns,  # weights are rounded
            streamed=widths,
            numbers=sum(numbers),
            reads=len(self.products) / (len(streamed) - len(numbers)),
            loaded=columns * sum(widths),
            stored_bytes=4 * rows * max(results) if self.splits else 0,
        )


@dataclass(frozen=True, kw_only=True)
class Sliced(_Loop):
    """The loop of a kernel that takes head dims in slices of `block_d` columns."""

    rows: Knob
    columns: Knob
    depth: Knob
    """One step is a matrix product of rows x depth and depth x columns."""
    results: int = 1
    """Tiles of rows x columns that are accumulated."""
    slices: tuple[Dim, ...]
    """Head dims that are taken in slices."""
    loops: bool
    """True if a program works on all slices. False if each slice has its own programs."""
    panel: Literal["", "writes", "reads"] = ""
    """`writes` or `reads`: the kernel's use of the panel that the kernels of a pass share."""
    weighs: bool = False
    """True if the panel holds weights, which are corrected by the maxima of score tiles."""
    launches: int = 1
    """Launches for each panel."""

    @property
    def is_fused(self) -> bool:
        """True if no scores leave the chip."""
        return not self.panel

    @property
    def in_part(self) -> bool:
        """True if the streamed tiles are those of a panel."""
        return self.panel == "reads" and self.stationary == "columns"

    @property
    def products(self) -> tuple[Dim, ...]:
        """The matrix products of a tile, each of query rows, key-value rows and a head dim."""
        return self.slices if self.panel else (*self.slices, "v")

    @property
    def score_tiles(self) -> int:
        """Score tiles that are live together."""
        return self.results

    def step(
        self,
        problem: AttentionProblem,
        config: TileConfig,
        reads: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Step:
        """Return one step on one slice; without a panel, on all slices of a streamed tile."""
        sides = {"block_m": config.rows, "block_n": config.block_n, "block_d": config.block_d}
        rows, columns, depth = (sides[one] for one in (self.rows, self.columns, self.depth))
        if not self.panel:
            return self._streamed(problem, rows, columns, depth)
        stored = 0
        if self.panel == "writes":
            stored = rows * columns * problem.element_bytes
        elif self.stationary == "columns":
            stored = 4 * rows * columns * self.results
        return Step(
            rows=rows,
            columns=columns,
            products=(Product(rows, columns, depth),),
            results=(columns,) * self.results,
            rescales=False,
            scores_after=rows * columns if self.panel == "writes" else 0,
            changed=rows * depth if self.panel == "reads" else 0,  # scaled, or masked
            weighted=self.weighs,
            streamed=(depth,),
            loaded=(rows + columns) * depth,
            stored_bytes=stored,
        )

    def _streamed(self, problem: AttentionProblem, rows: int, columns: int, depth: int) -> Step:
        slices, values = -(-problem.head_dim_qk // depth), chunks(problem.head_dim_v)
        return Step(
            rows=rows,
            columns=columns,
            products=(
                Product(rows, columns, depth, scores=True, times=slices),
                Product(rows, sum(values), columns, rows_in_shared=False),
            ),
            results=values,
            score_tiles=1,
            scores=rows * columns,
            changed=rows * columns,
            streamed=(depth,),
            loaded=(rows + columns) * depth,
            loads=slices,
        )


@dataclass(frozen=True, kw_only=True)
class OverRows(_Loop):
    """The loop of a kernel that passes over its rows once, without matrix products."""

    joins: bool = False
    """True if a step joins the rows of `block_n` splits, held in fp32."""
    masked = is_fused = False
    products: ClassVar[tuple[Dim, ...]] = ()
    score_tiles = 1

    def tile(self, config: TileConfig) -> str:
        """Describe the rows of a program in a phrase."""
        rows = config.block_m
        return f"{rows} row{'s' * (rows > 1)} per program"

    def step(
        self,
        problem: AttentionProblem,
        config: TileConfig,
        reads: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> Step:
        """Return one step, on the rows of a program."""
        results = _widths(problem, (one for one in (*reads, *outputs) if one.is_strided))
        rows = config.rows * config.block_n if self.joins else config.rows
        return Step(
            rows=rows,
            results=results,
            held_bytes=rows * sum(results) * (4 if self.joins else problem.element_bytes),
            summed=config.rows * sum(results) if self.joins else rows,
        )


Loop = Whole | Sliced | OverRows
