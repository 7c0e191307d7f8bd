"""Times, sizes, rates and ratios as text: at most four digits and a unit, never an exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Units = Sequence[tuple[str, float]]
"""Units with their sizes, the largest first."""

_TIMES: _Units = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_LONG_TIMES: _Units = (("y", 365.25 * 86400), ("d", 86400.0), ("h", 3600.0), ("min", 60.0))
_PREFIXES: _Units = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_MEMORIES: _Units = tuple((f"{'KMGTPE'[i]}iB", 1024.0 ** (i + 1)) for i in range(5, -1, -1))
_ROUNDED = 0.9995
"""Part of a unit from which a number of three digits is written in it: 999.6 us is 1.00 ms."""


def seconds_text(seconds: float) -> str:
    """Format a time in three digits, from ns to s, or from 1000 s on from min to y: `1.28 ms`."""
    if seconds == 0:
        return "0 us"
    units = _LONG_TIMES if abs(seconds) >= _ROUNDED * 1000 else _TIMES
    unit, size = next((pair for pair in units if abs(seconds) >= _ROUNDED * pair[1]), units[-1])
    return f"{_digits(seconds / size)} {unit}"


def us_text(microseconds: float | None) -> str:
    """Format a time [us] as `seconds_text` does; `?` for None."""
    return "?" if microseconds is None else seconds_text(1e-6 * microseconds)


def bytes_text(count: float) -> str:
    """Format bytes that move in three digits, in powers of a thousand: `4.69 GB`."""
    return rate_text(count, "B")


def rate_text(amount: float, unit: str) -> str:
    """Format an amount of a unit in three digits, with a decimal prefix: `250 GB/s`."""
    for prefix, size in _PREFIXES:
        if abs(amount) >= _ROUNDED * size:
            return f"{_digits(amount / size)} {prefix}{unit}"
    whole = abs(amount) >= 99.5 or amount == int(amount)
    return f"{amount:.0f} {unit}" if whole else f"{_digits(amount)} {unit}"


def memory_text(count: float) -> str:
    """Format the size of a memory, in powers of 1024: `161 KiB`."""
    for unit, size in _MEMORIES:
        if abs(count) >= size:
            return f"{_short(count / size)} {unit}"
    return f"{count:.0f} B"


def ratio_text(ratio: float) -> str:
    """Format a factor in two digits behind the point below 10, in one below 100: `13.9`."""
    if abs(ratio) >= 99.95:
        return f"{ratio:.0f}" if abs(ratio) < 9999.5 else rate_text(ratio, "").rstrip()
    return f"{ratio:.1f}" if abs(ratio) >= 9.995 else f"{ratio:.2f}"


def number_text(value: float) -> str:
    """Format the value of a symbol in full, without an exponent: `67584`, `0.0312`."""
    if not math.isfinite(value) or value == int(value):
        return f"{value:.0f}"
    places = 3 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(0, places)}f}"


def percent_text(part: float) -> str:
    """Format a part of a whole: `86 %`, `0.3 %` below a tenth."""
    percent = 100 * part
    whole = abs(percent) >= 9.95 or percent == 0
    return f"{percent:.0f} %" if whole else f"{percent:.1f} %"


def _digits(value: float) -> str:
    """Format a number in three digits, or as an integer, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    whole = math.floor(math.log10(abs(float(f"{value:.3g}")))) + 1
    return f"{value:.{max(0, 3 - max(whole, 1))}f}"


def _short(value: float) -> str:
    """Format a number as `_digits`, without zeros at the end of a fraction."""
    text = _digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text
