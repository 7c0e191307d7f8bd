"""Integers in expressions, modulo 2**64: sums and products are flattened, and equal terms joined.
All arguments are integers already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

from tilegen.masks.language.bounds import MAX_LENGTH, MAX_SHIFT, Ranges, bounded, limits
from tilegen.masks.language.elements import BOUNDS
from tilegen.masks.language.expr import FALSE, ONE, TRUE, ZERO, Expr, const, order

BITS = {"bitand": "&", "bitor": "|", "bitxor": "^", "shl": "<<", "shr": ">>"}
"""Operations on the bits of two integers, with their operators in Python and Triton."""


def linear(expr: Expr) -> tuple[dict[Expr, int], int]:
    """Split an integer into its terms, each with a factor, and a constant."""
    factors: dict[Expr, int] = {}
    constant = 0
    for part in expr.args if expr.op == "add" else (expr,):
        factor, term = as_coefficient(part)
        if term is ONE:
            constant += factor
        else:
            factors[term] = factors.get(term, 0) + factor
    return factors, constant


def as_coefficient(term: Expr) -> tuple[int, Expr]:
    """Split an integer that is no sum into a number and the rest, 1 if there is none."""
    if term.is_const:
        return term.value, ONE
    if term.op == "mul" and term.args[0].is_const:
        rest = term.args[1:]
        return term.args[0].value, rest[0] if len(rest) == 1 else Expr("mul", "int64", rest)
    return 1, term


def combined(factors: dict[Expr, int], constant: int = 0) -> Expr:
    """Return the integer that `linear` splits so."""
    terms = [_scaled(factor, term) for term, factor in factors.items() if factor]
    terms.sort(key=lambda term: order(as_coefficient(term)[1]))
    if constant or not terms:
        terms.append(const(constant))
    return terms[0] if len(terms) == 1 else Expr("add", "int64", tuple(terms))


def _scaled(factor: int, term: Expr) -> Expr:
    if factor == 1:
        return term
    parts = term.args if term.op == "mul" else (term,)
    return Expr("mul", "int64", (const(factor), *parts))


def total(terms: Iterable[Expr]) -> Expr:
    """Return a sum."""
    factors: dict[Expr, int] = {}
    constant = 0
    for term in terms:
        parts, own = linear(term)
        constant += own
        for part, factor in parts.items():
            factors[part] = factors.get(part, 0) + factor
    return combined(factors, constant)


def negative(expr: Expr) -> Expr:
    """Return an integer with the other sign."""
    return product((const(-1), expr))


def difference(left: Expr, right: Expr) -> Expr:
    """Return left - right."""
    return total((left, negative(right)))


def product(values: Iterable[Expr]) -> Expr:
    """Return a product, in which powers stand for equal factors."""
    constant = 1
    powers: dict[Expr, int] = {}
    for value in values:
        factor, rest = as_coefficient(value)
        constant *= factor
        for part in rest.args if rest.op == "mul" else (rest,):
            base, exponent = (part.args[0], part.value) if part.op == "power" else (part, 1)
            if base is not ONE:
                powers[base] = powers.get(base, 0) + exponent
    if not powers or not constant:
        return const(constant)
    parts = [base if n == 1 else Expr("power", "int64", (base,), n) for base, n in powers.items()]
    if len(parts) == 1 and parts[0].op == "add":
        terms, own = linear(parts[0])
        return combined({term: constant * f for term, f in terms.items()}, constant * own)
    parts.sort(key=order)
    if constant == 1:
        return parts[0] if len(parts) == 1 else Expr("mul", "int64", tuple(parts))
    return Expr("mul", "int64", (const(constant), *parts))


def floor_divide(top: Expr, below: Expr) -> Expr:
    """Return a quotient rounded down. An integer divided by 0 is left as it is."""
    if not below.is_const:
        return Expr("floordiv", "int64", (top, below))
    by = below.value
    if by in (0, 1):
        return top
    if top.is_const:
        return const(top.value // by)
    if by == -1:
        return negative(top)
    factors, constant = linear(top)
    outer = {term: factor // by for term, factor in factors.items() if factor % by == 0}
    inner = {term: factor for term, factor in factors.items() if factor % by}
    whole = constant // by if by > 0 else 0
    if outer or whole:  # what divides without rest need not be divided
        rest = combined(inner, constant - whole * by)
        return total((combined(outer, whole), floor_divide(rest, below)))
    common = gcd(by, constant, *inner.values())
    if common > 1:
        rest = combined({term: f // common for term, f in inner.items()}, constant // common)
        return floor_divide(rest, const(by // common))
    return Expr("floordiv", "int64", (top, below))


def remainder(top: Expr, below: Expr) -> Expr:
    """Return top modulo below, with the sign of below; 0 modulo 0."""
    if not below.is_const:
        return Expr("mod", "int64", (top, below))
    by = below.value
    if by in (-1, 0, 1):
        return ZERO
    factors, constant = linear(top)
    factors = {term: factor for term, factor in factors.items() if factor % by}
    rest = combined(factors, constant % abs(by))
    if rest.is_const:
        return const(rest.value % by)
    if rest.op == "mod" and rest.args[1] is below:
        return rest
    return Expr("mod", "int64", (rest, below))


def extreme(op: str, numbers: Sequence[Expr]) -> Expr:
    """Return the largest ("max") or the smallest ("min") of numbers."""
    parts = [part for number in numbers for part in (number.args if number.op == op else (number,))]
    kept: list[Expr] = []
    for operand in parts:
        if not any(_is_between(op, operand, other) for other in kept):
            kept = [*(other for other in kept if not _is_between(op, other, operand)), operand]
    kept.sort(key=order)
    return kept[0] if len(kept) == 1 else Expr(op, "int64", tuple(kept))


def _is_between(op: str, bound: Expr, other: Expr) -> bool:
    """Return whether a number is surely no larger (for "max"; no smaller for "min") than
    another."""
    room = difference(other, bound) if op == "max" else difference(bound, other)
    return limits(room)[0] >= 0


def absolute(expr: Expr) -> Expr:
    """Return an integer without its sign."""
    low, high = limits(expr)
    if low >= 0 or high <= 0:
        return expr if low >= 0 else negative(expr)
    factors, constant = linear(expr)
    common = gcd(constant, *factors.values())
    by = -common if next(iter(factors.values())) < 0 else common
    inner = combined({term: f // by for term, f in factors.items()}, constant // by)
    return product((const(common), Expr("abs", "int64", (inner,))))


def sign(expr: Expr) -> Expr:
    """Return 1, 0 or -1 with the sign of an integer."""
    low, high = limits(expr)
    if low > 0 or high < 0:
        return const(1 if low > 0 else -1)
    return ZERO if low == high else Expr("sign", "int64", (expr,))


def wrapped(expr: Expr, dtype: str) -> Expr:
    """Wrap an integer to fewer than 64 bits, modulo 2 to the number of bits."""
    low, high = BOUNDS[dtype]
    least, most = bounded(expr, MAX_LENGTH)
    if low <= least and most <= high:
        return expr
    if expr.is_const:
        return const((expr.value - low) % (high - low + 1) + low)
    return Expr("cast", dtype, (expr,))


def bits(op: str, left: Expr, right: Expr) -> Expr:
    """Return an operation on the bits of two integers, in two's complement; a shift by what is not
    in 0..MAX_SHIFT clears the bits, or leaves the sign. Shifts by a number, and low bits, become
    arithmetic, of which tiles have closer bounds."""
    if left.is_const and right.is_const:
        return const(bits_of(op, left.value, right.value))
    if op not in ("shl", "shr"):
        left, right = sorted((left, right), key=order)
    if right.is_const and right.value >= 0:
        by = right.value
        if op == "shl" and by < MAX_SHIFT:
            return product((left, const(2**by)))
        if op == "shr" and by < MAX_SHIFT:
            return floor_divide(left, const(2**by))
        if op == "bitand" and by & (by + 1) == 0:
            return remainder(left, const(by + 1))
    return Expr(op, "int64", (left, right))


def bits_of(op: str, left: int, right: int) -> int:
    """Compute an operation on the bits of two integers of 64 bits."""
    return (Ranges.bits_of(op, left, right) + 2**63) % 2**64 - 2**63


def compared(op: str, left: Expr, right: Expr) -> Expr:
    """Return the comparison "lt", "le" or "eq" of two integers."""
    if left is right:
        return FALSE if op == "lt" else TRUE
    if any(one.op == "load" and one.dtype == "int64" for one in (*left.walk(), *right.walk())):
        # The sides may wrap around: nothing is known of their difference.
        left, right = sorted((left, right), key=order) if op == "eq" else (left, right)
        return Expr(op, "bool", (left, right))
    low, high = limits(difference(right, left))
    least = int(op == "lt")
    if op == "eq":
        if low > 0 or high < 0:
            return FALSE
        left, right = sorted((left, right), key=order)
    elif low >= least:
        return TRUE
    elif high < least:
        return FALSE
    coprime = _of_coprime_terms(op, left, right)
    return Expr(op, "bool", (left, right)) if coprime is None else coprime


def _of_coprime_terms(op: str, left: Expr, right: Expr) -> Expr | None:
    """Return a comparison with a number, in which the factors of terms have no divisor in common;
    None where they have none already."""
    if not (left.is_const or right.is_const):
        return None
    number, other = (right, left) if right.is_const else (left, right)
    factors, constant = linear(other)
    common = gcd(*factors.values())
    if common == 1 or (constant == 0 and number.value == 0):
        return None
    inner = combined({term: factor // common for term, factor in factors.items()})
    room = number.value - constant
    if op == "eq":
        return FALSE if room % common else compared("eq", inner, const(room // common))
    strict = int(op == "lt")
    if number is right:  # common * inner <= room, or < room
        return compared("le", inner, const((room - strict) // common))
    return compared("le", const(-((-room - strict) // common)), inner)
