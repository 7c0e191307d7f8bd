"""Exponentials and logarithms in fp32, accurate to about one rounding. NaN, infinities and
denormals are handled as in IEEE 754."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilegen.cpu.ir import Code, Lane, typed

_EXP2 = (
    *(1.0, 0.6931472028550824, 0.2402264791362645, 0.05550332471099986, 0.00961843735783418),
    *(0.0013398874422299, 0.0001535336188461054),
)
"""2**x on [-1/2, 1/2]: smallest relative error (2e-9) with a constant term of 1."""
_EXP = (
    *(1.0, 1.000000032179329, 0.4999999420639233, 0.16666431192119532, 0.04166800244617292),
    *(0.008374161459217235, 0.0013843646355328242),
)
"""e**x on the x for which e**x is between 0.7 and 1.42, likewise."""


def fused(code: Code, a: str, b: str, c: str, *, lane: Lane, type_: str = "float") -> str:
    """Return a * b + c, rounded once if the processor has fma."""
    name = "fma" if code.target.fma else "fmuladd"  # without fma it would call a function
    return code.intrinsic(name, type_, lane, a, b, c)


def _nearest(code: Code, x: str, lane: Lane) -> str:
    """Round a number below 2**22 in magnitude to the nearest integer, as a float."""
    if code.target.rounds:
        return code.intrinsic("rint", "float", lane, x)
    vector, magic = typed("float", lane), code.number("float", 1.5 * 2.0**23, lane)
    return code.emit(f"fsub {vector} {code.emit(f'fadd {vector} {x}, {magic}')}, {magic}")


def _clamped(code: Code, x: str, low: float, high: float, lane: Lane) -> str:
    """Clamp x to two bounds; NaN stays NaN."""
    vector = typed("float", lane)
    for order, bound in (("ogt", low), ("olt", high)):
        limit = code.number("float", bound, lane)
        test = code.emit(f"fcmp {order} {vector} {limit}, {x}")
        x = code.select(test, limit, x, "float", lane)
    return x


def _polynomial(code: Code, coefficients: Sequence[float], x: str, lane: Lane) -> str:
    value = code.number("float", coefficients[-1], lane)
    for coefficient in coefficients[-2::-1]:
        value = fused(code, value, x, code.number("float", coefficient, lane), lane=lane)
    return value


def _scaled(code: Code, value: str, n: str, lane: Lane) -> str:
    """Return value * 2**n for an integer n, given as a float: of any size if the
    processor `_scales`, else between -160 and 160."""
    if _scales(code, lane):
        vector = "<16 x float>"
        name = "@llvm.x86.avx512.mask.scalef.ps.512"
        code.module.declare(
            f"declare {vector} {name}({vector}, {vector}, {vector}, i16, i32 immarg)"
        )
        given = f"{vector} {value}, {vector} {n}, {vector} {value}, i16 -1, i32 4"
        return code.emit(f"call {vector} {name}({given})")
    single, whole = typed("float", lane), typed("i32", lane)
    # fptosi of NaN is undefined: freeze makes it an arbitrary number, and NaN times that is NaN.
    i = code.emit(f"freeze {whole} {code.emit(f'fptosi {single} {n} to {whole}')}")
    # Two factors, since neither 2**-149 nor 2**128 is a normal number.
    half = code.emit(f"ashr {whole} {i}, {code.number('i32', 1, lane)}")
    for part in (half, code.emit(f"sub {whole} {i}, {half}")):
        power = code.emit(f"add {whole} {part}, {code.number('i32', 127, lane)}")
        power = code.emit(f"shl {whole} {power}, {code.number('i32', 23, lane)}")
        power = code.emit(f"bitcast {whole} {power} to {single}")
        value = code.emit(f"fmul {single} {value}, {power}")
    return value


def _scales(code: Code, lane: Lane) -> bool:
    """Check whether instructions take numbers of any size apart, and multiply by powers of 2."""
    return lane is not None and lane[1] == 16 and code.target.scalef


def exp2(code: Code, x: str, lane: Lane) -> str:
    """Write 2**x: the integer part, and a polynomial of degree 6 for the rest."""
    if _scales(code, lane):  # the rest of an infinity is 0
        name, vector = "@llvm.x86.avx512.mask.reduce.ps.512", "<16 x float>"
        code.module.declare(
            f"declare {vector} {name}({vector}, i32 immarg, {vector}, i16, i32 immarg)"
        )
        n = _nearest(code, x, lane)
        given = f"{vector} {x}, i32 0, {vector} {x}, i16 -1, i32 4"
        rest = code.emit(f"call {vector} {name}({given})")
    else:
        x = _clamped(code, x, -160.0, 160.0, lane)
        n = _nearest(code, x, lane)
        rest = code.emit(f"fsub {typed('float', lane)} {x}, {n}")
    return _scaled(code, _polynomial(code, _EXP2, rest, lane), n, lane)


def exp(code: Code, x: str, lane: Lane) -> str:
    """Write e**x as a power of 2; ln(2) is split in two so that the rest is exact in fp32."""
    x = _clamped(code, x, -110.0, 100.0, lane)
    vector = typed("float", lane)
    n = code.emit(f"fmul {vector} {x}, {code.number('float', math.log2(math.e), lane)}")
    n = _nearest(code, n, lane)
    rest = fused(code, n, code.number("float", -0.693359375, lane), x, lane=lane)
    low = code.number("float", 0.693359375 - math.log(2), lane)
    rest = fused(code, n, low, rest, lane=lane)
    return _scaled(code, _polynomial(code, _EXP, rest, lane), n, lane)


def _log(code: Code, x: str, lane: Lane, of_two: float, of_e: float) -> str:
    """Return n * of_two + log(m) * of_e for x = m * 2**n, with m between 0.7 and 1.42.

    log(m) is computed by the series of 2 * artanh(s), s = (m - 1) / (m + 1), to a relative error of
    2e-9.
    """
    single, whole = typed("float", lane), typed("i32", lane)
    number = code.number
    tiny = code.emit(f"fcmp olt {single} {x}, {number('float', 2.0**-126, lane)}")
    scaled = code.emit(f"fmul {single} {x}, {number('float', 2.0**23, lane)}")
    word = code.emit(f"bitcast {single} {code.select(tiny, scaled, x, 'float', lane)} to {whole}")
    # 0x3F3504F3 is sqrt(1/2): the exponent counts from there.
    word = code.emit(f"sub {whole} {word}, {number('i32', 0x3F3504F3, lane)}")
    n = code.emit(f"ashr {whole} {word}, {number('i32', 23, lane)}")
    word = code.emit(f"and {whole} {word}, {number('i32', 0x7FFFFF, lane)}")
    word = code.emit(f"add {whole} {word}, {number('i32', 0x3F3504F3, lane)}")
    m = code.emit(f"bitcast {whole} {word} to {single}")
    power = code.emit(f"sitofp {whole} {n} to {single}")
    less = code.emit(f"fsub {single} {power}, {number('float', 23.0, lane)}")
    power = code.select(tiny, less, power, "float", lane)
    above = code.emit(f"fsub {single} {m}, {number('float', 1.0, lane)}")
    below = code.emit(f"fadd {single} {m}, {number('float', 1.0, lane)}")
    s = code.emit(f"fdiv {single} {above}, {below}")
    square = code.emit(f"fmul {single} {s}, {s}")
    series = _polynomial(code, [2 * of_e / (2 * i + 1) for i in range(5)], square, lane)
    series = code.emit(f"fmul {single} {s}, {series}")
    result = fused(code, power, number("float", of_two, lane), series, lane=lane)
    infinity = number("float", math.inf, lane)
    is_finite = code.emit(f"fcmp one {single} {x}, {infinity}")
    result = code.select(is_finite, result, x, "float", lane)  # infinity and NaN
    is_zero = code.emit(f"fcmp oeq {single} {x}, {number('float', 0.0, lane)}")
    result = code.select(is_zero, number("float", -math.inf, lane), result, "float", lane)
    is_negative = code.emit(f"fcmp olt {single} {x}, {number('float', 0.0, lane)}")
    return code.select(is_negative, number("float", math.nan, lane), result, "float", lane)


def log2(code: Code, x: str, lane: Lane) -> str:
    """Write log2(x)."""
    return _log(code, x, lane, 1.0, math.log2(math.e))


def log(code: Code, x: str, lane: Lane) -> str:
    """Write the natural logarithm of x."""
    return _log(code, x, lane, math.log(2), 1.0)
