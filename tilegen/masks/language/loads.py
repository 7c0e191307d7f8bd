"""Loads of elements of captured tensors in kernels, for masks and for scores, and the arguments
that say where these tensors lie.

A negative index counts from the end, and an index beyond the end loads 0. An index that surely is
inside, or was checked before the launch, is loaded without a guard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilegen.kernels import arguments
from tilegen.masks.language.elements import BOUNDS, ELEMENTS, kind_of
from tilegen.masks.language.expr import Expr, slot_of
from tilegen.masks.language.value_bounds import Bounds

_AS_THEY_ARE = ("int32", "int64", "float32", "float64")
_WIDE = ("batch", "head")
"""Names of indices that have 64 bits."""
_NAMED = {*_WIDE, *(f"{axis}_{of}" for axis in "qk" for of in ("idx", "first", "last"))}


@dataclass(frozen=True)
class Load:
    """One load from a captured tensor, by the name of what is loaded."""

    name: str
    tensor: str
    wrapped: tuple[str, ...]
    """Statements that count negative indices from the end."""
    offset: str
    """Source of the element's place in the tensor; empty for the first element."""
    conditions: tuple[str, ...]
    """Conditions under which the indices are within the tensor; none where they surely are."""
    cast: str

    @property
    def statements(self) -> list[str]:
        """The statement that loads, after those that it needs."""
        lines = list(self.wrapped)
        if self.offset and not self.offset.isidentifier():
            lines.append(f"{self.name}_at = {self.offset}")
        if len(self.conditions) > 1:
            lines.append(f"{self.name}_in = {' & '.join(self.conditions)}")
        other = ", other=0" if self.conditions else ""
        return [*lines, f"{self.name} = tl.load({self.where}{self.guard}{other}){self.cast}"]

    @property
    def where(self) -> str:
        """The pointer that is loaded from."""
        at = self.offset if self.offset.isidentifier() else f"{self.name}_at"
        return f"{self.tensor}_ptr" + (f" + {at}" if self.offset else "")

    @property
    def guard(self) -> str:
        """The argument of the load that leaves out indices beyond the tensor."""
        if len(self.conditions) > 1:
            return f", mask={self.name}_in"
        return "".join(f", mask={condition}" for condition in self.conditions)


class Loads:
    """The captured tensors of a mask or a score, and the loads from them so far."""

    def __init__(
        self,
        elements: Sequence[str],
        *,
        letter: str,
        inside: Collection[tuple[int, str]] = (),
        limits: dict[int, Bounds] | None = None,
        narrowed: Collection[int] = (),
    ) -> None:
        """`elements` are PyTorch's names by slot; a kernel calls the tensors `letter` and a number.
        Indices `inside`, as (slot, source), are surely within their tensor; `limits` bound the
        integers of a slot more closely than their type. Integers in slots `narrowed` are made
        int32: a launch may give them in 64 bits."""
        self._elements = tuple(elements)
        self._letter = letter
        self._inside = set(inside)
        self._narrowed = set(narrowed)
        self.found: dict[str, Load] = {}
        """The loads by the names of what they load."""
        self._names: dict[tuple[str, ...], str] = {}
        self.bounds: dict[Any, Bounds] = {
            slot: (limits or {}).get(slot, BOUNDS[one])
            for slot, one in enumerate(elements)
            if one in BOUNDS
        }
        """Bounds of integer elements, by the tensor's slot."""
        self.wide = {slot for slot, one in enumerate(elements) if one == "int64"}
        """Slots of tensors of integers of 64 bits."""

    def load(
        self, lookup: Expr, indices: Sequence[str], natural: Sequence[bool]
    ) -> tuple[str, list[str]]:
        """Return the name of an element, and the statements that load it, none for one loaded
        before. `natural` says which indices are surely not negative."""
        slot = slot_of(lookup)
        tensor = f"{self._letter}{slot}"
        key = (tensor, *indices)
        if key in self._names:
            return self._names[key], []
        name = f"{tensor}_{len(self._names)}"
        if 0 < len(indices) <= 2 and _NAMED.issuperset(indices):
            name = "_".join(key)
        self._names[key] = name
        self.found[name] = load = self._made(name, tensor, lookup, indices, natural)
        return name, load.statements

    def _made(
        self, name: str, tensor: str, lookup: Expr, indices: Sequence[str], natural: Sequence[bool]
    ) -> Load:
        slot = slot_of(lookup)
        flat, conditions, wrapped = "", list[str](), list[str]()
        is_sum = False
        for axis, (index, is_natural) in enumerate(zip(indices, natural, strict=True)):
            size = f"{tensor}_n{axis}"
            if index == "0" and not flat:
                continue
            if not is_natural:
                wrapped.append(f"{name}_i{axis} = tl.where({index} < 0, {index} + {size}, {index})")
                index = f"{name}_i{axis}"
                conditions.append(f"({index} >= 0)")
            if index != "0" and (slot, index) not in self._inside:
                conditions.append(f"({index} < {size})")
            if flat:
                flat = f"({flat}) * {size} + {index}" if is_sum else f"{flat} * {size} + {index}"
                is_sum = True
            elif axis < len(indices) - 1 and not index.isdigit() and index not in _WIDE:
                flat = f"{index}.to(tl.int64)"
            else:
                flat = index
        element = self._elements[slot]
        to = "tl.float32" if kind_of(element).startswith("float") else "tl.int32"
        is_rounded = (element, lookup.dtype) == ("float64", "float32")
        stays = element in _AS_THEY_ARE and slot not in self._narrowed and not is_rounded
        cast = "" if stays else f".to({to})"
        return Load(name, tensor, tuple(wrapped), flat, tuple(conditions), cast)


def reading(
    expressions: Iterable[Expr],
    letter: str,
    elements: Sequence[str],
    why: str,
    gradients: Sequence[int] = (),
) -> tuple[arguments.Line, ...]:
    """Return the arguments for the captured tensors that expressions read, called `letter` and a
    number: pointers, sizes, and pointers of the gradients of some; `elements` has PyTorch's names
    by slot."""
    loads = {one for expression in expressions for one in expression.loads()}
    dimensions = {slot_of(one): len(one.args) for one in loads}
    read = [
        one
        for slot in sorted(dimensions)
        for one in arguments.tensor(
            f"{letter}{slot}", f"*{ELEMENTS[elements[slot]]}", dimensions[slot]
        )
    ]
    for slot in gradients:
        read += arguments.tensor(f"d{letter}{slot}", "*fp32", 0)
    return (arguments.Line(tuple(read), why),) if read else ()
