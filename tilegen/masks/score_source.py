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
from tilegen.masks.extras import Extras
from tilegen.masks.float_printer import value_statements
from tilegen.masks.nodes import normalise
from tilegen.masks.score import ELEMENTS, ScoreForm
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
    times: str
    """What `ds` is multiplied by, the derivative of the score by an element; empty where it is
    1."""
    reduce: str
    """Source that sums `part`, that product, to the elements."""


@dataclass(frozen=True)
class ScoreSource:
    """Statements that change `s`, the scaled scores of a tile."""

    forward: tuple[str, ...] = ()
    """End in `s`."""
    backward: tuple[str, ...] = ()
    """End in `score`, `slope` (its derivative by s, where that is not 1) and what `gradients`
    name."""
    has_slope: bool = False
    gradients: tuple[CapturedGradient, ...] = ()
    extras: Extras = field(default_factory=Extras)

    @property
    def uses_indices(self) -> bool:
        """Whether the statements read where in the sequence a pair lies."""
        return any(re.search(r"\b[qk]_idx\b", line) for line in (*self.forward, *self.backward))


def score_source(form: ScoreForm | None, *, trains: bool, precise: bool) -> ScoreSource:
    """Return the source of a score change; with `trains` that of the gradients of what it reads.
    `precise` is for fp32 inputs: others are rounded by more than a quick tanh.

    Kernels that train what a score reads hold queries along axis 0 of a tile, keys along axis 1.
    """
    if form is None or not form.changes:
        return ScoreSource()
    value = normalise(form.expression())
    reads = _Reads(form)
    forward = value_statements({"s": value}, NAMES, reads, precise=precise)
    wanted = {"score": value, "slope": derivative(value, S)}
    has_slope = wanted["slope"] != 1
    if not has_slope:
        del wanted["slope"]
    trained: list[Any] = []
    if trains:
        found = sorted(value.atoms(Lookup), key=to_text)
        trained = [one for one in found if int(str(one.args[0])[1:]) in form.trained]
    for i, one in enumerate(trained):
        factor = derivative(value, one)
        if factor != 1:
            wanted[f"factor{i}"] = factor
        wanted[f"element{i}"] = one
    backward = dict(value_statements(wanted, NAMES, reads, precise=precise))
    gradients: list[CapturedGradient] = []
    for i, one in enumerate(trained):
        name = backward.pop(f"element{i}")
        read = reads.found[backward[name]]
        times = f" * factor{i}" if f"factor{i}" in wanted else ""
        parts = free_parts(one) & {"q", "k"}
        axes = [axis for part, axis in (("q", 0), ("k", 1)) if part not in parts]
        reduce = "part"
        if len(axes) == 2:
            reduce = "tl.sum(part)"
        elif axes:  # along the other axis
            reduce = f"tl.sum(part, {axes[0]}, keep_dims=True)"
        where, guard = _own(f"d{read.where(name)}"), _own(read.guard(name))
        gradients.append(CapturedGradient(where, guard, times, reduce))
    return ScoreSource(
        forward=_lines(forward, reads),
        backward=_lines(list(backward.items()), reads),
        has_slope=has_slope,
        gradients=tuple(gradients),
        extras=_extras(form, value, trained),
    )


def argument_types(form: ScoreForm) -> dict[str, str]:
    """Return the Triton types of the pointers to captured tensors and their gradients."""
    types = {f"c{i}_ptr": f"*{ELEMENTS[name]}" for i, name in enumerate(form.elements)}
    return types | {f"dc{i}_ptr": "*fp32" for i in form.trained} | {"sinks_ptr": "*fp32"}


_WIDE = ("batch", "head")  # which are 64-bit already


@dataclass(frozen=True)
class _Read:
    """One load from a captured tensor. In its texts, {0} is the name of what is loaded."""

    tensor: str
    wrapped: tuple[str, ...]
    """Statements that count negative indices from the end."""
    offset: str
    """Empty for the first element."""
    exists: str
    """Condition that indices are within the tensor; empty where they must be."""
    cast: str

    def statements(self, name: str) -> list[str]:
        """Return the load into `name`, and what it needs before."""
        lines = [line.format(name) for line in self.wrapped]
        if self.offset:
            lines.append(f"{name}_at = {self.offset.format(name)}")
        if self.exists:
            lines.append(f"{name}_in = {self.exists.format(name)}")
        other = ", other=0" if self.exists else ""
        lines.append(f"{name} = tl.load({self.where(name)}{self.guard(name)}{other}){self.cast}")
        return lines

    def where(self, name: str) -> str:
        """Return the pointer that `name` is loaded from."""
        return f"{self.tensor}_ptr" + (f" + {name}_at" if self.offset else "")

    def guard(self, name: str) -> str:
        """Return the argument that leaves out elements which do not exist."""
        return f", mask={name}_in" if self.exists else ""


class _Reads:
    """Finds out where captured tensors are loaded from; `found` by what stands for the load."""

    def __init__(self, form: ScoreForm) -> None:
        self._elements = form.elements
        self.found: dict[str, _Read] = {}

    def __call__(self, name: str, indices: Sequence[str], negative: Sequence[bool]) -> str:
        flat, conditions, wrapped = "", list[str](), list[str]()
        for axis, (index, below) in enumerate(zip(indices, negative, strict=True)):
            size = f"{name}_n{axis}"
            if index == "0" and not flat:
                continue
            if below:
                wrapped.append(f"{{0}}_i{axis} = tl.where({index} < 0, {index} + {size}, {index})")
                index = f"{{0}}_i{axis}"
                conditions.append(f"({index} >= 0)")
            if index not in (*_WIDE, "0"):  # for those `check_sizes` answers, before the launch
                conditions.append(f"({index} < {size})")
            if flat:
                inner = (
                    flat if re.fullmatch(r"[\w{}]+|[\w{}]+\.to\(tl\.int64\)", flat) else f"({flat})"
                )
                flat = f"{inner} * {size} + {index}"
            elif axis < len(indices) - 1 and not index.isdigit() and index not in _WIDE:
                flat = f"{index}.to(tl.int64)"
            else:
                flat = index
        element = self._elements[int(name[1:])]
        to = "float32" if element[0] in "fb" and element != "bool" else "int32"
        cast = "" if element == to else f".to(tl.{to})"
        source = f"{name}[{', '.join(indices)}]"
        self.found[source] = _Read(name, tuple(wrapped), flat, " & ".join(conditions), cast)
        return source


def _own(source: str) -> str:
    """Return source with captured tensors called c0, c1, ...: t0, t1, ... are the mask's."""
    return re.sub(r"\b(d?)t(\d+)(?=_|\b)", r"\1c\2", source)


def _lines(statements: Sequence[tuple[str, str]], reads: _Reads) -> tuple[str, ...]:
    lines: list[str] = []
    for name, source in statements:
        read = reads.found.get(source)
        lines += read.statements(name) if read else [f"{name} = {source}"]
    return tuple(map(_own, lines))


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
