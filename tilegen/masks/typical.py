"""Typical tensors for a score, with which kernels are tuned and checked.

A form says what the elements of each tensor are; the size of a tensor follows from the indices
that it is looked up by, and from the sizes of a problem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilegen.errors import InvalidProblem
from tilegen.masks.language.expr import PAIR, Expr, captured_slots, slot_of
from tilegen.masks.language.integer_bounds import ANYTHING, MAX_LENGTH, Bounds, Sizes
from tilegen.masks.score import Score

if TYPE_CHECKING:
    from tilegen.masks.score import ScoreForm
    from tilegen.masks.shapes import Shape

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

    captured = tuple(map(tensor, range(len(form.captured))))
    sinks = torch.randn(shape.heads, generator=generator, device=device)
    return Score(form.text, captured, sinks.requires_grad_() if form.sinks else None)


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
