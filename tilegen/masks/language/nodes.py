"""The functions of expressions beyond SymPy's own, and `normalise`, the one form of expressions.

`normalise` leaves few kinds of nodes, in one spelling; texts, kernels and the reference know only
those.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from sympy.core.sorting import default_sort_key
from sympy.logic.boolalg import BooleanAtom

from tilegen.errors import Unsupported
from tilegen.masks.language.ordered import NAMES, ORDERED, Ordered, Same
from tilegen.masks.language.symbols import (
    SEQLEN_KV,
    SEQLEN_Q,
    B,
    H,
    K,
    Lookup,
    Q,
    S,
    is_captured,
    is_condition,
)
from tilegen.masks.language.widths import WRAPPED, Wrapped

MAX_EXPONENT = 64
"""Largest integer exponent: powers are printed as products."""
MAX_SHIFT = 63
"""Largest shift of integers of 64 bits that is not the same as a larger one."""


def _of_both(fact: str) -> Callable[[sympy.Basic], bool | None]:
    """Return SymPy's query for a fact of a choice, which is true where it is of both branches."""
    return lambda choice: all(getattr(branch, fact) for branch in choice.args[1:]) or None


class Where(sympy.Expr):
    """`Where(c, a, b)`: a where c holds, b elsewhere.

    SymPy's Piecewise would rewrite its conditions, differently for every kind of condition.
    """

    is_commutative = True
    is_number = False

    def __new__(cls, condition: Any, then: Any, otherwise: Any) -> sympy.Expr:
        """Return the branch itself where the condition is known or makes no difference."""
        condition, then, otherwise = map(sympy.sympify, (condition, then, otherwise))
        if condition == sympy.true or then == otherwise:
            return then
        if condition == sympy.false:
            return otherwise
        return super().__new__(cls, condition, then, otherwise)

    _eval_is_integer = _of_both("is_integer")
    _eval_is_real = _of_both("is_real")
    _eval_is_extended_real = _of_both("is_extended_real")
    _eval_is_nonnegative = _of_both("is_nonnegative")
    _eval_is_positive = _of_both("is_positive")


class Sigmoid(sympy.Function):
    """`Sigmoid(x)` = 1 / (1 + exp(-x)), whose derivative overflows nowhere."""

    nargs = 1

    @classmethod
    def eval(cls, x: Any) -> Any:
        """Return the value of a number, None for any other argument."""
        if x.is_Number:
            return sympy.Float(0.5 * (1 + math.tanh(float(x) / 2)))
        return None

    def _eval_is_real(self) -> bool | None:
        return self.args[0].is_extended_real

    def _eval_is_positive(self) -> bool | None:
        return self.args[0].is_real

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        """Return sigmoid(x) sigmoid(-x)."""
        return self * Sigmoid(-self.args[0])


class Log1p(sympy.Function):
    """`Log1p(x)` = log(1 + x), exact where x is much smaller than 1."""

    nargs = 1

    @classmethod
    def eval(cls, x: Any) -> Any:
        """Return the value of a number, None for any other argument."""
        return sympy.Float(math.log1p(float(x))) if x.is_Number and x > -1 else None

    def _eval_is_real(self) -> bool | None:
        return self.args[0].is_extended_real

    def _eval_is_nonnegative(self) -> bool | None:
        return self.args[0].is_nonnegative

    def fdiff(self, argindex: int = 1) -> sympy.Expr:
        """Return 1 / (1 + x)."""
        return 1 / (1 + self.args[0])


class Bits(sympy.Function):
    """An operation on the bits of two integers, in two's complement as Python and PyTorch have
    it."""

    nargs = 2
    is_commutative = True
    is_integer = True

    sign: str
    """The operator in Python and in Triton."""
    of: Callable[[Any, Any], Any]
    """The value for two integers, or for two tensors of integers."""

    @classmethod
    def eval(cls, left: Any, right: Any) -> Any:
        """Return the value of numbers, symmetric operands in one order, or None for any others."""
        if left.is_Integer and right.is_Integer:
            return sympy.Integer(cls.of(int(left), int(right)))
        if issubclass(cls, (BitAnd, BitOr, BitXor)):
            first, second = sorted((left, right), key=lambda one: (one.is_number, str(one)))
            if (first, second) != (left, right):
                return cls(first, second)
        return None

    def _eval_is_nonnegative(self) -> bool | None:
        signs = [bool(arg.is_nonnegative) for arg in self.args]
        return True if (any if isinstance(self, BitAnd) else all)(signs) else None


class BitAnd(Bits):
    """`left & right`."""

    sign, of = "&", staticmethod(operator.and_)


class BitOr(Bits):
    """`left | right`."""

    sign, of = "|", staticmethod(operator.or_)


class BitXor(Bits):
    """`left ^ right`."""

    sign, of = "^", staticmethod(operator.xor)


def _shifted_left(left: Any, right: Any) -> Any:
    if not isinstance(left, int):
        return left << right
    bits = left << right if 0 <= right <= MAX_SHIFT else 0
    return (bits + 2**63) % 2**64 - 2**63


def _shifted_right(left: Any, right: Any) -> Any:
    if isinstance(left, int):
        return left >> (right if 0 <= right <= MAX_SHIFT else MAX_SHIFT)
    return left >> right


class ShiftLeft(Bits):
    """`left << right`, 0 where right is not in 0..MAX_SHIFT, as in PyTorch."""

    sign, of = "<<", staticmethod(_shifted_left)


class ShiftRight(Bits):
    """`left >> right`, rounded down: 0 or -1 where right is not in 0..MAX_SHIFT."""

    sign, of = ">>", staticmethod(_shifted_right)


SYMBOLS = {str(symbol): symbol for symbol in (B, H, Q, K, S, SEQLEN_Q, SEQLEN_KV)}

ELEMENTARY: dict[str, type[sympy.Function]] = {
    "exp": sympy.exp,
    "log": sympy.log,
    "log1p": Log1p,
    "tanh": sympy.tanh,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "erf": sympy.erf,
    "sigmoid": Sigmoid,
}
"""Functions of one real number that every back end computes in floating point; PyTorch has them by
the same names."""

BITS: dict[str, type[Bits]] = {
    "bitand": BitAnd,
    "bitor": BitOr,
    "bitxor": BitXor,
    "shl": ShiftLeft,
    "shr": ShiftRight,
}

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **ELEMENTARY,
    **BITS,
    **WRAPPED,
    **{NAMES[relation]: node for relation, node in ORDERED.items()},
    "abs": sympy.Abs,
    "sqrt": sympy.sqrt,
    "sign": sympy.sign,
    "min": sympy.Min,
    "max": sympy.Max,
    "where": Where,
}
"""The functions of expressions by their names in texts; `floor` is spelt `//`."""

_KNOWN = (
    *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.floor, sympy.ceiling, sympy.sign),
    *(sympy.Abs, sympy.Max, sympy.Min, *ELEMENTARY.values(), *BITS.values()),
    *(*WRAPPED.values(), Ordered),
    *(sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt),
    *(sympy.And, sympy.Or, sympy.Not, Where),
)


def is_whole(expr: Any) -> bool:
    """Return whether a number is an integer, also where an integer is divided by one that may be 0,
    which SymPy takes for no number."""
    match expr:
        case sympy.floor() | sympy.ceiling():
            return True
        case sympy.Add() | sympy.Mul() | sympy.Max() | sympy.Min() | sympy.Abs() | sympy.Mod():
            return bool(expr.is_integer) or all(map(is_whole, expr.args))
        case Where():
            return all(map(is_whole, expr.args[1:]))
        case _:
            return bool(expr.is_integer)


def ties(args: Sequence[sympy.Expr]) -> list[sympy.Expr]:
    """Return the arguments of a minimum or maximum with constants last.

    The first of equal arguments takes the gradient: as in torch.clamp, not the bound.
    """
    return sorted(args, key=lambda arg: bool(arg.is_number))


def normalise(expr: Any) -> sympy.Basic:
    """Return an equal expression of the few nodes that texts and printers know.

    Raises Unsupported for any other node, for NaN and for what is not a real number.
    """
    expr = sympy.sympify(expr)
    known: dict[sympy.Basic, sympy.Basic] = {}
    result = _normalise(expr, known)
    if result.has(sympy.nan, sympy.zoo, sympy.I):
        raise Unsupported(f"expected a real number everywhere, got {result} from {expr}")
    return result


def _normalise(expr: sympy.Basic, known: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    if expr not in known:
        known[expr] = _one(expr, known)
    return known[expr]


def _one(expr: sympy.Basic, known: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    if isinstance(expr, (BooleanAtom, sympy.Integer, sympy.Rational)):
        return expr
    if expr in (sympy.oo, -sympy.oo, sympy.nan, sympy.zoo, sympy.I):
        return expr
    if isinstance(expr, sympy.Symbol):
        if expr not in SYMBOLS.values():
            raise Unsupported(f"expected {', '.join(SYMBOLS)} or a look-up, got {expr}")
        return expr
    if isinstance(expr, Lookup):
        return _lookup(expr, known)
    if isinstance(expr, sympy.Expr) and expr.is_number:
        evaluated = expr.func(*expr.args) if isinstance(expr, sympy.Mod) else expr
        return evaluated if evaluated.is_Rational else _constant(evaluated)
    if not isinstance(expr, _KNOWN):
        raise Unsupported(
            f"expected arithmetic, comparisons and {', '.join(FUNCTIONS)}, got "
            f"{expr.func.__name__} in the term {expr}"
        )
    args = [_normalise(arg, known) for arg in expr.args]
    match expr:
        case sympy.Max() | sympy.Min() if tuple(args) == expr.args:
            return expr  # to make one again takes SymPy long
        case Bits():
            return _bits(expr, args)
        case Wrapped() if not is_whole(args[0]):
            raise Unsupported(f"expected an integer in {expr.element}(...), got {args[0]}")
        case sympy.Abs():
            return _absolute(args[0])
        case sympy.Mul():
            # SymPy keeps 1.0*s.
            product = sympy.Mul(*args)
            coefficient, rest = product.as_coeff_Mul()
            return int(coefficient) * rest if coefficient in (1.0, -1.0) else product
        case sympy.Pow():
            return _power(*args)
        case sympy.Ge() | sympy.Gt():
            return (sympy.Le if isinstance(expr, sympy.Ge) else sympy.Lt)(args[1], args[0])
        case sympy.ceiling():
            return _normalise(-sympy.floor(-args[0]), known)
        case sympy.Eq() | sympy.Ne() | Same():
            # The constant on the right, else in SymPy's order.
            left, right = sorted(args, key=lambda arg: (arg.is_number, default_sort_key(arg)))
            return expr.func(left, right)
        case sympy.Mod():
            left, right = args
            if left.is_integer and right.is_integer:
                return sympy.Mod(left, right)
            return left - right * sympy.floor(left / right)
        case _:
            return expr.func(*args)


def _bits(expr: Bits, args: list[Any]) -> sympy.Basic:
    """Return an operation on bits; shifts by a number, and low bits, become arithmetic, of which
    tiles have closer bounds."""
    left, right = args
    for arg in args:
        if not is_whole(arg):
            raise Unsupported(f"expected integers in an operation on bits, got {arg} in {expr}")
    if right.is_Integer and right >= 0:
        number = int(right)
        if isinstance(expr, ShiftLeft) and number < MAX_SHIFT:
            return left * 2**number
        if isinstance(expr, ShiftRight) and number < MAX_SHIFT:
            return sympy.floor(left / 2**number)
        if isinstance(expr, BitAnd) and number & (number + 1) == 0:
            return sympy.Mod(left, number + 1)
    return expr.func(left, right)


def _lookup(expr: Lookup, known: dict[sympy.Basic, sympy.Basic]) -> sympy.Basic:
    if not is_captured(expr.args[0]):
        raise Unsupported(f"expected the name of a captured tensor, got {expr.args[0]} in {expr}")
    index = [_normalise(arg, known) for arg in expr.args[1:]]
    for part in index:
        if is_condition(part):
            raise Unsupported(f"expected an integer index, got the condition {part} in {expr}")
        if not is_whole(part):
            raise Unsupported(
                f"expected an integer index, got {part} in {expr}; use // or `.to(torch.int32)`"
            )
    return Lookup(expr.args[0], *index)


def _constant(expr: sympy.Expr) -> sympy.Expr:
    """Return log(2), sqrt(3), ... as a float, so that constants have one spelling."""
    try:
        value = float(expr)
    except (TypeError, OverflowError):
        value = math.inf
    if math.isinf(value):
        raise Unsupported(f"expected a real number that a float can hold, got {expr}")
    return sympy.Float(value)


def _absolute(arg: sympy.Expr) -> sympy.Basic:
    value = sympy.Abs(arg)
    if not isinstance(value, sympy.Abs):
        return value
    # Abs takes the sign out of its argument and leaves products unevaluated, deep inside too.
    return sympy.Abs(_rebuilt(value.args[0]), evaluate=False)


def _rebuilt(expr: sympy.Basic) -> sympy.Basic:
    """Return the expression with every sum and product evaluated."""
    if not expr.args or isinstance(expr, sympy.Abs):
        return expr
    args = tuple(map(_rebuilt, expr.args))
    if args == expr.args and not isinstance(expr, sympy.Add | sympy.Mul):
        return expr
    return expr.func(*args)


def _power(base: sympy.Expr, exponent: sympy.Expr) -> sympy.Expr:
    if isinstance(exponent, sympy.Float) and float(2 * exponent).is_integer():
        exponent = sympy.Rational(int(float(2 * exponent)), 2)
    if exponent.is_Integer and abs(exponent) > MAX_EXPONENT:
        raise Unsupported(f"expected an exponent up to {MAX_EXPONENT}, got {base}**{exponent}")
    if not (exponent.is_Number or base.is_nonnegative):
        raise Unsupported(
            f"expected a base that is never negative or a constant exponent, got {base}**{exponent}"
        )
    return sympy.Pow(base, exponent)
