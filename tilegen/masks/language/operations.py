"""PyTorch's functions as expressions.

`OPERATIONS` maps the name of a torch function or method to a function of expressions, with torch's
own parameter names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean

from tilegen.errors import Unsupported
from tilegen.masks.language.comparisons import compared, either, opposite
from tilegen.masks.language.nodes import (
    ELEMENTARY,
    BitAnd,
    BitOr,
    BitXor,
    Log1p,
    ShiftLeft,
    ShiftRight,
    Sigmoid,
    Where,
    is_whole,
    normalise,
)
from tilegen.masks.language.symbols import Lookup, is_condition


def number(expr: Any) -> Any:
    """Return an expression as a number: a condition as 1 or 0."""
    if not is_condition(expr):
        return expr
    if isinstance(expr, sympy.Ne) and isinstance(expr.lhs, Lookup) and expr.rhs == 0:
        holds = expr.lhs.args[0]
        if holds.is_integer and holds.is_nonnegative:  # a bool tensor is 1 or 0 as it is
            return expr.lhs
    return Where(expr, 1, 0)


def condition(expr: Any, function: str) -> Boolean:
    """Return an expression that must be a condition. Raises Unsupported, naming the function."""
    if is_condition(expr):
        return expr
    raise Unsupported(f"expected conditions in {function}, got {expr}")


def _bitwise(function: Any, bits: Any, name: str) -> Callable[..., Any]:
    """Return an operation on two conditions, or on the bits of two integers."""

    def apply(input: Any, other: Any) -> Any:
        if is_condition(input) and is_condition(other):
            return function(input, other)
        left, right = number(input), number(other)
        if is_whole(left) and is_whole(right):
            return bits(left, right)
        raise Unsupported(f"expected conditions or integers in {name}, got {left} and {right}")

    return apply


def exclusive_or(left: Any, right: Any) -> Any:
    """Return whether one of two conditions holds."""
    return either(left & opposite(right), opposite(left) & right)


def invert(input: Any) -> Any:
    """Return the opposite of a condition, or an integer with all bits changed."""
    if is_condition(input):
        return opposite(input)
    if is_whole(number(input)):
        return -1 - input
    raise Unsupported(f"expected a condition or an integer in ~, got {input}")


def logical(input: Any) -> Any:
    """Return a condition, or whether a number is not 0."""
    return input if is_condition(input) else sympy.Not(compared(sympy.Eq, input, sympy.S.Zero))


def truncate(x: Any) -> Any:
    """Return a number rounded towards zero, as a conversion to int does."""
    if is_whole(x):
        return x
    down = sympy.floor(x)
    return down if x.is_nonnegative else Where(sympy.Lt(x, 0), -sympy.floor(-x), down)


def cast(expr: Any, dtype: torch.dtype) -> Any:
    """Return an expression in another dtype; narrow floats round nothing."""
    if dtype == torch.bool:
        return logical(expr)
    if dtype.is_complex:
        raise Unsupported(f"expected real numbers, got a conversion to {dtype}")
    return number(expr) if dtype.is_floating_point else truncate(number(expr))


def power(base: Any, exponent: Any) -> Any:
    """Return base ** exponent."""
    if getattr(exponent, "is_Float", False) and float(exponent).is_integer():
        exponent = sympy.Integer(int(exponent))
    return sympy.Pow(number(base), number(exponent))


def integer_power(input: Any, exponent: Any) -> Any:
    """Return input ** exponent, both integers."""
    base, exponent = number(input), number(exponent)
    if exponent.is_Integer and exponent >= 0:
        return power(base, exponent)
    if base == 2:  # negative powers of which are rounded to 0
        return ShiftLeft(sympy.S.One, exponent)
    raise Unsupported(
        f"expected a power of 2 or a constant exponent, got the integer {base} ** ({exponent}); "
        "write it with floats"
    )


def floor_divide(input: Any, other: Any) -> Any:
    """Return input / other rounded down."""
    return sympy.floor(_quotient(input, other))


def remainder(input: Any, other: Any) -> Any:
    """Return input modulo other, with other's sign."""
    return normalise(sympy.Mod(number(input), number(other), evaluate=False))


def fmod(input: Any, other: Any) -> Any:
    """Compute the remainder of a quotient that is rounded towards zero."""
    left, right = number(input), number(other)
    return left - right * truncate(left / right)


def _quotient(input: Any, other: Any) -> Any:
    left, right = number(input), number(other)
    if right.is_Float and float(right).is_integer() and right != 0:
        right = sympy.Integer(int(right))  # a third is rounded once, by the kernel
    return left / right


def divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return input / other, rounded as asked."""
    match rounding_mode:
        case None:
            return _quotient(input, other)
        case "floor":
            return floor_divide(input, other)
        case "trunc":
            return truncate(_quotient(input, other))
        case _:
            raise Unsupported(f"expected rounding_mode None, floor or trunc, got {rounding_mode!r}")


def where(condition_: Any, input: Any, other: Any) -> Any:
    """Return input where the condition holds, other elsewhere."""
    keep = condition(condition_, "torch.where")
    if is_condition(input) and is_condition(other):
        return either(keep & input, opposite(keep) & other)
    return Where(keep, number(input), number(other))


def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Return min(max(input, min), max)."""
    value = number(input)
    if min is not None:
        value = sympy.Max(value, number(min))
    return value if max is None else sympy.Min(value, number(max))


def equal(input: Any, other: Any) -> Any:
    """Return whether two numbers or two conditions are the same."""
    if is_condition(input) and is_condition(other):
        return either(input & other, opposite(input) & opposite(other))
    return compared(sympy.Eq, number(input), number(other))


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    """Return log(1 + exp(beta x)) / beta, which is x where beta x is above the threshold."""
    x = number(input)
    return Where(sympy.Gt(beta * x, threshold), x, Log1p(sympy.exp(beta * x)) / beta)


def log_sigmoid(input: Any) -> Any:
    """Return log(sigmoid(x)), which overflows nowhere."""
    x = number(input)
    return sympy.Min(x, 0) - Log1p(sympy.exp(-sympy.Abs(x)))


def gelu(input: Any, approximate: str = "none") -> Any:
    """Return x times the normal distribution at x, or its approximation by tanh."""
    x = number(input)
    if approximate == "tanh":
        inner = sympy.Float(math.sqrt(2 / math.pi)) * (x + sympy.Float(0.044715) * x**3)
        return x * (1 + sympy.tanh(inner)) / 2
    return x * (1 + sympy.erf(x * sympy.Float(math.sqrt(0.5)))) / 2


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Return x, times the slope where it is negative."""
    x = number(input)
    return Where(sympy.Gt(x, 0), x, negative_slope * x)


def elu(
    input: Any, alpha: float = 1.0, scale: Any = 1, input_scale: Any = 1, inplace: bool = False
) -> Any:
    """Return x, or alpha (exp(x * input_scale) - 1) where it is negative, times the scale."""
    x = number(input)
    return scale * Where(sympy.Gt(x, 0), x, alpha * (sympy.exp(input_scale * x) - 1))


def _scalar(size: Any, value: Any) -> Any:
    if tuple(size):
        raise Unsupported(f"expected a new tensor of shape (), got {tuple(size)}")
    return value


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda input: function(number(input))


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, other: function(number(input), number(other))


def _sum(sign: int) -> Callable[..., Any]:
    return lambda input, other, *, alpha=1: number(input) + sign * alpha * number(other)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg negative": lambda x: -x,
    "pos positive": lambda x: x,
    "abs absolute": sympy.Abs,
    **ELEMENTARY,
    "exp2": lambda x: sympy.Integer(2) ** x,
    "expm1": lambda x: sympy.exp(x) - 1,
    "erfc": lambda x: 1 - sympy.erf(x),
    "frac": lambda x: x - truncate(x),
    "log2": lambda x: sympy.log(x) / sympy.Float(float(sympy.log(2))),
    "log10": lambda x: sympy.log(x) / sympy.Float(float(sympy.log(10))),
    "tan": lambda x: sympy.sin(x) / sympy.cos(x),
    "sqrt": sympy.sqrt,
    "rsqrt": lambda x: 1 / sympy.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x**2,
    "expit": Sigmoid,
    "sign sgn": sympy.sign,
    "floor": sympy.floor,
    "ceil": sympy.ceiling,
    "trunc fix": truncate,
    "isinf": lambda x: sympy.Eq(sympy.Abs(x), sympy.oo),
    "isneginf": lambda x: sympy.Eq(x, -sympy.oo),
    "zeros_like": lambda _: sympy.S.Zero,
    "ones_like": lambda _: sympy.S.One,
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mul multiply": lambda a, b: a * b,
    "truediv true_divide": _quotient,
    "maximum max": sympy.Max,
    "minimum min": sympy.Min,
    "lt less": partial(compared, sympy.Lt),
    "le less_equal": partial(compared, sympy.Le),
    "gt greater": partial(compared, sympy.Gt),
    "ge greater_equal": partial(compared, sympy.Ge),
}
_OTHER: dict[str, Callable[..., Any]] = {
    "add": _sum(1),
    "sub subtract": _sum(-1),
    "rsub": lambda input, other, *, alpha=1: number(other) - alpha * number(input),
    "pow float_power": lambda input, exponent: power(input, exponent),
    "div divide": divide,
    "floordiv floor_divide": floor_divide,
    "remainder mod": remainder,
    "fmod": fmod,
    "eq": equal,
    "ne not_equal": lambda input, other: opposite(equal(input, other)),
    "and bitwise_and": _bitwise(sympy.And, BitAnd, "&"),
    "or bitwise_or": _bitwise(either, BitOr, "|"),
    "xor bitwise_xor": _bitwise(exclusive_or, BitXor, "^"),
    "invert bitwise_not": invert,
    "logical_and": lambda input, other: logical(input) & logical(other),
    "logical_or": lambda input, other: either(logical(input), logical(other)),
    "logical_xor": lambda input, other: exclusive_or(logical(input), logical(other)),
    "logical_not": lambda input: opposite(logical(input)),
    "lshift bitwise_left_shift": _binary(ShiftLeft),
    "rshift bitwise_right_shift": _binary(ShiftRight),
    "where": lambda condition, input, other: where(condition, input, other),
    "clamp clip": clamp,
    "clamp_min": lambda input, min: clamp(input, min),
    "clamp_max": lambda input, max: clamp(input, None, max),
    "relu": lambda input, inplace=False: sympy.Max(number(input), 0),
    "softplus": softplus,
    "log_sigmoid logsigmoid": log_sigmoid,
    "gelu": gelu,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "relu6": lambda input, inplace=False: clamp(input, 0, 6),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: clamp(
        input, min_val, max_val
    ),
    "lerp": lambda input, end, weight: (
        number(input) + number(weight) * (number(end) - number(input))
    ),
    "silu": lambda input, inplace=False: number(input) * Sigmoid(number(input)),
    "full_like": lambda input, fill_value: number(fill_value),
    "new_full": lambda input, size, fill_value: _scalar(size, fill_value),
    "new_zeros": lambda input, size=(): _scalar(size, sympy.S.Zero),
    "new_ones": lambda input, size=(): _scalar(size, sympy.S.One),
}

OPERATIONS: dict[str, Callable[..., Any]] = {
    name: function
    for names, function in [
        *((names, _unary(function)) for names, function in _UNARY.items()),
        *((names, _binary(function)) for names, function in _BINARY.items()),
        *_OTHER.items(),
    ]
    for name in names.split()
}
