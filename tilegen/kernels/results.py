"""The tensors that launches allocate: their shapes, as records and in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilegen.kernels.arguments import PANELS
from tilegen.kernels.layout import PAIRED, empty_like

if TYPE_CHECKING:
    import torch

    from tilegen.kernels.spec import KernelSpec

LIKE = {"out": ("q", "v"), "dq": ("q", "q"), "dk": ("k", "k"), "dv": ("v", "v")}
"""Results with the layout of one tensor and the head dim of another."""
OF_ROWS = {"lse": "q", "delta": "out"}
"""Results with an fp32 number for each row of a tensor."""
OF_SPLITS: dict[str, tuple[str, ...]] = {}
"""fp32 results for each row of one tensor and each split of another's rows, and the tensor whose
head dim they have: `KernelSpec.parts` of all kernels."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One size of a result."""

    of: str
    """The tensor that the size is read from, or a number that the launch is given."""
    axis: int | None = None
    """The dimension of the tensor; None for a number."""
    by: Literal["", "keys", "unit"] = ""
    """Blank: the size itself. `keys`: the number of score tiles or splits, rounded up. `unit`: the
    size rounded up to a multiple of the elements in which strides are counted."""

    def value(self, given: Mapping[str, Any], unit: int, keys: int) -> int:
        """Compute the size from the arguments of the launch, by name."""
        size = given[self.of] if self.axis is None else given[self.of].shape[self.axis]
        if self.by == "unit":
            return -(-size // unit) * unit
        return -(-size // keys) if self.by == "keys" else size


def extents(name: str, given: Collection[str], *, pairs: bool) -> tuple[Extent | int, ...]:
    """Return the sizes of a result, for a launch with the arguments `given`.

    With `pairs`, a log-sum-exp is two numbers, in the dimension before rows.
    """
    pair = (2,) if pairs and name in PAIRED else ()
    if name in LIKE:
        like, width = LIKE[name]
        return *(Extent(like, axis) for axis in range(3)), Extent(width, 3)
    if name in OF_ROWS:
        of = OF_ROWS[name]
        return Extent(of, 0), Extent(of, 1), *pair, Extent(of, 2)
    if name in OF_SPLITS:
        stays, passes, *widths = OF_SPLITS[name]
        is_paged = "longest_kv" in given
        splits = Extent("longest_kv", None, "keys") if is_paged else Extent(passes, 2, "keys")
        rows = Extent(stays, 2), *(Extent(width, 3) for width in widths)
        return Extent(stays, 0), Extent(stays, 1), splits, *pair, *rows
    if name in PANELS:
        return Extent("num_heads"), Extent("num_rows"), Extent("k", 2, "unit")
    return Extent("num_heads"), Extent("k", 2, "keys"), Extent("num_rows")  # maxima and sums


def allocate(
    name: str, given: Mapping[str, Any], unit: int, keys: int, pairs: bool
) -> torch.Tensor:
    """Allocate an uninitialised tensor for a result of a launch.

    `given` are the launch's arguments by name. `unit` is the number of elements in which strides
    are counted. `keys` is the number of keys of a score tile, or of rows of a split.
    """
    import torch

    if name in LIKE:
        like, width = LIKE[name]
        return empty_like(given[like], given[width].shape[3])
    sizes = extents(name, given, pairs=pairs)
    shape = [size if isinstance(size, int) else size.value(given, unit, keys) for size in sizes]
    first = next(iter(given.values()))
    dtype = first.dtype if name in PANELS else torch.float32
    return torch.empty(shape, device=first.device, dtype=dtype)


NOT_WRITTEN = "where the mask leaves a tile nothing of the split, whose {part} not written"
_QUERIES = "(batch, heads, seqlen_q, head_dim_qk)"
_OUTPUTS = "(batch, heads, seqlen_q, head_dim_v)"
_KEYS = "(batch, heads_kv, seqlen_kv, head_dim_qk)"
_VALUES = "(batch, heads_kv, seqlen_kv, head_dim_v)"
_PANEL = "(num_heads, num_rows, seqlen_kv padded to STRIDE_UNIT)"
_OF_TILES = "(num_heads, score tiles, num_rows), fp32"
_NOTES = {
    "q": _QUERIES,
    "k": _KEYS,
    "v": _VALUES,
    "out": _OUTPUTS,
    "dout": _OUTPUTS,
    "dq": _QUERIES,
    "dk": _KEYS,
    "dv": _VALUES,
    "lse": "(batch, heads, seqlen_q), fp32, dense: natural log-sum-exp of each row",
    "delta": "(batch, heads, seqlen_q), fp32, dense: rowsum(out * dout)",
    "partials": "(batch, heads, splits, seqlen_q, head_dim_v), fp32: output of a split's keys",
    "partial_lse": "(batch, heads, splits, seqlen_q), fp32: log-sum-exp in base 2, -inf "
    + NOT_WRITTEN.format(part="partials are"),
    "weights": f"{_PANEL}: rows from a multiple of BLOCK_M; heads of all batches are numbered",
    "ds": f"{_PANEL}: gradients of scores",
    "panel": f"{_PANEL}: weights, or gradients of scores",
    "maxima": _OF_TILES,
    "sums": _OF_TILES,
    "score_width": "keys of a score tile",
    "y": "q or dout: grad gains factor * panel^T y",
    "grad": "(batch, heads_kv, seqlen_kv, head_dim)",
    "acc": "(seqlen_kv, head_dim), fp32: the sum so far, where a key/value head has several panels",
    "block_table": "(requests, pages of a request), int32 or int64",
    "lengths": "(requests,), int32 or int64: keys of each request",
    "q_starts": "(requests + 1,), int32 or int64: where the queries of each request start",
}
"""Shapes, dtypes and meaning of tensors."""
_PAGED_NOTES = {
    "q": "(1, heads, total_q, head_dim_qk): queries of all requests",
    "k": "(pages, heads_kv, PAGE, head_dim_qk)",
    "v": "(pages, heads_kv, PAGE, head_dim_v)",
    "partials": _NOTES["partials"].replace("batch", "1").replace("seqlen_q", "total_q"),
    "partial_lse": _NOTES["partial_lse"].replace("batch", "1").replace("seqlen_q", "total_q"),
}
"""Shapes, dtypes and meaning of tensors in kernels that read pages."""


def shape_note(name: str, spec: KernelSpec, *, pairs: bool) -> str:
    """Describe the shape, dtype and meaning of a tensor; empty for numbers."""
    note = _PAGED_NOTES.get(name, "") if "pages" in spec.supports else ""
    note = note or spec.notes.get(name) or _NOTES.get(name, "")
    if pairs and name in PAIRED:
        note = note.replace("splits, ", "splits, 2, ").replace("heads, seqlen", "heads, 2, seqlen")
        note += "; the second of a pair, in base 2, is what the first leaves out in fp32"
    return note
