"""The arguments that a mask adds to an emitted kernel: what it reads."""

# SymPy is typed only in part:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from tilegen.kernels.arguments import LISTS, Line, tensor
from tilegen.masks.language.symbols import Lookup
from tilegen.masks.mask import Mask, Side
from tilegen.masks.score import ELEMENTS
from tilegen.masks.source import closed_form
from tilegen.masks.tiles.closed_form import predicate


def extras(mask: Mask, side: Side) -> tuple[Line, ...]:
    """Return the tensors and sizes that the kernels of a side read for a mask."""
    ranges = closed_form(mask, side)
    expressions: list[Any] = [predicate(mask, side)]
    for one in (*ranges.live, *ranges.dropped) if ranges else ():
        expressions += [one.lo, one.hi, *one.guards]
    dimensions = {
        found.args[0].name: len(found.args) - 1
        for expression in expressions
        for found in expression.atoms(Lookup)
    }
    read = [
        one
        for slot, value in enumerate(mask.values)
        if (name := f"t{slot}") in dimensions
        for one in tensor(name, f"*{ELEMENTS[value.elements]}", dimensions[name])
    ]
    lines = [Line(tuple(read), "what the mask reads, with its sizes")] if read else []
    return (*lines, LISTS) if ranges is None else tuple(lines)
