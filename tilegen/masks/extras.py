"""The arguments that a mask or a score adds to an emitted kernel: the tensors read, and their
sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilegen.kernels.arguments import LISTS, Line, tensor
from tilegen.masks.language.elements import ELEMENTS
from tilegen.masks.language.symbols import Lookup, slot_of
from tilegen.masks.mask import Mask, Side
from tilegen.masks.source import closed_form
from tilegen.masks.tiles.closed_form import predicate


def reading(
    expressions: Iterable[Any],
    letter: str,
    elements: Sequence[str],
    why: str,
    gradients: Sequence[int] = (),
) -> tuple[Line, ...]:
    """Return the arguments for the captured tensors that expressions read, called `letter` and a
    number: pointers, sizes, and pointers of the gradients of some; `elements` has PyTorch's names
    by slot."""
    looked_up = {one for expression in expressions for one in expression.atoms(Lookup)}
    dimensions = {slot_of(one): len(one.args) - 1 for one in looked_up}
    read = [
        one
        for slot in sorted(dimensions)
        for one in tensor(f"{letter}{slot}", f"*{ELEMENTS[elements[slot]]}", dimensions[slot])
    ]
    for slot in gradients:
        read += tensor(f"d{letter}{slot}", "*fp32", 0)
    return (Line(tuple(read), why),) if read else ()


def extras(mask: Mask, side: Side) -> tuple[Line, ...]:
    """Return the tensors and sizes that the kernels of a side read for a mask."""
    ranges = closed_form(mask, side)
    expressions: list[Any] = [predicate(mask, side)]
    for one in (*ranges.live, *ranges.dropped) if ranges else ():
        expressions += [one.lo, one.hi, *one.guards]
    elements = [value.elements for value in mask.values]
    found = reading(expressions, "t", elements, "what the mask reads, with its sizes")
    return found if ranges else (*found, LISTS)
