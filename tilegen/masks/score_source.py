"""Triton source of a score change, as the templates put it into a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import sympy

from tilegen.errors import Unsupported
from tilegen.kernels.arguments import Line
from tilegen.masks.language.loads import Loads, reading
from tilegen.masks.language.nodes import Where, normalise, ties
from tilegen.masks.language.symbols import Lookup, S, slot_of
from tilegen.masks.language.texts import free_parts, to_text
from tilegen.masks.language.triton_source import NAMES, Writer
from tilegen.masks.mask import Side
from tilegen.masks.score import ScoreForm


@dataclass(frozen=True)
class CapturedGradient:
    """Source that adds a tile's part to the gradient of a captured tensor."""

    where: str
    """Source of the pointers of the gradient's elements."""
    guard: str
    """The argument of the addition that leaves out indices beyond the tensor."""
    times: str
    """Source of the factor of `ds`, the derivative of the score by an element; empty where that
    is 1."""
    reduce: str
    """Source that sums `part`, that product, to the elements."""


@dataclass(frozen=True)
class ScoreSource:
    """Statements that change `s`, the scaled scores of a tile."""

    forward: tuple[str, ...] = ()
    """Statements that end in `s`, the changed score."""
    backward: tuple[str, ...] = ()
    """Statements that end in `score`, `slope` (its derivative by s, where that is not 1) and the
    names that `gradients` use."""
    has_slope: bool = False
    gradients: tuple[CapturedGradient, ...] = ()
    extras: tuple[Line, ...] = ()

    @property
    def uses_indices(self) -> bool:
        """Whether the statements read the positions of a pair."""
        return any(re.search(r"\b[qk]_idx\b", line) for line in (*self.forward, *self.backward))


def score_source(
    form: ScoreForm | None, *, trains: bool, precise: bool, side: Side = "rows"
) -> ScoreSource:
    """Return the source of a score change; with `trains` that of the gradients of what it reads.
    `precise` is for fp32 inputs: other inputs are rounded by more than a quick tanh errs.

    Tiles hold the `side` that stays along axis 0: queries, or with "columns" keys.
    """
    if form is None or not form.changes:
        return ScoreSource()
    value = normalise(form.expression())
    _check_indices(form, value)
    wanted = {"score": value, "slope": derivative(value, S)}
    has_slope = wanted["slope"] != 1
    if not has_slope:
        del wanted["slope"]
    trained: list[Any] = []
    if trains:
        found = sorted(value.atoms(Lookup), key=to_text)
        trained = [one for one in found if slot_of(one) in form.trained]
    for i, one in enumerate(trained):
        factor = derivative(value, one)
        if factor != 1:
            wanted[f"factor{i}"] = factor
        wanted[f"element{i}"] = one
    forward = _writer(form, precise)
    changed = _as_tile(forward.sources({"s": value})["s"], value)
    backward = _writer(form, precise)
    sources = backward.sources(wanted)
    sources["score"] = _as_tile(sources["score"], value)
    gradients: list[CapturedGradient] = []
    for i, one in enumerate(trained):
        element = sources.pop(f"element{i}").removesuffix(".to(tl.float32)")  # as doubles need
        load = backward.loads.found[element]
        times = f" * factor{i}" if f"factor{i}" in wanted else ""
        parts = free_parts(one) & {"q", "k"}
        along = "qk" if side == "rows" else "kq"
        axes = [axis for axis, part in enumerate(along) if part not in parts]
        reduce = "part"
        if len(axes) == 2:
            reduce = "tl.sum(part)"
        elif axes:  # along the other axis
            reduce = f"tl.sum(part, {axes[0]}, keep_dims=True)"
        gradients.append(CapturedGradient(f"d{load.where}", load.guard, times, reduce))
    return ScoreSource(
        forward=(*forward.statements, f"s = {changed}"),
        backward=(*backward.statements, *(f"{name} = {one}" for name, one in sources.items())),
        has_slope=has_slope,
        gradients=tuple(gradients),
        extras=reading(
            [value],
            "c",
            form.elements,
            "what the score reads",
            sorted({*map(slot_of, trained)}),
        ),
    )


def _as_tile(source: str, value: sympy.Expr) -> str:
    """Return the source of a score as a tile, also where it is one number, a row or a column."""
    return source if S in value.free_symbols else f"tl.zeros_like(s) + ({source})"


def _writer(form: ScoreForm, precise: bool) -> Writer:
    # `check_sizes` answers for heads and batches, before the launch.
    checked = [(slot, name) for slot in range(len(form.captured)) for name in ("batch", "head")]
    return Writer(NAMES, Loads(form.elements, letter="c", inside=checked), precise=precise)


def _check_indices(form: ScoreForm, value: sympy.Expr) -> None:
    """Raise Unsupported for an index that has a gradient, which would be lost."""
    for found in sorted(value.atoms(Lookup), key=to_text):
        for index in found.args[1:]:
            if index.has(S):
                raise Unsupported(
                    f"expected indices that do not depend on the score, got {to_text(index)} in "
                    f"{to_text(found)}"
                )
            for inner in index.atoms(Lookup):
                if slot_of(inner) in form.trained:
                    raise Unsupported(
                        "expected no gradient for a tensor that is used as an index, got "
                        f"{to_text(inner)} in {to_text(found)}; pass it detached"
                    )


# --------------------------------------------------------------------------------------------------
# Derivatives: constant pieces (floor, sign, conditions) have derivative 0, as in PyTorch; at a kink
# the derivative of abs is 0, and that of min and max the argument's that is no constant


def derivative(expr: sympy.Expr, by: sympy.Symbol | Lookup) -> sympy.Expr:
    """Return the derivative of a score by s or by one element it reads. Raises Unsupported."""
    return normalise(_select(_derivative(expr, by)))


def _derivative(expr: Any, by: sympy.Basic) -> Any:
    """Return the derivative around most points, by the chain rule."""
    if expr == by:
        return sympy.S.One
    if not expr.has(by):
        return sympy.S.Zero
    match expr:
        case Lookup():
            raise Unsupported(f"expected an index that does not depend on the score, got {expr}")
        case sympy.floor() | sympy.sign() | sympy.Mod():
            return sympy.S.Zero
        case Where():
            return Where(expr.args[0], *(_derivative(arg, by) for arg in expr.args[1:]))
        case sympy.Abs():
            return sympy.sign(expr.args[0]) * _derivative(expr.args[0], by)
        case sympy.Max() | sympy.Min():
            keeps = sympy.Ge if isinstance(expr, sympy.Max) else sympy.Le
            so_far, *others = ties(expr.args)
            found = _derivative(so_far, by)
            for other in others:
                found = Where(keeps(so_far, other), found, _derivative(other, by))
                so_far = expr.func(so_far, other)
            return found
        case _:
            parts = {sympy.Dummy("part", real=True): arg for arg in expr.args}
            outer = expr.func(*parts)
            return sympy.Add(
                *(
                    outer.diff(part).xreplace(parts) * _derivative(arg, by)
                    for part, arg in parts.items()
                    if arg.has(by)
                )
            )


def _select(expr: sympy.Basic) -> sympy.Basic:
    """Return the expression with products inside choices: 0 is chosen even where a factor is
    infinite."""
    if not expr.args or isinstance(expr, Lookup):
        return expr
    args = [_select(arg) for arg in expr.args]
    if isinstance(expr, sympy.Mul):
        for choice in args:
            if isinstance(choice, Where) and 0 in choice.args[1:]:
                others = [arg for arg in args if arg is not choice]
                branches = (_select(sympy.Mul(part, *others)) for part in choice.args[1:])
                return Where(choice.args[0], *branches)
    return expr.func(*args)
