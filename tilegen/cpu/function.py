"""Launch a compiled kernel as `function[grid](*arguments)`, as emitted launches do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from tilegen.cpu.copies import Copies
from tilegen.cpu.jit import Linked
from tilegen.cpu.objects import CompiledObject
from tilegen.cpu.reports import NOT_MOVED, CountedTraffic, bounds_words, finding
from tilegen.cpu.threads import Memory, by_pool, free, lent, parallel, usable_threads
from tilegen.cpu.work import Work
from tilegen.errors import Unsupported, WrongResult
from tilegen.launch.launcher import Run, by_address

BuildMode = Literal["", "bounds", "count"]
"""Extra work of a build: none, checks of addresses, or counts of bytes."""

_CODES = {
    **{"ptr": "q", "i64": "q", "i32": "i4x", "i16": "h6x", "i8": "b7x", "i1": "b7x"},
    **{"float": "f4x", "double": "d"},
}
_THREAD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_LINE = 64
"""Bytes of a cache line, and of the words before the arguments; see `jit.driver`."""
_BODY = """
    threads = count(grid, arguments)
    memory = lent(head + threads * stride)
    words, address, _ = memory
    try:
        pack(words, 0, 0, address + line, address + head, stride, 0, grid, 1, 1, {values})
    except error:
        free.append(memory)
        return wide(grid, arguments, device)
    start(memory, threads)
"""
_TYPES = {
    **{torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"},
    **{torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32", torch.int16: "i16"},
    **{torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1"},
}


class LoadedCode(Protocol):
    """Machine code in this process, linked by LLVM or opened as a shared object."""

    work: int
    """Address of the function that each thread of a grid runs; see `jit.driver`."""


class CpuFunction:
    """The machine code of a kernel, launched as `function[grid](*arguments)`."""

    def __init__(
        self,
        made: CompiledObject,
        mode: BuildMode = "",
        traffic: CountedTraffic | None = None,
        work: Work | None = None,
        code: LoadedCode | None = None,
    ) -> None:
        """`work` identifies small launches, which run on one thread; without it none is small.
        Without `code` the object is linked by LLVM."""
        self.made = made
        self.traffic = traffic or CountedTraffic()
        """Bytes that the launches of a counting build have moved."""
        self._mode = mode
        self._work = work
        self._linked: LoadedCode = code or Linked(made.binary)
        self._thread = _THREAD(self._linked.work)
        # The number of chunks and their table follow, if the kernel adds to copies.
        codes = [_CODES[type_] for type_ in made.arguments] + ["2q"] * bool(made.private)
        packed = struct.Struct("=8q" + "".join(codes))
        self._pack = packed.pack_into
        self._head = -(-packed.size // _LINE) * _LINE
        # Whole pages for each thread, plus 64 bytes so that threads use different cache sets.
        self._stride = (made.scratch_bytes + 4095) // 4096 * 4096 + 64

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        gx, gy, gz = (*grid, 1, 1)[:3]

        def launch(*given: Any, **_options: Any) -> None:
            if gx * gy * gz == 0:
                return
            values, owners = flat(given)
            self._refuse_overlaps(owners)
            if self.made.private:
                self._start_in_chunks((gx, gy, gz), values, owners)
                return
            extra = self._words(owners) if self._mode else None
            self._start((gx, gy, gz), values, None if extra is None else extra.data_ptr())
            if extra is not None:
                self._look(extra, owners)

        return launch

    def by_address(
        self,
        arguments: list[Any],
        wide: Run | None = None,
        written: Sequence[int] = (),
        checked: Run | None = None,
    ) -> Run:
        """Return the `run` of a launch for arguments like these.

        An integer that does not fit the declared 32 bits is passed on to `wide`, or else raises
        struct.error. `checked` runs if a tensor at a place in `written` may share memory with
        another; no other argument is checked."""
        names = dict(count=self._threads, lent=lent, pack=self._pack, start=self._run, wide=wide)
        names |= dict(head=self._head, line=_LINE, stride=self._stride, free=free)
        names |= dict(error=struct.error if wide else (), checked=checked)
        return by_address(arguments, _BODY, written, **names)

    def _start(
        self, grid: tuple[int, int, int], values: list[Any], extra: int | None, threads: int = 0
    ) -> None:
        gx, gy, gz = grid
        threads = threads or self._threads(gx * gy * gz, values)
        memory = lent(self._head + threads * self._stride)
        words, address, _ = memory
        shared = address + _LINE, address + self._head, self._stride, extra or 0
        self._pack(words, 0, 0, *shared, *grid, *values)
        self._run(memory, threads)

    def _run(self, memory: Memory, threads: int) -> None:
        """Run a grid on its threads, and give its memory back."""
        if threads <= 1:
            self._thread(memory[1])
        elif start := parallel():
            start(self._linked.work, memory[1], threads, 0)
        else:
            by_pool(self._thread, memory[1], threads)
        free.append(memory)

    def _start_in_chunks(
        self, grid: tuple[int, int, int], values: list[Any], owners: list[torch.Tensor | None]
    ) -> None:
        """Launch a kernel that adds to copies of its private arguments. Raises WrongResult."""
        gx, gy, gz = grid
        private = self.made.private
        copies = Copies([owners[i] for i in private], gx * gy * gz)
        extras = self._extras(copies, owners) if self._mode else []
        for i, extra in enumerate(extras):
            copies.table[i, 0] = extra.data_ptr()
        threads = min(self._threads(gx * gy * gz, values), copies.chunks)
        values += copies.chunks, copies.table.ctypes.data
        self._start(grid, values, None, threads)  # `extra` is in the table
        copies.add()
        for i, extra in enumerate(extras if self._mode == "bounds" else extras[:1]):
            moved = dict(zip(private, copies.addresses(i), strict=True))
            self._look(extra, owners, moved)

    def _threads(self, programs: int, values: list[Any]) -> int:
        """Return the number of threads of a launch."""
        if self._work is not None and self._work.is_small(programs, values):
            return 1
        return usable_threads(programs)

    def _extras(self, copies: Copies, owners: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the words of each chunk for a checking or counting build."""
        if self._mode == "count":
            return [self._words(owners)] * copies.chunks
        spans = (zip(copies.addresses(i), copies.sizes, strict=True) for i in range(copies.chunks))
        moved = (dict(zip(self.made.private, span, strict=True)) for span in spans)
        return [self._words(owners, replaced) for replaced in moved]

    def _words(
        self, owners: list[torch.Tensor | None], moved: Mapping[int, tuple[int, int]] = NOT_MOVED
    ) -> torch.Tensor:
        """Return the words that a checking or counting kernel reads and writes."""
        if self._mode == "bounds":
            return bounds_words(owners, moved)
        return torch.zeros(2 * len(owners) + 2, dtype=torch.int64)

    def _look(
        self,
        extra: torch.Tensor,
        owners: list[torch.Tensor | None],
        moved: Mapping[int, int] = NOT_MOVED,
    ) -> None:
        """Read the results of a checking or counting launch. Raises WrongResult."""
        if self._mode == "count":
            self.traffic.add(self.made.names, extra)
        elif error := finding(extra, self.made.name, self.made.names, owners, moved):
            raise WrongResult(error)

    def _refuse_overlaps(self, owners: list[torch.Tensor | None]) -> None:
        """Raise Unsupported if an argument that the kernel writes shares memory with another
        argument: the machine code assumes that it does not."""
        spans = [(0, 0) if owner is None else _extent(owner) for owner in owners]
        for i in self.made.stored:
            first, end = spans[i]
            for j, (other_first, other_end) in enumerate(spans):
                if j == i or first >= other_end or other_first >= end:
                    continue
                written, other = owners[i], owners[j]
                if written is None or other is None or not overlap(written, other):
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
    """Return arguments as numbers, and for each the tensor whose address it is, or None.

    A tensor descriptor becomes the arguments to which Triton expands it.
    """
    values: list[Any] = []
    owners: list[torch.Tensor | None] = []
    for argument in given:
        if isinstance(argument, torch.Tensor):
            values.append(argument.data_ptr())
            owners.append(argument)
        elif hasattr(argument, "block_shape"):
            parts = _described(argument)
            values += parts
            owners += [argument.base, *[None] * (len(parts) - 1)]
        else:
            values.append(argument)
            owners.append(None)
    return values, owners


def _described(descriptor: Any) -> list[int]:
    sizes, strides = [*descriptor.shape], [*descriptor.strides]
    flags = [descriptor.padding != "zero"]
    if hasattr(descriptor, "round_f32_to_tf32"):  # since Triton 3.7
        flags.append(bool(descriptor.round_f32_to_tf32))
    return [descriptor.base.data_ptr(), *sizes, *strides, *flags, *sizes, *strides]


def names_of(signature: Sequence[tuple[str, str]], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the name of each argument of the compiled function. In `signature` a descriptor is a
    single argument."""
    described = sum(type_.startswith("tensordesc") for _, type_ in signature)
    # All descriptors have the same number of parts, which depends on Triton's version.
    parts = (len(arguments) - len(signature) + described) // max(described, 1)
    names: list[str] = []
    for name, type_ in signature:
        names += [name] * (parts if type_.startswith("tensordesc") else 1)
    return tuple(names)


def overlap(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Check whether two tensors share an element of memory."""
    first, second = _extent(tensor), _extent(other)
    if first[0] >= second[1] or second[0] >= first[1]:
        return False
    if tensor.data_ptr() == other.data_ptr() or tensor.dtype != other.dtype:
        return True
    # Interleaved slices may share no element: mark those of a tensor, look at those of the other.
    low = min(first[0], second[0])
    size = tensor.element_size()
    marks = torch.zeros((max(first[1], second[1]) - low) // size, dtype=torch.bool)
    marks.as_strided(tensor.shape, tensor.stride(), (first[0] - low) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (second[0] - low) // size).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last."""
    last = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if size == 0:
            return 0, 0
        last += (size - 1) * stride
    first = tensor.data_ptr()
    return first, first + last * tensor.element_size()
