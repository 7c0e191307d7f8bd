"""A compiled kernel as a function: `function[grid](*arguments)`, as the emitted `launch` calls it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tilegen.cpu.jit import Linked
from tilegen.errors import Unsupported

_CODES = {"ptr": "q", "i64": "q", "i32": "i4x", "i16": "h6x", "i8": "b7x", "i1": "b7x"}
_CODES |= {"float": "f4x", "double": "d"}
_LAUNCH = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    *[ctypes.c_int32] * 4,
    *[ctypes.c_void_p] * 2,
    ctypes.c_int64,
    ctypes.c_void_p,
)


class CpuFunction:
    """Stands where the emitted module has its `@triton.jit` function."""

    def __init__(
        self,
        binary: bytes,
        arguments: tuple[str, ...],
        scratch_bytes: int,
        stored: tuple[int, ...] = (),
        name: str = "",
    ) -> None:
        self.name = name
        self._linked = Linked(binary)
        self._launch = _LAUNCH(self._linked.launch)
        self._pack = struct.Struct("=" + "".join(_CODES[type_] for type_ in arguments)).pack
        self._stride = (scratch_bytes + 4095) // 4096 * 4096 + 64
        self._stored = stored

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        gx, gy, gz = (*grid, 1, 1)[:3]

        def launch(*given: Any, **_options: Any) -> None:
            if gx * gy * gz == 0:
                return
            values = flat(given)
            self._refuse_overlaps(given)
            words = self._pack(*values)
            threads = min(torch.get_num_threads(), gx * gy * gz)
            scratch = torch.empty(threads * self._stride + 64, dtype=torch.uint8)
            first = (scratch.data_ptr() + 63) // 64 * 64
            self._launch(words, gx, gy, gz, threads, _parallel(), first, self._stride, None)

        return launch

    def _refuse_overlaps(self, given: tuple[Any, ...]) -> None:
        """Raise Unsupported if memory that the kernel writes is also given as another argument."""
        tensors = [(i, one) for i, one in enumerate(given) if isinstance(one, torch.Tensor)]
        for i in self._stored:
            if i >= len(given) or not isinstance(given[i], torch.Tensor):
                continue
            for j, other in tensors:
                if j != i and overlap(given[i], other):
                    raise Unsupported(
                        f"{self.name}: argument {i} is written and shares memory with argument "
                        f"{j}; pass a copy of one of them"
                    )


def flat(given: tuple[Any, ...]) -> list[Any]:
    """Return arguments as numbers; a tensor descriptor is what Triton expands it to."""
    values: list[Any] = []
    for one in given:
        if isinstance(one, torch.Tensor):
            values.append(one.data_ptr())
        elif hasattr(one, "block_shape"):
            values += _described(one)
        else:
            values.append(one)
    return values


def _described(one: Any) -> list[int]:
    sizes, strides = [*one.shape], [*one.strides]
    flags = [one.padding != "zero"]
    if hasattr(one, "round_f32_to_tf32"):  # since Triton 3.7
        flags.append(bool(one.round_f32_to_tf32))
    return [one.base.data_ptr(), *sizes, *strides, *flags, *sizes, *strides]


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors share an element of memory."""
    first, second = _extent(one), _extent(other)
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if one.data_ptr() == other.data_ptr() or one.dtype != other.dtype:
        return True
    # Slices of one tensor may interleave without sharing an element: mark and look.
    low = min(first[0], second[0])
    size = one.element_size()
    marks = torch.zeros((max(first[1], second[1]) - low) // size, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), (first[0] - low) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (second[0] - low) // size).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


@cache
def _parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP library that PyTorch has loaded."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    address = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    assert address
    return address
