"""The operations of Gluon, as the model has them. Layouts and dtypes are Triton's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon import language as real

from tests.gluon.memory_model import values
from tests.gluon.memory_model.faults import Fault, NotModelled
from tests.gluon.memory_model.machine import Machine, Product
from tests.gluon.memory_model.memory import Buffer, Descriptor, Pointer
from tests.gluon.memory_model.values import Int, Tile, as_operand, combined, rounded

_machine: Machine | None = None
Twins = Mapping[str, Callable[..., Tile]]
"""Functions from tiles to a tile, by the text of the inline assembly that each stands for."""
_twins: Twins = {}

values.add_operators(real.int1)


def use(machine: Machine | None, twins: Twins | None = None) -> None:
    """Run operations on a machine, and assembly by its twins."""
    global _machine, _twins
    _machine, _twins = machine, twins or {}


def now() -> Machine:
    """Return the machine that runs. Raises NotModelled outside of one."""
    if _machine is None:
        raise NotModelled("operations of Gluon are modelled while a kernel runs only")
    return _machine


# --------------------------------------------------------------------------------------------------
# Tiles


def _tile(data: np.ndarray, dtype: Any, layout: Any = None) -> Tile:
    return Tile(rounded(data, dtype), dtype, layout)


def arange(start: int, end: int, layout: Any = None) -> Tile:
    """Integers from start to end - 1."""
    return Tile(np.arange(start, end, dtype=np.int64), real.int32, layout)


def full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tile:
    """A tile of one value."""
    return _tile(np.full([int(one) for one in shape], value, np.float64), dtype, layout)


def zeros(shape: Sequence[int], dtype: Any, layout: Any = None) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, dtype, layout)


def convert_layout(value: Tile, layout: Any, assert_trivial: bool = False) -> Tile:
    """The same values, elsewhere."""
    return Tile(value.data, value.dtype, layout)


def where(condition: Any, value: Any, other: Any) -> Any:
    """One value or the other."""
    if not any(isinstance(x, Tile) for x in (condition, value, other)):
        return Int(value if condition else other)
    kept = as_operand(condition, real.int1)[0]
    first = next((x for x in (value, other, condition) if isinstance(x, Tile)), condition)
    dtype = real.float32 if first is condition else first.dtype  # of two numbers
    a, _ = as_operand(value, dtype)
    b, _ = as_operand(other, dtype)
    return _tile(np.where(kept, a, b), dtype, first.layout)


def largest(a: Any, b: Any) -> Any:
    """The larger of two values. NaN stays NaN, which shows it: the hardware's `max` would hide
    it."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return Int(max(int(a), int(b)))
    return combined(np.maximum, a, b)


def smallest(a: Any, b: Any) -> Any:
    """The smaller of two values; NaN stays NaN."""
    if not isinstance(a, Tile) and not isinstance(b, Tile):
        return Int(min(int(a), int(b)))
    return combined(np.minimum, a, b)


def reduced(run: Callable[..., np.ndarray]) -> Callable[..., Tile]:
    """Return a reduction of tiles along an axis."""

    def reduce(value: Tile, axis: int) -> Tile:
        return _tile(run(value.data, axis=axis), value.dtype)

    return reduce


def function_of(run: Callable[..., np.ndarray]) -> Callable[[Tile], Tile]:
    """Return an element-wise function of fp32 tiles."""

    def apply(value: Tile) -> Tile:
        if str(value.dtype) != "fp32":
            raise NotModelled(f"functions of {value.dtype} are not modelled: convert to fp32 first")
        with np.errstate(all="ignore"):
            return _tile(run(value.data), value.dtype, value.layout)

    return apply


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Tile], dtype: Any, is_pure: bool, pack: int
) -> Tile:
    """Result of the twin of an assembly text. Raises NotModelled if there is none."""
    if match := re.match(r"bar\.(sync|arrive) (\d+), (\d+);", asm):
        now().named_barrier(int(match[2]), int(match[3]), waits=match[1] == "sync")
        return args[0]
    if (twin := _twins.get(asm)) is None:
        raise NotModelled(f"inline assembly needs a twin in Python (run(..., twins=)): {asm}")
    return twin(*args)


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    """Elements of global memory; a single integer is a number."""
    at, kept = pointer.places(mask)
    values = np.full(at.shape, other, np.float64)
    values[kept] = pointer.tensor.load(at[kept])
    dtype = dtype_of(pointer.tensor.tensor.dtype)
    is_integer = not values.ndim and dtype in (real.int32, real.int64)
    return Int(values) if is_integer else _tile(values, dtype)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    """Store elements to global memory."""
    at, kept = pointer.places(mask)
    data = np.broadcast_to(as_operand(value, dtype_of(pointer.tensor.tensor.dtype))[0], at.shape)
    pointer.tensor.store(at[kept], data[kept])


def dtype_of(dtype: Any) -> Any:
    """Return Triton's dtype of a PyTorch dtype. Raises NotModelled."""
    name = {"torch.float32": "float32", "torch.bfloat16": "bfloat16", "torch.float16": "float16"}
    name |= {"torch.int32": "int32", "torch.int64": "int64", "torch.uint8": "uint8"}
    if str(dtype) not in name:
        raise NotModelled(f"tensors of {dtype} are not modelled")
    return getattr(real, name[str(dtype)])


def program_id(axis: int) -> Int:
    """The program's number in its one-dimensional grid."""
    return Int(now().program_id if axis == 0 else 0)


def num_programs(axis: int) -> Int:
    """The number of programs of the grid."""
    return Int(now().num_programs if axis == 0 else 1)


class constexpr:  # noqa: N801, the name in Gluon
    """A value that the compiler knows: the value itself."""

    def __new__(cls, value: Any) -> Any:
        """Return the value."""
        return value


def cdiv(a: int, b: int) -> Any:
    """a / b, rounded up."""
    actual = (a + b - 1) // b
    return Int(actual) if isinstance(a, Int) or isinstance(b, Int) else actual


def static_assert(condition: bool, message: str = "") -> None:
    """Raises Fault where a condition known to the compiler does not hold."""
    if not condition:
        raise Fault(f"static_assert: {message}")


# --------------------------------------------------------------------------------------------------
# mbarriers


def init(barrier: Buffer, count: int) -> None:
    """mbarrier.init."""
    machine = now()
    machine.barrier(barrier).start(int(count), machine.me.view, machine.fault)
    machine.me.release()


def invalidate(barrier: Buffer) -> None:
    """mbarrier.inval."""
    machine = now()
    machine.barrier(barrier).end(machine.fault)


def expect(
    barrier: Buffer, bytes_per_cta: int | None = None, pred: Any = True, **named: Any
) -> None:
    """mbarrier.arrive.expect_tx; its bytes are called `bytes` in some versions of Triton."""
    machine, size = now(), named.get("bytes", bytes_per_cta)
    if pred:
        machine.barrier(barrier).expect(int(size or 0), machine.me.view, machine.fault)
        machine.me.release()
    machine.pause()


def arrive(barrier: Buffer, *, count: int = 1, pred: Any = True) -> None:
    """mbarrier.arrive."""
    machine = now()
    if pred:
        machine.barrier(barrier).arrive(int(count), machine.me.view, machine.fault)
        machine.me.release()
    machine.pause()


def wait(barrier: Buffer, phase: int, pred: Any = True, deps: Any = ()) -> None:
    """mbarrier.try_wait.parity, until it succeeds."""
    machine = now()
    if not pred:
        return
    actual, me = machine.barrier(barrier), machine.me
    number = actual.awaited(me.actor, int(phase), me.view, machine.fault)
    machine.wait(lambda: actual.is_over(number), f"phase {number} of {actual.name}")
    actual.leave(me.actor, number, me.view, machine.fault)


# --------------------------------------------------------------------------------------------------
# TMA


def tma_load(
    descriptor: Descriptor,
    coordinates: Sequence[int],
    barrier: Buffer,
    result: Buffer,
    pred: Any = True,
    multicast: bool = False,
) -> None:
    """cp.async.bulk.tensor from global to shared memory; completes whenever the schedule likes."""
    machine = now()
    if multicast:
        raise NotModelled("multicast to a cluster is not modelled")
    if not pred:
        return
    _check_tile(machine, descriptor, "loads to", result)
    awaited = machine.barrier(barrier)
    at, exists = descriptor.places(coordinates)
    view = machine.fork()
    what = f"this TMA load to {result}"
    machine.access(result, writes=True, what=what, by=view)
    told = what.replace("this", "the", 1) + machine.place()

    def complete() -> None:
        values = np.zeros(at.shape, np.float32)
        values[exists] = descriptor.tensor.load(at[exists])
        result.write(values)
        awaited.deliver(descriptor.bytes, view, machine.fault)

    machine.transfer(complete, view, told)
    machine.pause()


def _check_tile(machine: Machine, descriptor: Descriptor, does: str, buffer: Buffer) -> None:
    """Raise Fault where shared memory is no tile of a descriptor."""
    tile = list(descriptor.block_shape)
    if tile != buffer.shape or str(descriptor.dtype) != str(buffer.dtype):
        raise machine.fault(
            f"a descriptor of tiles {tile} of {descriptor.dtype} {does} {buffer.shape} of "
            f"{buffer.dtype}"
        )


def tma_store(descriptor: Descriptor, coordinates: Sequence[int], source: Buffer) -> None:
    """cp.async.bulk.tensor from shared to global memory; reads until `store_wait`."""
    machine = now()
    _check_tile(machine, descriptor, "stores", source)
    at, exists = descriptor.places(coordinates)
    view = machine.fork()
    machine.access(source, writes=False, what="this TMA store", by=view)
    descriptor.tensor.store(at[exists], source.read()[exists])
    machine.me.stores.append(view)
    machine.pause()


def store_wait(pendings: int) -> None:
    """cp.async.bulk.wait_group.read: all but the last `pendings` stores have read."""
    machine, me = now(), now().me
    while len(me.stores) > int(pendings):
        me.view.join(me.stores.pop(0))
    machine.pause()


def fence_async_shared(cluster: bool = False) -> None:
    """fence.proxy.async: what the asynchronous proxy does later comes after ordinary loads and
    stores of this partition."""
    machine, me = now(), now().me
    me.view.fenced[me.actor] = me.view.seen[me.actor]
    me.release()
    machine.pause()


# --------------------------------------------------------------------------------------------------
# wgmma


def warpgroup_mma(
    a: Buffer | Tile,
    b: Buffer,
    acc: Tile,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: bool = False,
) -> Tile:
    """wgmma.mma_async of one group: reads shared memory, and registers of `a`, until it is waited
    for. An accumulator may be in flight, as products of one follow each other in order."""
    machine = now()
    view = machine.fork()
    operands: list[np.ndarray] = []
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, Buffer):
            machine.access(operand, writes=False, what=f"operand {name} of this product", by=view)
            operands.append(operand.read())
        elif name == "a":
            operands.append(operand.data)
        else:
            raise machine.fault("operand b of a product lies in shared memory, not in registers")
    left, right = operands
    rows, columns = acc.shape
    if left.shape != (rows, right.shape[0]) or right.shape[1] != columns:
        raise machine.fault(f"a product of {left.shape} and {right.shape} goes to {acc.shape}")
    if str(a.dtype) != str(b.dtype) or str(a.dtype) not in ("bf16", "fp16"):
        raise machine.fault(f"a product of {a.dtype} and {b.dtype}: expected bf16 or fp16 of both")
    with np.errstate(all="ignore"):
        actual = left @ right
        if use_acc:
            actual = actual + _accumulator(machine, acc)
    result = Tile(actual.astype(np.float32, copy=False), acc.dtype, acc.layout)
    result.in_flight = what = f"the product{machine.place()}"
    registers = (a,) if isinstance(a, Tile) else ()
    machine.me.products.append(Product(view, result, acc, registers, what))
    machine.pause()
    return result if is_async else _retired(machine, 0, (result, *registers))[0]


def _accumulator(machine: Machine, acc: Tile) -> np.ndarray:
    if acc.in_flight and not any(one.result is acc for one in machine.me.products):
        raise machine.fault(f"{acc.in_flight} is in flight, or was waited for by another name")
    return acc.late_data


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] | None = None) -> Any:
    """wgmma.wait_group: all but the last `num_outstanding` products are done. Returns `deps`, with
    values instead of results that are there."""
    machine = now()
    if deps is None:
        raise machine.fault("deps must be given: what products read and write until here")
    actual = _retired(machine, int(num_outstanding), deps)
    machine.pause()
    return actual[0] if len(actual) == 1 else actual


def _retired(machine: Machine, left: int, deps: Sequence[Any]) -> tuple[Any, ...]:
    """Return `deps` when all but the last products are done. Raises Fault where one that is done
    has registers that are not among them: they may have been used again."""
    me = machine.me
    number = max(0, len(me.products) - left)
    done, me.products[:] = me.products[:number], me.products[number:]
    values: dict[int, Tile] = {}
    for item in done:
        goes_on = any(other.accumulates is item.result for other in (*done, *me.products))
        for tile in (*item.registers, *(() if goes_on else (item.result,))):
            if not any(tile is dep for dep in deps):
                raise machine.fault(
                    f"deps leave out a tile of {item.what}, whose registers may be used again "
                    "before it is done"
                )
        values[id(item.result)] = Tile(item.result.late_data, item.result.dtype, item.result.layout)
        me.view.join(item.view)
    return tuple(values.get(id(dep), dep) for dep in deps)
