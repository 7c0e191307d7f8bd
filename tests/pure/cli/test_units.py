"""Times, sizes and rates as text: at most four digits and a unit, never an exponent."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilegen.units import (
    bytes_text,
    memory_text,
    number_text,
    percent_text,
    rate_text,
    ratio_text,
    seconds_text,
    us_text,
)


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
        (999.4, "999 s"),
        (999.6, "16.7 min"),
        (86000.0, "23.9 h"),
        (5e6, "57.9 d"),
        (1e9, "31.7 y"),
        (-3.4e-6, "-3.40 us"),
        (3.4e-9, "3.40 ns"),
    ],
)
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
    assert us_text(1e6 * seconds) == text


def test_a_missing_time() -> None:
    assert us_text(None) == "?"


def test_sizes() -> None:
    assert bytes_text(4.694e9) == "4.69 GB"
    assert bytes_text(1.02e12) == "1.02 TB"
    assert bytes_text(999_600) == "1.00 MB"
    assert bytes_text(512) == "512 B"
    assert bytes_text(0) == "0 B"
    assert memory_text(164864) == "161 KiB"
    assert memory_text(227 * 1024) == "227 KiB"
    assert memory_text(1536) == "1.5 KiB"
    assert memory_text(2**45) == "32 TiB"


def test_rates_and_ratios() -> None:
    assert rate_text(250e9, "B/s") == "250 GB/s"
    assert rate_text(11e9, "/s") == "11.0 G/s"
    assert rate_text(2.5, "flop/s") == "2.50 flop/s"
    assert ratio_text(13.94) == "13.9"
    assert ratio_text(9.996) == "10.0"
    assert ratio_text(1) == "1.00"
    assert ratio_text(12345.0) == "12.3 k"
    assert percent_text(0.861) == "86 %"
    assert percent_text(0.0044) == "0.4 %"
    assert number_text(67584) == "67584"
    assert number_text(1 / 32) == "0.03125"
    assert number_text(2093.41) == "2093"


FORMATTERS: dict[str, tuple[Callable[[float], str], float]] = {
    "seconds": (seconds_text, 3e11),
    "us": (us_text, 3e17),
    "bytes": (bytes_text, 9e21),
    "memory": (memory_text, 1e22),
    "rate": (lambda value: rate_text(value, "flop/s"), 9e21),
    "ratio": (ratio_text, 9e21),
}


@pytest.mark.parametrize("name", FORMATTERS)
@given(exponent=st.floats(-12, 22), sign=st.sampled_from([1, -1]))
def test_no_value_has_an_exponent_or_more_than_four_digits(
    name: str, exponent: float, sign: int
) -> None:
    formatted, largest = FORMATTERS[name]
    text = formatted(sign * min(10**exponent, largest))
    number, _, unit = text.partition(" ")
    assert re.fullmatch(r"-?\d+(\.\d+)?", number), text
    assert len(number.strip("-").replace(".", "").lstrip("0")) <= 4, text
    assert re.fullmatch(r"[a-zA-Z/]*", unit), text


@given(st.floats(min_value=1e-9, max_value=900))
def test_a_time_reads_back_within_half_a_digit(seconds: float) -> None:
    text, unit = seconds_text(seconds).split()
    assert re.fullmatch(r"\d{1,3}(\.\d\d?)?", text)
    back = float(text) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert back == pytest.approx(seconds, rel=0.0051)


@given(st.floats(min_value=1, max_value=1e21))
def test_bytes_read_back_within_half_a_digit(count: float) -> None:
    text, unit = bytes_text(count).split()
    scale = 1000.0 ** " kMGTPE".index(unit[0]) if unit != "B" else 1.0
    assert float(text) * scale == pytest.approx(count, rel=0.0051, abs=0.0051)
