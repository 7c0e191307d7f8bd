"""Multiply vectors and add: elements of fp32, or pairs of bf16."""

from __future__ import annotations

from tilegen.cpu.conversions import from_memory
from tilegen.cpu.exponentials import fused
from tilegen.cpu.ir import Code, typed


def added(code: Code, pairs: bool, so_far: str, left: str, right: str, lanes: int) -> str:
    """Return so_far + left * right, of vectors of elements or of pairs."""
    lane = (0, lanes) if lanes > 1 else None
    if not pairs:
        return fused(code, left, right, so_far, lane=lane)
    single, way = typed("float", lane), code.target.pairs
    if way == "emulated" or lanes != code.target.lanes:
        return _emulated(code, so_far, left, right, lanes)
    both = f"<{2 * lanes} x bfloat>"
    x, y = (code.emit(f"bitcast {single} {words} to {both}") for words in (left, right))
    if way == "x86":
        name = f"@llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    else:
        name = f"@llvm.aarch64.neon.bfdot.v{lanes}f32.v{2 * lanes}bf16"
    code.module.declare(f"declare {single} {name}({single}, {both}, {both})")
    return code.emit(f"call {single} {name}({single} {so_far}, {both} {x}, {both} {y})")


def _emulated(code: Code, so_far: str, left: str, right: str, lanes: int) -> str:
    """Multiply pairs of bf16 as two products in fp32."""
    lane = (0, lanes) if lanes > 1 else None
    whole = typed("i32", lane)
    words = [
        code.emit(f"bitcast {typed('float', lane)} {value} to {whole}") for value in (left, right)
    ]
    for shift in (0, 16):
        parts: list[str] = []
        for word in words:
            half = code.emit(f"lshr {whole} {word}, {code.number('i32', shift, lane)}")
            half = code.emit(f"trunc {whole} {half} to {typed('i16', lane)}")
            parts.append(from_memory(code, half, "bf16", lane))
        so_far = fused(code, parts[0], parts[1], so_far, lane=lane)
    return so_far
