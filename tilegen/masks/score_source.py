"""Triton source of a score change, as the templates put it into a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from tilegen.errors import Unsupported
from tilegen.kernels.arguments import Line
from tilegen.masks.language.derivatives import derivatives
from tilegen.masks.language.expr import Expr, K, Q, S, slot_of
from tilegen.masks.language.loads import Loads, reading
from tilegen.masks.language.rewriting import free_parts
from tilegen.masks.language.texts import to_text
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
    uses_indices: bool = False
    """Whether the statements read the positions of a pair."""
    extras: tuple[Line, ...] = ()


def score_source(
    form: ScoreForm | None, *, trains: bool, precise: bool, side: Side = "rows", tanh: str = ""
) -> ScoreSource:
    """Return the source of a score change; with `trains` that of the gradients of what it reads.
    `precise` is for fp32 inputs: other inputs are rounded by more than a quick tanh errs. `tanh`
    names a function of the kernel that the changed score uses.

    Tiles hold the `side` that stays along axis 0: queries, or with "columns" keys.
    """
    if form is None or not form.changes:
        return ScoreSource()
    value = form.expression()
    _check_indices(form, value)
    loads = sorted(value.loads(), key=to_text)
    trained = [load for load in loads if trains and slot_of(load) in form.trained]
    slope, *factors = derivatives(value, [S, *trained])
    wanted = {"score": value}
    has_slope = not _is_one(slope)
    if has_slope:
        wanted["slope"] = slope
    for i, (element, factor) in enumerate(zip(trained, factors, strict=True)):
        if not _is_one(factor):
            wanted[f"factor{i}"] = factor
        wanted[f"element{i}"] = element
    forward = _writer(form, precise, tanh)
    changed = _as_tile(forward.sources({"s": value})["s"], value)
    backward = _writer(form, precise, tanh)
    sources = backward.sources(wanted)
    sources["score"] = _as_tile(sources["score"], value)
    gradients: list[CapturedGradient] = []
    for i, trained_load in enumerate(trained):
        load = backward.loads.found[sources.pop(f"element{i}")]
        times = f" * factor{i}" if f"factor{i}" in wanted else ""
        parts = free_parts(trained_load) & {"q", "k"}
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
        backward=(
            *backward.statements,
            *(f"{name} = {source}" for name, source in sources.items()),
        ),
        has_slope=has_slope,
        gradients=tuple(gradients),
        uses_indices=not value.free.isdisjoint({Q, K}),
        extras=reading(
            [value],
            "c",
            form.elements,
            "what the score reads",
            sorted({*map(slot_of, trained)}),
        ),
    )


def _is_one(factor: Expr) -> bool:
    return factor.is_const and factor.value == 1


def _as_tile(source: str, value: Expr) -> str:
    """Return the source of a score as a tile, also where it is one number, a row or a column."""
    return source if S in value.free else f"tl.zeros_like(s) + ({source})"


def _writer(form: ScoreForm, precise: bool, tanh: str = "") -> Writer:
    # `check_sizes` answers for heads and batches, before the launch.
    checked = [(slot, name) for slot in range(len(form.captured)) for name in ("batch", "head")]
    loads = Loads(form.elements, letter="c", inside=checked)
    return Writer(NAMES, loads, precise=precise, tanh=tanh)


def _check_indices(form: ScoreForm, value: Expr) -> None:
    """Raise Unsupported for an index that has a gradient, which would be lost."""
    for load in value.loads():
        for index in load.args:
            if index.has(S):
                raise Unsupported(
                    f"expected indices that do not depend on the score, got {to_text(index)} in "
                    f"{to_text(load)}"
                )
            for inner in index.loads():
                if slot_of(inner) in form.trained:
                    raise Unsupported(
                        "expected no gradient for a tensor that is used as an index, got "
                        f"{to_text(inner)} in {to_text(load)}; pass it detached"
                    )
