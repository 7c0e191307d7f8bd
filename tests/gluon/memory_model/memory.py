"""Shared and global memory, and the descriptors through which kernels reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import torch

from tests.gluon.memory_model.clocks import Ledger, Region, View
from tests.gluon.memory_model.faults import Fault, NotModelled
from tests.gluon.memory_model.values import Tile, as_operand

SMEM_PER_BLOCK = 227 * 1024
"""Shared memory that one program may have on sm_90 [bytes] (CUDA C++ programming guide)."""
MAX_RANK = 5
"""Largest number of dimensions of a tensor map (PTX, tensors: cp.async.bulk.tensor, 1 to 5)."""
_NARROW = (torch.float16, torch.bfloat16)


class Machine(Protocol):
    """The machine that runs (machine.py), as far as memory needs it."""

    def fault(self, message: str) -> Fault:
        """Return a fault of the partition that runs."""
        ...

    def access(self, buffer: Buffer, *, writes: bool, what: str, by: View | None = None) -> None:
        """Note that shared memory is read or written."""
        ...

    def pause(self) -> None:
        """Let others go on."""
        ...


class Allocation:
    """Shared memory of one `allocate_shared_memory`."""

    def __init__(self, name: str, dtype: Any, shape: Sequence[int]) -> None:
        self.name = name
        self.dtype = dtype
        self.data = np.full(shape, np.nan, np.float32)
        self.written = np.zeros(shape, bool)
        self.ledger = Ledger(name)
        self.bytes = prod(shape) * dtype.primitive_bitwidth // 8


@dataclass(frozen=True)
class Buffer:
    """A view of an allocation (shared_memory_descriptor)."""

    machine: Machine
    allocation: Allocation
    layout: Any
    region: Region
    axes: tuple[int, ...]
    """The dimensions of the allocation that the view has, in its order."""

    @property
    def dtype(self) -> Any:
        """The dtype of the elements."""
        return self.allocation.dtype

    @property
    def shape(self) -> list[int]:
        """The length of each dimension of the view."""
        return [self.region[axis][1] - self.region[axis][0] for axis in self.axes]

    def index(self, index: int) -> Buffer:
        """Return the view of one entry of the first dimension. Raises Fault beyond it."""
        return self._part(self.axes[0], int(index), 1, drop=True)

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        """Return the view of a part of a dimension. Raises Fault beyond it."""
        return self._part(self.axes[dim], int(start), int(length), drop=False)

    def _part(self, axis: int, start: int, length: int, *, drop: bool) -> Buffer:
        first, end = self.region[axis]
        if not 0 <= start <= start + length <= end - first:
            raise self.machine.fault(
                f"{self.allocation.name} has {end - first} entries, asked for {start} to "
                f"{start + length - 1}"
            )
        region = list(self.region)
        region[axis] = first + start, first + start + length
        axes = tuple(one for one in self.axes if one != axis) if drop else self.axes
        return Buffer(self.machine, self.allocation, self.layout, tuple(region), axes)

    def permute(self, order: Sequence[int]) -> Buffer:
        """Return the view with its dimensions in another order."""
        axes = tuple(self.axes[one] for one in order)
        return Buffer(self.machine, self.allocation, self.layout, self.region, axes)

    def reshape(self, shape: Sequence[int]) -> Buffer:
        """Return the view without dimensions of size 1. Raises NotModelled for other shapes."""
        axes = tuple(one for one in self.axes if self.region[one][1] - self.region[one][0] > 1)
        actual = Buffer(self.machine, self.allocation, self.layout, self.region, axes)
        if actual.shape != list(shape):
            raise NotModelled(f"expected a shape without ones of {self.shape}, got {list(shape)}")
        return actual

    def load(self, layout: Any = None) -> Tile:
        """Return the elements, by ordinary loads."""
        self.machine.access(self, writes=False, what="this load")
        self.machine.pause()
        return Tile(self.read().copy(), self.dtype, layout)

    def store(self, value: Tile) -> None:
        """Store a tile, by ordinary stores."""
        if value.shape != self.shape or str(value.dtype) != str(self.dtype):
            raise self.machine.fault(
                f"a tile {value.shape} of {value.dtype} is stored to {self.shape} of {self.dtype}"
            )
        self.machine.access(self, writes=True, what="this store")
        self.write(value.data)
        self.machine.pause()

    def read(self) -> np.ndarray:
        """Return the elements. Raises Fault for elements that were never written."""
        where = self._where
        if not self.allocation.written[where].all():
            raise self.machine.fault(f"{self} is read, and nobody has written it")
        return self._in_order(self.allocation.data[where])

    def write(self, values: np.ndarray) -> None:
        """Set the elements."""
        self._in_order(self.allocation.data[self._where])[...] = values
        self.allocation.written[self._where] = True

    @property
    def _where(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in self.region)

    def _in_order(self, whole: np.ndarray) -> np.ndarray:
        dropped = tuple(i for i in range(whole.ndim) if i not in self.axes)
        kept = [i for i in range(whole.ndim) if i in self.axes]
        return whole.squeeze(dropped).transpose([kept.index(axis) for axis in self.axes])

    def __str__(self) -> str:
        parts = (str(a) if b == a + 1 else f"{a}:{b}" for a, b in self.region)
        return f"{self.allocation.name}[{', '.join(parts)}]"


class GlobalTensor:
    """A tensor of global memory, and how often each of its elements was written."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.tensor = tensor
        extent = 1 + sum(
            (n - 1) * s
            for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            if tensor.numel()
        )
        given = tensor.detach().as_strided((extent if tensor.numel() else 0,), (1,))
        narrow = tensor.dtype in _NARROW
        self._values = (given.float() if narrow else given).numpy()
        self._bits = given.view(torch.int16).numpy() if narrow else None
        self.writes = np.zeros(given.numel(), np.int64)
        self.read_bytes = 0
        self.written_bytes = 0

    @property
    def element_bytes(self) -> int:
        """Size of one element [bytes]."""
        return self.tensor.element_size()

    def load(self, at: np.ndarray) -> np.ndarray:
        """Return the elements at flat indices."""
        self.read_bytes += at.size * self.element_bytes
        return self._values[at]

    def store(self, at: np.ndarray, values: np.ndarray) -> None:
        """Set the elements at flat indices, and count the writes."""
        self.written_bytes += at.size * self.element_bytes
        self.writes[at] += 1
        self._values[at] = values
        if self._bits is not None:
            actual = torch.from_numpy(np.ascontiguousarray(values)).to(self.tensor.dtype)
            self._bits[at] = actual.view(torch.int16).numpy()


@dataclass(frozen=True)
class Pointer:
    """An address of global memory, or a tile of them."""

    machine: Machine
    tensor: GlobalTensor
    at: np.ndarray

    def __add__(self, offset: Any) -> Pointer:
        more = offset.data if isinstance(offset, Tile) else np.asarray(int(offset))
        return Pointer(self.machine, self.tensor, self.at + more)

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat indices and which of them are meant. Raises Fault beyond the tensor."""
        kept = np.ones((), bool) if mask is None else as_operand(mask, "int1")[0]
        at, kept = np.broadcast_arrays(self.at, kept)
        outside = kept & ((at < 0) | (at >= self.tensor.tensor.numel()))
        if outside.any():
            raise self.machine.fault(
                f"{self.tensor.name} has {self.tensor.tensor.numel()} elements, element "
                f"{int(at[outside][0])} is asked for"
            )
        return at, kept


@dataclass(frozen=True)
class Descriptor:
    """A tensor descriptor (PTX, tensor maps): tiles by coordinates, 0 for what does not exist."""

    machine: Machine
    tensor: GlobalTensor
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any

    def places(self, coordinates: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat indices of a tile, and which of its elements exist. Raises Fault for
        coordinates of another number."""
        if len(coordinates) != len(self.shape):
            raise self.machine.fault(
                f"a descriptor of {len(self.shape)} dimensions is asked for {len(coordinates)}"
            )
        at, exists = np.zeros((), np.int64), np.ones((), bool)
        for first, block, side, stride in zip(
            coordinates, self.block_shape, self.shape, self.strides, strict=True
        ):
            rows = int(first) + np.arange(block, dtype=np.int64)
            at = at[..., None] + rows * stride
            exists = exists[..., None] & (rows >= 0) & (rows < side)
        return at, exists

    @property
    def bytes(self) -> int:
        """Size of a tile, which a transfer counts whether its elements exist or not [bytes]."""
        return prod(self.block_shape) * self.tensor.element_bytes


def described(
    machine: Machine, name: str, tensor: GlobalTensor, given: Any, dtype: Any
) -> Descriptor:
    """Return a descriptor as Triton's TensorDescriptor says. Raises Fault for what the hardware
    refuses: an address or strides that are no multiples of 16 bytes, a last dimension that is not
    dense, or whose tiles are less than 16 bytes, more than five dimensions."""
    size = tensor.element_bytes
    if given.strides[-1] != 1 or any(one * size % 16 for one in given.strides[:-1]):
        raise Fault(
            f"descriptor {name} needs a dense last dimension and strides that are multiples of 16 "
            f"bytes, got strides {list(given.strides)} of {size} bytes"
        )
    if given.base.data_ptr() % 16 or given.block_shape[-1] * size % 16:
        raise Fault(
            f"descriptor {name} needs an address and rows of tiles in multiples of 16 bytes"
        )
    if not 1 <= len(given.shape) <= MAX_RANK:
        raise Fault(f"descriptor {name} has {len(given.shape)} dimensions, not 1 to {MAX_RANK}")
    return Descriptor(
        machine,
        tensor,
        dtype,
        tuple(given.shape),
        tuple(given.strides),
        tuple(given.block_shape),
        given.layout,
    )
