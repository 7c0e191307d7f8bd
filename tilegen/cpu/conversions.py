"""Convert floats between registers and memory: registers hold bf16 and fp16 as fp32."""

from __future__ import annotations

from tilegen.cpu.ir import Code, Lane, typed


def rounded(code: Code, value: str, elem: str, lane: Lane) -> str:
    """Round an fp32 value to bf16 or fp16, still in fp32; return other types unchanged."""
    if elem == "bf16":
        return _rounded_to_bf16(code, value, lane)
    if elem == "f16":
        return from_memory(code, to_memory(code, value, "f16", lane, exact=False), "f16", lane)
    return value


def converted(code: Code, value: str, of: str, to: str, lane: Lane) -> str:
    """Convert a float to another type."""
    if of == "f64" and to != "f64":
        # fp64 is rounded twice on its way to bf16, as Triton does on NVIDIA GPUs.
        value = code.emit(f"fptrunc {typed('double', lane)} {value} to {typed('float', lane)}")
    elif to == "f64" and of != "f64":
        return code.emit(f"fpext {typed('float', lane)} {value} to {typed('double', lane)}")
    return rounded(code, value, to, lane) if to != of else value


def to_memory(code: Code, value: str, elem: str, lane: Lane, *, exact: bool = True) -> str:
    """Convert a value to its form in memory. With `exact` it is already rounded to bf16 or fp16."""
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


def to_factors(code: Code, value: str, lane: Lane) -> str:
    """Round fp32 to bf16 in memory, for products of pairs alone: they take denormals for 0, as the
    instruction does."""
    if code.target.pairs != "x86" or not lane or lane[1] != 16:
        return to_memory(code, value, "bf16", lane, exact=False)
    name = "@llvm.x86.avx512bf16.cvtneps2bf16.512"
    code.module.declare(f"declare <16 x bfloat> {name}(<16 x float>)")
    narrow = code.emit(f"call <16 x bfloat> {name}(<16 x float> {value})")
    return code.emit(f"bitcast <16 x bfloat> {narrow} to <16 x i16>")


def from_memory(code: Code, value: str, elem: str, lane: Lane) -> str:
    """Convert a value from its form in memory to its form in a register."""
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


def _rounded_to_bf16(code: Code, value: str, lane: Lane) -> str:
    """Round to nearest, ties to even; the lower half of the word becomes 0."""
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
    """Round fp32 to fp16 without fp16 instructions; a float addition rounds denormals."""
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
