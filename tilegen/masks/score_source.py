"""Triton source of a score change, as the templates put it into a kernel."""

# SymPy is typed only in part:
# pyright: reportArgumentType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilegen.masks.derivatives import derivative
from tilegen.masks.expression import captured_slots, free_parts, to_text
from tilegen.masks.float_printer import value_statements
from tilegen.masks.nodes import normalise
from tilegen.masks.score import ELEMENTS, ScoreForm
from tilegen.masks.source import Extras
from tilegen.masks.symbols import SEQLEN_KV, SEQLEN_Q, B, H, K, Lookup, Q, S

NAMES: dict[Any, str] = {
    B: "batch",
    H: "head",
    Q: "q_idx",
    K: "k_idx",
    S: "s",
    SEQLEN_Q: "seqlen_q",
    SEQLEN_KV: "seqlen_kv",
}


@dataclass(frozen=True)
class CapturedGradient:
    """What a tile adds to the gradient of a captured tensor."""

    where: str
    """Pointer of the elements."""
    guard: str
    """Argument that leaves out those which do not exist."""
    factor: str
    """Name of the derivative of the score by an element."""
    reduce: str
    """Source that sums `part`, the gradient by the score times the factor, to the elements."""


@dataclass(frozen=True)
class ScoreSource:
    """Statements that change `s`, the scaled scores of a tile."""

    forward: tuple[str, ...] = ()
    """End in `s`."""
    backward: tuple[str, ...] = ()
    """End in `score`, `slope` (its derivative by s) and what `gradients` name."""
    gradients: tuple[CapturedGradient, ...] = ()
    extras: Extras = field(default_factory=Extras)

    @property
    def uses_indices(self) -> bool:
        """Whether the statements read where in the sequence a pair lies."""
        return any(re.search(r"\b[qk]_idx\b", line) for line in (*self.forward, *self.backward))


def score_source(form: ScoreForm | None, *, trains: bool) -> ScoreSource:
    """Return the source of a score change; with `trains` that of the gradients of what it reads.

    Kernels that train what a score reads hold queries along axis 0 of a tile, keys along axis 1.
    """
    if form is None or not form.changes:
        return ScoreSource()
    value = normalise(form.expression())
    reads = _Reads(form)
    forward = value_statements({"s": value}, NAMES, reads)
    wanted = {"score": value, "slope": derivative(value, S)}
    trained: list[Any] = []
    if trains:
        found = sorted(value.atoms(Lookup), key=to_text)
        trained = [one for one in found if int(str(one.args[0])[1:]) in form.trained]
    for i, one in enumerate(trained):
        wanted[f"factor{i}"] = derivative(value, one)
        wanted[f"element{i}"] = one
    backward = dict(value_statements(wanted, NAMES, reads))
    gradients: list[CapturedGradient] = []
    for i, one in enumerate(trained):
        name = backward.pop(f"element{i}")
        where, exists = reads.found[backward[name]]
        parts = free_parts(one) & {"q", "k"}
        axes = [axis for part, axis in (("q", 0), ("k", 1)) if part not in parts]
        reduce = "part"
        if len(axes) == 2:
            reduce = "tl.sum(part)"
        elif axes:  # along the other axis
            reduce = f"tl.sum(part, {axes[0]}, keep_dims=True)"
        guard = f", mask={_own(exists)}" if exists else ""
        gradients.append(CapturedGradient(_own(f"d{where}"), guard, f"factor{i}", reduce))
    return ScoreSource(
        forward=_lines(forward),
        backward=_lines(list(backward.items())),
        gradients=tuple(gradients),
        extras=_extras(form, value, trained),
    )


def argument_types(form: ScoreForm) -> dict[str, str]:
    """Return the Triton types of the pointers to captured tensors and their gradients."""
    types = {f"c{i}_ptr": f"*{ELEMENTS[name]}" for i, name in enumerate(form.elements)}
    return types | {f"dc{i}_ptr": "*fp32" for i in form.trained} | {"sinks_ptr": "*fp32"}


_WIDE = ("batch", "head")  # which are 64-bit already


class _Reads:
    """Writes loads from captured tensors, and remembers where each loads from."""

    def __init__(self, form: ScoreForm) -> None:
        self._elements = form.elements
        self.found: dict[str, tuple[str, str]] = {}

    def __call__(self, name: str, indices: Sequence[str], negative: Sequence[bool]) -> str:
        flat, conditions = "", list[str]()
        for axis, (index, below) in enumerate(zip(indices, negative, strict=True)):
            size = f"{name}_n{axis}"
            if index == "0" and not flat:
                continue
            if not index.isidentifier() and not index.isdigit():
                index = f"({index})"
            if below:
                index = f"tl.where({index} < 0, {index} + {size}, {index})"
                conditions.append(f"({index} >= 0)")
            conditions.append(f"({index} < {size})")
            if flat:
                flat = f"({flat}) * {size} + {index}"
            elif axis < len(indices) - 1 and not index.isdigit() and index not in _WIDE:
                flat = f"{index}.to(tl.int64)"
            else:
                flat = index
        where = f"{name}_ptr + {flat}" if flat else f"{name}_ptr"
        exists = " & ".join(conditions)
        guard = f", mask={exists}, other=0" if exists else ""
        element = self._elements[int(name[1:])]
        to = "float32" if element[0] in "fb" and element != "bool" else "int32"
        source = f"tl.load({where}{guard})" + ("" if element == to else f".to(tl.{to})")
        self.found[source] = where, exists
        return source


def _own(source: str) -> str:
    """Return source with captured tensors called c0, c1, ...: t0, t1, ... are the mask's."""
    return re.sub(r"\b(d?)t(\d+)(?=_|\b)", r"\1c\2", source)


def _lines(statements: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(_own(f"{name} = {source}") for name, source in statements)


def _extras(form: ScoreForm, value: Any, trained: list[Any]) -> Extras:
    dimensions = {int(one.args[0].name[1:]): len(one.args) - 1 for one in value.atoms(Lookup)}
    slots = captured_slots(value)
    gradients = sorted({int(one.args[0].name[1:]) for one in trained})
    parameters = [
        ", ".join([f"c{slot}_ptr", *(f"c{slot}_n{axis}" for axis in range(dimensions[slot]))])
        for slot in slots
    ] + [f"dc{slot}_ptr" for slot in gradients]
    names = [f"c{slot}" for slot in slots] + [f"dc{slot}" for slot in gradients]
    arguments = [f"c{slot}, *c{slot}.shape" for slot in slots] + [f"dc{slot}" for slot in gradients]
    return Extras.of(parameters, names, arguments, "what the score reads")
