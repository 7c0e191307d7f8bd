"""Integers of fewer than 64 bits: what does not fit wraps around, as in PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

import sympy

from tilegen.masks.language.elements import BOUNDS


class Wrapped(sympy.Function):
    """`Int8(x)`: the integer of 8 bits that is x modulo 256, and its like."""

    nargs = 1
    is_integer = True

    element: ClassVar[str]
    """PyTorch's name of the dtype."""
    low: ClassVar[int]
    high: ClassVar[int]
    """The smallest and the largest integer of the dtype."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.element = cls.__name__.lower()
        cls.low, cls.high = BOUNDS[cls.element]

    @classmethod
    def eval(cls, x: Any) -> Any:
        """Return the value of a number, and what fits as it is; None for any other argument."""
        if x.is_Integer:
            return sympy.Integer((int(x) - cls.low) % (cls.high - cls.low + 1) + cls.low)
        fits = isinstance(x, Wrapped) and cls.low <= x.low and x.high <= cls.high
        return x if fits else None

    def _eval_is_nonnegative(self) -> bool | None:
        return True if self.low == 0 else None


class Int8(Wrapped):
    """An integer of 8 bits."""


class UInt8(Wrapped):
    """An integer of 8 bits that is never negative."""


class Int16(Wrapped):
    """An integer of 16 bits."""


class Int32(Wrapped):
    """An integer of 32 bits."""


WRAPPED: dict[str, type[Wrapped]] = {one.element: one for one in (Int8, UInt8, Int16, Int32)}
"""The functions that make integers narrow, by PyTorch's names of the dtypes."""
