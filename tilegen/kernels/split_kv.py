"""Forward with the keys split over programs, for few queries (Flash-Decoding: Dao, Haziza, Massa,
Sizov, 2023). A tile holds the query rows of all heads that share a key-value head, and a program
streams the keys of one split past it. A second kernel joins the splits' results.

A split is a fixed number of keys, counted from the first, so the splits of a row depend on the
row's keys alone. Requests in pages differ: their keys are divided over the available programs,
unless they are batch-invariant. The grid is sized for the longest request allowed, and most
requests are shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilegen.kernels.allocation import allocator
from tilegen.kernels.arguments import SCALE_IN_BASE_2, numbers, sizes
from tilegen.kernels.layout import Laid, strides_like
from tilegen.kernels.loops import OverRows, Whole
from tilegen.kernels.panels import Launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs
from tilegen.kernels.tensors import LSE, NOT_WRITTEN, OUT, K, Number, Q, Tensor, V

if TYPE_CHECKING:
    import torch

    from tilegen.kernels.config import TileConfig
    from tilegen.problem import AttentionProblem

FILLING = 256
"""Programs that fill a GPU, about two per SM: a guess. An emitted kernel serves GPUs with any
number of SMs."""
READ_OVER_LEFT = 32
"""Least ratio of the keys and values that a split reads [bytes] to its partial results, which are
written and read again, once programs fill the GPU: a guess."""

_OF_SPLITS = "batch num_heads_q num_splits seqlen_q"
_WEIGHTS = f": log-sum-exp in base 2, -inf {NOT_WRITTEN.format(part='partials are')}"
PARTIALS = Tensor("partials", f"{_OF_SPLITS} head_dim_v", ": output of a split's keys", "fp32")
PARTIAL_LSE = Tensor("partial_lse", _OF_SPLITS, _WEIGHTS, "fp32", paired=True)

FWD_SPLIT = KernelSpec(
    name="fwd_split",
    template="split_kv/attention_fwd_split.py.jinja",
    title="Attention forward, keys split over programs: out and lse of each split.",
    inputs=(Q, K, V, SCALE_IN_BASE_2),
    outputs=(PARTIALS, PARTIAL_LSE),
    grid=(
        ("seqlen_q", "block_m"),
        ("num_heads_q", "tile_heads"),
        ("batch", 1),
        ("seqlen_kv", "split_kv"),
    ),
    loop=Whole(
        products=("qk", "v"),  # S = Q K^T; O += P V
        score_tiles=1,
        splits=True,
    ),
    checked_by=("out", "lse"),
    described=("k", "v"),
    knobs=Knobs(
        block_m=(16, 32, 64, 128),
        block_n=(16, 32, 64, 128),
        split_kv=(128, 256, 512, 1024, 2048, 4096, 8192),
    ),
    supports=frozenset({"scores", "order", "aliases"}),
    like="fwd",
)

_ALL_Q = Q.shape.replace("seqlen_q", "total_q")
_OF_PAGES = "pages num_heads_kv PAGE"
_STRIDES = "page, head and row strides"
_Q = replace(Q, shape=_ALL_Q, note=": queries of all requests")


def _table(name: str, note: str, address: str = "") -> Tensor:
    return Tensor(name, "_", note.format("int32 or int64"), "i32", address=address)


_TABLES = (
    _table("block_table", "(requests, pages of a request), {}", "table_ptr"),
    _table("lengths", "(requests,), {}: keys of each request"),
    _table("q_starts", "(requests + 1,), {}: where the queries of each request start"),
)

FWD_PAGED = replace(
    FWD_SPLIT,
    name="fwd_paged",
    template="split_kv/attention_fwd_paged.py.jinja",
    title="Attention forward, keys in pages and split over programs: out and lse of each split.",
    inputs=(
        _Q,
        Tensor("k", f"{_OF_PAGES} head_dim_qk", stride_note=_STRIDES),
        Tensor("v", f"{_OF_PAGES} head_dim_v", alias="k"),
        *_TABLES,
        Number("requests"),
        numbers("longest_q", "longest_kv", "table_row", why="of all requests; stride of the table"),
        SCALE_IN_BASE_2,
    ),
    outputs=tuple(
        replace(one, shape=one.shape.replace("seqlen_q", "total_q")) for one in FWD_SPLIT.outputs
    ),
    own_sizes=sizes("num_heads_q total_q", [_Q]),
    grid=(
        ("longest_q", "block_m"),
        ("num_heads_q", "tile_heads"),
        ("requests", 1),
        ("longest_kv", "split_kv"),
    ),
    described=(),  # rows beyond a request's length are in its last page, and are not loaded
    # The largest splits are for grids whose partial results take much memory (search_space.py).
    knobs=replace(FWD_SPLIT.knobs, split_kv=(*FWD_SPLIT.knobs.split_kv, 16384, 32768, 65536)),
    supports=FWD_SPLIT.supports | {"pages"},
    unpaged=FWD_SPLIT,
)

FWD_COMBINE = KernelSpec(
    name="fwd_combine",
    template="split_kv/attention_fwd_combine.py.jinja",
    title="Attention forward, keys split over programs: out and lse of all splits together.",
    inputs=(PARTIALS, PARTIAL_LSE, OUT, LSE),
    outputs=(OUT, LSE),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=OverRows(joins=True),
    checked_by=("out", "lse"),
    knobs=Knobs(block_m=(1,), block_n=(16, 32), num_warps=(1, 4), num_stages=(1,)),
    supports=frozenset({"order", "sinks"}),
)


def usual_tiles(problem: AttentionProblem, config: TileConfig) -> int:
    """Return the least number of key tiles per split of a divided request, if such splits leave no
    SM idle: by READ_OVER_LEFT, but at most `config.split_kv` keys."""
    left = 2 * 4 * config.rows * problem.head_dim_v
    width = problem.head_dim_qk + (0 if problem.latent else problem.head_dim_v)
    tile = config.block_n * width * problem.element_bytes
    return min(-(-READ_OVER_LEFT * left // tile), config.split_kv // config.block_n)


def run(
    launch: Mapping[str, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    pairs: bool = False,
    laid: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse)."""
    return _combined(launch, launch[FWD_SPLIT.name](q, k, v, scale, laid=laid), q, v)


@dataclass(slots=True, kw_only=True)
class Views:
    """The views in which kernels see the tensors of a paged call. Launches take the tensors as the
    caller laid them out: each view costs a tenth of a warm call. The record is never changed."""

    inputs: tuple[tuple[int, ...], ...]
    """The shapes, then the strides, of q, k and v, as `run_paged` describes them."""
    written: Laid
    """The result as kernels write it, (1, heads, all queries, head dim)."""
    out: Laid
    """The result as the caller gets it."""
    lse: Laid
    """The log-sum-exps as the caller gets them; kernels write (1, heads, all queries)."""


@dataclass(slots=True)
class Requests:
    """Places of the queries and keys of requests: tensors on the device, and their bounds. The
    record is never changed; a frozen record would take longer to create."""

    block_table: torch.Tensor
    """(requests, pages), int32 or int64: the pages of each request, in the order of its keys."""
    lengths: torch.Tensor
    """(requests,): the keys of each request."""
    q_starts: torch.Tensor
    """(requests + 1,): the first query of each request, and the end of the last."""
    longest_q: int
    longest_kv: int
    """The largest numbers of queries and of keys that a request has."""
    views: Views | None = None
    """The views of q, k, v and the results; None if the tensors are already laid out for
    kernels."""
    out: torch.Tensor | None = None
    """The caller's tensor for the result."""

    @property
    def narrow(self) -> Requests:
        """Return the same in 32 bits, which kernels of bundles read."""
        tensors = (self.block_table, self.lengths, self.q_starts)
        table, lengths, starts = (one.int() for one in tensors)
        return replace(self, block_table=table, lengths=lengths, q_starts=starts)


def run_paged(
    launch: Mapping[str, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    pairs: bool = False,
    requests: Requests,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of q (1, heads, all queries, head_dim_qk) and pages k and v (pages, heads,
    keys of a page, head dim), or of tensors with such views."""
    table, lengths, views = requests.block_table, requests.lengths, requests.views
    where = table, lengths, requests.q_starts, lengths.shape[0]
    given = q, k, v, *where, requests.longest_q, requests.longest_kv, table.stride(0), scale
    if views is None:
        return _combined(launch, launch[FWD_PAGED.name](*given), q, v)
    partials = launch[FWD_PAGED.name](*given, laid=views.inputs)
    return _combined(launch, partials, q, v, views, requests.out)


def _combined(
    launch: Mapping[str, Launch],
    partials: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    v: torch.Tensor,
    views: Views | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    values, weights = partials
    empty = allocator(is_cuda=q.is_cuda)
    if views is None:
        (batch, heads, rows, _), width = q.shape, v.shape[3]
        out = empty((batch, heads, rows, width), strides_like(q, width), q.dtype)
        shape, strides = (batch, heads, rows), (heads * rows, rows, 1)
    else:
        out = empty(*views.out, q.dtype) if out is None else out
        shape, strides = views.lse
    if weights.dim() == 4:
        lse = empty(shape, strides, weights.dtype)
    else:
        batch, heads, _, _, rows = weights.shape
        whole = 2 * heads * rows, 2 * rows, rows, 1
        lse = empty((batch, heads, 2, rows), whole, weights.dtype)
    if views is None:
        launch[FWD_COMBINE.name](values, weights, out, lse)
    else:
        launch[FWD_COMBINE.name](values, weights, out, lse, laid=views.written)
    return out, lse


PAGED = FamilySpec(
    name="paged", direction="forward", kernels=(FWD_PAGED, FWD_COMBINE), run=run_paged
)
SPLIT_KV = FamilySpec(
    name="split_kv",
    direction="forward",
    kernels=(FWD_SPLIT, FWD_COMBINE),
    run=run,
    few_programs_only=True,
)

FAMILIES = (SPLIT_KV, PAGED)
