"""PyTorch's functions as expressions.

`OPERATIONS` maps the name of a torch function or method to a function of expressions, with torch's
own parameter names. Operands have the dtype that PyTorch computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from tilegen.errors import Unsupported
from tilegen.masks.language.algebra import (
    absolute,
    add,
    as_expr,
    at_most,
    both,
    cast,
    ceiling,
    divide,
    either,
    equal,
    floor,
    floor_divide,
    less,
    maximum,
    minimum,
    multiply,
    negative,
    number,
    number_of,
    opposite,
    subtract,
    where,
)
from tilegen.masks.language.expr import Expr, const
from tilegen.masks.language.functions import (
    ELEMENTARY,
    bits,
    elementary,
    exclusive_or,
    power,
    sign,
)
from tilegen.masks.language.remainders import remainder, truncated_remainder, whole_quotient


def condition(value: Any, function: str) -> Expr:
    """Return an expression that must be a condition. Raises Unsupported, naming the function."""
    expr = as_expr(value)
    if expr.is_condition:
        return expr
    raise Unsupported(f"expected conditions in {function}, got {expr}")


def _bitwise(function: Any, operation: str, name: str) -> Callable[..., Any]:
    """Return an operation on two conditions, or on the bits of two integers."""

    def apply(input: Any, other: Any) -> Any:
        left, right = as_expr(input), as_expr(other)
        if left.is_condition and right.is_condition:
            return function(left, right)
        left, right = number(left), number(right)
        if left.is_int and right.is_int:
            return bits(operation, left, right)
        raise Unsupported(f"expected conditions or integers in {name}, got {left} and {right}")

    return apply


def invert(input: Any) -> Any:
    """Return the opposite of a condition, or an integer with all bits changed."""
    expr = as_expr(input)
    if expr.is_condition:
        return opposite(expr)
    if expr.is_int:
        return subtract(-1, expr)
    raise Unsupported(f"expected a condition or an integer in ~, got {expr}")


def logical(input: Any) -> Any:
    """Return a condition, or whether a number is not 0."""
    return cast(input, "bool")


def integer_power(input: Any, exponent: Any) -> Any:
    """Return input ** exponent, both integers."""
    base, raised = number(input), number(exponent)
    if raised.is_const and raised.value >= 0:
        return power(base, raised)
    if base.is_const and base.value == 2:  # negative powers of which are rounded to 0
        return bits("shl", 1, raised)
    raise Unsupported(
        f"expected a power of 2 or a constant exponent, got the integer {base} ** ({raised}); "
        "write it with floats"
    )


def truncated(x: Any) -> Any:
    """Return a number rounded towards zero, in its own dtype."""
    expr = number(x)
    if expr.is_int:
        return expr
    return where(less(expr, 0), ceiling(expr), floor(expr))


def fmod(input: Any, other: Any) -> Any:
    """Compute the remainder of a quotient that is rounded towards zero."""
    left, right = number(input), number(other)
    if left.is_int and right.is_int:
        return subtract(left, multiply(right, _towards_zero(left, right)))
    return truncated_remainder(left, right)


def _towards_zero(left: Expr, right: Expr) -> Expr:
    """Return the quotient of integers, rounded towards zero."""
    down = floor_divide(left, right)
    exact = equal(multiply(down, right), left)
    return where(either(exact, at_most(0, down)), down, add(down, 1))


def divided(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return input / other, rounded as asked."""
    match rounding_mode:
        case None:
            return divide(input, other)
        case "floor":
            return whole_quotient(input, other)
        case "trunc":
            left, right = number(input), number(other)
            if left.is_int and right.is_int:
                return _towards_zero(left, right)
            quotient = divide(left, right)
            if left.dtype == right.dtype and not right.is_const:
                quotient = cast(quotient, left.dtype)  # which PyTorch rounds to 16 bits before
            return truncated(quotient)
        case _:
            raise Unsupported(f"expected rounding_mode None, floor or trunc, got {rounding_mode!r}")


def _chosen(keep: Any, input: Any, other: Any) -> Any:
    """Return input where a condition holds, other elsewhere."""
    return where(condition(keep, "torch.where"), input, other)


def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Return min(max(input, min), max)."""
    value = number(input)
    if min is not None:
        value = maximum(value, min)
    return value if max is None else minimum(value, max)


def relu(input: Any, inplace: bool = False) -> Any:
    """Return x, or 0 where it is not positive; PyTorch gives 0 the derivative 0."""
    x = number(input)
    return where(at_most(x, 0), 0, x)


def isclose(
    input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Any:
    """Return |input - other| <= atol + |rtol other|, each step rounded to the dtype of the two, and
    integers computed with as single floats."""
    left, right = number(input), number(other)
    dtype = "float32" if left.is_int else left.dtype

    def allowed(value: Any) -> Expr:
        return cast(value, dtype)

    room = absolute(allowed(multiply(number_of(rtol, dtype), allowed(right))))
    error = absolute(allowed(subtract(allowed(left), allowed(right))))
    near = at_most(error, allowed(add(number_of(atol, dtype), room)))
    is_close = either(equal(left, right), both(less(error, math.inf), near))
    if not equal_nan or left.is_int:
        return is_close
    return either(is_close, both(opposite(equal(left, left)), opposite(equal(right, right))))


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    """Return log(1 + exp(beta x)) / beta, which is x where beta x is above the threshold."""
    x = number(input)
    scaled = multiply(x, beta)
    small = divide(elementary("log1p", elementary("exp", scaled)), beta)
    return where(less(threshold, scaled), x, small)


def log_sigmoid(input: Any) -> Any:
    """Return log(sigmoid(x)), which overflows nowhere."""
    x = number(input)
    return subtract(minimum(x, 0), elementary("log1p", elementary("exp", negative(absolute(x)))))


def gelu(input: Any, approximate: str = "none") -> Any:
    """Return x times the normal distribution at x, or its approximation by tanh."""
    x = number(input)
    if approximate == "tanh":
        inner = multiply(math.sqrt(2 / math.pi), add(x, multiply(0.044715, power(x, 3))))
        return multiply(0.5, x, add(1, elementary("tanh", inner)))
    return multiply(0.5, x, add(1, elementary("erf", multiply(x, math.sqrt(0.5)))))


def leaky_relu(input: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Return x, times the slope where it is negative."""
    x = number(input)
    return where(less(0, x), x, multiply(negative_slope, x))


def elu(
    input: Any, alpha: float = 1.0, scale: Any = 1, input_scale: Any = 1, inplace: bool = False
) -> Any:
    """Return x, or alpha (exp(x * input_scale) - 1) where it is negative, times the scale."""
    x = number(input)
    grown = subtract(elementary("exp", multiply(input_scale, x)), 1)
    return multiply(scale, where(less(0, x), x, multiply(alpha, grown)))


def _scalar(size: Any, value: Any) -> Any:
    if tuple(size):
        raise Unsupported(f"expected a new tensor of shape (), got {tuple(size)}")
    return as_expr(value)


def _added(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return add(input, other if alpha == 1 else multiply(alpha, other))


def _subtracted(input: Any, other: Any, *, alpha: Any = 1) -> Any:
    return subtract(input, other if alpha == 1 else multiply(alpha, other))


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda input: function(number(input))


def _binary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda input, other: function(number(input), number(other))


def _function(name: str) -> Callable[[Any], Any]:
    return partial(elementary, name)


_UNARY: dict[str, Callable[[Any], Any]] = {
    "neg negative": negative,
    "pos positive": lambda x: x,
    "abs absolute": absolute,
    **{name: _function(name) for name in ELEMENTARY},
    "exp2": lambda x: power(2.0, x),
    "expm1": lambda x: subtract(elementary("exp", x), 1),
    "erfc": lambda x: subtract(1, elementary("erf", x)),
    "frac": lambda x: subtract(x, truncated(x)),
    "log2": lambda x: divide(elementary("log", x), math.log(2)),
    "log10": lambda x: divide(elementary("log", x), math.log(10)),
    "tan": lambda x: divide(elementary("sin", x), elementary("cos", x)),
    "rsqrt": lambda x: divide(1.0, elementary("sqrt", x)),
    "reciprocal": lambda x: divide(1.0, x),
    "square": lambda x: power(x, 2),
    "expit": _function("sigmoid"),
    "sign sgn": sign,
    "floor": floor,
    "ceil": ceiling,
    "trunc fix": truncated,
    "isnan": lambda x: opposite(equal(x, x)),
    "isfinite": lambda x: less(absolute(x), math.inf),
    "isinf": lambda x: equal(absolute(x), math.inf),
    "isposinf": lambda x: equal(x, math.inf),
    "isneginf": lambda x: equal(x, -math.inf),
    "zeros_like": lambda _: const(0),
    "ones_like": lambda _: const(1),
}
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "mul multiply": multiply,
    "truediv true_divide": divide,
    "maximum max": maximum,
    "minimum min": minimum,
    "lt less": less,
    "le less_equal": at_most,
    "gt greater": lambda a, b: less(b, a),
    "ge greater_equal": lambda a, b: at_most(b, a),
}
_OTHER: dict[str, Callable[..., Any]] = {
    "add": _added,
    "sub subtract": _subtracted,
    "rsub": lambda input, other, *, alpha=1: _subtracted(other, input, alpha=alpha),
    "pow float_power": lambda input, exponent: power(input, exponent),
    "div divide": divided,
    "floordiv floor_divide": lambda input, other: whole_quotient(input, other),
    "remainder mod": lambda input, other: remainder(input, other),
    "fmod": fmod,
    "eq": lambda input, other: equal(input, other),
    "ne not_equal": lambda input, other: opposite(equal(input, other)),
    "and bitwise_and": _bitwise(both, "bitand", "&"),
    "or bitwise_or": _bitwise(either, "bitor", "|"),
    "xor bitwise_xor": _bitwise(exclusive_or, "bitxor", "^"),
    "invert bitwise_not": invert,
    "logical_and": lambda input, other: both(logical(input), logical(other)),
    "logical_or": lambda input, other: either(logical(input), logical(other)),
    "logical_xor": lambda input, other: exclusive_or(logical(input), logical(other)),
    "logical_not": lambda input: opposite(logical(input)),
    "lshift bitwise_left_shift": _binary(partial(bits, "shl")),
    "rshift bitwise_right_shift": _binary(partial(bits, "shr")),
    "where": lambda condition, input, other: _chosen(condition, input, other),
    "clamp clip": clamp,
    "clamp_min": lambda input, min: clamp(input, min),
    "clamp_max": lambda input, max: clamp(input, None, max),
    "isclose": isclose,
    "relu": relu,
    "softplus": softplus,
    "log_sigmoid logsigmoid": log_sigmoid,
    "gelu": gelu,
    "leaky_relu": leaky_relu,
    "elu": elu,
    "relu6": lambda input, inplace=False: clamp(input, 0, 6),
    "hardtanh": lambda input, min_val=-1.0, max_val=1.0, inplace=False: clamp(
        input, min_val, max_val
    ),
    "lerp": lambda input, end, weight: add(input, multiply(weight, subtract(end, input))),
    "silu": lambda input, inplace=False: multiply(input, elementary("sigmoid", input)),
    "full_like": lambda input, fill_value: as_expr(fill_value),
    "new_full": lambda input, size, fill_value: _scalar(size, fill_value),
    "new_zeros": lambda input, size=(): _scalar(size, 0),
    "new_ones": lambda input, size=(): _scalar(size, 1),
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
