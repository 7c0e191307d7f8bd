"""What an emitted kernel is given beyond its own tensors: what its mask and its score read."""

# SymPy is typed only in part:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilegen.masks.language.symbols import Lookup
from tilegen.masks.mask import Mask, Side
from tilegen.masks.source import closed_form
from tilegen.masks.tiles.closed_form import predicate


@dataclass(frozen=True)
class Extras:
    """What a kernel is given beyond its own tensors, as source."""

    parameters: tuple[str, ...] = ()
    """Lines of the kernel's parameters: `count` of them in all."""
    count: int = 0
    names: str = ""
    """What follows the parameters of `launch`."""
    arguments: tuple[str, ...] = ()
    """Lines that `launch` passes on."""

    @classmethod
    def of(
        cls, parameters: Sequence[str], names: Sequence[str], arguments: Sequence[str], why: str
    ) -> Extras:
        """Return extras of one kind: comma-separated parameters, their names, what is passed."""
        if not names:
            return cls()
        line = ", ".join(parameters)
        return cls(
            parameters=(f"{line},  # {why}",),
            count=line.count(",") + 1,
            names="".join(f", {name}" for name in names),
            arguments=(f"{', '.join(arguments)},",),
        )

    def __add__(self, other: Extras) -> Extras:
        return Extras(
            self.parameters + other.parameters,
            self.count + other.count,
            self.names + other.names,
            self.arguments + other.arguments,
        )


def extras(mask: Mask, side: Side) -> Extras:
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
    names = [f"t{slot}" for slot in range(len(mask.values)) if f"t{slot}" in dimensions]
    found = Extras.of(
        [
            ", ".join([f"{name}_ptr", *(f"{name}_n{i}" for i in range(dimensions[name]))])
            for name in names
        ],
        names,
        [f"{name}, *{name}.shape" for name in names],
        "what the mask reads, with its sizes",
    )
    if ranges is None:
        lists = ["tiles", "starts", "tiles_sb", "tiles_sh"]
        parameters = ["tiles_ptr", "starts_ptr", *lists[2:]]
        found += Extras.of(parameters, lists, lists, "lists of tiles; strides in lists")
    return found
