"""Comparisons that fail where a side is NaN, and their opposites, which hold there."""

from __future__ import annotations

from typing import Any, ClassVar

import sympy
from sympy.core.relational import Relational


class Ordered(Relational):
    """A comparison of two numbers that SymPy does not simplify; see `comparisons`."""

    relation: ClassVar[type[Relational]]
    """SymPy's comparison, which holds where this one does if both sides are numbers."""
    other: ClassVar[type[Ordered]]
    holds_for_nan: ClassVar[bool] = False

    @property
    def canonical(self) -> Any:
        """The comparison itself."""
        return self

    @property
    def negated(self) -> Any:
        """The comparison that holds where this one fails."""
        return self.other(*self.args)

    def _sympystr(self, printer: Any) -> str:
        left, right = map(printer.doprint, self.args)
        return f"{'~' * self.holds_for_nan}{NAMES[self.relation]}({left}, {right})"


class Less(Ordered):
    """`left < right`."""

    relation = sympy.Lt


class LessEqual(Ordered):
    """`left <= right`."""

    relation = sympy.Le


class Same(Ordered):
    """`left == right`."""

    relation = sympy.Eq


class NotLess(Less):
    """`~(left < right)`."""

    other, holds_for_nan = Less, True


class NotLessEqual(LessEqual):
    """`~(left <= right)`."""

    other, holds_for_nan = LessEqual, True


class NotSame(Same):
    """`~(left == right)`."""

    other, holds_for_nan = Same, True


Less.other, LessEqual.other, Same.other = NotLess, NotLessEqual, NotSame
ORDERED: dict[type[Relational], type[Ordered]] = {
    sympy.Lt: Less,
    sympy.Le: LessEqual,
    sympy.Eq: Same,
}
NAMES: dict[type[Relational], str] = {sympy.Lt: "less", sympy.Le: "lessequal", sympy.Eq: "same"}
"""The names of comparisons in texts, where `~` is an opposite."""
