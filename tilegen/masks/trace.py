"""Traces Python functions of (b, h, q_idx, kv_idx) into expressions.

FlexAttention's mask_mod and score_mod functions work unchanged: each is called once, with values
that remember what is done to them, be it by Python's operators, by torch's functions or by
indexing a real tensor.
"""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportMatchNotExhaustive=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import sympy
import torch
from sympy.core.relational import Relational

from tilegen.errors import InvalidProblem, Unsupported
from tilegen.masks.expression import kinds_of, merge
from tilegen.masks.nodes import Where, normalise
from tilegen.masks.operations import OPERATIONS, cast, is_condition
from tilegen.masks.symbols import B, H, K, Lookup, Q, S, captured_name

MAX_CHOICES = 8
"""Most choices between numbers (`torch.where`) in a mask: each may double its comparisons."""


@dataclass(frozen=True, eq=False)
class Traced:
    """What a function computes: t<i> in `expr` is `captured[i]`."""

    expr: sympy.Basic
    captured: tuple[torch.Tensor, ...]


def trace_mask(fn: Callable[..., Any]) -> Traced:
    """Return the predicate that `fn(b, h, q_idx, kv_idx)` computes, FlexAttention's `mask_mod`.

    Raises Unsupported, naming the term, for what has no expression.
    """
    traced = _trace(fn, "(b, h, q_idx, kv_idx)", (B, H, Q, K))
    if not is_condition(traced.expr):
        raise Unsupported(f"expected a mask function that returns a bool, got {traced.expr}")
    return Traced(_without_where(traced.expr), traced.captured)


def trace_score(fn: Callable[..., Any]) -> Traced:
    """Return the score that `fn(score, b, h, q_idx, kv_idx)` computes, FlexAttention's `score_mod`.

    Raises Unsupported, naming the term, for what has no expression.
    """
    traced = _trace(fn, "(score, b, h, q_idx, kv_idx)", (S, B, H, Q, K))
    if is_condition(traced.expr):
        raise Unsupported(f"expected a score function that returns a number, got {traced.expr}")
    return traced


def _trace(fn: Callable[..., Any], arguments: str, symbols: Sequence[sympy.Symbol]) -> Traced:
    tracer = _Tracer()
    terms = [Term(tracer, symbol) for symbol in symbols]
    try:
        inspect.signature(fn).bind(*terms)
    except ValueError:
        pass  # a built-in function: calling it will tell
    except TypeError:
        raise InvalidProblem(f"expected a function of {arguments}, got {fn}") from None
    result = normalise(tracer.expression(fn(*terms)))
    # Only tensors that still matter keep a slot: `0 * bias[q]` needs none.
    (expr,), captured = merge([(result, tracer.captured)])
    return Traced(expr, captured)


def _without_where(expr: sympy.Basic) -> sympy.Basic:
    """Return an equal predicate of comparisons alone: `where(c, a, b) < x` is a choice of two."""
    choices = sorted(expr.atoms(Where), key=lambda choice: (choice.count(Where), str(choice)))
    if len(choices) > MAX_CHOICES:
        raise Unsupported(
            f"expected at most {MAX_CHOICES} choices between numbers in a mask, got "
            f"{len(choices)}; choose between conditions, with & and |"
        )
    if not choices:
        return expr
    choice = choices[0]  # holds no other
    condition, then, otherwise = choice.args
    comparisons = {
        atom: (condition & atom.xreplace({choice: then}))
        | (~condition & atom.xreplace({choice: otherwise}))
        for atom in expr.atoms(Relational)
        if atom.has(choice)
    }
    return _without_where(normalise(expr.xreplace(comparisons)))


_PLACEMENT = ("device", "layout", "memory_format", "non_blocking", "copy", "pin_memory")
"""Arguments of torch's functions that do not change a value."""


@dataclass(eq=False)
class _Tracer:
    """Collects the tensors one function captures."""

    captured: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def expression(self, value: Any) -> Any:
        """Return the expression of an operand: a traced value, a number, a 0-dimensional
        tensor."""
        match value:
            case Term():
                return value.expr
            case Rows():
                value.incomplete()
            case torch.Tensor():
                if value.ndim:
                    raise Unsupported(
                        f"expected a tensor of shape {tuple(value.shape)} to be indexed, by b, h, "
                        "q_idx or kv_idx, before it is computed with"
                    )
                return self.element(value, ())
            case bool() | int() | float():
                return sympy.sympify(value)
            case np.generic():
                return self.expression(value.item())
        raise Unsupported(f"expected a traced value, a number or a tensor, got {value!r}")

    def element(self, tensor: torch.Tensor, index: Sequence[Any]) -> Any:
        """Return one element of a real tensor, which takes a slot."""
        (kind,) = kinds_of([tensor])
        slots = [i for i, known in enumerate(self.captured) if known is tensor]
        if not slots:
            slots = [len(self.captured)]
            self.captured.append(tensor)
        found = Lookup(captured_name(slots[0], kind), *index)
        return sympy.Ne(found, 0) if kind == "bool" else found

    def index(self, tensor: torch.Tensor, index: tuple[Any, ...]) -> Term | Rows:
        """Return `tensor[index]`: an element, or rows that still lack an index."""
        parts: list[Any] = []
        for part in index:
            if isinstance(part, (slice, list)) or part is None or part is Ellipsis:
                raise Unsupported(
                    f"expected one index per dimension of a tensor of shape "
                    f"{tuple(tensor.shape)}, got {part!r}"
                )
            expr = self.expression(part)
            if is_condition(expr) or not expr.is_integer:
                raise Unsupported(
                    f"expected an integer index, got {expr}; use //, or `.to(torch.int32)`"
                )
            parts.append(expr)
        if len(parts) > tensor.ndim:
            raise Unsupported(
                f"expected {tensor.ndim} indices of a tensor of shape {tuple(tensor.shape)}, "
                f"got {len(parts)}"
            )
        if len(parts) < tensor.ndim:
            return Rows(self, tensor, tuple(parts))
        return Term(self, self.element(tensor, parts))

    def apply(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what one of torch's functions or methods makes of its arguments."""
        name = name.strip("_") if name.startswith("__") else name
        if name == "getitem":
            tensor, index = args
            if not isinstance(tensor, torch.Tensor):
                raise Unsupported(f"expected only real tensors to be indexed, got {tensor}")
            return self.index(tensor, index if isinstance(index, tuple) else (index,))
        kwargs = {key: value for key, value in kwargs.items() if key not in _PLACEMENT}
        dtype = kwargs.pop("dtype", None)
        if name in ("to", "type"):
            dtypes = [a for a in (*args[1:], dtype) if isinstance(a, torch.dtype)]
            value = self.expression(args[0])
            return Term(self, cast(value, dtypes[0]) if dtypes else value)
        if name not in OPERATIONS:
            raise Unsupported(
                f"expected arithmetic, comparisons, torch.where and torch's elementary functions, "
                f"got {name}; {_ADVICE.get(name, 'write it with those')}"
            )
        function = OPERATIONS[name]
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise Unsupported(f"expected torch's elementwise {name}, got {error}") from None
        for key, value in bound.arguments.items():
            if isinstance(value, (Term, Rows, torch.Tensor, bool, int, float, np.generic)):
                bound.arguments[key] = self.expression(value)
        result = self.expression_of_result(function(*bound.args, **bound.kwargs))
        return Term(self, result if dtype is None else cast(result, dtype))

    def expression_of_result(self, value: Any) -> Any:
        """Return a result, which must be a real number. Raises Unsupported."""
        expr = sympy.sympify(value)
        if expr.has(sympy.nan, sympy.zoo, sympy.I):
            raise Unsupported(f"expected a real number, got {expr}")
        return expr


_ADVICE = {
    "item": "a captured 0-dimensional tensor can be used as it is",
    "detach": "a score is differentiated as written; detach captured tensors outside the function",
    "softplus": "write torch.log(1 + torch.exp(x))",
    "erf": "write gelu by its tanh formula",
    "any": "write | between the conditions",
    "all": "write & between the conditions",
    "sum": "a function sees one score at a time; write the sum term by term",
    "stack": "write torch.where or torch.minimum",
    "index_select": "index the tensor: table[i]",
    "take": "index the tensor: table[i]",
    "gather": "index the tensor: table[i]",
}


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Term, *args: Any) -> Any:
        if any(isinstance(arg, (str, list, tuple, dict)) for arg in args):
            return NotImplemented
        return self.tracer.apply(name, [self, *args], {})

    return apply


class Term:
    """A value that remembers how it was computed; stands for a 0-dimensional tensor."""

    __array_ufunc__ = None  # numpy's numbers leave arithmetic to this class
    __hash__ = object.__hash__

    def __init__(self, tracer: _Tracer, expr: Any) -> None:
        """Operations on the value collect tensors in `tracer`."""
        self.tracer = tracer
        self.expr = expr

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        tracer = _find_tracer([*args, *(kwargs or {}).values()])
        return tracer.apply(func.__name__, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.tracer.apply(name, [self, *args], kwargs)

    def __repr__(self) -> str:
        return str(self.expr)

    @property
    def dtype(self) -> torch.dtype:
        """bool, int64 or float32, by what the value is."""
        if is_condition(self.expr):
            return torch.bool
        return torch.int64 if self.expr.is_integer else torch.float32

    @property
    def device(self) -> torch.device:
        """The CPU: a traced value is nowhere yet."""
        return torch.device("cpu")

    @property
    def shape(self) -> torch.Size:
        """Of one element."""
        return torch.Size()

    ndim = 0

    def dim(self) -> int:
        """Return 0."""
        return 0

    def size(self) -> torch.Size:
        """Return the empty shape."""
        return torch.Size()

    def __getitem__(self, index: Any) -> Any:
        return self.tracer.apply("getitem", [self, index], {})

    def __bool__(self) -> NoReturn:
        self._decide("if, and, or, not, min(), max() or chained comparisons on", "bool")

    def __index__(self) -> NoReturn:
        self._decide("range(), list indices or int() of", "int")

    def __int__(self) -> NoReturn:
        self._decide("int() of", "int")

    def __float__(self) -> NoReturn:
        self._decide("float() or math functions of", "float")

    def __iter__(self) -> NoReturn:
        self._decide("loops over", "iter")

    def __len__(self) -> NoReturn:
        self._decide("len() of", "len")

    def _decide(self, what: str, function: str) -> NoReturn:
        raise Unsupported(
            f"expected a function without {what} traced values, got {function}({self.expr}); "
            "write torch.where, &, |, ~, torch.minimum, torch.maximum, .to(dtype)"
        )

    __add__, __radd__ = _operator("add"), _operator("add")
    __sub__, __rsub__ = _operator("sub"), _operator("rsub")
    __mul__, __rmul__ = _operator("mul"), _operator("mul")
    __truediv__, __rtruediv__ = _operator("truediv"), _operator("rtruediv")
    __floordiv__, __rfloordiv__ = _operator("floordiv"), _operator("rfloordiv")
    __mod__, __rmod__ = _operator("mod"), _operator("rmod")
    __pow__, __rpow__ = _operator("pow"), _operator("rpow")
    __and__, __rand__ = _operator("and"), _operator("and")
    __or__, __ror__ = _operator("or"), _operator("or")
    __xor__, __rxor__ = _operator("xor"), _operator("xor")
    __lt__, __le__ = _operator("lt"), _operator("le")
    __gt__, __ge__ = _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __neg__, __pos__ = _operator("neg"), _operator("pos")
    __abs__, __invert__ = _operator("abs"), _operator("invert")


class Rows:
    """A real tensor with some of its indices given: `bias[h]` before `[q_idx - kv_idx]`."""

    def __init__(self, tracer: _Tracer, tensor: torch.Tensor, index: tuple[Any, ...]) -> None:
        """`index` holds the expressions given so far."""
        self.tracer = tracer
        self._tensor = tensor
        self._index = index

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Term.__torch_function__(func, types, args, kwargs)

    def __getitem__(self, index: Any) -> Term | Rows:
        parts = index if isinstance(index, tuple) else (index,)
        given = (Term(self.tracer, part) for part in self._index)
        return self.tracer.index(self._tensor, (*given, *parts))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.incomplete()

    def incomplete(self) -> NoReturn:
        """Raise Unsupported: rows are not a number yet."""
        raise Unsupported(
            f"expected {self._tensor.ndim} indices of a tensor of shape "
            f"{tuple(self._tensor.shape)}, got {len(self._index)}: {self._index}"
        )

    def _operand(self, *_: Any) -> NoReturn:
        self.incomplete()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _operand
    __rtruediv__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = __neg__ = _operand


def _find_tracer(values: Sequence[Any]) -> _Tracer:
    """Return the tracer of the first traced value among arguments, inside tuples and lists too."""
    queue = list(values)
    while queue:
        value = queue.pop(0)
        if isinstance(value, (Term, Rows)):
            return value.tracer
        if isinstance(value, (tuple, list)):
            queue.extend(value)
    raise Unsupported("expected a traced value among the arguments of a torch function")
