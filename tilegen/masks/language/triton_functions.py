"""Triton source of functions that Triton lacks, or has with wrong values for some arguments."""

from __future__ import annotations

from collections.abc import Callable

Name = Callable[[str], str]
"""Makes a source a statement of its own and returns its name."""

# tanh(x) = x + x z (c0 + c1 z + ...) with z = x*x, interpolated at Chebyshev's points of |x| < 0.6;
# in fp32 1.4 units in the last place, as 1 - 2 / (exp(2x) + 1) is beyond.
TANH_SMALL = 0.6
TANH_SERIES = (-0.33333330333, 0.13332915367, -0.053873948849, 0.021110959049, -0.0062691197187)


def tanh(name: Name, source: str, *, precise: bool) -> str:
    """Return the name of a hyperbolic tangent; unless `precise`, it errs by up to 1e-7 also where
    it is smaller than that."""
    x = name(source)
    if not precise:
        return name(f"1.0 - 2.0 / (tl.exp(2.0 * {x}) + 1.0)")
    square = name(f"{x} * {x}")
    size = name(f"tl.abs({x})")
    series = repr(TANH_SERIES[-1])
    for factor in reversed(TANH_SERIES[:-1]):
        series = name(f"{series} * {square} {'-' if factor < 0 else '+'} {abs(factor)!r}")
    small = name(f"{x} + {x} * {square} * {series}")
    large = name(f"1.0 - 2.0 / (tl.exp(2.0 * {size}) + 1.0)")
    signed = f"tl.where({x} < 0, -{large}, {large})"
    return name(f"tl.where({size} < {TANH_SMALL}, {small}, {signed})")


def log1p(
    name: Name, source: str, quotient: Callable[[str, str], tuple[str, int]], *, precise: bool
) -> str:
    """Return the name of log(1 + x). If `precise`, a factor puts back what 1 + x rounds away
    (Goldberg 1991, theorem 4)."""
    if not precise:
        return f"tl.log({source} + 1.0)"
    x = name(source)
    above = name(f"{x} + 1.0")
    ratio = quotient(x, f"{above} - 1.0")[0]
    plain = f"({above} == 1.0) | ({above} == float('inf'))"
    return name(f"tl.where({plain}, {x}, tl.log({above}) * ({ratio}))")
