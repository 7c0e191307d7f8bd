"""Arguments of emitted kernels, as records: templates print them, launches fill them in.

A kernel has a few `Line`s, each of which is a line of its parameter list. Each argument names the
tensor or number that it comes from, and the part that it takes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tilegen.kernels.tensors import Number, Tensor

if TYPE_CHECKING:
    from tilegen.masks.mask import Side

Taken = Literal[
    "address", "descriptor", "stride", "size", "units", "number", "base 2", "flag", "nothing"
]
"""The part of a tensor or number that an argument holds: the address; a descriptor of tiles; a
stride, in the kernel's unit; a size; a size in that unit; the number itself; a scale times log2(e),
above 0; a truth value as an int. Scratch pointers, which these kernels do not use, hold nothing."""


@dataclass(frozen=True)
class Argument:
    """One argument of an emitted kernel."""

    name: str
    type: str
    """Triton's name of the type; `element` stands for the problem's dtype. Empty for pointers whose
    element type only a mask or a score knows."""
    of: str
    """The tensor or number that the argument comes from, by its name in `launch`."""
    taken: Taken
    axis: int = 0
    """The dimension of a stride or a size; the columns of a descriptor's tiles."""
    rows: int = 0
    """The rows of a descriptor's tiles."""

    def type_for(self, dtype: str) -> str:
        """Return the argument's Triton type for a problem's dtype."""
        return self.type.replace("element", dtype)

    @property
    def expression(self) -> str:
        """The expression that the emitted `launch` passes: a tensor instead of an address, and
        sizes by name, before a division by the unit of strides."""
        match self.taken:
            case "units":
                return self.name.removesuffix("_units")
            case "base 2":  # dropped scores are -inf before they are scaled: 0 would make them NaN
                return f"max({self.of} * {math.log2(math.e)!r}, 2.0**-149)"
            case "flag":
                return f"int({self.of})"
            case "address" | "number":
                return self.of
            case _:
                return self.name


@dataclass(frozen=True)
class Line:
    """Arguments that share a line, and a comment on them."""

    arguments: tuple[Argument, ...]
    why: str = ""

    @property
    def names(self) -> str:
        """The arguments' names, separated by commas."""
        return ", ".join(argument.name for argument in self.arguments)

    @property
    def parameters(self) -> str:
        """The line in the kernel's list of parameters."""
        return f"{self.names}," + (f"  # {self.why}" if self.why else "")

    def without(self, tensors: Collection[str]) -> Line:
        """Return the line without the arguments of some tensors."""
        kept = tuple(argument for argument in self.arguments if argument.of not in tensors)
        return self if kept == self.arguments else replace(self, arguments=kept)

    @property
    def expressions(self) -> list[str]:
        """The expressions that the emitted `launch` passes for the line."""
        sizes = [one.of for one in self.arguments if one.name == f"{one.of}_n{one.axis}"]
        passed = (
            one.expression
            if one.name != f"{one.of}_n{one.axis}"
            else f"*{one.of}.shape"
            if sizes.count(one.of) > 1
            else f"{one.of}.numel()"  # in less than half the time of a shape
            for one in self.arguments
        )
        return list(dict.fromkeys(passed))


def pointers(tensors: Iterable[Tensor]) -> Line:
    """Return the addresses of tensors."""
    return Line(
        tuple(
            Argument(one.address or f"{one.name}_ptr", f"*{one.dtype}", one.name, "address")
            for one in tensors
        )
    )


def strides(tensor: Tensor, why: str = "") -> Line:
    """Return the strides of a tensor: batch, head and row, or head and row of a panel."""
    axes = "hm" if tensor.is_panel else "bhn" if tensor.side == "columns" else "bhm"
    why = " ".join(filter(None, (why, tensor.stride_note)))
    name = tensor.stride_name or tensor.name
    return Line(
        tuple(
            Argument(f"stride_{name}{axis}", "i32", tensor.name, "stride", i)
            for i, axis in enumerate(axes)
        ),
        why,
    )


def sizes(names: str, tensors: Iterable[Tensor], why: str = "") -> Line:
    """Return sizes by name, read from tensors that have them; others are arguments of `launch`."""
    return Line(tuple(size(name, tensors) for name in names.split()), why)


def size(name: str, tensors: Iterable[Tensor]) -> Argument:
    """Return a size by name. It is read from the first of the tensors with strides that has it,
    then from others, small ones first. Otherwise it is an argument of `launch`."""
    if name.endswith("_units"):
        return replace(size(name.removesuffix("_units"), tensors), name=name, taken="units")
    having = [one for one in tensors if name in one.sizes]
    if not having:
        return Argument(name, "i32", name, "number")
    of = min(having, key=lambda one: (not one.is_strided, len(one.sizes)))
    return Argument(name, "i32", of.name, "size", of.sizes.index(name))


def names_of(given: Tensor | Line | Number) -> tuple[str, ...]:
    """Return the names of the parameters of `launch` from which an input is taken."""
    if isinstance(given, Line):
        return tuple(one.of for one in given.arguments if one.taken not in ("size", "units"))
    return (given.name,)


def places(tensors: Collection[Tensor]) -> tuple[Line, ...]:
    """Return the addresses of tensors, the strides of those with any, and of a panel."""
    strided = [one for one in tensors if one.is_strided]
    return (
        pointers(sorted(tensors, key=lambda one: one.dtype == "i32")),
        *(
            strides(one, "" if i else "batch, head and row strides")
            for i, one in enumerate(strided)
        ),
        *[strides(one) for one in tensors if one.is_panel][:1],
    )


def usual_sizes(tensors: Collection[Tensor], stationary: Side, *, splits: bool) -> Line:
    """Return the sizes that kernels take: heads of the stationary side, and lengths of tensors with
    strides. With `splits`, also the number of splits."""
    lengths = {size for one in tensors if one.is_strided for size in one.sizes}
    names = ["num_heads_kv" if stationary == "columns" else "num_heads_q"]
    names += [size for size in ("seqlen_q", "seqlen_kv") if size in lengths]
    return sizes(" ".join([*names, *(["num_splits"] if splits else [])]), tensors)


def numbers(*names: str, why: str = "") -> Line:
    """Return integers that are arguments of `launch` by the same names."""
    return Line(tuple(Argument(name, "i32", name, "number") for name in names), why)


def flags(*names: str, why: str = "") -> Line:
    """Return truth values that are arguments of `launch` by the same names."""
    return Line(tuple(Argument(name, "i32", name, "flag") for name in names), why)


def factor(name: str, why: str = "") -> Line:
    """Return an fp32 number that is an argument of `launch` by the same name."""
    return Line((Argument(name, "fp32", name, "number"),), why)


SCALE_IN_BASE_2 = Line(
    (Argument("softmax_scale_log2", "fp32", "softmax_scale", "base 2"),),
    "softmax scale * log2(e), above 0",
)
"""The scale of kernels that scale scores and convert them to base 2 in one product; at least the
smallest fp32 number above 0."""
SCALE = factor("softmax_scale", "not negative")
"""The scale of kernels that change scores before converting them to base 2."""


def tensor(name: str, type_: str, dimensions: int) -> tuple[Argument, ...]:
    """Return the address and the sizes of a tensor that a mask or a score reads."""
    shape = (Argument(f"{name}_n{i}", "i32", name, "size", i) for i in range(dimensions))
    return Argument(f"{name}_ptr", type_, name, "address"), *shape


LISTS = Line(
    (
        Argument("tiles_ptr", "*i32", "tiles", "address"),
        Argument("starts_ptr", "*i64", "starts", "address"),
        Argument("tiles_sb", "i32", "tiles_sb", "number"),
        Argument("tiles_sh", "i32", "tiles_sh", "number"),
    ),
    "lists of tiles; strides in lists",
)
"""Lists of tiles, for masks without a closed form."""
SINKS = Line((Argument("sinks_ptr", "*fp32", "sinks", "address"),), "a logit per query head")
DROPOUT = Line(
    (
        Argument("dropout_ptr", "*i64", "dropout", "address"),
        Argument("dropout_p", "fp32", "dropout_p", "number"),
    ),
    "seed and offset; the probability that a weight is dropped",
)
"""Arguments that dropout adds to kernels that drop weights."""

_BY_NAME = {one.name: one for line in (LISTS, SINKS, DROPOUT, SCALE) for one in line.arguments}

_TENSOR = re.compile(r"([tc]\d+)_ptr")
_SIZE = re.compile(r"([tc]\d+)_n(\d)")
_GRADIENT = re.compile(r"(dc\d+)_ptr")
_SCRATCH = re.compile(r"scratch_\d+")


def extra(name: str) -> Argument | None:
    """Return the argument of a name that a mask, a score, dropout or Triton adds; None for other
    names.

    `t0` and `c0` are tensors of a mask and of a score; `dc0` is the gradient of `c0`.
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
