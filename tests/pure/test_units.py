"""Times and sizes as text: three digits, never an exponent."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegen.units import bytes_text, memory_text, seconds_text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 us"),
        (1.23456e-6, "1.23 us"),
        (0.99951e-3, "1.00 ms"),
        (0.9994e-3, "999 us"),
        (1281.9e-6, "1.28 ms"),
        (1.187391, "1.19 s"),
        (61.25, "61.2 s"),
        (-3.4e-6, "-3.40 us"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_sizes() -> None:
    assert bytes_text(4.694e9) == "4.69 GB"
    assert bytes_text(999_600) == "1.00 MB"
    assert bytes_text(512) == "512 B"
    assert memory_text(164864) == "161 KiB"
    assert memory_text(227 * 1024) == "227 KiB"
    assert memory_text(1536) == "1.5 KiB"


@given(st.floats(min_value=1e-9, max_value=900))
def test_a_time_reads_back_within_half_a_digit(seconds: float) -> None:
    text, unit = seconds_text(seconds).split()
    assert re.fullmatch(r"\d{1,3}(\.\d\d?)?", text)
    back = float(text) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
    assert back == pytest.approx(seconds, rel=0.0051, abs=0.0051e-6)
