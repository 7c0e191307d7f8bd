"""Values in registers: tiles, and integers as C has them. Arithmetic rounds where the machine's
does: tiles of fp16 and bf16 only convert, products of them accumulate in fp32."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.gluon.memory_model.faults import Fault, NotModelled

INT32 = -(2**31), 2**31 - 1
_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NUMPY: dict[str, type[Any]] = {
    **{"fp32": np.float32, "bf16": np.float32, "fp16": np.float32},
    **{"int32": np.int64, "int64": np.int64, "uint8": np.int64, "int1": np.bool_},
}
"""Types that hold the values of a dtype exactly."""


def numpy_type(dtype: Any) -> type[Any]:
    """Return the NumPy type that holds a dtype's values. Raises NotModelled."""
    if (actual := _NUMPY.get(str(dtype))) is None:
        raise NotModelled(f"expected a dtype out of {', '.join(_NUMPY)}, got {dtype}")
    return actual


def rounded(data: np.ndarray, dtype: Any) -> np.ndarray:
    """Return values as a dtype holds them, rounded to the nearest, ties to even."""
    if (narrow := _TORCH.get(str(dtype))) is None:
        return data.astype(numpy_type(dtype), copy=False)
    return torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(narrow).float().numpy()


_WIDER = ("int32", "int64", "fp32")
"""Dtypes that an operation of two operands promotes, to the later one."""


class Int(int):
    """A 32-bit integer that only the run knows: `//` and `%` round to zero, as in C."""

    def __floordiv__(self, other: Any) -> Any:
        return _divided(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _divided(other, self)

    def __mod__(self, other: Any) -> Any:
        return _remainder(self, other)

    def __rmod__(self, other: Any) -> Any:
        return _remainder(other, self)

    def __neg__(self) -> Int:
        return _checked(-int(self))

    def to(self, dtype: Any) -> Int:
        """Return the integer: widths beyond 32 bits are not told apart."""
        return self


def _checked(value: int) -> Int:
    if not INT32[0] <= value <= INT32[1]:
        raise Fault(f"a 32-bit integer overflows: {value}")
    return Int(value)


def _divided(value: Any, other: Any) -> Any:
    if not isinstance(other, int) or not isinstance(value, int):
        return NotImplemented
    if other == 0:
        raise Fault(f"{value} // 0")
    size = abs(int(value)) // abs(int(other))
    return _checked(size if (value < 0) == (other < 0) else -size)


def _remainder(value: Any, other: Any) -> Any:
    if not isinstance(other, int) or not isinstance(value, int):
        return NotImplemented
    return _checked(int(value) - int(_divided(value, other)) * int(other))


def _integer_operation(name: str) -> Callable[[Int, Any], Any]:
    plain = getattr(int, name)

    def run(self: Int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return _checked(plain(int(self), int(other)))

    return run


for _name in ("add", "sub", "mul", "and", "or", "xor", "lshift", "rshift"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(Int, _side, _integer_operation(_side))


class Tile:
    """A distributed tensor. One that an asynchronous product still writes has no values yet."""

    __array_ufunc__ = None  # NumPy leaves operators to this class

    def __init__(self, data: np.ndarray, dtype: Any, layout: Any = None) -> None:
        """`data` holds values of the dtype exactly."""
        self._data = data
        self.dtype = dtype
        self.layout = layout
        self.in_flight = ""
        """The operation that still writes the tile, in words; empty if the values are there."""

    @property
    def data(self) -> np.ndarray:
        """The values. Raises Fault while they are written."""
        if self.in_flight:
            raise Fault(f"registers are read that {self.in_flight} still writes")
        return self._data

    @property
    def late_data(self) -> np.ndarray:
        """The values, including those of writes in flight."""
        return self._data

    @property
    def shape(self) -> list[int]:
        """The length of each dimension of the tile."""
        return list(self._data.shape)

    def to(self, dtype: Any) -> Tile:
        """Return the values rounded to a dtype."""
        return Tile(rounded(self.data, dtype), dtype, self.layout)

    def __getitem__(self, key: Any) -> Tile:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(one is None or one == slice(None) for one in parts):
            raise NotModelled(f"expected [:, None] or [None, :], got {key}")
        return Tile(self.data[key], self.dtype, self.layout)

    def __neg__(self) -> Tile:
        return Tile(-self.data, self.dtype, self.layout)

    def __invert__(self) -> Tile:
        return Tile(~self.data, self.dtype, self.layout)

    def __bool__(self) -> bool:
        raise Fault("a tile is no condition")


def as_operand(value: Any, like: Any) -> tuple[np.ndarray, Any]:
    """Return the values and the dtype of an operand; numbers take the dtype beside them."""
    if isinstance(value, Tile):
        return value.data, value.dtype
    if isinstance(value, bool | int | float | np.floating):
        if str(like) in ("fp32", "bf16", "fp16"):
            return np.asarray(np.float32(value)), like
        if isinstance(value, int):
            return np.asarray(int(value)), like
    raise NotModelled(f"expected a tile or a number beside {like}, got {type(value).__name__}")


def combined(run: Callable[..., np.ndarray], value: Any, other: Any, gives: Any = None) -> Tile:
    """Return an element-wise operation of two operands, one of them a tile."""
    first = value if isinstance(value, Tile) else other
    a, dtype = as_operand(value, first.dtype)
    b, other_dtype = as_operand(other, first.dtype)
    names = {str(dtype), str(other_dtype)}
    if len(names) > 1 and names <= set(_WIDER):  # as Triton promotes
        dtype = max((dtype, other_dtype), key=lambda x: _WIDER.index(str(x)))
        names = {str(dtype)}
        a, b = a.astype(numpy_type(dtype)), b.astype(numpy_type(dtype))
    if len(names) > 1:
        raise NotModelled(f"expected operands of one dtype, got {' and '.join(sorted(names))}")
    if names & {"bf16", "fp16"} and gives is None:
        raise NotModelled(f"arithmetic of {dtype} is not modelled: convert to fp32 first")
    with np.errstate(all="ignore"):
        record = run(a, b)
    if gives is None and str(dtype) == "int32":
        low, high = (int(record.min()), int(record.max())) if record.size else (0, 0)
        if low < INT32[0] or high > INT32[1]:
            raise Fault(f"a 32-bit integer of a tile overflows: {low if low < INT32[0] else high}")
    kept = gives or dtype
    return Tile(record.astype(numpy_type(kept), copy=False), kept, first.layout)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind != "f" or b.dtype.kind != "f":
        raise NotModelled("a / b of integers is not modelled")
    return a / b


def _divide_to_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if (b == 0).any():
        raise Fault("a tile is divided by 0")
    return np.sign(a) * np.sign(b) * (abs(a) // abs(b))


def _remainder_to_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divide_to_zero(a, b) * b


ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": _divide,
    "floordiv": _divide_to_zero,
    "mod": _remainder_to_zero,
    "and": operator.and_,
    "or": operator.or_,
}
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def add_operators(boolean: Any) -> None:
    """Give tiles their operators; `boolean` is the dtype of comparisons."""
    for name, run in ARITHMETIC.items():

        def forward(self: Tile, other: Any, run: Any = run) -> Tile:
            return combined(run, self, other)

        def backward(self: Tile, other: Any, run: Any = run) -> Tile:
            return combined(run, other, self)

        setattr(Tile, f"__{name}__", forward)
        setattr(Tile, f"__r{name}__", backward)
    for name in COMPARISONS:
        run = getattr(operator, name)

        def compare(self: Tile, other: Any, run: Any = run) -> Tile:
            return combined(run, self, other, gives=boolean)

        setattr(Tile, f"__{name}__", compare)
