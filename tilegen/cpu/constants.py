"""Parse constants of MLIR."""

from __future__ import annotations

import struct


def float_of(text: str, elem: str) -> float:
    """Return the value of a constant, given as a decimal or as the bits of its type."""
    if not text.startswith("0x"):
        return _nearest(float(text), elem)
    raw = bytes.fromhex(text[2:])
    if elem == "bf16":
        return struct.unpack(">f", raw + b"\0\0")[0]
    return struct.unpack({"f16": ">e", "f32": ">f", "f64": ">d"}[elem], raw)[0]


def _nearest(value: float, elem: str) -> float:
    """Return the number of a type nearest to a decimal: MLIR prints only as many digits as tell the
    number from its neighbours."""
    if elem == "f16":
        return struct.unpack("<e", struct.pack("<e", value))[0]
    if elem == "bf16":
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        return struct.unpack("<f", struct.pack("<I", (word + 0x8000) & 0xFFFF0000))[0]
    return value
