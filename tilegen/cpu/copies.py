"""Add to copies of tensors instead of adding atomically.

A launch is divided into chunks of consecutive programs. Their number depends on the grid and the
tensors, never on the threads. The programs of a chunk run in order on one thread. The first chunk
adds to the tensor, every other chunk to a copy, and the copies are added to the tensor in order. So
the bits of a result are the same for any number of threads and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tilegen.errors import Unsupported

MAX_COPIES = 15
SMALL_BYTES = 4 << 20
"""Most memory for MAX_COPIES [bytes]; larger tensors have FEW_COPIES. Each element of a copy is
cleared and added, which is noticeable beside a kernel that computes few pairs per element."""
FEW_COPIES = 3
MAX_BYTES = 64 << 20
"""Memory of FEW_COPIES [bytes]. A single copy may be larger, so that two threads can work."""
_LINE = 64
_BLOCK = 1 << 15
"""Elements added at a time, so that sums stay in a cache."""


def chunks_of(programs: int, size: int) -> int:
    """Return the number of chunks of a launch whose copies take `size` bytes each."""
    copies = MAX_COPIES
    if copies * size > SMALL_BYTES:
        copies = min(max(MAX_BYTES // size, 1), FEW_COPIES)
    return min(programs, 1 + copies)


class Copies:
    """The copies of a launch, and the table of their addresses that the machine code reads."""

    def __init__(self, given: Sequence[torch.Tensor | None], programs: int) -> None:
        """Raise Unsupported for a tensor that is not contiguous."""
        tensors: list[torch.Tensor] = []
        for tensor in given:
            if tensor is None:
                raise Unsupported("a gradient that programs add to is an address; pass a tensor")
            tensors.append(tensor)
            if not tensor.is_contiguous():
                raise Unsupported(
                    f"a gradient that programs add to has strides {tensor.stride()} for shape "
                    f"{tuple(tensor.shape)}; pass a contiguous tensor"
                )
        self._tensors = tensors
        self.sizes = [tensor.nbytes for tensor in tensors]
        # At least a cache line lies between copies, so that no two threads write to the same line.
        self._offsets = [0]
        for size in self.sizes:
            self._offsets.append(self._offsets[-1] + -(-size // _LINE) * _LINE + _LINE)
        size = self._offsets.pop()
        self.chunks = chunks_of(programs, size)
        # Each chunk clears its own copies.
        self._memory = np.empty((self.chunks - 1, size), np.uint8)
        # A row per chunk: a word for `extra`, then each tensor's address and bytes to clear.
        self.table = np.zeros((self.chunks, 1 + 2 * len(tensors)), np.int64)
        first = self._memory.ctypes.data
        for i, tensor in enumerate(tensors):
            self.table[0, 1 + 2 * i] = tensor.data_ptr()
            start = first + self._offsets[i]
            self.table[1:, 1 + 2 * i] = range(start, start + size * (self.chunks - 1), size)
            self.table[1:, 2 + 2 * i] = self.sizes[i]

    def addresses(self, chunk: int) -> list[int]:
        """Return the addresses that a chunk adds to: the tensors, or copies of them."""
        return self.table[chunk, 1::2].tolist()

    def add(self) -> None:
        """Add the copies to their tensors, in order."""
        if self.chunks == 1:
            return
        for tensor, offset, size in zip(self._tensors, self._offsets, self.sizes, strict=True):
            # NumPy adds on this thread; PyTorch would wake other threads for each copy.
            sums = tensor.detach().view(-1).numpy()
            copies = self._memory[:, offset : offset + size].view(sums.dtype)
            for first in range(0, len(sums), _BLOCK):
                block = sums[first : first + _BLOCK]
                for copy in copies:
                    block += copy[first : first + _BLOCK]
