"""Prints masks and scores as Triton statements, in fp32 and in integers of 32 bits, or of 64 where
32 might not do.

Common subexpressions and look-ups become statements of their own. Beyond what Triton has:
integer division and remainder round down as Python's do, powers are products, and tanh is right
for small and for large arguments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import sympy
from sympy.core.relational import Relational

from tilegen.errors import Unsupported
from tilegen.masks.language.integer_bounds import Sizes
from tilegen.masks.language.integers import Exact, FloorDiv, exact, is_int, prepared
from tilegen.masks.language.loads import Loads
from tilegen.masks.language.nodes import (
    ELEMENTARY,
    MAX_SHIFT,
    Bits,
    Log1p,
    ShiftLeft,
    ShiftRight,
    Sigmoid,
    Where,
)
from tilegen.masks.language.ordered import Ordered
from tilegen.masks.language.symbols import PAIR, Lookup, S, is_condition, reads, slot_of
from tilegen.masks.language.texts import (
    AND,
    ATOM,
    COMPARISON,
    LOWEST,
    OR,
    PRODUCT,
    RELATIONS,
    SUM,
    UNARY,
    factors,
    spelt_sum,
)
from tilegen.masks.language.triton_functions import log1p, tanh
from tilegen.masks.language.widths import Wrapped

FP32_TINY, FP32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127

_SPELT = ("batch", "head", "q_idx", "k_idx", "seqlen_q", "seqlen_kv", "s")
NAMES: dict[sympy.Basic, str] = dict(zip((*PAIR, S), _SPELT, strict=True))
"""The names of a pair's symbols in kernels."""
_RELATIONS = RELATIONS | {sympy.Ge: ">=", sympy.Gt: ">"}


def _count(expr: sympy.Basic, uses: Counter[sympy.Basic]) -> None:
    """Count the places of an expression in which each part stands."""
    uses[expr] += 1
    if uses[expr] == 1:
        for part in expr.args[1:] if isinstance(expr, Lookup) else expr.args:
            _count(part, uses)


class Writer:
    """Writes expressions; whatever needs a name becomes a statement first."""

    def __init__(
        self,
        names: Mapping[sympy.Basic, str],
        loads: Loads,
        *,
        stem: str = "x",
        precise: bool = True,
    ) -> None:
        """`names` spells the symbols, `loads` says where captured tensors lie, and shared values
        are called `stem` and a number. Unless `precise`, tanh errs by up to 1e-7, also where it is
        smaller than that, and roots and quotients by two units in the last place."""
        self.statements: list[str] = []
        self._names = dict(names)
        self.loads = loads
        self._stem = stem
        self._precise = precise
        self._sizes = Sizes(loads.bounds, loads.wide)
        self._shared: set[sympy.Basic] = set()
        self._named: dict[tuple[sympy.Basic, bool], str] = {}
        self._written: dict[str, str] = {}
        self._double = False

    def sources(self, exprs: Mapping[str, sympy.Basic]) -> dict[str, str]:
        """Write the statements that expressions share, and return the source of each expression: a
        condition or an fp32 value. Raises Unsupported."""
        whole = {name: prepared(expr) for name, expr in exprs.items()}
        uses: Counter[sympy.Basic] = Counter()
        for expr in whole.values():
            _count(expr, uses)
        self._shared = {  # what is loaded has a name
            expr
            for expr, times in uses.items()
            if times > 1 and expr.args and not isinstance(expr, Lookup)
        }
        return {
            name: self._inside(expr, LOWEST) if is_condition(expr) else self._float(expr)
            for name, expr in whole.items()
        }

    def inline(self, expr: sympy.Basic) -> str:
        """Return the source of a condition, or of an integer as one."""
        return self._inside(exact(expr), LOWEST)

    def is_wide(self, expr: sympy.Basic) -> bool:
        """Whether the source of an integer has 64 bits; infinity has none."""
        return not expr.is_infinite and self._sizes.is_wide(exact(expr))

    def name(self, source: str) -> str:
        """Return the name of a statement with this source, written once."""
        if source.isidentifier():
            return source
        if source not in self._written:
            name = f"{self._stem}{len(self._written)}"
            self._written[source] = name
            self.statements.append(f"{name} = {source}")
        return self._written[source]

    def _inside(self, expr: sympy.Basic, binding: int) -> str:
        """Return the source of an expression, in brackets unless it binds as tightly as asked; for
        one that occurs again, its name."""
        if expr in self._shared:
            key = (expr, self._double)
            if key not in self._named:
                self._named[key] = self.name(self._write(expr)[0])
            return self._named[key]
        text, own = self._write(expr)
        return text if own >= binding else f"({text})"

    @property
    def _dtype(self) -> str:
        return "tl.float64" if self._double else "tl.float32"

    def _float(self, expr: sympy.Basic, binding: int = LOWEST) -> str:
        """Return the source of a value that must be floating."""
        if isinstance(expr, sympy.Number):
            text = self._literal(expr)
            return f"({text})" if expr < 0 and binding > UNARY else text
        if is_int(expr):
            return f"{self._inside(expr, ATOM)}.to({self._dtype})"
        return self._inside(expr, binding)

    def _int(self, expr: sympy.Basic, binding: int) -> str:
        """Return the source of a value that must be an integer."""
        if is_int(expr):
            return self._inside(expr, binding)
        return f"{self._inside(expr, ATOM)}.to(tl.int64)"

    def _operand(self, expr: sympy.Basic, binding: int, as_int: bool = False) -> str:
        """Return the source of an operand; Triton itself makes integers floats beside floats."""
        if as_int:
            return self._int(expr, binding)
        if isinstance(expr, sympy.Number) or (isinstance(expr, Lookup) and not is_int(expr)):
            return self._float(expr, binding)
        return self._inside(expr, binding)

    def _speller(self, expr: sympy.Basic) -> Callable[[sympy.Basic, int], str]:
        """Return the function that writes operands of an operation: integers in 64 bits where the
        result, or a part of it, may not fit into 32."""
        if not is_int(expr):
            return self._operand

        def write(arg: sympy.Basic, binding: int) -> str:
            if isinstance(arg, sympy.Number) or self._sizes.is_wide(arg):
                return self._int(arg, binding)
            return f"{self._inside(arg, ATOM)}.to(tl.int64)"

        return self._int if self._sizes.fits(expr) else write

    def _write(self, expr: Any) -> tuple[str, int]:
        integers = is_int(expr)
        match expr:
            case sympy.Symbol():
                return self._names[expr], ATOM
            case sympy.Integer():
                return str(expr), UNARY if expr < 0 else ATOM
            case sympy.Number():
                return self._literal(expr), UNARY if expr < 0 else ATOM
            case Lookup():
                name = self._load(expr)
                is_float = not self._double and slot_of(expr) in self.loads.doubles
                return f"{name}.to(tl.float32)" if is_float else name, ATOM
            case sympy.Add():
                return spelt_sum(expr.args, self._speller(expr), " "), SUM
            case sympy.Mul():
                return self._product(expr, integers)
            case sympy.Pow():
                return self._power(expr)
            case FloorDiv():
                return self._floor_divide(*expr.args), PRODUCT
            case sympy.Mod():
                return self._remainder(*expr.args)
            case Bits():
                return self._bits(expr)
            case Wrapped():
                return self._wrapped(expr), ATOM
            case Exact():
                return f"{self._inside(expr.args[0], ATOM)}.to({self._dtype})", ATOM
            case sympy.Max() | sympy.Min():
                return self._extreme(expr, integers), ATOM
            case sympy.Abs():
                return f"tl.abs({self._inside(expr.args[0], LOWEST)})", ATOM
            case sympy.sign():
                return self._sign(expr.args[0], integers), ATOM
            case Where():
                keep = self._inside(expr.args[0], LOWEST)
                values = [self._operand(arg, LOWEST, integers) for arg in expr.args[1:]]
                return f"tl.where({keep}, {', '.join(values)})", ATOM
            case sympy.And():
                return " & ".join(sorted(self._inside(arg, SUM) for arg in expr.args)), AND
            case sympy.Or():
                return " | ".join(sorted(self._inside(arg, SUM) for arg in expr.args)), OR
            case sympy.Not():
                return f"~{self._inside(expr.args[0], ATOM)}", UNARY
            case _ if expr in (sympy.true, sympy.false):
                return str(expr), ATOM
            case Ordered() if expr.holds_for_nan:
                return f"~{self._inside(expr.negated, ATOM)}", UNARY
            case Relational():
                return self._relation(expr), COMPARISON
            case _:
                return self._function(expr)

    def _wrapped(self, expr: Wrapped) -> str:
        """Return the source of a narrow integer, in 32 bits."""
        narrow = f"{self._int(expr.args[0], ATOM)}.to(tl.{expr.element})"
        return narrow if expr.element == "int32" else f"{narrow}.to(tl.int32)"

    def _relation(self, expr: Relational) -> str:
        both = all(map(is_int, expr.args))
        outer = self._double
        self._double = outer or reads(expr, self.loads.doubles)
        sides = [self._operand(arg, OR, both) for arg in expr.args]
        self._double = outer
        relation = expr.relation if isinstance(expr, Ordered) else type(expr)
        return f" {_RELATIONS[relation]} ".join(sides)

    def _load(self, expr: Lookup) -> str:
        indices: list[str] = []
        for arg in expr.args[1:]:
            source = self._int(arg, LOWEST)
            indices.append(source if source.isdigit() else self.name(source))
        natural = [self._sizes.is_natural(arg) for arg in expr.args[1:]]
        name, statements = self.loads.load(expr, indices, natural)
        self.statements += statements
        return name

    def _product(self, expr: sympy.Mul, integers: bool) -> tuple[str, int]:
        coefficient, times, over = factors(expr)
        spell = self._speller(expr)
        if over and all(map(is_int, times)):  # `div_rn` takes floats alone
            spell = self._float
        above = sorted(spell(factor, UNARY) for factor in times)
        below = sorted(self._float(factor, UNARY) for factor in over)
        size = abs(coefficient)
        if size != 1 or not above:
            above.insert(0, str(size) if integers else self._literal(size))
        text = ("-" if coefficient < 0 else "") + " * ".join(above)
        if not below:
            return text, PRODUCT
        return self._quotient(text, " * ".join(below))

    def _quotient(self, above: str, below: str) -> tuple[str, int]:
        """Return a quotient of floats, which Triton's `/` may round wrongly."""
        if self._precise and not self._double:
            return f"tl.div_rn({above}, {below})", ATOM
        return f"{above} / {below if below.isidentifier() else f'({below})'}", PRODUCT

    def _root(self, source: str) -> str:
        exactly = self._precise and not self._double
        return f"tl.sqrt_rn({source})" if exactly else f"tl.sqrt({source})"

    def _power(self, expr: sympy.Pow) -> tuple[str, int]:
        base, exponent = expr.args
        if exponent.is_Rational and exponent < 0:
            return self._quotient("1.0", self._float(sympy.Pow(base, -exponent)))
        if exponent.is_Integer:
            base = self.name(self._speller(expr)(base, LOWEST))
            return self._repeated(base, int(exponent)), PRODUCT
        if exponent == sympy.Rational(1, 2):
            return self._root(self._float(base)), ATOM
        if exponent.is_Rational and exponent.q == 2:
            value = self.name(self._float(base))
            root = self.name(self._root(value))
            return f"{self._repeated(value, int(exponent))} * {root}", PRODUCT
        if base.is_Number:
            scale = sympy.Float(float(sympy.log(base, 2)))
            scaled = exponent if scale == 1 else scale * exponent
            return f"tl.exp2({self._float(scaled)})", ATOM
        return f"tl.exp({self._float(exponent, UNARY)} * tl.log({self._float(base)}))", ATOM

    def _repeated(self, value: str, times: int) -> str:
        """Return the product of a named value with itself, by squaring."""
        parts: list[str] = []
        while True:
            if times % 2:
                parts.append(value)
            times //= 2
            if not times:
                return " * ".join(parts)
            if times == 1 and not parts:
                return f"{value} * {value}"
            value = self.name(f"{value} * {value}")

    def _divisor(self, expr: sympy.Expr) -> str:
        """Return a divisor, with 1 for 0, by which nothing can be divided."""
        low, high = self._sizes.bounds(expr)
        source = self._int(expr, UNARY)
        if low > 0 or high < 0 or expr.is_positive:
            return source
        value = self.name(source)
        return self.name(f"tl.where({value} == 0, 1, {value})")

    def _remainder(self, left: sympy.Expr, right: sympy.Expr) -> tuple[str, int]:
        """Return a remainder with the sign of the right operand; Triton's `%` has that of the left
        one."""
        divisor = self._divisor(right)
        whole = f"{self._int(left, UNARY)} % {divisor}"
        if self._sizes.is_natural(left) and self._sizes.is_positive(right):
            return whole, PRODUCT
        rest = self.name(whole)
        if self._sizes.is_positive(right):
            return f"tl.where({rest} < 0, {rest} + {divisor}, {rest})", ATOM
        wrong = f"({rest} != 0) & (({rest} < 0) != ({divisor} < 0))"
        return f"tl.where({wrong}, {rest} + {divisor}, {rest})", ATOM

    def _floor_divide(self, left: sympy.Expr, right: sympy.Expr) -> str:
        """Return a quotient rounded down; Triton's `//` rounds towards zero."""
        divisor = self._divisor(right)
        if self._sizes.is_natural(left) and self._sizes.is_positive(right):
            return f"{self._int(left, UNARY)} // {divisor}"
        rest = self.name(self._remainder(left, right)[0])
        return f"({self._int(left, SUM)} - {rest}) // {divisor}"

    def _bits(self, expr: Bits) -> tuple[str, int]:
        spell = self._speller(expr)
        value, shift = expr.args
        if not isinstance(expr, ShiftLeft | ShiftRight):
            return f"{spell(value, ATOM)} {expr.sign} {spell(shift, ATOM)}", OR
        most = 31 if not self._sizes.is_wide(expr) else MAX_SHIFT
        low, high = self._sizes.bounds(shift)
        amount = spell(shift, ATOM)
        if low >= 0 and high <= most:
            return f"{spell(value, ATOM)} {expr.sign} {amount}", OR
        amount = self.name(amount)
        inside = f"({amount} >= 0) & ({amount} <= {most})"
        amount = f"tl.where({inside}, {amount}, {most})"
        shifted = f"{spell(value, ATOM)} {expr.sign} {amount}"
        if isinstance(expr, ShiftRight):
            return shifted, OR
        return f"tl.where({inside}, {shifted}, 0)", ATOM

    def _extreme(self, expr: sympy.Max | sympy.Min, integers: bool) -> str:
        name = "tl.maximum" if isinstance(expr, sympy.Max) else "tl.minimum"
        values = sorted(self._operand(arg, LOWEST, integers) for arg in expr.args)
        # As in PyTorch, what is not a number wins.
        nan = "" if integers else ", tl.PropagateNan.ALL"
        return reduce(lambda left, right: f"{name}({left}, {right}{nan})", values)

    def _sign(self, arg: sympy.Expr, integers: bool) -> str:
        value = self.name(self._inside(arg, LOWEST))
        one, zero = ("1", "0") if integers else ("1.0", "0.0")
        return f"tl.where({value} > 0, {one}, tl.where({value} < 0, -{one}, {zero}))"

    def _function(self, expr: Any) -> tuple[str, int]:
        source = self._float(expr.args[0])
        match expr:
            case sympy.tanh():
                return tanh(self.name, source, precise=self._precise), ATOM
            case Sigmoid():
                below = f"1.0 + tl.exp({self._float(-expr.args[0])})"
                return self._quotient("1.0", below)
            case Log1p():
                return log1p(self.name, source, self._quotient, precise=self._precise), ATOM
            case _ if type(expr) in (*ELEMENTARY.values(), sympy.floor):
                return f"tl.{type(expr).__name__}({source})", ATOM
            case _:
                raise Unsupported(f"expected a function that kernels compute, got the term {expr}")

    def _literal(self, value: sympy.Number) -> str:
        """Return a number as a literal; Triton makes a double of one that fp32 cannot hold."""
        number = float(value)
        if self._double:
            return repr(number) if math.isfinite(number) else f'float("{number}")'
        if abs(number) > FP32_MAX:
            return 'float("inf")' if number > 0 else '-float("inf")'
        return repr(number if abs(number) >= FP32_TINY else 0.0)
