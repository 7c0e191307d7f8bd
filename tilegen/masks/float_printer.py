"""Prints masks and scores as Triton statements, in fp32 and 32-bit integers.

Common subexpressions and look-ups become statements of their own. Beyond what Triton has:
integer division and remainder round down as Python's do, powers are products, and tanh is right
for small and for large arguments.
"""

# SymPy is typed only in part, and where it is, too narrowly:
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportReturnType=false, reportCallIssue=false, reportMatchNotExhaustive=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import sympy
from sympy.core.relational import Relational

from tilegen.masks.integers import Exact, FloorDiv, exact, is_int
from tilegen.masks.nodes import Sigmoid, Where, normalise
from tilegen.masks.operations import is_condition
from tilegen.masks.symbols import Lookup

LookupSource = Callable[[str, Sequence[str], Sequence[bool]], str]
"""Returns the source that loads an element: of the captured tensor's name, its index sources, and
whether each index may be negative. Elements are int32 (bool ones 0 or 1) or fp32."""

FP32_TINY, FP32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127

# tanh(x) = x + x z (c0 + c1 z + ...) with z = x*x, interpolated at Chebyshev's points of |x| < 0.6;
# in fp32 1.4 units in the last place, as 1 - 2 / (exp(2x) + 1) is beyond.
TANH_SMALL = 0.6
TANH_SERIES = (-0.33333330333, 0.13332915367, -0.053873948849, 0.021110959049, -0.0062691197187)


def value_statements(
    exprs: Mapping[str, sympy.Basic],
    names: Mapping[sympy.Symbol, str],
    lookup: LookupSource,
    *,
    precise: bool = True,
) -> list[tuple[str, str]]:
    """Return statements (name, Triton source) that end in the given expressions, by name.

    `names` spells B, H, Q, K, S and the lengths. Other statements take names x0, x1, ... and
    t0_0, ... for elements of t0. Unless `precise`, tanh errs by up to 1e-7, also where it is
    smaller than that.
    """
    prepared = [exact(normalise(expr)) for expr in exprs.values()]
    shared, reduced = sympy.cse(
        prepared, symbols=sympy.numbered_symbols("common"), optimizations=[], order="canonical"
    )
    writer = _Writer(dict(names), lookup, precise)
    typed: dict[sympy.Basic, sympy.Basic] = {}
    for symbol, value in shared:
        value = value.xreplace(typed)
        typed[symbol] = writer.share(symbol, value)
    for name, value in zip(exprs, reduced, strict=True):
        writer.statements.append((name, writer.result(value.xreplace(typed))))
    return writer.statements


# How tightly Python's operators bind.
_LOWEST, _COMPARISON, _OR, _AND, _SUM, _PRODUCT, _UNARY, _ATOM = range(8)

_FUNCTIONS = {
    sympy.exp: "tl.exp",
    sympy.log: "tl.log",
    sympy.sin: "tl.sin",
    sympy.cos: "tl.cos",
    sympy.floor: "tl.floor",
}
_RELATIONS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Le: "<=", sympy.Lt: "<"}


class _Writer:
    """Writes expressions; whatever needs a name becomes a statement first."""

    def __init__(self, names: dict[sympy.Basic, str], lookup: LookupSource, precise: bool) -> None:
        """`names` spells the symbols; shared values are added to it."""
        self.statements: list[tuple[str, str]] = []
        self._names = names
        self._lookup = lookup
        self._precise = precise
        self._written: dict[str, str] = {}

    def share(self, symbol: sympy.Symbol, value: sympy.Basic) -> sympy.Symbol:
        """Write a shared value; return a symbol of which as much is known as of the value."""
        if is_condition(value):
            known = symbol
        else:
            facts = ["positive"] * bool(value.is_positive) + ["nonnegative"] * _is_natural(value)
            kind = "integer" if is_int(value) else "real"
            known = sympy.Symbol(symbol.name, **dict.fromkeys([*facts, kind], True))
        self._names[known] = self.name(self.source(value, _LOWEST))
        return known

    def name(self, source: str, stem: str = "x") -> str:
        """Return the name of a statement with this source, written once."""
        if source.isidentifier():
            return source
        if source not in self._written:
            taken = sum(name.startswith(stem) for name in self._written.values())
            self._written[source] = f"{stem}{taken}"
            self.statements.append((f"{stem}{taken}", source))
        return self._written[source]

    def source(self, expr: sympy.Basic, binding: int) -> str:
        """Return the source of an expression, in brackets unless it binds as tightly as asked."""
        text, own = self._write(expr)
        return text if own >= binding else f"({text})"

    def result(self, expr: sympy.Basic) -> str:
        """Return the source of a whole expression: a condition or an fp32 value."""
        return self.source(expr, _LOWEST) if is_condition(expr) else self._float(expr)

    def _float(self, expr: sympy.Basic, binding: int = _LOWEST) -> str:
        """Return the source of a value that must be floating."""
        if isinstance(expr, sympy.Number):
            text = _literal(expr)
            return f"({text})" if expr < 0 and binding > _UNARY else text
        if is_int(expr):
            return f"{self.source(expr, _ATOM)}.to(tl.float32)"
        return self.source(expr, binding)

    def _int(self, expr: sympy.Basic, binding: int) -> str:
        """Return the source of a value that must be an integer."""
        if is_int(expr):
            return self.source(expr, binding)
        return f"{self.source(expr, _ATOM)}.to(tl.int32)"

    def _operand(self, expr: sympy.Basic, as_int: bool, binding: int) -> str:
        """Return the source of an operand; Triton itself makes integers floats beside floats."""
        if isinstance(expr, sympy.Number) and not as_int:
            return self._float(expr, binding)
        return self.source(expr, binding)

    def _write(self, expr: Any) -> tuple[str, int]:
        integers = is_int(expr)
        match expr:
            case sympy.Symbol():
                return self._names[expr], _ATOM
            case sympy.Integer():
                return str(expr), _UNARY if expr < 0 else _ATOM
            case sympy.Number():
                return _literal(expr), _UNARY if expr < 0 else _ATOM
            case Lookup():
                return self._load(expr), _ATOM
            case sympy.Add():
                return self._sum(expr, integers), _SUM
            case sympy.Mul():
                return self._product(expr, integers), _PRODUCT
            case sympy.Pow():
                return self._power(expr)
            case FloorDiv():
                return self._floor_divide(*expr.args), _PRODUCT
            case sympy.Mod():
                return self._remainder(*expr.args)
            case Exact():
                return f"{self.source(expr.args[0], _ATOM)}.to(tl.float32)", _ATOM
            case sympy.Max() | sympy.Min():
                name = "tl.maximum" if isinstance(expr, sympy.Max) else "tl.minimum"
                values = sorted(self._operand(arg, integers, _LOWEST) for arg in expr.args)
                return reduce(lambda left, right: f"{name}({left}, {right})", values), _ATOM
            case sympy.Abs():
                return f"tl.abs({self.source(expr.args[0], _LOWEST)})", _ATOM
            case sympy.sign():
                return self._sign(expr.args[0], integers), _ATOM
            case Where():
                keep = self.source(expr.args[0], _LOWEST)
                values = [self._operand(arg, integers, _LOWEST) for arg in expr.args[1:]]
                return f"tl.where({keep}, {', '.join(values)})", _ATOM
            case sympy.tanh():
                return self._tanh(self._float(expr.args[0])), _ATOM
            case Sigmoid():
                return f"1.0 / (1.0 + tl.exp({self._float(-expr.args[0])}))", _PRODUCT
            case sympy.And():
                return " & ".join(sorted(self.source(arg, _SUM) for arg in expr.args)), _AND
            case sympy.Or():
                return " | ".join(sorted(self.source(arg, _SUM) for arg in expr.args)), _OR
            case sympy.Not():
                return f"~{self.source(expr.args[0], _ATOM)}", _UNARY
            case _ if expr in (sympy.true, sympy.false):
                return str(expr), _ATOM
            case Relational():
                both = all(map(is_int, expr.args))
                sides = [self._operand(arg, both, _OR) for arg in expr.args]
                return f" {_RELATIONS[type(expr)]} ".join(sides), _COMPARISON
        return f"{_FUNCTIONS[type(expr)]}({self._float(expr.args[0])})", _ATOM

    def _load(self, expr: Lookup) -> str:
        sources = [self._int(arg, _LOWEST) for arg in expr.args[1:]]
        indices = [one if one.isdigit() else self.name(one) for one in sources]
        signed = [not _is_natural(arg) for arg in expr.args[1:]]
        tensor = expr.args[0].name
        return self.name(self._lookup(tensor, indices, signed), f"{tensor}_")

    def _sum(self, expr: sympy.Add, integers: bool) -> str:
        terms: list[tuple[bool, bool, str]] = []
        for term in expr.args:
            negative = bool(term.as_coeff_Mul()[0] < 0)
            size = -term if negative else term
            # -a % b would be (-a) % b.
            rounded = negative and isinstance(size, (FloorDiv, sympy.Mod))
            text = self._operand(size, integers, _UNARY if rounded else _PRODUCT)
            terms.append((negative, term.is_number, text))
        text = "".join((" - " if negative else " + ") + term for negative, _, term in sorted(terms))
        return text.removeprefix(" + ") if text.startswith(" + ") else f"-{text[3:]}"

    def _product(self, expr: sympy.Mul, integers: bool) -> str:
        coefficient, rest = expr.as_coeff_Mul()
        above: list[str] = []
        below: list[str] = []
        for factor in sympy.Mul.make_args(rest):
            base, exponent = factor.as_base_exp()
            if isinstance(factor, sympy.Pow) and exponent.is_Rational and exponent < 0:
                below.append(self._operand(sympy.Pow(base, -exponent), False, _UNARY))
            else:
                above.append(self._operand(factor, integers, _UNARY))
        above.sort()
        size = abs(coefficient)
        if size != 1 or not above:
            above.insert(0, str(size) if integers else _literal(size))
        under = " * ".join(sorted(below))
        quotient = f" / ({under})" if len(below) > 1 else f" / {under}" if below else ""
        return ("-" if coefficient < 0 else "") + " * ".join(above) + quotient

    def _power(self, expr: sympy.Pow) -> tuple[str, int]:
        base, exponent = expr.args
        if exponent.is_Rational and exponent < 0:
            below = self._operand(sympy.Pow(base, -exponent), False, _UNARY)
            return f"1.0 / {below}", _PRODUCT
        if exponent.is_Integer:
            return self._repeated(self.name(self.source(base, _LOWEST)), int(exponent)), _PRODUCT
        if exponent == sympy.Rational(1, 2):
            return f"tl.sqrt({self._float(base)})", _ATOM
        if exponent.is_Rational and exponent.q == 2:
            value = self.name(self._float(base))
            root = self.name(f"tl.sqrt({value})")
            return f"{self._repeated(value, int(exponent))} * {root}", _PRODUCT
        if base.is_Number:
            scale = sympy.Float(float(sympy.log(base, 2)))
            scaled = exponent if scale == 1 else scale * exponent
            return f"tl.exp2({self._float(scaled)})", _ATOM
        return f"tl.exp({self._float(exponent, _UNARY)} * tl.log({self._float(base)}))", _ATOM

    def _repeated(self, value: str, times: int) -> str:
        """Return the product of a named value with itself, by squaring."""
        factors: list[str] = []
        while True:
            if times % 2:
                factors.append(value)
            times //= 2
            if not times:
                return " * ".join(factors)
            if times == 1 and not factors:
                return f"{value} * {value}"
            value = self.name(f"{value} * {value}")

    def _remainder(self, left: sympy.Expr, right: sympy.Expr) -> tuple[str, int]:
        """Triton's `%` has the sign of the left operand, ours that of the right one."""
        divisor = self._int(right, _UNARY)
        if left.is_nonnegative and right.is_positive:
            return f"{self._int(left, _UNARY)} % {divisor}", _PRODUCT
        rest = self.name(f"{self._int(left, _UNARY)} % {divisor}")
        if right.is_positive:
            return f"tl.where({rest} < 0, {rest} + {divisor}, {rest})", _ATOM
        wrong = f"({rest} != 0) & (({rest} < 0) != ({divisor} < 0))"
        return f"tl.where({wrong}, {rest} + {divisor}, {rest})", _ATOM

    def _floor_divide(self, left: sympy.Expr, right: sympy.Expr) -> str:
        """Triton's `//` rounds towards zero, ours down."""
        number, divisor = self._int(left, _UNARY), self._int(right, _UNARY)
        if left.is_nonnegative and right.is_positive:
            return f"{number} // {divisor}"
        rest = self.name(self._remainder(left, right)[0])
        return f"({self._int(left, _SUM)} - {rest}) // {divisor}"

    def _sign(self, arg: sympy.Expr, integers: bool) -> str:
        value = self.name(self.source(arg, _LOWEST))
        one, zero = ("1", "0") if integers else ("1.0", "0.0")
        return f"tl.where({value} > 0, {one}, tl.where({value} < 0, -{one}, {zero}))"

    def _tanh(self, source: str) -> str:
        x = self.name(source)
        if not self._precise:
            return self.name(f"1.0 - 2.0 / (tl.exp(2.0 * {x}) + 1.0)")
        square = self.name(f"{x} * {x}")
        size = self.name(f"tl.abs({x})")
        series = repr(TANH_SERIES[-1])
        for factor in reversed(TANH_SERIES[:-1]):
            series = self.name(f"{series} * {square} {'-' if factor < 0 else '+'} {abs(factor)!r}")
        small = self.name(f"{x} + {x} * {square} * {series}")
        large = self.name(f"1.0 - 2.0 / (tl.exp(2.0 * {size}) + 1.0)")
        signed = f"tl.where({x} < 0, -{large}, {large})"
        return self.name(f"tl.where({size} < {TANH_SMALL}, {small}, {signed})")


def _is_natural(expr: sympy.Expr) -> bool:
    """Whether a value is surely not negative, as clipped indices are."""
    if expr.is_nonnegative:
        return True
    lowest = _lowest(expr)
    return lowest is not None and lowest >= 0


def _lowest(expr: sympy.Expr) -> sympy.Rational | None:
    """Return a number that a value is never below, where one is easily known."""
    if isinstance(expr, sympy.Rational):
        return expr
    if isinstance(expr, (sympy.Add, sympy.Max, sympy.Min)):
        parts = [_lowest(arg) for arg in expr.args]
        known = [part for part in parts if part is not None]
        if isinstance(expr, sympy.Max) and known:
            return max(known)
        if len(known) == len(parts):
            return min(known) if isinstance(expr, sympy.Min) else sum(known, sympy.Integer(0))
        return None
    return sympy.Integer(0) if expr.is_nonnegative else None


def _literal(value: sympy.Number) -> str:
    """Return a number as an fp32 literal; Triton makes others, even tiny ones, double precision."""
    number = float(value)
    if abs(number) > FP32_MAX:
        return 'float("inf")' if number > 0 else '-float("inf")'
    return repr(number if abs(number) >= FP32_TINY else 0.0)
