"""Times, sizes and ratios as text, in units that keep numbers below a thousand."""

from __future__ import annotations

import math


def seconds_text(seconds: float) -> str:
    """Format a time in three digits, in seconds, milliseconds or microseconds: `1.28 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if abs(seconds) * scale >= 0.9995:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def bytes_text(count: float) -> str:
    """Format bytes that move in three digits, in powers of a thousand: `4.69 GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= 0.9995 * scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count:.0f} B"


def memory_text(count: float) -> str:
    """Format the size of a memory, in powers of 1024: `161 KiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{float(_digits(count / scale)):g} {unit}"
    return f"{count:.0f} B"


def _digits(value: float) -> str:
    """Format a number below a thousand in three digits, without an exponent."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    whole = math.floor(math.log10(abs(float(f"{value:.3g}")))) + 1
    return f"{value:.{max(0, 3 - max(whole, 1))}f}"
