"""A compiled kernel as a function, `function[grid](*arguments)`, as emitted launches call it."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from tilegen.cpu.checks import Traffic, bounds_words, finding
from tilegen.cpu.jit import Linked
from tilegen.cpu.objects import CompiledObject
from tilegen.errors import Unsupported, WrongResult

Mode = Literal["", "bounds", "count"]
"""Extra work of a build: none, checks of addresses, or counts of bytes."""

_CODES = {
    **{"ptr": "q", "i64": "q", "i32": "i4x", "i16": "h6x", "i8": "b7x", "i1": "b7x"},
    **{"float": "f4x", "double": "d"},
}
_LAUNCH = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    *[ctypes.c_int32] * 4,
    *[ctypes.c_void_p] * 2,
    ctypes.c_int64,
    ctypes.c_void_p,
)


_TYPES = {
    **{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16"},
    **{torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1"},
}
_forked = False
"""True in a child of a process that had OpenMP threads, which the child has not."""


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)


class CpuFunction:
    """Machine code of one kernel, launched as `function[grid](*arguments)`."""

    def __init__(
        self, made: CompiledObject, mode: Mode = "", traffic: Traffic | None = None
    ) -> None:
        self.made = made
        self.traffic = traffic or Traffic()
        """Bytes that launches of a counting build have moved."""
        self._mode = mode
        self._linked = Linked(made.binary)
        self._launch = _LAUNCH(self._linked.launch)
        self._pack = struct.Struct("=" + "".join(_CODES[one] for one in made.arguments)).pack
        # Threads write to their own pages; 64 bytes more keep them off each other's cache sets.
        self._stride = (made.scratch_bytes + 4095) // 4096 * 4096 + 64

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        gx, gy, gz = (*grid, 1, 1)[:3]

        def launch(*given: Any, **_options: Any) -> None:
            programs = gx * gy * gz
            if programs == 0:
                return
            values, owners = flat(given)
            self._refuse_overlaps(owners)
            extra = self._extra(owners)
            threads = 1 if _forked else min(torch.get_num_threads(), programs)
            scratch = torch.empty(threads * self._stride + 64, dtype=torch.uint8)
            self._launch(
                self._pack(*values),
                *(gx, gy, gz, threads),
                _parallel() if threads > 1 else None,
                (scratch.data_ptr() + 63) // 64 * 64,
                self._stride,
                None if extra is None else extra.data_ptr(),
            )
            if extra is not None:
                self._look(extra, owners)

        return launch

    def _extra(self, owners: list[torch.Tensor | None]) -> torch.Tensor | None:
        if self._mode == "bounds":
            return bounds_words(owners)
        if self._mode == "count":
            return torch.zeros(2 * len(owners) + 2, dtype=torch.int64)
        return None

    def _look(self, extra: torch.Tensor, owners: list[torch.Tensor | None]) -> None:
        """Read what a checking or counting launch left. Raises WrongResult."""
        if self._mode == "count":
            self.traffic.add(self.made.names, extra)
        elif error := finding(extra, self.made.name, self.made.names, owners):
            raise WrongResult(error)

    def _refuse_overlaps(self, owners: list[torch.Tensor | None]) -> None:
        """Raise Unsupported if memory that the kernel writes is also given as another argument: the
        machine code relies on that it is not."""
        for i in self.made.stored:
            for j, other in enumerate(owners):
                written = owners[i]
                if j == i or other is None or written is None or not overlap(written, other):
                    continue
                raise Unsupported(
                    f"{self.made.name}: {self.made.names[i]} is written and shares memory with "
                    f"{self.made.names[j]}; pass a copy of one of them"
                )


def triton_type(tensor: torch.Tensor) -> str:
    """Return Triton's type of a tensor's address. Raises Unsupported."""
    if tensor.dtype not in _TYPES:
        raise Unsupported(f"kernels compiled for the CPU read no {tensor.dtype}")
    return f"*{_TYPES[tensor.dtype]}"


def flat(given: tuple[Any, ...]) -> tuple[list[Any], list[torch.Tensor | None]]:
    """Return arguments as numbers, and the tensor that each is an address of.

    A tensor descriptor becomes the arguments that Triton expands it to.
    """
    values: list[Any] = []
    owners: list[torch.Tensor | None] = []
    for one in given:
        if isinstance(one, torch.Tensor):
            values.append(one.data_ptr())
            owners.append(one)
        elif hasattr(one, "block_shape"):
            parts = _described(one)
            values += parts
            owners += [one.base, *[None] * (len(parts) - 1)]
        else:
            values.append(one)
            owners.append(None)
    return values, owners


def _described(one: Any) -> list[int]:
    sizes, strides = [*one.shape], [*one.strides]
    flags = [one.padding != "zero"]
    if hasattr(one, "round_f32_to_tf32"):  # since Triton 3.7
        flags.append(bool(one.round_f32_to_tf32))
    return [one.base.data_ptr(), *sizes, *strides, *flags, *sizes, *strides]


def names_of(signature: Sequence[tuple[str, str]], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each argument of the compiled function; `signature` has descriptors as one
    argument each."""
    described = sum(type_.startswith("tensordesc") for _, type_ in signature)
    # Descriptors have the same number of parts, which depends on the version of Triton.
    parts = (len(arguments) - len(signature) + described) // max(described, 1)
    names: list[str] = []
    for name, type_ in signature:
        names += [name] * (parts if type_.startswith("tensordesc") else 1)
    return tuple(names)


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
