"""Arguments of emitted kernels, as records: a template prints them, a launch fills them in.

A kernel's list is a few `Line`s, each a line of its parameters. The value of an argument is given
once: by the tensor or number to take it from, and by the part to take.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

Taken = Literal[
    "address", "descriptor", "stride", "size", "units", "number", "base 2", "flag", "nothing"
]
"""Parts of a tensor or number that an argument holds: its address; a descriptor of its tiles; a
stride, in the kernel's unit; a size; a size in that unit; the number itself; a scale times log2(e),
above 0; a truth value as an int. Scratch pointers, which kernels here do not use, hold nothing."""

FP32_TENSORS = frozenset(
    ("lse", "delta", "maxima", "sums", "acc", "sinks", "partials", "partial_lse")
)
"""Tensors of fp32, whatever the dtype of a problem; a kernel may have others."""
PANELS = frozenset(("weights", "ds", "panel"))
"""Tensors (heads, rows, columns) that kernels of a panel share, all of the same strides."""
COLUMN_TENSORS = frozenset(("k", "v", "dk", "dv", "grad"))
"""Tensors whose rows are key-value rows."""
_STRIDE_NAMES = {"out": "o", "dout": "do", "grad": "g", **dict.fromkeys(PANELS, "w")}
"""Names of tensors in the names of their strides, where these are not the tensors' own."""
_SIZES: dict[str, tuple[str, int]] = {
    "batch": ("q out dq y dk k", 0),
    "num_heads_q": ("q out dq y", 1),
    "seqlen_q": ("q out dq y", 2),
    "num_heads_kv": ("k v grad dk", 1),
    "seqlen_kv": ("k v grad dk", 2),
    "head_dim": ("grad", 3),
    "head_dim_qk": ("k q", 3),
    "head_dim_v": ("v", 3),
    "num_heads": ("weights ds panel", 0),
    "num_rows": ("weights ds panel", 1),
    "score_tiles": ("maxima", 1),
    "num_splits": ("partial_lse", 2),
    "total_q": ("q", 2),
}
"""Tensors that a size is read from, of which the first that a kernel has counts, and the
dimension."""


@dataclass(frozen=True)
class Argument:
    """One argument of an emitted kernel."""

    name: str
    type: str
    """The type as Triton names it; `element` stands for the problem's dtype. Empty for a pointer to
    elements that only masks and scores know."""
    of: str
    """The tensor or number that the argument is taken from, as `launch` names it."""
    taken: Taken
    axis: int = 0
    """The dimension of a stride or a size; the columns of a descriptor's tiles."""

    def type_for(self, dtype: str) -> str:
        """Return the type in a kernel for a dtype."""
        return self.type.replace("element", dtype)

    @property
    def expression(self) -> str:
        """The expression that the emitted `launch` passes; sizes have names there."""
        match self.taken:
            case "units":
                return f"{self.name.removesuffix('_units')} // STRIDE_UNIT.value"
            case "base 2":
                return f"max({self.of} * math.log2(math.e), 2.0**-149)"
            case "flag":
                return f"int({self.of})"
            case "address" | "number":
                return self.of
            case "descriptor":
                rows = "BLOCK_N" if self.of in COLUMN_TENSORS else "BLOCK_M"
                return f"_described({self.of}, {rows}.value, {self.axis})"
            case _:
                return self.name


@dataclass(frozen=True)
class Line:
    """Some arguments that stand together, and a comment on them."""

    arguments: tuple[Argument, ...]
    why: str = ""

    @property
    def names(self) -> str:
        """The arguments' names, separated by commas."""
        return ", ".join(one.name for one in self.arguments)

    @property
    def parameters(self) -> str:
        """The line in the kernel's list of parameters."""
        return f"{self.names}," + (f"  # {self.why}" if self.why else "")

    def without(self, tensor: str) -> Line:
        """Return the line with none of a tensor's arguments."""
        if all(one.of != tensor for one in self.arguments):
            return self
        return replace(self, arguments=tuple(one for one in self.arguments if one.of != tensor))

    @property
    def expressions(self) -> list[str]:
        """The expressions that the emitted `launch` passes for the line."""
        first = self.arguments[0]
        if first.taken == "stride":
            if first.of in PANELS:
                return [f"*(stride // STRIDE_UNIT.value for stride in {first.of}.stride()[:2])"]
            return [f"*_strides({first.of})"]
        passed = (
            f"*{one.of}.shape" if one.name == f"{one.of}_n{one.axis}" else one.expression
            for one in self.arguments
        )
        return list(dict.fromkeys(passed))


def pointers(*tensors: str, fp32: Collection[str] = ()) -> Line:
    """Return the addresses of tensors, of which FP32_TENSORS and `fp32` are of fp32."""
    types = {one: "*fp32" for one in (*FP32_TENSORS, *fp32)}
    return Line(
        tuple(Argument(f"{one}_ptr", types.get(one, "*element"), one, "address") for one in tensors)
    )


def strides(tensor: str, why: str = "") -> Line:
    """Return the strides of a tensor: batch, head and row, or head and row of a panel."""
    name = _STRIDE_NAMES.get(tensor, tensor)
    axes = "hm" if tensor in PANELS else "bhn" if tensor in COLUMN_TENSORS else "bhm"
    return Line(
        tuple(
            Argument(f"stride_{name}{axis}", "i32", tensor, "stride", i)
            for i, axis in enumerate(axes)
        ),
        why,
    )


def sizes(names: str, tensors: str, why: str = "") -> Line:
    """Return sizes by their names; each is read from one of `tensors`, or given as a number."""
    return Line(tuple(size(name, tensors.split()) for name in names.split()), why)


def size(name: str, tensors: list[str] | tuple[str, ...]) -> Argument:
    """Return the size of a name, read from one of `tensors`; a number where none of them has it."""
    if name.endswith("_units"):
        return replace(size(name.removesuffix("_units"), tensors), name=name, taken="units")
    candidates, axis = _SIZES.get(name, ("", 0))
    of = next((one for one in candidates.split() if one in tensors), None)
    if of is None:
        return Argument(name, "i32", name, "number")
    return Argument(name, "i32", of, "size", axis)


def size_name(tensor: str, axis: int, among: tuple[str, ...]) -> str:
    """Return the name of a tensor's size: one of `among` that fits, else the usual name."""
    fitting = [name for name, (of, at) in _SIZES.items() if tensor in of.split() and at == axis]
    return next((name for name in fitting if name in among), fitting[0])


def numbers(*names: str, why: str = "") -> Line:
    """Return integers that `launch` is given under the same names."""
    return Line(tuple(Argument(name, "i32", name, "number") for name in names), why)


def flags(*names: str, why: str = "") -> Line:
    """Return truth values that `launch` is given under the same names."""
    return Line(tuple(Argument(name, "i32", name, "flag") for name in names), why)


def factor(name: str, why: str = "") -> Line:
    """Return an fp32 number that `launch` is given under the same name."""
    return Line((Argument(name, "fp32", name, "number"),), why)


SCALE_IN_BASE_2 = Line(
    (Argument("softmax_scale_log2", "fp32", "softmax_scale", "base 2"),),
    "softmax scale * log2(e), above 0",
)
"""The scale of kernels that take scores to base 2 with it, at least LEAST_SCALE."""
LEAST_SCALE = 2.0**-149
"""The least number of fp32 above 0: a scale of 0 would make NaN of dropped scores, which are -inf
before they are scaled."""
SCALE = factor("softmax_scale", "not negative")
"""The scale of kernels that change scores before they take them to base 2."""


def tensor(name: str, type_: str, dimensions: int) -> tuple[Argument, ...]:
    """Return the address of a tensor that a mask or a score reads, and its sizes."""
    shape = (Argument(f"{name}_n{i}", "i32", name, "size", i) for i in range(dimensions))
    return Argument(f"{name}_ptr", type_, name, "address"), *shape


PAGES = (
    Argument("table_ptr", "*i32", "block_table", "address"),
    Argument("lengths_ptr", "*i32", "lengths", "address"),
    Argument("q_starts_ptr", "*i32", "q_starts", "address"),
)
"""The pages of each request, its number of keys, and where its queries start."""
LISTS = Line(
    (
        Argument("tiles_ptr", "*i32", "tiles", "address"),
        Argument("starts_ptr", "*i64", "starts", "address"),
        Argument("tiles_sb", "i32", "tiles_sb", "number"),
        Argument("tiles_sh", "i32", "tiles_sh", "number"),
    ),
    "lists of tiles; strides in lists",
)
"""Lists of tiles, of masks without a closed form."""
SINKS = Line((Argument("sinks_ptr", "*fp32", "sinks", "address"),), "a logit per query head")
DROPOUT = Line(
    (
        Argument("dropout_ptr", "*i64", "dropout", "address"),
        Argument("dropout_p", "fp32", "dropout_p", "number"),
    ),
    "seed and offset; the probability that a weight is dropped",
)
"""Arguments that dropout reads, in kernels that drop weights."""

_BY_NAME = {one.name: one for line in (LISTS, SINKS, DROPOUT, SCALE) for one in line.arguments}

_TENSOR = re.compile(r"([tc]\d+)_ptr")
_SIZE = re.compile(r"([tc]\d+)_n(\d)")
_GRADIENT = re.compile(r"(dc\d+)_ptr")
_SCRATCH = re.compile(r"scratch_\d+")


def extra(name: str) -> Argument | None:
    """Return the argument of a name that a mask, a score or dropout adds, or that Triton appends;
    None for other names.

    `t0` and `c0` are tensors of a mask and of a score, `dc0` the gradient of such a one.
    """
    if match := _TENSOR.fullmatch(name):
        return Argument(name, "", match[1], "address")
    if match := _SIZE.fullmatch(name):
        return Argument(name, "i32", match[1], "size", int(match[2]))
    if match := _GRADIENT.fullmatch(name):
        return Argument(name, "*fp32", match[1], "address")
    if _SCRATCH.fullmatch(name):
        return Argument(name, "*u8", name, "nothing")
    return _BY_NAME.get(name)
