"""Texts of masks and scores: `to_text` writes the canonical one, `from_text` reads it back.

A text looks like Python without white space: `(k<=q)&(q-k<16)`, `20.0*tanh(0.05*s)`,
`s+t0[h]*(k-q)`. `t0` is the first captured tensor, `t0[()]` a captured scalar, `a//b` rounds down.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import sympy

from tilegen.errors import InvalidProblem
from tilegen.masks.language.elements import kind_of
from tilegen.masks.language.integers import FloorDiv, quotient
from tilegen.masks.language.nodes import BITS, FUNCTIONS, SYMBOLS, Where, normalise
from tilegen.masks.language.ordered import NAMES, Ordered
from tilegen.masks.language.reader import Reader, chain
from tilegen.masks.language.symbols import (
    B,
    H,
    K,
    Lookup,
    Q,
    captured_name,
    captured_slots,
    is_captured,
    is_condition,
)
from tilegen.masks.language.widths import WRAPPED

if TYPE_CHECKING:
    import torch

MAX_TEXT = 2**15
MAX_DEPTH = 64
MAX_INTEGER = 2**62

LOWEST, COMPARISON, OR, AND, SUM, PRODUCT, UNARY, POWER, ATOM = range(9)
"""Python's operators in the order in which they bind, the loosest first."""

RELATIONS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Le: "<=", sympy.Lt: "<"}

Spell = Callable[[sympy.Expr, int], str]
"""Returns the text of an operand, in brackets unless it binds at least as tightly as asked."""


def to_text(expr: Any) -> str:
    """Return the canonical text of a mask predicate or score, without white space; equal
    expressions have one text.

    Raises Unsupported for what masks and scores cannot hold.
    """
    return _text(normalise(expr))[0]


_NAMES = {
    function: name
    for name, function in FUNCTIONS.items()
    if isinstance(function, type)  # sqrt is a power
}


def _inside(expr: sympy.Basic, binding: int) -> str:
    """Return the text of a part, in brackets unless it binds at least as tightly as asked."""
    text, own = _text(expr)
    return text if own >= binding else f"({text})"


def _text(expr: sympy.Basic) -> tuple[str, int]:
    match expr:
        case sympy.Symbol():
            return expr.name, ATOM
        case sympy.Number():
            return _number(expr)
        case Lookup():
            index = ",".join(_inside(arg, COMPARISON) for arg in expr.args[1:])
            return f"{expr.args[0]}[{index or '()'}]", ATOM
        case sympy.Add():
            return spelt_sum(expr.args, _inside, ""), SUM
        case sympy.Mul():
            return _product(expr)
        case sympy.Pow():
            return _power(expr)
        case sympy.floor():
            numerator, denominator = quotient(expr.args[0])
            return f"{_inside(numerator, UNARY)}//{_inside(denominator, UNARY)}", PRODUCT
        case sympy.Mod():
            return "%".join(_inside(arg, UNARY) for arg in expr.args), PRODUCT
        case sympy.And():
            return "&".join(sorted(_inside(arg, SUM) for arg in expr.args)), AND
        case sympy.Or():
            return "|".join(sorted(_inside(arg, SUM) for arg in expr.args)), OR
        case sympy.Not():
            return f"~{_inside(expr.args[0], ATOM)}", UNARY
        case Ordered() if expr.holds_for_nan:
            return f"~{_text(expr.negated)[0]}", UNARY
        case _ if expr in (sympy.true, sympy.false):
            return str(expr), ATOM
        case _ if type(expr) in RELATIONS:
            return RELATIONS[type(expr)].join(_inside(arg, OR) for arg in expr.args), COMPARISON
        case _:
            arguments = [_text(arg)[0] for arg in expr.args]
            if isinstance(expr, (sympy.Min, sympy.Max)):
                arguments.sort()
            return f"{_NAMES[type(expr)]}({','.join(arguments)})", ATOM


def _number(value: sympy.Number) -> tuple[str, int]:
    if value.is_infinite:
        text = "inf" if value > 0 else "-inf"
    else:
        text = repr(float(value)) if value.is_Float else str(value)
    if "/" in text:
        return text, PRODUCT
    return text, UNARY if value < 0 else ATOM


def _product(expr: sympy.Mul) -> tuple[str, int]:
    coefficient, times, over = factors(expr)
    above = sorted(_inside(factor, UNARY) for factor in times)
    below = sorted(_inside(factor, UNARY) for factor in over)
    size = abs(coefficient)
    numerator, denominator = (size.p, size.q) if size.is_Rational else (size, 1)
    if numerator != 1 or not above or size.is_Float:
        above.insert(0, _number(sympy.sympify(numerator))[0])
    if denominator != 1:
        below.append(str(denominator))
    sign = "-" if coefficient < 0 else ""
    return sign + "*".join(above) + "".join(f"/{part}" for part in below), PRODUCT


def _power(expr: sympy.Pow) -> tuple[str, int]:
    base, exponent = expr.args
    if exponent.is_Rational and exponent < 0:
        return f"1/{_inside(sympy.Pow(base, -exponent), UNARY)}", PRODUCT
    if exponent == sympy.Rational(1, 2):
        return f"sqrt({_text(base)[0]})", ATOM
    return f"{_inside(base, ATOM)}**{_inside(exponent, ATOM)}", POWER


def spelt_sum(terms: Iterable[sympy.Expr], spell: Spell, space: str) -> str:
    """Return the text of a sum: positive terms first, numbers last of each sign, else by text."""
    parts: list[tuple[bool, bool, str]] = []
    for term in terms:
        negative = bool(term.as_coeff_Mul()[0] < 0)
        size = -term if negative else term
        # -a % b would be (-a) % b.
        rounded = negative and isinstance(size, (sympy.floor, FloorDiv, sympy.Mod))
        parts.append((negative, term.is_number, spell(size, UNARY if rounded else PRODUCT)))
    text = "".join(
        f"{space}{'-' if negative else '+'}{space}{part}" for negative, _, part in sorted(parts)
    )
    sign, rest = text[len(space)], text[2 * len(space) + 1 :]
    return rest if sign == "+" else f"-{rest}"


def factors(product: sympy.Mul) -> tuple[sympy.Number, list[sympy.Expr], list[sympy.Expr]]:
    """Return the coefficient of a product, its factors, and those it is divided by."""
    coefficient, rest = product.as_coeff_Mul()
    above: list[sympy.Expr] = []
    below: list[sympy.Expr] = []
    for factor in sympy.Mul.make_args(rest):
        base, exponent = factor.as_base_exp()
        if isinstance(factor, sympy.Pow) and exponent.is_Rational and exponent < 0:
            below.append(sympy.Pow(base, -exponent))
        elif factor != 1:
            above.append(factor)
    return coefficient, above, below


def from_text(text: str, kinds: Sequence[str] = ()) -> sympy.Basic:
    """Return the expression of a text; `kinds[i]` says what t<i> holds: bool, int or float.

    Raises InvalidProblem for anything that is not a mask predicate or a score, without running it.
    """
    return _Expressions(kinds).parse(text)


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.FloorDiv: lambda left, right: sympy.floor(left / right),
    ast.Mod: sympy.Mod,
}
_COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
_NAMED = {**SYMBOLS, "inf": sympy.oo}
_EXACT = ("min", "max", "abs", "sign", *BITS, *NAMES.values(), *WRAPPED)
"""The functions whose value of an exact number SymPy knows at once."""


class _Expressions(Reader):
    """Reads expressions of SymPy."""

    what = "the text of a mask or score"
    longest = MAX_TEXT
    deepest = MAX_DEPTH
    operators: ClassVar = {ast.BitAnd: sympy.And, ast.BitOr: sympy.Or, ast.Invert: sympy.Not}

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds

    def whole(self, text: str) -> Any:
        return normalise(self.read(ast.parse(text, mode="eval").body, 0))

    def leaf(self, value: Any, *, is_name: bool) -> Any:
        if is_name and value in _NAMED:
            return _NAMED[value]
        if is_name or not isinstance(value, bool | int | float):
            raise InvalidProblem(f"expected numbers, {', '.join(_NAMED)}, got {value!r}")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise InvalidProblem(f"expected integers up to {MAX_INTEGER}")
        return sympy.sympify(value)

    def call(self, name: str, args: list[ast.expr], depth: int) -> Any:
        if name == "where" and len(args) == 3:
            condition = self.operand(args[0], depth)
            return Where(condition, *(self._value(arg, depth) for arg in args[1:]))
        if name not in FUNCTIONS:
            raise InvalidProblem(f"expected {', '.join(FUNCTIONS)}, got the function {name!r}")
        pairs = (*BITS, *NAMES.values())
        arity = len(args) if name in ("min", "max") and args else 2 if name in pairs else 1
        if name == "where" or len(args) != arity:
            raise InvalidProblem(f"{name} does not take {len(args)} arguments")
        values = [self._value(arg, depth) for arg in args]
        if name not in _EXACT and values[0].is_number:
            # SymPy might compute billions of digits of an exact number's function.
            values[0] = sympy.Float(float(normalise(values[0])))
        return FUNCTIONS[name](*values)

    def operand(self, node: ast.expr, depth: int) -> Any:
        value = self.read(node, depth)
        if not is_condition(value):
            raise InvalidProblem(f"expected a condition, got the number {ast.unparse(node)!r}")
        return value

    def other(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return Lookup(self._captured(name), *(self._value(part, depth) for part in parts))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                return _COMPARE[type(op)](self._value(left, depth), self._value(right, depth))
            case ast.UnaryOp(op=ast.USub()) | ast.BinOp(op=ast.Mult() | ast.Div()):
                return sympy.Mul(*self._factors(node, depth))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return sympy.Add(*self._terms(node, depth))
            case ast.BinOp(left=left, op=ast.Pow(), right=right):
                return self._power(self._value(left, depth), self._value(right, depth))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._value(left, depth), self._divisor(right, depth))
            case _:
                return super().other(node, depth)

    def _value(self, node: ast.expr, depth: int) -> Any:
        value = self.read(node, depth)
        if is_condition(value):
            raise InvalidProblem(f"expected a number, got the condition {ast.unparse(node)!r}")
        return value

    def _divisor(self, node: ast.expr, depth: int) -> Any:
        value = self._value(node, depth)
        if value.is_zero:
            raise InvalidProblem(f"division by {ast.unparse(node)!r}, which is 0")
        return value

    def _captured(self, name: str) -> sympy.Symbol:
        digits = name[1:]
        if name[0] != "t" or not digits.isdecimal() or name != f"t{int(digits)}":
            raise InvalidProblem(f"expected a captured tensor (t0, t1, ...), got {name!r}")
        if int(digits) >= len(self._kinds):
            raise InvalidProblem(f"{name} was asked for, and {len(self._kinds)} tensors given")
        return captured_name(int(digits), self._kinds[int(digits)])

    def _power(self, base: Any, exponent: Any) -> Any:
        if base.is_number and exponent.is_number:
            return sympy.Float(float(base) ** float(exponent))
        return base**exponent

    def _terms(self, node: ast.expr, depth: int) -> list[Any]:
        """Return the terms of a sum, added up at once as `to_text` took them apart."""
        return [
            sympy.Mul(-1, *self._factors(part, depth))
            if isinstance(op, ast.Sub)
            else self._value(part, depth)
            for op, part in chain(node, ast.Add, ast.Sub)
        ]

    def _factors(self, node: ast.expr, depth: int) -> list[Any]:
        """Return the factors of a product, multiplied at once as `to_text` took them apart."""
        factors: list[Any] = []
        for op, part in chain(node, ast.Mult, ast.Div):
            match part:
                case ast.UnaryOp(op=ast.USub(), operand=operand) if op is None:
                    factors += [sympy.Integer(-1), *self._factors(operand, depth)]
                case _:
                    if isinstance(op, ast.Div):
                        factors.append(1 / self._divisor(part, depth))
                    else:
                        factors.append(self._value(part, depth))
        return factors


def free_parts(expr: sympy.Basic) -> frozenset[str]:
    """Return which of b, h, q and k an expression depends on."""
    return frozenset(str(symbol) for symbol in expr.free_symbols & {B, H, Q, K})


def kind_of_tensor(tensor: torch.Tensor) -> str:
    """Return the kind of a tensor's elements: bool, int or float. Raises InvalidProblem."""
    if tensor.dtype.is_complex:
        raise InvalidProblem(f"expected captured tensors of real numbers, got {tensor.dtype}")
    return kind_of(str(tensor.dtype).removeprefix("torch."))


def rename(expr: sympy.Basic, slots: Sequence[int]) -> sympy.Basic:
    """Return the expression with captured tensor i in slot slots[i]."""
    names = {
        symbol: sympy.Symbol(f"t{slots[int(symbol.name[1:])]}", **symbol.assumptions0)
        for symbol in expr.free_symbols
        if is_captured(symbol)
    }
    return normalise(expr.xreplace(names)) if names else expr


def without(
    tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the tensors, each once, that are none of the others."""
    known = {id(one) for one in others}
    return tuple({id(one): one for one in tensors if id(one) not in known}.values())


def merge(
    parts: Sequence[tuple[sympy.Basic, Sequence[torch.Tensor]]],
) -> tuple[list[sympy.Basic], tuple[torch.Tensor, ...]]:
    """Return expressions over one tuple of captured tensors: the same tensor has one slot, unread
    ones none."""
    merged: list[torch.Tensor] = []
    renamed: list[sympy.Basic] = []
    for expr, captured in parts:
        slots = [-1] * len(captured)
        for slot in captured_slots(expr):
            same = [i for i, tensor in enumerate(merged) if tensor is captured[slot]]
            slots[slot] = same[0] if same else len(merged)
            if not same:
                merged.append(captured[slot])
        renamed.append(rename(expr, slots))
    return renamed, tuple(merged)
