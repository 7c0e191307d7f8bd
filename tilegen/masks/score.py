"""Score changes: functions of the logits between the product q k^T and the softmax.

A score is a small frozen value: the canonical text of an expression in s (the logit after scaling),
b, h, q and k, and the tensors that it reads. A cached call only hashes scores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.language.elements import ELEMENTS, kind_of
from tilegen.masks.made import Chain, follows_of, is_traced, noted
from tilegen.masks.plain import check_plain
from tilegen.masks.tables import OfTables
from tilegen.masks.values import Table, table_of

if TYPE_CHECKING:
    import torch

    from tilegen.masks.language.expr import Expr
    from tilegen.masks.tracing.trace import Traced


@dataclass(frozen=True)
class ScoreForm:
    """A score change without its tensors: the key of records, and what kernels are specialised
    on."""

    text: str
    captured: tuple[str, ...] = ()
    """PyTorch's name for the elements of each captured tensor, with `+` behind it if the tensor
    needs a gradient."""
    sinks: bool = False

    @property
    def notation(self) -> str:
        """The form as text: `score(s+t0[h,k-q],float32)`, with `,sinks` at the end where there are
        sinks."""
        return f"score({','.join([self.text, *self.captured, *['sinks'] * self.sinks])})"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each captured tensor's elements, as look-ups know it."""
        return tuple(map(kind_of, self.elements))

    @property
    def elements(self) -> tuple[str, ...]:
        """PyTorch's name for the elements of each captured tensor."""
        return tuple(name.rstrip("+") for name in self.captured)

    @property
    def trained(self) -> tuple[int, ...]:
        """The slots of captured tensors that need a gradient."""
        return tuple(slot for slot, name in enumerate(self.captured) if name.endswith("+"))

    @property
    def changes(self) -> bool:
        """Whether scores change at all; sinks alone change none."""
        return self.text != "s"

    @property
    def has_slope(self) -> bool:
        """Whether the derivative of the changed score by the score is another than 1."""
        from tilegen.masks.language.derivatives import derivatives
        from tilegen.masks.language.expr import S

        (slope,) = derivatives(self.expression(), [S])
        return not (slope.is_const and slope.value == 1)

    def expression(self) -> Expr:
        """Return the text as an expression, a number in single precision."""
        from tilegen.masks.language.algebra import real
        from tilegen.masks.language.derivatives import in_single
        from tilegen.masks.language.texts import from_text

        return real(in_single(from_text(self.text, self.kinds)))


def check_function(score: Any) -> None:
    """Raise InvalidProblem for a value that is neither a score nor a function."""
    if not callable(score):
        raise InvalidProblem(
            "score must be a tilegen score such as tilegen.softcap(20.0), or a function of "
            f"(score, b, h, q_idx, kv_idx); got {type(score).__name__}"
        )


def parse_score(notation: str) -> ScoreForm:
    """Return the form that `score(...)` describes. Raises InvalidProblem."""
    if not notation.endswith(")"):
        raise InvalidProblem(f"expected score(...), got {notation[:200]!r}: ) is missing")
    inner = notation.removeprefix("score(").removesuffix(")")
    text, *rest = map(str.strip, re.split(r",(?=[\w+, ]*$)", inner))  # before names up to the end
    sinks = rest[-1:] == ["sinks"]
    form = ScoreForm(text, tuple(rest[:-1] if sinks else rest), sinks)
    if not set(form.elements) <= set(ELEMENTS):
        raise InvalidProblem(
            f"expected elements such as {', '.join(ELEMENTS)} in a score, got {notation[:200]!r}"
        )
    if not all(form.kinds[slot].startswith("float") for slot in form.trained):
        raise InvalidProblem(
            f"expected gradients of floating-point tensors only, got {notation[:200]!r}"
        )
    form.expression()  # which checks the text
    return form


@dataclass(frozen=True, eq=False)
class Score(OfTables):
    """A score change; `a.then(b)` applies b to the result of a. Scores are equal if their texts
    are equal and their tensors are the same objects."""

    text: str = "s"
    """The change in canonical spelling; `s` is the scaled score, unchanged."""
    tables: tuple[Table, ...] = field(default=(), repr=False)
    sinks: Table | None = field(default=None, repr=False)
    """(heads,): one more logit per head in the softmax's denominator, as it is: neither scaled nor
    changed by the text."""
    unused: tuple[Table, ...] = field(default=(), repr=False)

    def _identity(self) -> tuple[object, ...]:
        tables = (*self.tables, *self.unused)
        return self.text, self.sinks and self.sinks.identity, *(one.identity for one in tables)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        return self.text if self.sinks is None else f"{self.text} with sinks"

    @property
    def sink_logits(self) -> torch.Tensor | None:
        """The tensor of the sinks."""
        return self.sinks and self.sinks.tensor

    @property
    def form(self) -> ScoreForm:
        """The score without its tensors, which kernels are specialised on."""
        names = (
            str(one.dtype).removeprefix("torch.") + ("+" if one.requires_grad else "")
            for one in self.captured
        )
        return ScoreForm(self.text, tuple(names), self.sinks is not None)

    def expression(self) -> Expr:
        """Return the text as an expression."""
        return self.form.expression()

    def anew(self) -> Score:
        """Compute again the tensors that the score's function derives from other tensors, so
        that in-place changes are seen and gradients reach the other tensors."""
        return self.with_tables(Table.anew) if self.makes_tensors else self

    def with_tables(self, changed: Callable[[Table], Table]) -> Score:
        score = super().with_tables(changed)
        return score if self.sinks is None else replace(score, sinks=changed(self.sinks))

    def then(self, other: Score) -> Score:
        """Return the score that applies `other` to this one's result; sinks stay as they are."""
        if is_traced():
            return Chain((self, other))  # type: ignore[return-value]
        follows = follows_of(Score.then, (self, other))
        return noted(self._then(other), ("chain", Chain((self, other))), follows)

    def _then(self, other: Score) -> Score:
        from tilegen.masks.language.algebra import real
        from tilegen.masks.language.derivatives import text_of
        from tilegen.masks.language.expr import S
        from tilegen.masks.language.rewriting import merge, replaced, without

        if self.sinks is not None and other.sinks is not None:
            raise InvalidProblem("expected at most one score with sinks, got two")
        parts = [(part.expression(), part.tables) for part in (self, other)]
        (first, second), tables = merge(parts)
        (composed,), tables = merge([(replaced(second, {S: real(first)}), tables)])
        read = (*self.tables, *other.tables, *self.unused, *other.unused)
        return Score(text_of(composed), tables, self.sinks or other.sinks, without(read, tables))


def softcap(cap: float) -> Score:
    """Return `cap * tanh(s / cap)`: logits stay within ±cap (Gemma 2, Grok)."""
    try:
        cap, given = float(cap), cap
    except Unsupported:  # of a traced value: the message says what to write
        raise
    except (TypeError, ValueError, RuntimeError):
        raise InvalidProblem(f"expected a positive cap, got {type(cap).__name__}") from None
    if not 0 < cap < float("inf"):
        raise InvalidProblem(f"expected a positive cap, got {given}")
    return Score(f"{cap!r}*tanh({1 / cap!r}*s)")


def alibi(slopes: torch.Tensor) -> Score:
    """Return `s + slopes[h] * (k - q)`; slopes (heads,) are positive: the past is punished."""
    _check("slopes", slopes, (1,))
    return Score("(k-q)*t0[h]+s", (table_of(slopes, "h"),))


def temperature(values: torch.Tensor) -> Score:
    """Return `s / values[h]`; values (heads,)."""
    _check("temperature", values, (1,))
    return Score("s/t0[h]", (table_of(values, "h"),))


def relative_bias(table: torch.Tensor) -> Score:
    """Return `s + table[h, clip(k - q, -r, r) + r]` with r = (table.shape[-1] - 1) / 2.

    table (heads, 2r + 1), or (2r + 1,) for all heads: the middle column is the diagonal, the first
    and the last one hold for all greater distances.
    """
    _check("table", table, (1, 2))
    if table.shape[-1] % 2 == 0:
        raise InvalidProblem(
            f"expected an odd number of distances (-r..r), got {table.shape[-1]} in a table of "
            f"shape {tuple(table.shape)}"
        )
    reach = table.shape[-1] // 2
    column = f"min({reach},max(-{reach},k-q))+{reach}" if reach else "0"
    if table.ndim == 1:
        return Score(f"s+t0[{column}]", (table_of(table),))
    return Score(f"s+t0[h,{column}]", (table_of(table, "h"),))


def bias(values: torch.Tensor) -> Score:
    """Return `s + values[b, h, q, k]`.

    values (batch, heads, seqlen_q, seqlen_kv), broadcast as PyTorch does: leading dimensions may be
    missing, and dimensions of size 1 count for all.
    """
    _check("bias", values, (1, 2, 3, 4))
    names = "bhqk"[4 - values.ndim :]
    axes = "".join(
        ["." if size == 1 else name for name, size in zip(names, values.shape, strict=True)]
    )
    return Score(f"s+t0[{','.join(axes.replace('.', '0'))}]", (table_of(values, axes),))


def sinks(logits: torch.Tensor) -> Score:
    """Return unchanged scores with `exp(logits[h])` added to the softmax's denominator; logits
    (heads,).

    As in GPT-OSS: each head can attend to nothing. lse includes the sink.
    """
    _check("sinks", logits, (1,))
    return Score(sinks=table_of(logits, "h"))


def score(function: Callable[..., Any]) -> Score:
    """Trace `function(score, b, h, q_idx, kv_idx)`, FlexAttention's score_mod, as a score.

    Tensors that the function derives from captured tensors are computed again at each call, and
    attributes of objects that the function names are looked up again. Raises Unsupported, naming a
    term that has no expression.
    """
    from tilegen.masks.tracing.trace import followed, followed_numbers, trace_score

    if is_traced():
        return Chain((function,))  # type: ignore[return-value]
    trace = trace_score(function)
    follows = followed(function, trace, score) or followed_numbers(function, trace, _of_trace)
    return noted(_of_trace(trace), ("function", function), follows)


def traced(function: Callable[..., Any]) -> Score:
    """Trace a function as the score of a call, and keep no reference to the function."""
    from tilegen.masks.tracing.trace import at_call, trace_score

    return _of_trace(at_call(function, trace_score(function)))


def _of_trace(traced_score: Traced) -> Score:
    from tilegen.masks.language.derivatives import text_of

    return Score(text_of(traced_score.expr), traced_score.tables, unused=traced_score.unused)


def _check(name: str, tensor: torch.Tensor, dimensions: tuple[int, ...]) -> None:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise InvalidProblem(
            f"expected {name} to be a floating tensor, got {type(tensor).__name__}; such as "
            "torch.tensor([0.5, 0.25])"
        )
    if tensor.ndim not in dimensions or not tensor.dtype.is_floating_point:
        raise InvalidProblem(
            f"expected {name} to be floating with {' or '.join(map(str, dimensions))} dimensions, "
            f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
    check_plain(**{name: tensor})
