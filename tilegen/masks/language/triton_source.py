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
from functools import partial, reduce

import numpy as np

from tilegen.errors import Unsupported
from tilegen.masks.language import algebra
from tilegen.masks.language.exactness import exact_parts, separate_products
from tilegen.masks.language.expr import PAIR, Expr, S
from tilegen.masks.language.functions import ELEMENTARY, log1p, tanh
from tilegen.masks.language.integers import BITS, MAX_SHIFT, as_coefficient
from tilegen.masks.language.loads import Loads
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
    float_sum,
    spelt_sum,
)
from tilegen.masks.language.value_bounds import Sizes

FP32_TINY, FP32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127

_SPELT = ("batch", "head", "q_idx", "k_idx", "seqlen_q", "seqlen_kv", "s")
NAMES: dict[Expr, str] = dict(zip((*PAIR, S), _SPELT, strict=True))
"""The names of a pair's symbols in kernels."""


def _count(expr: Expr, uses: Counter[Expr]) -> None:
    """Count the places of an expression in which each part stands."""
    uses[expr] += 1
    if uses[expr] == 1:
        for part in expr.args:
            _count(part, uses)


class Writer:
    """Writer of expressions; parts that need a name become statements first."""

    def __init__(
        self,
        names: Mapping[Expr, str],
        loads: Loads,
        *,
        stem: str = "x",
        precise: bool = True,
        tanh: str = "",
    ) -> None:
        """`names` spells the symbols, `loads` says where captured tensors lie, and shared values
        are called `stem` and a number. Unless `precise`, tanh errs by up to 1e-7, also where it is
        smaller than that, and roots and quotients by two units in the last place. `tanh` names the
        kernel's own function, which replaces both."""
        self.statements: list[str] = []
        self._names = dict(names)
        self.loads = loads
        self._stem = stem
        self._precise = precise
        self._tanh = tanh
        self._sizes = Sizes(loads.bounds, loads.wide)
        self._shared: set[Expr] = set()
        self._named: dict[Expr, str] = {}
        self._written: dict[str, str] = {}
        self._exact: frozenset[Expr] = frozenset()
        self._separate: frozenset[Expr] = frozenset()

    def sources(self, exprs: Mapping[str, Expr]) -> dict[str, str]:
        """Write the statements that expressions share, and return the source of each expression: a
        condition or an fp32 value. Raises Unsupported."""
        uses: Counter[Expr] = Counter()
        for expr in exprs.values():
            _count(expr, uses)
        self._shared = {  # what is loaded has a name, and so has what is converted
            expr
            for expr, times in uses.items()
            if times > 1 and expr.args and expr.op not in ("load", "cast")
        }
        self._exact = exact_parts(exprs.values())
        self._separate = separate_products(self._exact)
        return {
            name: self._inside(expr, LOWEST) if expr.is_condition else self._float(expr, LOWEST)
            for name, expr in exprs.items()
        }

    def inline(self, expr: Expr) -> str:
        """Return the source of a condition, or of an integer as one."""
        return self._inside(expr, LOWEST)

    def is_wide(self, expr: Expr) -> bool:
        """Return whether the source of an integer has 64 bits."""
        return self._sizes.is_wide(expr)

    def name(self, source: str) -> str:
        """Return the name of a statement with this source, written once."""
        if source.isidentifier():
            return source
        if source not in self._written:
            name = f"{self._stem}{len(self._written)}"
            self._written[source] = name
            self.statements.append(f"{name} = {source}")
        return self._written[source]

    def _inside(self, expr: Expr, binding: int) -> str:
        """Return the source of an expression, or its name if it occurs again. The source is in
        brackets unless it binds as tightly as `binding`."""
        if expr in self._shared:
            if expr not in self._named:
                self._named[expr] = self.name(self._write(expr)[0])
            return self._named[expr]
        text, own = self._write(expr)
        return text if own >= binding else f"({text})"

    def _float(self, expr: Expr, binding: int) -> str:
        """Return the source of a value that must be floating."""
        return self._inside(algebra.real(expr) if expr.is_int else expr, binding)

    def _beside(self, expr: Expr) -> Callable[[Expr, int], str]:
        """Return the function that writes the operands of a float. Triton itself makes an integer
        beside a float a float; sums of integers are converted, so that none of their terms is."""
        operands = expr.args[1:] if expr.op == "where" else expr.args
        is_mixed = not all(map(_is_converted, operands))

        def write(arg: Expr, binding: int) -> str:
            bare = is_mixed and _is_converted(arg)
            if bare and not (expr.op == "add" and arg.args[0].op == "add"):
                return self._inside(arg.args[0], binding)
            return self._inside(arg, binding)

        return write

    def _speller(self, expr: Expr) -> Callable[[Expr, int], str]:
        """Return the function that writes operands of an operation on integers: in 64 bits where
        the result, or a part of it, may not fit into 32."""

        def write(arg: Expr, binding: int) -> str:
            if arg.is_const or self._sizes.is_wide(arg):
                return self._inside(arg, binding)
            return f"{self._inside(arg, ATOM)}.to(tl.int64)"

        return self._inside if self._sizes.fits(expr) else write

    def _write(self, expr: Expr) -> tuple[str, int]:
        args, op = expr.args, expr.op
        match op:
            case "symbol":
                return self._names[expr], ATOM
            case "const":
                text = self._literal(expr) if expr.is_float else str(expr.value)
                return text, UNARY if text.startswith("-") else ATOM
            case "load":
                return self._load(expr), ATOM
            case "add" if expr.is_int:
                return spelt_sum(args, self._speller(expr), " "), SUM
            case "add":
                return float_sum(expr, self._beside(expr), " "), SUM
            case "neg":
                return f"-{self._inside(args[0], UNARY)}", PRODUCT
            case "mul" if expr.is_int:
                return self._product(expr)
            case "mul":
                return self._float_product(expr)
            case "div":
                above, below = (self._inside(arg, PRODUCT) for arg in args)
                return self._quotient(above, below, expr)
            case "power":
                spell = self._speller(expr) if expr.is_int else self._inside
                return self._repeated(expr, self.name(spell(args[0], LOWEST))), PRODUCT
            case "pow":
                return self._general_power(expr), ATOM
            case "floordiv":
                return self._floor_divide(*args), PRODUCT
            case "mod":
                return self._remainder(*args)
            case "cast":
                return self._cast(expr), ATOM
            case "max" | "min":
                return self._extreme(expr), ATOM
            case "abs":
                return f"tl.abs({self._inside(args[0], LOWEST)})", ATOM
            case "sign":
                return self._sign(expr), ATOM
            case "where":
                spell = self._inside if expr.is_int else self._beside(expr)
                values = [spell(arg, LOWEST) for arg in args[1:]]
                return f"tl.where({self._inside(args[0], LOWEST)}, {', '.join(values)})", ATOM
            case "and" | "or":
                sign, binding = ("&", AND) if op == "and" else ("|", OR)
                return f" {sign} ".join(sorted(self._inside(arg, SUM) for arg in args)), binding
            case "not" if args[0].op == "eq" and args[0] not in self._shared:
                return self._relation(args[0], "!="), COMPARISON
            case "not":
                return f"~{self._inside(args[0], ATOM)}", UNARY
            case _ if op in RELATIONS:
                return self._relation(expr, RELATIONS[op]), COMPARISON
            case _ if op in BITS:
                return self._bits(expr)
            case _:
                return self._function(expr)

    def _cast(self, expr: Expr) -> str:
        """Return the source of a number in another dtype; narrow integers are held in 32 bits."""
        converted = f"{self._inside(expr.args[0], ATOM)}.to(tl.{expr.dtype})"
        return (
            f"{converted}.to(tl.int32)" if expr.dtype in ("int8", "uint8", "int16") else converted
        )

    def _relation(self, expr: Expr, sign: str) -> str:
        spell = self._inside if expr.args[0].is_int else self._beside(expr)
        return f" {sign} ".join(spell(arg, OR) for arg in expr.args)

    def _load(self, expr: Expr) -> str:
        indices: list[str] = []
        for arg in expr.args:
            source = self._inside(arg, LOWEST)
            indices.append(source if source.isdigit() else self.name(source))
        natural = [self._sizes.is_natural(arg) for arg in expr.args]
        name, statements = self.loads.load(expr, indices, natural)
        self.statements += statements
        return name

    def _product(self, expr: Expr) -> tuple[str, int]:
        coefficient, rest = as_coefficient(expr)
        spell = self._speller(expr)
        parts = rest.args if rest.op == "mul" else (rest,)
        factors = sorted(spell(factor, UNARY) for factor in parts)
        if abs(coefficient) != 1:
            factors.insert(0, str(abs(coefficient)))
        return ("-" if coefficient < 0 else "") + " * ".join(factors), PRODUCT

    def _float_product(self, expr: Expr) -> tuple[str, int]:
        spell = self._beside(expr)
        left, right = expr.args
        if expr in self._separate:
            return _separate(*sorted(self._inside(arg, LOWEST) for arg in expr.args)), ATOM
        if left.is_const or left.op == "mul":
            return f"{spell(left, PRODUCT)} * {spell(right, UNARY)}", PRODUCT
        return " * ".join(sorted(spell(arg, UNARY) for arg in expr.args)), PRODUCT

    def _quotient(self, above: str, below: str, expr: Expr) -> tuple[str, int]:
        """Return a quotient of floats, which Triton's `/` may round wrongly."""
        if self._is_exact(expr):
            return f"tl.div_rn({above}, {below})", ATOM
        return f"{above} / {below if below.isidentifier() else f'({below})'}", PRODUCT

    def _general_power(self, expr: Expr) -> str:
        base, exponent = expr.args
        if base.is_const:
            scale = algebra.const(math.log2(base.value), expr.dtype)
            return f"tl.exp2({self._inside(algebra.multiply(scale, exponent), LOWEST)})"
        return f"tl.exp({self._inside(exponent, UNARY)} * tl.log({self._inside(base, LOWEST)}))"

    def _is_exact(self, expr: Expr) -> bool:
        """Check whether a value needs Triton's correctly rounded functions, which exist for fp32
        alone."""
        return expr.dtype == "float32" and (self._precise or expr in self._exact)

    def _repeated(self, expr: Expr, value: str) -> str:
        """Return a power as the product of a named value with itself, by squaring."""
        parts: list[str] = []
        times = expr.value
        while True:
            if times % 2:
                parts.append(value)
            times //= 2
            if times == 1 and not parts:
                parts, times = [value, value], 0
            if times == 0:
                *first, last = parts
                if expr in self._separate and first:
                    return _separate(" * ".join(first), last)
                return " * ".join(parts)
            value = self.name(f"{value} * {value}")

    def _divisor(self, expr: Expr) -> str:
        """Return a divisor, with 1 for 0, by which nothing can be divided."""
        low, high = self._sizes.bounds(expr)
        source = self._inside(expr, UNARY)
        if low > 0 or high < 0 or self._sizes.is_positive(expr):
            return source
        value = self.name(source)
        return self.name(f"tl.where({value} == 0, 1, {value})")

    def _remainder(self, left: Expr, right: Expr) -> tuple[str, int]:
        """Return a remainder with the sign of the right operand; Triton's `%` has that of the left
        one."""
        divisor = self._divisor(right)
        whole = f"{self._inside(left, UNARY)} % {divisor}"
        if self._sizes.is_natural(left) and self._sizes.is_positive(right):
            return whole, PRODUCT
        rest = self.name(whole)
        if self._sizes.is_positive(right):
            return f"tl.where({rest} < 0, {rest} + {divisor}, {rest})", ATOM
        wrong = f"({rest} != 0) & (({rest} < 0) != ({divisor} < 0))"
        return f"tl.where({wrong}, {rest} + {divisor}, {rest})", ATOM

    def _floor_divide(self, left: Expr, right: Expr) -> str:
        """Return a quotient rounded down; Triton's `//` rounds towards zero."""
        divisor = self._divisor(right)
        if self._sizes.is_natural(left) and self._sizes.is_positive(right):
            return f"{self._inside(left, UNARY)} // {divisor}"
        rest = self.name(self._remainder(left, right)[0])
        return f"({self._inside(left, SUM)} - {rest}) // {divisor}"

    def _bits(self, expr: Expr) -> tuple[str, int]:
        spell, sign = self._speller(expr), BITS[expr.op]
        value, shift = expr.args
        if expr.op not in ("shl", "shr"):
            return f"{spell(value, ATOM)} {sign} {spell(shift, ATOM)}", OR
        most = 31 if not self._sizes.is_wide(expr) else MAX_SHIFT
        low, high = self._sizes.bounds(shift)
        amount = spell(shift, ATOM)
        if low >= 0 and high <= most:
            return f"{spell(value, ATOM)} {sign} {amount}", OR
        amount = self.name(amount)
        inside = f"({amount} >= 0) & ({amount} <= {most})"
        amount = f"tl.where({inside}, {amount}, {most})"
        shifted = f"{spell(value, ATOM)} {sign} {amount}"
        if expr.op == "shr":
            return shifted, OR
        return f"tl.where({inside}, {shifted}, 0)", ATOM

    def _extreme(self, expr: Expr) -> str:
        spell = self._inside if expr.is_int else self._beside(expr)
        values = sorted(spell(arg, LOWEST) for arg in expr.args)
        # As in PyTorch, what is not a number wins.
        nan = "" if expr.is_int else ", tl.PropagateNan.ALL"
        name = f"tl.{expr.op}imum"
        return reduce(lambda left, right: f"{name}({left}, {right}{nan})", values)

    def _sign(self, expr: Expr) -> str:
        value = self.name(self._inside(expr.args[0], LOWEST))
        unit, zero = ("1", "0") if expr.is_int else ("1.0", "0.0")
        return f"tl.where({value} > 0, {unit}, tl.where({value} < 0, -{unit}, {zero}))"

    def _function(self, expr: Expr) -> tuple[str, int]:
        source = self._inside(expr.args[0], LOWEST)
        match expr.op:
            case "tanh" if self._tanh:
                return f"{self._tanh}({source})", ATOM
            case "tanh":
                return tanh(self.name, source, precise=self._precise), ATOM
            case "sigmoid":
                below = f"1.0 + tl.exp({self._inside(algebra.negative(expr.args[0]), LOWEST)})"
                return self._quotient("1.0", below, expr)
            case "log1p":
                quotient = partial(self._quotient, expr=expr)
                return log1p(self.name, source, quotient, precise=self._precise), ATOM
            case "sqrt":
                return f"tl.sqrt{'_rn' * self._is_exact(expr)}({source})", ATOM
            case op if op in (*ELEMENTARY, "floor"):
                return f"tl.{op}({source})", ATOM
            case _:
                raise Unsupported(f"expected a function that kernels compute, got the term {expr}")

    def _literal(self, number: Expr) -> str:
        """Return a float as a literal, or a double that fp32 does not hold as a constant."""
        value = float(number.value)
        if math.isnan(value):
            return 'float("nan")'
        if number.dtype == "float64" and math.isfinite(value):
            # Triton rounds a literal to fp32, and only then makes a double of it.
            is_rounded = float(np.float32(value)) != value
            return f"tl.full((), {value!r}, tl.float64)" if is_rounded else repr(value)
        if abs(value) > FP32_MAX:
            return 'float("inf")' if value > 0 else '-float("inf")'
        return repr(value if abs(value) >= FP32_TINY else 0.0)


def _separate(left: str, right: str) -> str:
    """Return a product that no compiler fuses with a sum."""
    return f"tl.fma({left}, {right}, 0.0)"


def _is_converted(expr: Expr) -> bool:
    """Return whether a float is an integer that was converted."""
    return expr.op == "cast" and expr.args[0].is_int
