"""Write operations on elements as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilegen.cpu import exponentials
from tilegen.cpu.conversions import converted, from_memory, rounded, to_memory
from tilegen.cpu.exponentials import fused
from tilegen.cpu.ir import FLOATS, REGISTER, Code, Lane, typed
from tilegen.cpu.mlir import Op

_INTEGERS = {
    **{"addi": "add", "subi": "sub", "muli": "mul", "andi": "and", "ori": "or", "xori": "xor"},
    **{"shli": "shl", "shrui": "lshr", "shrsi": "ashr"},
}
_DIVISIONS = {"divsi": "sdiv", "divui": "udiv", "remsi": "srem", "remui": "urem"}
_ORDERS = {"maxsi": "smax", "minsi": "smin", "maxui": "umax", "minui": "umin"}
_FLOATS = {
    **{"addf": "fadd", "subf": "fsub", "mulf": "fmul", "divf": "fdiv", "remf": "frem"},
    **{"precise_divf": "fdiv"},
}
_CASTS = {
    **{"extsi": "sext", "extui": "zext", "trunci": "trunc", "sitofp": "sitofp"},
    **{"uitofp": "uitofp", "index_cast": "sext"},
}
_FUNCTIONS: dict[str, Callable[[Code, str, Lane], str]] = {
    **{"exp2": exponentials.exp2, "exp": exponentials.exp},
    **{"log2": exponentials.log2, "log": exponentials.log},
}
_LIBRARY = {
    **{"absf": "fabs", "precise_sqrt": "sqrt"},
    **{name: name for name in ("sqrt", "floor", "ceil", "sin", "cos", *_FUNCTIONS)},
}
_CALLED = {"erf": "erf"}
"""Functions of the C library for which LLVM has no intrinsic."""


def compute(
    code: Code, op: Op, elems: Sequence[str], to: str, values: Sequence[str], lane: Lane
) -> str:
    """Write an elementwise operation and return its result.

    `elems` are the element types of the operands, and `to` that of the result. Raises Unsupported
    for an unknown operation.
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
        return code.emit(
            f"{test} {op.text.partition(',')[0].strip()} {vector} {values[0]}, {values[1]}"
        )
    if kind == "select":
        return code.select(values[0], values[1], values[2], REGISTER[to], lane)
    if kind == "absi":
        zero = code.number(type_, 0, lane)
        negative = code.emit(f"icmp slt {vector} {values[0]}, {zero}")
        return code.select(
            negative, code.emit(f"sub {vector} {zero}, {values[0]}"), values[0], type_, lane
        )
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
    if kind in _LIBRARY:
        result = code.intrinsic(_LIBRARY.get(kind, kind), type_, lane, *values)
        return rounded(code, result, elem, lane)
    if kind in _CALLED:
        name = _CALLED[kind] + "f" * (type_ == "float")
        return rounded(code, _of_each(code, name, type_, values[0], lane), elem, lane)
    if kind == "fma":
        return rounded(code, fused(code, *values, lane=lane, type_=type_), elem, lane)
    raise op.refused("unknown to the CPU compiler; use a GPU, or TILEGEN_CPU=torch")


def reduced(code: Code, op: Op, elem: str, so_far: str, value: str, lane: Lane) -> str:
    """Write one step of a reduction and return the new accumulator.

    The accumulator of a maximum starts at -infinity and drops every NaN, so it is never NaN. Then a
    compare and a select are enough, a single instruction on x86.
    """
    type_ = REGISTER[elem]
    if op.name in ("arith.maxnumf", "arith.minnumf"):
        order = "ogt" if op.name == "arith.maxnumf" else "olt"
        test = code.emit(f"fcmp {order} {typed(type_, lane)} {value}, {so_far}")
        return code.select(test, value, so_far, type_, lane)
    return compute(code, op, [elem, elem], elem, [so_far, value], lane)


def _divided(code: Code, name: str, type_: str, a: str, b: str, lane: Lane) -> str:
    """Divide integers. x / 0 is x with remainder 0, where the processor would trap."""
    vector = typed(type_, lane)
    if b.startswith("splat") or not b.startswith("%"):
        return code.emit(f"{name} {vector} {a}, {b}")
    zero, unit = code.number(type_, 0, lane), code.number(type_, 1, lane)
    if name in ("udiv", "urem"):
        test = code.emit(f"icmp eq {vector} {b}, {zero}")
        return code.emit(f"{name} {vector} {a}, {code.select(test, unit, b, type_, lane)}")
    # The smallest integer divided by -1 traps too.
    less_one = code.number(type_, -1, lane)
    shifted = code.emit(f"add {vector} {b}, {unit}")
    special = code.emit(f"icmp ult {vector} {shifted}, {code.number(type_, 2, lane)}")
    result = code.emit(f"{name} {vector} {a}, {code.select(special, unit, b, type_, lane)}")
    if name == "srem":
        return result
    negates = code.emit(f"icmp eq {vector} {b}, {less_one}")
    return code.select(negates, code.emit(f"sub {vector} {zero}, {a}"), result, type_, lane)


def _extreme(code: Code, kind: str, type_: str, a: str, b: str, lane: Lane) -> str:
    """Return the larger or smaller value. Kinds with `num` drop a NaN, the others keep it."""
    vector = typed(type_, lane)
    order = "ogt" if kind.startswith("max") else "olt"
    best = code.select(code.emit(f"fcmp {order} {vector} {a}, {b}"), a, b, type_, lane)
    # `best` is b if a or b is NaN.
    test = code.emit(
        f"fcmp uno {vector} {b}, {b}" if "num" in kind else f"fcmp uno {vector} {a}, {a}"
    )
    return code.select(test, a, best, type_, lane)


def _of_each(code: Code, name: str, type_: str, value: str, lane: Lane) -> str:
    """Call a function of the C library for each element."""
    code.module.declare(f"declare {type_} @{name}({type_})")
    if not lane:
        return code.emit(f"call {type_} @{name}({type_} {value})")
    vector, result = typed(type_, lane), "poison"
    for i in range(lane[1]):
        element = code.emit(f"extractelement {vector} {value}, i32 {i}")
        element = code.emit(f"call {type_} @{name}({type_} {element})")
        result = code.emit(f"insertelement {vector} {result}, {type_} {element}, i32 {i}")
    return result


def _to_integer(code: Code, kind: str, type_: str, value: str, to: str, lane: Lane) -> str:
    """Convert to an integer. As on a GPU, values out of range saturate and NaN gives 0."""
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
