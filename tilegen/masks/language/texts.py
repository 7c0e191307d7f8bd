"""Texts of masks and scores: `to_text` writes the canonical one, `from_text` reads it back.

A text looks like Python without white space: `(k<=q)&(q-k<16)`, `20.0*tanh(0.05*s)`,
`s+t0[h]*(k-q)`. `t0` is the first captured tensor, `t0[()]` a captured scalar, `a//b` rounds down.
Integers beside floats become float32; every other conversion is spelt: `float64(q)`, `int8(t0[q])`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from tilegen.errors import InvalidProblem
from tilegen.masks.language import algebra, functions, remainders
from tilegen.masks.language.algebra import load
from tilegen.masks.language.expr import FLOATS, INTEGERS, SPELLING, SYMBOLS, Expr, const, slot_of
from tilegen.masks.language.functions import ELEMENTARY
from tilegen.masks.language.integers import BITS, as_coefficient
from tilegen.masks.language.reader import Reader, chain
from tilegen.parsing import parse_expression

MAX_TEXT = 2**15
MAX_DEPTH = 64
MAX_INTEGER = 2**62

LOWEST, COMPARISON, OR, AND, SUM, PRODUCT, UNARY, POWER, ATOM = range(9)
"""Python's operators in the order in which they bind, the loosest first."""

RELATIONS = {"eq": "==", "le": "<=", "lt": "<"}

Spell = Callable[[Expr, int], str]
"""Returns the text of an operand, in brackets unless it binds at least as tightly as asked."""


def to_text(expr: Expr) -> str:
    """Return the canonical text of a mask predicate or score, without white space."""
    return _text(expr)[0]


def _inside(expr: Expr, binding: int) -> str:
    """Return the text of a part, in brackets unless it binds at least as tightly as asked."""
    text, own = _text(expr)
    return text if own >= binding else f"({text})"


def _text(expr: Expr) -> tuple[str, int]:
    match expr.op:
        case "symbol":
            return expr.value, ATOM
        case "const":
            return _number(expr)
        case "load":
            index = ",".join(_inside(arg, COMPARISON) for arg in expr.args)
            return f"t{slot_of(expr)}[{index or '()'}]", ATOM
        case "add" if expr.is_int:
            return spelt_sum(expr.args, _inside, ""), SUM
        case "add":
            return float_sum(expr, _marked(expr), ""), SUM
        case "neg":
            return f"-{_inside(expr.args[0], PRODUCT)}", PRODUCT
        case "mul" if expr.is_int:
            return _product(expr)
        case "mul":
            left, right = expr.args
            spell = _marked(expr)
            return f"{spell(left, PRODUCT)}*{spell(right, UNARY)}", PRODUCT
        case "div":
            top, below = expr.args
            return f"{_inside(top, PRODUCT)}/{_inside(below, UNARY)}", PRODUCT
        case "power":
            return f"{_marked(expr)(expr.args[0], ATOM)}**{expr.value}", POWER
        case "pow":
            return "**".join(_inside(arg, ATOM) for arg in expr.args), POWER
        case "floordiv" | "mod":
            sign = "//" if expr.op == "floordiv" else "%"
            return sign.join(_inside(arg, UNARY) for arg in expr.args), PRODUCT
        case "and" | "or":
            sign, binding = ("&", AND) if expr.op == "and" else ("|", OR)
            return sign.join(sorted(_inside(arg, SUM) for arg in expr.args)), binding
        case "not" if expr.args[0].op == "eq":
            return "!=".join(_sides(expr.args[0])), COMPARISON
        case "not":
            return f"~{_inside(expr.args[0], ATOM)}", UNARY
        case op if op in RELATIONS:
            return RELATIONS[op].join(_sides(expr)), COMPARISON
        case "cast" if _is_implicit(expr):
            return _text(expr.args[0])
        case op:
            spell = _marked(expr) if op in ("max", "min", "where") else _inside
            arguments = [spell(arg, LOWEST) for arg in expr.args]
            if op in ("max", "min"):
                arguments.sort()
            return f"{expr.dtype if op == 'cast' else op}({','.join(arguments)})", ATOM


def _marked(expr: Expr) -> Spell:
    """Return the function that writes the operands of an operation: where all of them are integers
    that became floats, the first is spelt as the float that it is."""
    operands = expr.args[1:] if expr.op == "where" else expr.args
    if operands[0].dtype != "float32" or not all(map(_is_implicit, operands)):
        return _inside

    def write(arg: Expr, binding: int) -> str:
        return f"float32({_text(arg)[0]})" if arg is operands[0] else _inside(arg, binding)

    return write


def _is_implicit(expr: Expr) -> bool:
    """Return whether the text of a float is the text of an integer."""
    return expr.op == "cast" and expr.dtype == "float32" and expr.args[0].is_int


def _sides(comparison: Expr) -> list[str]:
    spell = _marked(comparison)
    return [spell(arg, OR) for arg in comparison.args]


def _number(expr: Expr) -> tuple[str, int]:
    if expr.is_float and expr.dtype != "float32":
        return f"{expr.dtype}({expr.value!r})", ATOM
    text = repr(expr.value)
    return text, UNARY if text.startswith("-") else ATOM


def _product(expr: Expr) -> tuple[str, int]:
    coefficient, rest = as_coefficient(expr)
    parts = rest.args if rest.op == "mul" else (rest,)
    factors = sorted(_inside(factor, UNARY) for factor in parts)
    if abs(coefficient) != 1:
        factors.insert(0, str(abs(coefficient)))
    return ("-" if coefficient < 0 else "") + "*".join(factors), PRODUCT


def spelt_sum(terms: Iterable[Expr], spell: Spell, space: str) -> str:
    """Return the text of a sum of integers: positive terms first, numbers last of each sign, else
    by text."""
    parts: list[tuple[bool, bool, str]] = []
    for term in terms:
        negative = as_coefficient(term)[0] < 0
        size = algebra.negative(term) if negative else term
        rounded = negative and size.op in ("floordiv", "mod")  # -a % b would be (-a) % b
        parts.append((negative, term.is_const, spell(size, UNARY if rounded else PRODUCT)))
    text = "".join(
        f"{space}{'-' if negative else '+'}{space}{part}" for negative, _, part in sorted(parts)
    )
    sign, rest = text[len(space)], text[2 * len(space) + 1 :]
    return rest if sign == "+" else f"-{rest}"


def float_sum(expr: Expr, spell: Spell, space: str) -> str:
    """Return the text of a sum of two floats, of which the first may be a sum: a positive term
    first, numbers last, else by text."""
    parts: list[tuple[bool, bool, bool, str]] = []
    for i, term in enumerate(expr.args):
        leads = i == 0 and term.op == "add"
        negative = not leads and _has_sign(term)
        size = algebra.negative(term) if negative else term
        text = spell(term, SUM) if leads else spell(size, PRODUCT)
        parts.append((not leads, negative, term.is_const, text))
    (_, first_negative, _, first), (_, second_negative, _, second) = sorted(parts)
    sign = "-" if second_negative else "+"
    return f"{'-' * first_negative}{first}{space}{sign}{space}{second}"


def _has_sign(term: Expr) -> bool:
    """Return whether a term of a sum is written with a minus before it."""
    if term.op == "cast" and term.args[0].is_int and term.args[0].op != "add":
        return as_coefficient(term.args[0])[0] < 0
    return term.op == "neg" or (term.is_const and term.value < 0)


def from_text(text: str, kinds: Sequence[str] = ()) -> Expr:
    """Return the expression of a text; `kinds[i]` says what t<i> holds: bool, int or float.

    Raises InvalidProblem for anything that is not a mask predicate or a score, without running it.
    """
    expr: Expr = _Expressions(kinds).parse(text)
    return expr


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.FloorDiv: algebra.floor_divide,
    ast.Mod: remainders.remainder,
    ast.Pow: functions.power,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: algebra.equal,
    ast.NotEq: lambda left, right: algebra.opposite(algebra.equal(left, right)),
    ast.Lt: algebra.less,
    ast.LtE: algebra.at_most,
    ast.Gt: lambda left, right: algebra.less(right, left),
    ast.GtE: lambda left, right: algebra.at_most(right, left),
}
_NAMED: dict[Any, Expr] = {**SYMBOLS, "inf": const(float("inf")), "nan": const(float("nan"))}
UNARY_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    **{name: partial(functions.elementary, name) for name in ELEMENTARY},
    **{name: partial(algebra.cast, dtype=name) for name in (*INTEGERS, *FLOATS)},
    "abs": algebra.absolute,
    "sign": functions.sign,
    "floor": algebra.floor,
}
_BITS: dict[str, Callable[[Any, Any], Any]] = {name: partial(functions.bits, name) for name in BITS}
_PAIRS: Mapping[str, Callable[[Any, Any], Any]] = {
    **_BITS,
    # Older texts spelt comparisons of floats that may be NaN as functions.
    "less": algebra.less,
    "lessequal": algebra.at_most,
    "same": algebra.equal,
}
FUNCTIONS = (*UNARY_FUNCTIONS, *_PAIRS, "min", "max", "where")
"""The functions of expressions by their names in texts."""


def _scalars(*values: Expr) -> list[Expr]:
    """Return operands in which numbers beside doubles are doubles, not rounded to single first."""
    if all(value.dtype != "float64" for value in values):
        return list(values)
    return [
        algebra.number_of(value.value, "float64") if value.is_const and value.is_float else value
        for value in values
    ]


class _Expressions(Reader):
    """Reads expressions."""

    what = "the text of a mask or score"
    longest = MAX_TEXT
    deepest = MAX_DEPTH
    operators: ClassVar = {
        ast.BitAnd: algebra.both,
        ast.BitOr: algebra.either,
        ast.Invert: algebra.opposite,
    }

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds

    def whole(self, text: str) -> Any:
        return self.read(parse_expression(text), 0)

    def leaf(self, value: Any, *, is_name: bool) -> Any:
        if is_name and value in _NAMED:
            return _NAMED[value]
        if is_name or not isinstance(value, bool | int | float):
            raise InvalidProblem(f"expected numbers, {', '.join(_NAMED)}, got {value!r}")
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise InvalidProblem(f"expected integers up to {MAX_INTEGER}")
        return const(value)

    def call(self, name: str, args: list[ast.expr], depth: int) -> Any:
        if name == "where" and len(args) == 3:
            condition = self.operand(args[0], depth)
            return algebra.where(
                condition, *_scalars(*(self._value(arg, depth) for arg in args[1:]))
            )
        if name not in FUNCTIONS:
            raise InvalidProblem(f"expected {', '.join(FUNCTIONS)}, got the function {name!r}")
        arity = len(args) if name in ("min", "max") and args else 2 if name in _PAIRS else 1
        if name == "where" or len(args) != arity:
            raise InvalidProblem(f"{name} does not take {len(args)} arguments")
        values = [self._value(arg, depth) for arg in args]
        if name in ("min", "max"):
            return algebra.extreme(name, *_scalars(*values))
        if name in FLOATS and values[0].is_const:
            return algebra.number_of(float(values[0].value), name)
        return _PAIRS[name](*values) if name in _PAIRS else UNARY_FUNCTIONS[name](values[0])

    def operand(self, node: ast.expr, depth: int) -> Any:
        value = self.read(node, depth)
        if not value.is_condition:
            raise InvalidProblem(f"expected a condition, got the number {ast.unparse(node)!r}")
        return value

    def other(self, node: ast.expr, depth: int) -> Any:
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                parts = index.elts if isinstance(index, ast.Tuple) else [index]
                return self._captured(name, [self._value(part, depth) for part in parts])
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
                sides = _scalars(self._value(left, depth), self._value(right, depth))
                return _COMPARE[type(op)](*sides)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return algebra.negative(self._value(operand, depth))
            case ast.BinOp(op=ast.Mult() | ast.Div()):
                return self._chained(node, depth, ast.Mult, ast.Div)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                return self._chained(node, depth, ast.Add, ast.Sub)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                below = self._value if isinstance(op, ast.Pow) else self._divisor
                return _BINARY[type(op)](self._value(left, depth), below(right, depth))
            case _:
                return super().other(node, depth)

    def _value(self, node: ast.expr, depth: int) -> Any:
        value = self.read(node, depth)
        if value.is_condition:
            raise InvalidProblem(f"expected a number, got the condition {ast.unparse(node)!r}")
        return value

    def _divisor(self, node: ast.expr, depth: int) -> Any:
        value = self._value(node, depth)
        if value.is_const and value.value == 0:
            raise InvalidProblem(f"division by {ast.unparse(node)!r}, which is 0")
        return value

    def _captured(self, name: str, indices: list[Expr]) -> Expr:
        digits = name[1:]
        if name[0] != "t" or not digits.isdecimal() or name != f"t{int(digits)}":
            raise InvalidProblem(f"expected a captured tensor (t0, t1, ...), got {name!r}")
        if int(digits) >= len(self._kinds):
            raise InvalidProblem(f"{name} was asked for, and {len(self._kinds)} tensors given")
        # Older texts have floors, which are whole numbers, for indices.
        indices = [algebra.truncate(one) if one.op == "floor" else one for one in indices]
        for index in indices:
            if not index.is_int:
                raise InvalidProblem(f"expected an integer index of {name}, got {index}; use //")
        return load(int(digits), self._kinds[int(digits)], *indices)

    def _chained(self, node: ast.expr, depth: int, *operators: type[ast.operator]) -> Expr:
        """Read a chain of sums or products, from left to right."""
        (_, first), *rest = reversed(chain(node, *operators))
        total = self._value(first, depth)
        terms = [total]
        for op, part in rest:
            value = (self._divisor if isinstance(op, ast.Div) else self._value)(part, depth)
            if isinstance(op, ast.Add | ast.Sub) and total.is_int and value.is_int:
                terms.append(value if isinstance(op, ast.Add) else algebra.negative(value))
                continue  # long sums of integers are added up at once
            total = algebra.add(*terms) if len(terms) > 1 else total
            total, value = _scalars(total, value)
            match op:
                case ast.Add():
                    total = algebra.add(total, value)
                case ast.Sub():
                    total = algebra.subtract(total, value)
                case ast.Mult():
                    total = algebra.multiply(total, value)
                case _:
                    total = algebra.divide(total, value)
            terms = [total]
        return algebra.add(*terms) if len(terms) > 1 else total


SPELLING.append(to_text)
