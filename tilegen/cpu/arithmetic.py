"""Operations on elements as LLVM IR: integers, floats, conversions, exponentials and logarithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tilegen.cpu.ir import FLOATS, REGISTER, Code, Lane, typed
from tilegen.cpu.mlir import Op

_INTEGERS = {
    **{"addi": "add", "subi": "sub", "muli": "mul", "andi": "and", "ori": "or", "xori": "xor"},
    **{"shli": "shl", "shrui": "lshr", "shrsi": "ashr"},
}
_DIVISIONS = {"divsi": "sdiv", "divui": "udiv", "remsi": "srem", "remui": "urem"}
_ORDERS = {"maxsi": "smax", "minsi": "smin", "maxui": "umax", "minui": "umin"}
_FLOATS = {"addf": "fadd", "subf": "fsub", "mulf": "fmul", "divf": "fdiv", "remf": "frem"}
_FLOATS |= {"precise_divf": "fdiv"}
_CASTS = {"extsi": "sext", "extui": "zext", "trunci": "trunc", "sitofp": "sitofp"}
_CASTS |= {"uitofp": "uitofp", "index_cast": "sext"}
_LIBRARY = {"absf": "fabs", "precise_sqrt": "sqrt"}
_LIBRARY |= {name: name for name in ("sqrt", "floor", "ceil", "sin", "cos", "exp", "log")}

_EXP2 = (
    *(1.0, 0.6931472028550824, 0.2402264791362645, 0.05550332471099986, 0.00961843735783418),
    *(0.0013398874422299, 0.0001535336188461054),
)
"""2**x on [-1/2, 1/2], smallest relative error (2e-9) with a constant term of 1."""
_EXP = (
    *(1.0, 1.000000032179329, 0.4999999420639233, 0.16666431192119532, 0.04166800244617292),
    *(0.008374161459217235, 0.0013843646355328242),
)
"""e**x where 2**x is between 0.7 and 1.42, likewise."""


def compute(
    code: Code, op: Op, elems: Sequence[str], to: str, values: Sequence[str], lane: Lane
) -> str:
    """Write an elementwise operation and return its result.

    `elems` are the element types of its operands, `to` that of its result. Raises Unsupported for an
    operation that is unknown.
    """
    kind = op.name.partition(".")[2]
    elem, type_ = elems[0], REGISTER[elems[0]]
    vector = typed(type_, lane)
    if kind in _INTEGERS:
        return code.emit(f"{_INTEGERS[kind]} {vector} {values[0]}, {values[1]}")
    if kind in _DIVISIONS:
        return _divided(code, _DIVISIONS[kind], type_, values[0], values[1], lane)
    if kind in _FLOATS:
        result = code.emit(f"{_FLOATS[kind]} contract {vector} {values[0]}, {values[1]}")
        return rounded(code, result, elem, lane)
    if kind in _ORDERS:
        return code.intrinsic(_ORDERS[kind], type_, lane, *values)
    if kind in ("maxnumf", "minnumf", "maximumf", "minimumf"):
        return _extreme(code, kind, type_, values[0], values[1], lane)
    if kind in ("cmpi", "cmpf"):
        test = "icmp" if kind == "cmpi" else "fcmp"
        return code.emit(f"{test} {op.text.partition(',')[0].strip()} {vector} {values[0]}, {values[1]}")
    if kind == "select":
        return code.select(values[0], values[1], values[2], REGISTER[to], lane)
    if kind == "negf":
        return code.emit(f"fneg {vector} {values[0]}")
    if kind in ("extf", "truncf"):
        return converted(code, values[0], elem, to, lane)
    if kind in ("fptosi", "fptoui"):
        return _to_integer(code, kind, type_, values[0], to, lane)
    if kind in _CASTS:
        result = code.emit(f"{_CASTS[kind]} {vector} {values[0]} to {typed(REGISTER[to], lane)}")
        return rounded(code, result, to, lane)
    if kind == "bitcast":
        return _bits_of(code, op, elem, to, values[0], lane)
    if kind == "mulhiui":
        return _high_product(code, type_, values[0], values[1], lane)
    if elem != "f64" and kind in _FUNCTIONS:
        return rounded(code, _FUNCTIONS[kind](code, values[0], lane), elem, lane)
    if kind in _LIBRARY or (elem == "f64" and kind in _FUNCTIONS):
        result = code.intrinsic(_LIBRARY.get(kind, kind), type_, lane, *values)
        return rounded(code, result, elem, lane)
    if kind == "fma":
        return rounded(code, fused(code, *values, lane=lane, type_=type_), elem, lane)
    raise op.refused("unknown to the CPU compiler; use a GPU, or TILEGEN_CPU=torch")


def reduced(code: Code, op: Op, elem: str, so_far: str, value: str, lane: Lane) -> str:
    """Write one step of a reduction and return the new accumulator.

    An accumulator of a maximum starts at -infinity and drops every NaN, so it is never NaN itself.
    One compare and select is enough then, which is a single instruction on x86.
    """
    type_ = REGISTER[elem]
    if op.name in ("arith.maxnumf", "arith.minnumf"):
        order = "ogt" if op.name == "arith.maxnumf" else "olt"
        test = code.emit(f"fcmp {order} {typed(type_, lane)} {value}, {so_far}")
        return code.select(test, value, so_far, type_, lane)
    return compute(code, op, [elem, elem], elem, [so_far, value], lane)


def fused(code: Code, a: str, b: str, c: str, *, lane: Lane, type_: str = "float") -> str:
    """Return a * b + c, with one rounding where the processor can."""
    name = "fma" if code.target.fma else "fmuladd"  # fma would be a call per element without one
    return code.intrinsic(name, type_, lane, a, b, c)


def rounded(code: Code, value: str, elem: str, lane: Lane) -> str:
    """Return an fp32 value as bf16 or fp16 would hold it; other types are returned as they are."""
    if elem == "bf16":
        return _rounded_to_bf16(code, value, lane)
    if elem == "f16":
        return from_memory(code, to_memory(code, value, "f16", lane, exact=False), "f16", lane)
    return value


def converted(code: Code, value: str, of: str, to: str, lane: Lane) -> str:
    """Return a float of another type."""
    if of == "f64" and to != "f64":
        # fp64 to bf16 is rounded twice here, as Triton does on NVIDIA's GPUs.
        value = code.emit(f"fptrunc {typed('double', lane)} {value} to {typed('float', lane)}")
    elif to == "f64" and of != "f64":
        return code.emit(f"fpext {typed('float', lane)} {value} to {typed('double', lane)}")
    return rounded(code, value, to, lane) if to != of else value


def to_memory(code: Code, value: str, elem: str, lane: Lane, *, exact: bool = True) -> str:
    """Return a value as it lies in memory. `exact` says that bf16 and fp16 are rounded already."""
    whole, half, one_byte = (typed(name, lane) for name in ("i32", "i16", "i8"))
    if elem == "bf16":
        if not exact:
            value = _rounded_to_bf16(code, value, lane)
        word = code.emit(f"bitcast {typed('float', lane)} {value} to {whole}")
        high = code.emit(f"lshr {whole} {word}, {code.number('i32', 16, lane)}")
        return code.emit(f"trunc {whole} {high} to {half}")
    if elem == "f16":
        if not code.target.halves:
            return _to_half_by_integers(code, value, lane)
        narrow = code.emit(f"fptrunc {typed('float', lane)} {value} to {typed('half', lane)}")
        return code.emit(f"bitcast {typed('half', lane)} {narrow} to {half}")
    if elem == "i1":
        return code.emit(f"zext {typed('i1', lane)} {value} to {one_byte}")
    return value


def from_memory(code: Code, value: str, elem: str, lane: Lane) -> str:
    """Return a value in a register, from what lies in memory."""
    whole, half = typed("i32", lane), typed("i16", lane)
    if elem == "bf16":
        word = code.emit(f"zext {half} {value} to {whole}")
        word = code.emit(f"shl {whole} {word}, {code.number('i32', 16, lane)}")
        return code.emit(f"bitcast {whole} {word} to {typed('float', lane)}")
    if elem == "f16":
        if not code.target.halves:
            return _from_half_by_integers(code, value, lane)
        narrow = code.emit(f"bitcast {half} {value} to {typed('half', lane)}")
        return code.emit(f"fpext {typed('half', lane)} {narrow} to {typed('float', lane)}")
    if elem == "i1":
        return code.emit(f"icmp ne {typed('i8', lane)} {value}, {code.number('i8', 0, lane)}")
    return value


def _divided(code: Code, name: str, type_: str, a: str, b: str, lane: Lane) -> str:
    """Divide integers; x / 0 gives x with remainder 0, where the processor would trap."""
    vector = typed(type_, lane)
    if b.startswith("splat") or not b.startswith("%"):
        return code.emit(f"{name} {vector} {a}, {b}")
    zero, one = code.number(type_, 0, lane), code.number(type_, 1, lane)
    if name in ("udiv", "urem"):
        test = code.emit(f"icmp eq {vector} {b}, {zero}")
        return code.emit(f"{name} {vector} {a}, {code.select(test, one, b, type_, lane)}")
    # The least integer divided by -1 traps, too.
    less_one = code.number(type_, -1, lane)
    shifted = code.emit(f"add {vector} {b}, {one}")
    special = code.emit(f"icmp ult {vector} {shifted}, {code.number(type_, 2, lane)}")
    result = code.emit(f"{name} {vector} {a}, {code.select(special, one, b, type_, lane)}")
    if name == "srem":
        return result
    negates = code.emit(f"icmp eq {vector} {b}, {less_one}")
    return code.select(negates, code.emit(f"sub {vector} {zero}, {a}"), result, type_, lane)


def _extreme(code: Code, kind: str, type_: str, a: str, b: str, lane: Lane) -> str:
    """Return the larger or smaller value. `num` kinds drop a NaN, the others keep it."""
    vector = typed(type_, lane)
    order = "ogt" if kind.startswith("max") else "olt"
    best = code.select(code.emit(f"fcmp {order} {vector} {a}, {b}"), a, b, type_, lane)
    # `best` is b where either is NaN.
    test = code.emit(f"fcmp uno {vector} {b}, {b}" if "num" in kind else f"fcmp uno {vector} {a}, {a}")
    return code.select(test, a, best, type_, lane)


def _to_integer(code: Code, kind: str, type_: str, value: str, to: str, lane: Lane) -> str:
    """Convert to an integer; out of range it saturates and NaN gives 0, as on a GPU."""
    name, vector = f"llvm.{kind}.sat", typed(REGISTER[to], lane)
    given, wide = typed(type_, lane), f"v{lane[1]}" if lane else ""
    short = "f64" if type_ == "double" else "f32"
    full = f"{name}.{wide}{REGISTER[to]}.{wide}{short}"
    code.module.declare(f"declare {vector} @{full}({given})")
    return code.emit(f"call {vector} @{full}({given} {value})")


def _bits_of(code: Code, op: Op, elem: str, to: str, value: str, lane: Lane) -> str:
    if elem in ("bf16", "f16"):
        value = to_memory(code, value, elem, lane)
        if to == "i16":
            return value
    elif elem == "i16" and to in ("bf16", "f16"):
        return from_memory(code, value, to, lane)
    elif elem == to or (elem in FLOATS) != (to in FLOATS):
        of, into = typed(REGISTER[elem], lane), typed(REGISTER[to], lane)
        return value if of == into else code.emit(f"bitcast {of} {value} to {into}")
    raise op.refused(f"a bitcast of {elem} to {to}")


def _high_product(code: Code, type_: str, a: str, b: str, lane: Lane) -> str:
    size = int(type_[1:])
    vector, wide = typed(type_, lane), typed(f"i{2 * size}", lane)
    a, b = (code.emit(f"zext {vector} {value} to {wide}") for value in (a, b))
    product = code.emit(f"mul {wide} {a}, {b}")
    high = code.emit(f"lshr {wide} {product}, {code.number(f'i{2 * size}', size, lane)}")
    return code.emit(f"trunc {wide} {high} to {vector}")


# ---- bf16 and fp16


def _rounded_to_bf16(code: Code, value: str, lane: Lane) -> str:
    """Round to nearest, ties to even, in place: the lower half of the word becomes 0."""
    single, whole = typed("float", lane), typed("i32", lane)
    word = code.emit(f"bitcast {single} {value} to {whole}")
    odd = code.emit(f"lshr {whole} {word}, {code.number('i32', 16, lane)}")
    odd = code.emit(f"and {whole} {odd}, {code.number('i32', 1, lane)}")
    up = code.emit(f"add {whole} {word}, {code.number('i32', 0x7FFF, lane)}")
    up = code.emit(f"add {whole} {up}, {odd}")
    up = code.emit(f"and {whole} {up}, {code.number('i32', -65536, lane)}")
    # The sum would turn some NaN into infinity or 0.
    is_nan = code.emit(f"fcmp uno {single} {value}, {value}")
    up = code.select(is_nan, code.number("i32", 0x7FC00000, lane), up, "i32", lane)
    return code.emit(f"bitcast {whole} {up} to {single}")


def _to_half_by_integers(code: Code, value: str, lane: Lane) -> str:
    """Round fp32 to fp16 without instructions for fp16; a float addition rounds denormals."""
    single, whole = typed("float", lane), typed("i32", lane)

    def number(n: int) -> str:
        return code.number("i32", n, lane)

    word = code.emit(f"bitcast {single} {value} to {whole}")
    size = code.emit(f"and {whole} {word}, {number(0x7FFFFFFF)}")
    sign = code.emit(f"lshr {whole} {code.emit(f'xor {whole} {word}, {size}')}, {number(16)}")
    # Normal numbers: rebias the exponent and round to nearest even.
    odd = code.emit(f"and {whole} {code.emit(f'lshr {whole} {size}, {number(13)}')}, {number(1)}")
    normal = code.emit(f"add {whole} {size}, {number((-112 << 23) + 0xFFF)}")
    normal = code.emit(f"lshr {whole} {code.emit(f'add {whole} {normal}, {odd}')}, {number(13)}")
    # Denormal numbers: adding 0.5 shifts the mantissa into place.
    small = code.emit(f"bitcast {whole} {size} to {single}")
    small = code.emit(f"fadd {single} {small}, {code.number('float', 0.5, lane)}")
    small = code.emit(f"bitcast {single} {small} to {whole}")
    small = code.emit(f"sub {whole} {small}, {number(0x3F000000)}")
    is_small = code.emit(f"icmp ult {whole} {size}, {number(113 << 23)}")
    result = code.select(is_small, small, normal, "i32", lane)
    is_large = code.emit(f"icmp uge {whole} {size}, {number(0x477FF000)}")
    result = code.select(is_large, number(0x7C00), result, "i32", lane)
    is_nan = code.emit(f"icmp ugt {whole} {size}, {number(0x7F800000)}")
    result = code.select(is_nan, number(0x7E00), result, "i32", lane)
    result = code.emit(f"or {whole} {result}, {sign}")
    return code.emit(f"trunc {whole} {result} to {typed('i16', lane)}")


def _from_half_by_integers(code: Code, value: str, lane: Lane) -> str:
    single, whole = typed("float", lane), typed("i32", lane)

    def number(n: int) -> str:
        return code.number("i32", n, lane)

    word = code.emit(f"zext {typed('i16', lane)} {value} to {whole}")
    size = code.emit(f"and {whole} {word}, {number(0x7FFF)}")
    sign = code.emit(f"shl {whole} {code.emit(f'xor {whole} {word}, {size}')}, {number(16)}")
    shifted = code.emit(f"shl {whole} {size}, {number(13)}")
    scaled = code.emit(f"bitcast {whole} {shifted} to {single}")
    scaled = code.emit(f"fmul {single} {scaled}, {code.number('float', 2.0**112, lane)}")
    scaled = code.emit(f"bitcast {single} {scaled} to {whole}")
    special = code.emit(f"or {whole} {shifted}, {number(0x7F800000)}")
    is_special = code.emit(f"icmp uge {whole} {size}, {number(0x7C00)}")
    result = code.select(is_special, special, scaled, "i32", lane)
    return code.emit(f"bitcast {whole} {code.emit(f'or {whole} {result}, {sign}')} to {single}")


# ---- exponentials and logarithms of fp32


def _nearest(code: Code, x: str, lane: Lane) -> str:
    """Return the nearest integer, as a float, of a number below 2**22 in size."""
    if code.target.rounds:
        return code.intrinsic("rint", "float", lane, x)
    vector, magic = typed("float", lane), code.number("float", 1.5 * 2.0**23, lane)
    return code.emit(f"fsub {vector} {code.emit(f'fadd {vector} {x}, {magic}')}, {magic}")


def _clamped(code: Code, x: str, low: float, high: float, lane: Lane) -> str:
    """Return x within two bounds; NaN stays NaN."""
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
    """Return value * 2**n for an integer n, a float between -160 and 160."""
    if lane and lane[1] == 16 and code.target.scalef:
        vector = "<16 x float>"
        name = "@llvm.x86.avx512.mask.scalef.ps.512"
        code.module.declare(
            f"declare {vector} {name}({vector}, {vector}, {vector}, i16, i32 immarg)"
        )
        given = f"{vector} {value}, {vector} {n}, {vector} {value}, i16 -1, i32 4"
        return code.emit(f"call {vector} {name}({given})")
    single, whole = typed("float", lane), typed("i32", lane)
    # NaN has no integer: frozen, it is some number, and NaN times that is NaN.
    i = code.emit(f"freeze {whole} {code.emit(f'fptosi {single} {n} to {whole}')}")
    # In two factors, since neither 2**-149 nor 2**128 is a normal number.
    half = code.emit(f"ashr {whole} {i}, {code.number('i32', 1, lane)}")
    for part in (half, code.emit(f"sub {whole} {i}, {half}")):
        power = code.emit(f"add {whole} {part}, {code.number('i32', 127, lane)}")
        power = code.emit(f"shl {whole} {power}, {code.number('i32', 23, lane)}")
        power = code.emit(f"bitcast {whole} {power} to {single}")
        value = code.emit(f"fmul {single} {value}, {power}")
    return value


def _exp2(code: Code, x: str, lane: Lane) -> str:
    """2**x: an integer, and a polynomial of degree 6 for the rest (relative error 2e-9)."""
    x = _clamped(code, x, -160.0, 160.0, lane)
    n = _nearest(code, x, lane)
    rest = code.emit(f"fsub {typed('float', lane)} {x}, {n}")
    return _scaled(code, _polynomial(code, _EXP2, rest, lane), n, lane)


def _exp(code: Code, x: str, lane: Lane) -> str:
    """e**x: as 2**x, with ln(2) in two parts so that the rest is exact to fp32."""
    x = _clamped(code, x, -110.0, 100.0, lane)
    vector = typed("float", lane)
    n = code.emit(f"fmul {vector} {x}, {code.number('float', math.log2(math.e), lane)}")
    n = _nearest(code, n, lane)
    rest = fused(code, n, code.number("float", -0.693359375, lane), x, lane=lane)
    low = code.number("float", 0.693359375 - math.log(2), lane)
    rest = fused(code, n, low, rest, lane=lane)
    return _scaled(code, _polynomial(code, _EXP, rest, lane), n, lane)


def _log(code: Code, x: str, lane: Lane, of_two: float, of_e: float) -> str:
    """Return n * of_two + log(m) * of_e, where x = m * 2**n and m lies between 0.7 and 1.42.

    log(m) is the series of 2 * artanh(s), s = (m - 1) / (m + 1), whose relative error is 2e-9.
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


def _log2(code: Code, x: str, lane: Lane) -> str:
    return _log(code, x, lane, 1.0, math.log2(math.e))


def _ln(code: Code, x: str, lane: Lane) -> str:
    return _log(code, x, lane, math.log(2), 1.0)


_FUNCTIONS: dict[str, Callable[[Code, str, Lane], str]] = {
    **{"exp2": _exp2, "exp": _exp, "log2": _log2, "log": _ln}
}
