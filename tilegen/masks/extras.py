"""What an emitted kernel is given beyond its own tensors: what its mask and its score read."""

# SymPy is typed only in part:
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilegen.masks.language.symbols import Lookup, slot_of
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

    @classmethod
    def reading(
        cls, expressions: Iterable[Any], letter: str, why: str, others: Sequence[str] = ()
    ) -> Extras:
        """Return what it takes to read the captured tensors of expressions, called `letter` and a
        number, with their sizes; and pointers to `others`."""
        looked_up = {one for expression in expressions for one in expression.atoms(Lookup)}
        dimensions = {slot_of(one): len(one.args) - 1 for one in looked_up}
        names = {f"{letter}{slot}": dimensions[slot] for slot in sorted(dimensions)}
        sizes = [
            ", ".join([f"{one}_ptr", *(f"{one}_n{i}" for i in range(names[one]))]) for one in names
        ]
        return cls.of(
            [*sizes, *(f"{one}_ptr" for one in others)],
            [*names, *others],
            [*(f"{one}, *{one}.shape" for one in names), *others],
            why,
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
    found = Extras.reading(expressions, "t", "what the mask reads, with its sizes")
    if ranges is None:
        lists = ["tiles", "starts", "tiles_sb", "tiles_sh"]
        parameters = ["tiles_ptr", "starts_ptr", *lists[2:]]
        found += Extras.of(parameters, lists, lists, "lists of tiles; strides in lists")
    return found
