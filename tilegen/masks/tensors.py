"""The tensors that masks and scores read: checks that they fit a call, and their form for
kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.form import Shape
from tilegen.masks.language.expr import PAIR, B, Expr, H, captured_slots, slot_of
from tilegen.masks.language.value_bounds import ANYTHING, MAX_LENGTH, Bounds, Sizes
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score, ScoreForm
from tilegen.masks.values import Made, has_values, table_of


def tensors_of(mask: Mask, shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return the tables that a mask reads, on a device. Raises InvalidProblem where sizes do not
    fit."""
    if mask.is_stand_in:
        raise InvalidProblem(f"expected a mask with its tensors, got {mask}")
    made: Made = {}
    tables: list[torch.Tensor] = []
    for value, within in mask.places_of_tables:
        axes = value.axes or ""
        table = value.on(device, (shape.seqlen_q, shape.seqlen_kv), made)
        needed, names = shape.by_axis, _AXIS_NAMES
        if within is not None:  # documents, of which there may be longer ones another time
            needed, names = within.shape_of_parts(shape).by_axis, DOCUMENT_AXES
            sizes = zip(axes, table.shape, strict=False)
            needed |= {axis: max(size, needed[axis]) for axis, size in sizes if axis in "qk"}
        if value.recipe is not None and axes.startswith("b"):
            table = table[: needed["b"]]  # what a function reads may be for more batches
        _check_axes(_VALUES, axes, table, needed, names)
        tables.append(table)
    return tuple(tables)


def check_kv_lengths(lengths: Any) -> None:
    """Raise InvalidProblem unless these can be the lengths of a padded batch."""
    is_dense = isinstance(lengths, torch.Tensor) and lengths.layout is torch.strided
    if not is_dense or lengths.ndim != 1:
        raise InvalidProblem("kv_lengths must be a dense tensor of shape (batch,)")
    if lengths.is_floating_point() or lengths.dtype is torch.bool:
        raise InvalidProblem(f"kv_lengths must be integers, got {lengths.dtype}")


def check_columns(lengths: torch.Tensor, columns: int) -> None:
    """Raise InvalidProblem if lengths of a padded batch are outside of the columns;
    nothing is looked at on a GPU, but for TILEGEN_CHECK=1."""
    if has_values(lengths) and lengths.numel():
        least, most = (int(one) for one in lengths.aminmax())
        if not 0 <= least <= most <= columns:
            raise InvalidProblem(f"kv_lengths must be 0..{columns}, got {lengths.tolist()}")


def are_readable(lengths: torch.Tensor, batch: int, device: torch.device) -> bool:
    """Whether kernels can read the lengths of a padded batch as they are, once compiled for their
    dtype. Raises InvalidProblem unless there is one for each batch entry."""
    if len(lengths) != batch:
        raise _wrong_size(_VALUES, batch, _AXIS_NAMES["b"], len(lengths))
    is_int = lengths.dtype in (torch.int32, torch.int64)
    return is_int and lengths.device == device and lengths.is_contiguous()


def check_fit(mask: Mask, score: Score | None, shape: Shape) -> None:
    """Raise InvalidProblem where a mask or a score is for other sizes than those of a call."""
    mask.check_lengths(shape.seqlen_q, shape.seqlen_kv)
    if score is not None:
        check_sizes(score, shape)


def check_sizes(score: Score, shape: Shape) -> None:
    """Raise InvalidProblem where a tensor that a score reads is empty or of another size."""
    if not all(tensor.numel() for tensor in score.captured):
        raise InvalidProblem("tensors that a score reads must not be empty")
    needed = shape.by_axis
    check_axes(score, needed, _AXIS_NAMES)
    for slot, axis, name in _whole_axes(score.form):
        size = score.captured[slot].shape[axis]
        if size < needed[name]:
            raise _wrong_size(_READ, needed[name], _AXIS_NAMES[name], size)
    if score.sinks is not None:
        _check_axes("sinks", "h", score.sinks.tensor, needed, _AXIS_NAMES)


def check_axes(score: Score, needed: Mapping[str, int], names: Mapping[str, str]) -> None:
    """Raise InvalidProblem where a tensor that a score reads has another size along an axis than is
    `needed`; errors call the axes by their `names`."""
    for table in score.tables:
        _check_axes(_READ, table.axes or "", table.tensor, needed, names)


def _check_axes(
    what: str, axes: str, table: torch.Tensor, needed: Mapping[str, int], names: Mapping[str, str]
) -> None:
    for axis, size in zip(axes, table.shape, strict=False):
        if size != needed.get(axis, size):
            raise _wrong_size(what, needed[axis], names[axis], size)


def _wrong_size(what: str, needed: int, along: str, size: int) -> InvalidProblem:
    return InvalidProblem(f"{what} must have size {needed} along {along}, got {size}")


@lru_cache(maxsize=256)
def _whole_axes(form: ScoreForm) -> tuple[tuple[int, int, str], ...]:
    """Return (slot, axis, name) of each axis that a score indexes by h or b alone."""
    return tuple(
        (slot_of(load), axis, str(index))
        for load in form.expression().loads()
        for axis, index in enumerate(load.args)
        if index in (B, H)
    )


def score_tensors(
    captured: Sequence[torch.Tensor],
    sinks: torch.Tensor | None,
    gradients: Mapping[int, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors that a score reads, by the names of a launch's parameters; `gradients` by
    slot."""
    reads = {
        f"c{slot}": (one.view(torch.uint8) if one.dtype == torch.bool else one).contiguous()
        for slot, one in enumerate(captured)
    }
    if sinks is not None:
        reads["sinks"] = sinks.to(torch.float32).contiguous()
    return reads | {f"dc{slot}": one for slot, one in (gradients or {}).items()}


_READ, _VALUES = "a tensor that the score reads", "the mask's values"
_AXIS_NAMES = {"b": "batch", "h": "query heads", "q": "query rows", "k": "key-value columns"}
DOCUMENT_AXES = _AXIS_NAMES | {
    "b": "documents",
    "q": "rows of the longest document",
    "k": "columns of the longest document",
}
"""Names of the axes of tensors that are read within documents."""


# --------------------------------------------------------------------------------------------------
# Typical tensors of a score


INTEGERS = 8
"""Number of different integers in a tensor: few, so that what they are an index of stays small."""
SPREAD = 0.5
"""Standard deviation of floats."""
LEAST = 0.5
"""Least of the floats that something is divided by, or whose logarithm or root is taken."""


def typical_score(
    form: ScoreForm | None,
    shape: Shape,
    device: torch.device | str = "cpu",
    *,
    seed: int = 0,
) -> Score | None:
    """Return a score of this form that reads random tensors of the sizes that `shape` needs; those
    that the form trains need a gradient, and so do sinks.

    Floats are normal, integers count from 0. Raises InvalidProblem where a tensor is looked up by
    different numbers of indices.
    """
    if form is None:
        return None
    generator = torch.Generator(device).manual_seed(seed)
    sizes, ranges = _extents(form, shape)

    def tensor(slot: int) -> torch.Tensor:
        dtype, size = getattr(torch, form.elements[slot]), sizes[slot]
        low, high = ranges[slot]
        options: Any = {"generator": generator, "device": device, "dtype": dtype}
        if not dtype.is_floating_point:
            return torch.randint(low, high + 1, size, **options)
        values = torch.randn(size, **options) * SPREAD
        values = values.abs() + LEAST if low > 0 else values
        return values.requires_grad_(slot in form.trained)

    tables = tuple([table_of(tensor(slot)) for slot in range(len(form.captured))])
    sinks = torch.randn(shape.heads, generator=generator, device=device)
    return Score(form.text, tables, table_of(sinks.requires_grad_()) if form.sinks else None)


def _extents(form: ScoreForm, shape: Shape) -> tuple[dict[int, tuple[int, ...]], dict[int, Bounds]]:
    """Return by slot the size of each tensor and the bounds of its integers; floats are positive
    where the lower bound is above 0."""
    expr = form.expression()
    positive = _positive(expr)
    ranges: dict[int, Bounds] = {
        slot: (0, 1) if kind == "bool" else (int(slot in positive), INTEGERS - 1)
        for slot, kind in enumerate(form.kinds)
    }
    known: dict[Expr | int, Bounds] = {**ranges}
    last = [(0, size - 1) for size in shape.by_axis.values()]
    lengths = [(length, length) for length in (shape.seqlen_q, shape.seqlen_kv)]
    known |= dict(zip(PAIR, (*last, *lengths), strict=True))
    bounds = Sizes(known, set()).bounds
    sizes: dict[int, tuple[int, ...]] = {}
    for load in expr.loads():
        slot, indices = slot_of(load), load.args
        needed = tuple(_size(bounds(index), shape) for index in indices)
        if len(before := sizes.get(slot, needed)) != len(needed):
            raise InvalidProblem(
                f"expected one number of indices for t{slot}, got {len(before)} and {len(needed)} "
                f"in {form.notation}"
            )
        sizes[slot] = tuple(map(max, before, needed))
    return {slot: sizes.get(slot, (1,)) for slot in ranges}, ranges


def _size(index: Bounds, shape: Shape) -> int:
    """Return the size that a dimension needs for an index with these bounds: the longest size of
    the call where a bound is not known, as an index beyond the end reads 0."""
    longest = max(shape.by_axis.values())
    low, high = index
    last = longest - 1 if high >= ANYTHING[1] else high
    first = -longest if low <= ANYTHING[0] else low  # counts from the end
    return min(max(last + 1, -first, 1), MAX_LENGTH)


def _positive(expr: Expr) -> set[int]:
    """Return the slots of tensors that something is divided by, or whose logarithm or root is
    taken."""
    slots: set[int] = set()
    for part in expr.walk():
        match part.op:
            case "div":
                slots.update(captured_slots(part.args[1]))
            case "log" | "log1p" | "sqrt" | "pow":
                slots.update(captured_slots(part.args[0]))
            case _:
                pass
    return slots
