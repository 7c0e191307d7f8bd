"""Triton's interpreter, made right for bfloat16, quicker, and able to count what a kernel loads
and stores: an oracle that shares nothing with the compiler for the CPU.

The interpreter runs emitted kernels on CPU tensors when TRITON_INTERPRET=1 is set before Triton is
first imported.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tilegen import cpu
from tilegen.errors import Unsupported

_KNOWN = ((3, 6), (3, 9))
"""Oldest and newest version of Triton whose interpreter is made quicker."""


@dataclass
class Traffic:
    """Traffic of loads and stores [bytes]; masked-off elements are not counted."""

    read_bytes: int = 0
    write_bytes: int = 0


def trouble() -> str:
    """Return why the interpreter cannot work with the packages that are installed, or nothing.

    Up to Triton 3.6 it makes numbers of arrays with one element, which numpy refuses from 2.4 on.
    """
    triton, numpy = version("triton"), version("numpy")
    if _release(triton) >= (3, 7) or _release(numpy) < (2, 4):
        return ""
    return (
        f"Triton's interpreter needs triton from 3.7 on, or numpy below 2.4; found triton {triton} "
        f"and numpy {numpy}"
    )


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def prepare() -> None:
    """Make the interpreter right for bfloat16, and quicker, and have calls on CPU tensors run in
    it. Raises Unsupported if it cannot work."""
    if reason := trouble():
        raise Unsupported(reason)
    repair_bfloat16()
    repair_comparisons()
    skip_idle_work()
    cpu.serves_calls = lambda: True


@cache
def repair_bfloat16() -> None:
    """Replace the interpreter's bfloat16 arithmetic, once.

    It stores bfloat16 as 16-bit patterns; up to Triton 3.9 `tl.dot` multiplies those patterns as
    integers, and rounding from fp32 truncates where GPUs round to nearest even.
    """
    import triton.language as tl

    builder, handle = _builder(), _handle_type()
    cast_impl, create_dot = builder.cast_impl, builder.create_dot

    def cast(src: Any, dst_type: Any) -> Any:
        types = (src.dtype.scalar, dst_type.scalar)
        if types == (tl.float32, tl.bfloat16):
            return handle(_round_to_bfloat16(src.data), tl.bfloat16)
        if types == (tl.bfloat16, tl.float32):
            return handle(_from_bfloat16(src.data), tl.float32)
        return cast_impl(src, dst_type)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        a, b = (
            handle(_from_bfloat16(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x
            for x in (a, b)
        )
        return create_dot(a, b, *rest)

    builder.cast_impl, builder.create_dot = cast, dot


@cache
def repair_comparisons() -> None:
    """Have the interpreter take the result of comparing two fp32 scalars for a bool, once.

    It keeps the operands' type, so that a block made of the result holds floats, which `&` refuses.
    """
    import triton.language as tl

    builder, handle = _builder(), _handle_type()
    create_splat = builder.create_splat

    def splat(shape: Any, value: Any) -> Any:
        compared = value.data.dtype == bool
        return create_splat(shape, handle(value.data, tl.int1) if compared else value)

    builder.create_splat = splat


@cache
def skip_idle_work() -> None:
    """Patch the interpreter permanently to skip work without effect, most of a kernel's time.

    It patches `triton.language` again whenever a kernel calls a function, such as `tl.sum`, and
    finds all of it patched by then.
    """
    if not _KNOWN[0] <= _release(version("triton")) <= _KNOWN[1]:
        return
    import triton.language as tl
    import triton.runtime.interpreter

    builder, module = _builder(), cast("Any", triton.runtime.interpreter)
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)

    patch, patched = module._patch_lang, set[int]()

    def patch_once(fn: Any) -> Any:
        names = {id(tl), id(tl.core)}.intersection(map(id, fn.__globals__.values()))
        if names and names <= patched:
            return module._LangPatchScope()
        scope = patch(fn)
        if not patched:  # a launch, whose end undoes it
            _remember_operators(scope)
            # Infinities and what comes of them are part of kernels; a GPU does not warn of them.
            settings = np.seterr(all="ignore")

            def restore(undo: Callable[[], None] = scope.restore) -> None:
                patched.clear()
                undo()
                np.seterr(**settings)

            scope.restore = restore
        patched.update(names)
        return scope

    module._patch_lang = patch_once
    _remember_types(module)


def _remember_types(module: Any) -> None:
    """Keep what the interpreter finds out about a type: its dtype in numpy, and what a value or a
    block of it is made with, but for the handle and the types themselves. Values of one `kind` have
    equal types."""
    import triton.language as tl

    core = cast("Any", tl.core)
    make_value, make_block = core.tensor.__init__, core.block_type.__init__
    values, blocks = dict[Any, dict[str, Any]](), dict[Any, dict[str, Any]]()
    dtypes, dtype_of = dict[str, Any](), module._get_np_dtype

    def value(self: Any, handle: Any, type: Any) -> None:
        key = (type.scalar.name, type.shape if type.is_block() else ())
        if (known := values.get(key)) is None:
            make_value(self, handle, type)
            self.kind = len(values)
            values[key] = dict(self.__dict__)
            return
        self.__dict__.update(known)
        self.handle, self.type, self.dtype = handle, type, type.scalar

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if (known := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
            return
        self.__dict__.update(known)
        self.element_ty = element_ty

    def dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(type)
        return dtypes[name]

    core.tensor.__init__, core.block_type.__init__ = value, block
    module._get_np_dtype = dtype


def _quotient(left: Any, right: Any) -> Any:
    """Return integers divided and rounded towards 0, as kernels and the interpreter divide."""
    return (left - np.fmod(left, right)) // right


_OPERATORS: dict[str, Any] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
    "__floordiv__": _quotient,
    "__mod__": np.fmod,
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
}
_NUMBERS = {int: "int", float: "fp32"}
_REFLECTED = {name.replace("__", "__r", 1): name for name in _OPERATORS}


@dataclass
class _Operation:
    """An operator on operands of certain types: how numpy computes it, and the attributes of the
    result but for its handle."""

    compute: Callable[[Any, Any], Any]
    dtype: Any
    attributes: dict[str, Any]


_operations = dict[Any, _Operation | None]()
"""Operations by the operator and the types of the operands; None if numpy alone does not compute
one."""


def _remember_operators(scope: Any) -> None:
    """Have numpy alone compute operators, which broadcasts, and reshape blocks (`x[:, None]`), as
    long as the launch of `scope` lasts.

    Triton's way of converting and broadcasting operands costs far more than what it computes. An
    operation of certain types goes Triton's way once, and by numpy if that gave the same bits.
    """
    import triton.language as tl

    tensor, constexpr, handle_of = tl.core.tensor, tl.core.constexpr, _handle_type()

    def made(operation: _Operation, left: Any, right: Any) -> Any:
        result = object.__new__(tensor)
        result.__dict__.update(operation.attributes)
        data = operation.compute(left.handle.data, right)
        result.handle = handle_of(data, operation.dtype)
        return result

    def quick(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        def operator(self: Any, other: Any, **_: Any) -> Any:
            if type(other) is constexpr:
                other = other.value
            if (kind := type(other)) is tensor:
                key, right = (name, self.kind, other.kind), other.handle.data
            elif _is_plain(other):
                key, right = (name, self.kind, kind), other
            else:
                return slow(self, other)
            if key not in _operations:
                actual = slow(self, other)
                _operations[key] = _operation(name, self, other, right, actual)
                return actual
            if (operation := _operations[key]) is None:
                return slow(self, other)
            return made(operation, self, right)

        return operator

    for name in (*_OPERATORS, *_REFLECTED):
        if (slow := getattr(tensor, name, None)) is not None:
            scope.set_attr(tensor, name, quick(name, slow))

    slow_item, every = tensor.__getitem__, slice(None)

    def item(self: Any, slices: Any, **_: Any) -> Any:
        """Return a block with more dimensions of one element: `x[:, None]`."""
        key = (self.kind, *(one is None for one in slices)) if type(slices) is tuple else None
        if key is None or any(one is not None and one != every for one in slices):
            return slow_item(self, slices)
        if key not in _operations:
            actual, data = slow_item(self, slices), self.handle.data[slices]
            same = data.shape == actual.handle.data.shape
            known = _Operation(np.ndarray.__getitem__, actual.handle.dtype, _attributes(actual))
            _operations[key] = known if same else None
            return actual
        if (operation := _operations[key]) is None:
            return slow_item(self, slices)
        return made(operation, self, slices)

    scope.set_attr(tensor, "__getitem__", item)


def _is_plain(number: Any) -> bool:
    """True for a Python number that is an int32, or an fp32 that is not subnormal."""
    if type(number) is int:
        return -(2**31) <= number < 2**31
    return type(number) is float and (number == 0 or 1e-37 < abs(number) < 1e38)


def _operation(name: str, self: Any, other: Any, right: Any, value: Any) -> _Operation | None:
    """Return the numpy function for Triton's operation; None if they differ."""
    import triton.language as tl

    ufunc = _OPERATORS[_REFLECTED.get(name, name)]
    compute = (lambda one, two: ufunc(two, one)) if name in _REFLECTED else ufunc
    mine, whole = self.dtype.name, {"int32", "int64"}
    theirs = other.dtype.name if isinstance(other, tl.tensor) else _NUMBERS[type(other)]
    if self.dtype.is_ptr() and name == "__add__" and theirs in whole:
        width = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
        compute = lambda one, two: one + width * two.astype(np.uint64)  # noqa: E731
    elif not (
        (mine in whole and theirs in {*whole, "int"})
        or (mine == "fp32" and theirs in {"fp32", "int"})
        or mine == theirs == "int1"
    ):
        return None
    try:
        data = compute(self.handle.data, right)
    except TypeError:
        return None
    expected = value.handle.data
    same = (data.dtype, data.shape) == (expected.dtype, expected.shape)
    if not same or data.tobytes() != expected.tobytes():
        return None
    dtype = tl.int1 if data.dtype == bool else value.handle.dtype
    return _Operation(compute, dtype, _attributes(value))


def _attributes(actual: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(actual).items() if name != "handle"}


@contextmanager
def count_traffic() -> Generator[Traffic]:
    """Count the bytes that kernels load and store in the interpreter while the context is open."""
    builder = _builder()
    load, store = builder.create_masked_load, builder.create_masked_store
    traffic = Traffic()

    def element_bytes(pointers: Any) -> int:
        return pointers.get_element_ty().primitive_bitwidth // 8

    def counted_load(ptrs: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        traffic.read_bytes += int(np.count_nonzero(mask.data)) * element_bytes(ptrs)
        return load(ptrs, mask, *rest, **options)

    def counted_store(ptrs: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        traffic.write_bytes += int(np.count_nonzero(mask.data)) * element_bytes(ptrs)
        return store(ptrs, value, mask, *rest, **options)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield traffic
    finally:
        del builder.create_masked_load, builder.create_masked_store


def _from_bfloat16(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round_to_bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _builder() -> Any:
    import triton.runtime.interpreter as module

    return module.interpreter_builder


def _handle_type() -> Callable[..., Any]:
    import triton.runtime.interpreter as module

    return module.TensorHandle
