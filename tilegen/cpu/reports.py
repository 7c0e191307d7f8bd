"""Read the reports of builds that check every address, or that count the bytes moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

BOUNDS = 3
"""Words before the bounds of arguments. Bounds are the first byte and the byte after the last."""


@dataclass
class CountedTraffic:
    """Bytes that launches of counting kernels moved, by argument name."""

    read: dict[str, int] = field(default_factory=dict[str, int])
    written: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def read_bytes(self) -> int:
        """Number of bytes loaded."""
        return sum(self.read.values())

    @property
    def write_bytes(self) -> int:
        """Number of bytes stored."""
        return sum(self.written.values())

    def add(self, names: tuple[str, ...], words: torch.Tensor) -> None:
        """Add the counters of one launch."""
        for i, name in enumerate(("unknown", *names)):
            for moved, number in zip(
                (self.read, self.written), words[2 * i : 2 * i + 2], strict=True
            ):
                if number:
                    moved[name] = moved.get(name, 0) + int(number)


NOT_MOVED: Mapping[int, Any] = {}


def bounds_words(
    owners: list[torch.Tensor | None], moved: Mapping[int, tuple[int, int]] = NOT_MOVED
) -> torch.Tensor:
    """Return the words that a checking kernel reads: an empty report, and the bounds of each
    argument's storage, 0 and 0 for an argument that is not a tensor.

    `moved` maps arguments that are replaced by other memory to the address and size [bytes] of that
    memory.
    """
    words = [0] * BOUNDS
    for i, owner in enumerate(owners):
        if i in moved:
            address, size = moved[i]
            words += [address, address + size]
            continue
        if owner is None:
            words += [0, 0]
            continue
        storage = owner.untyped_storage()
        words += [storage.data_ptr(), storage.data_ptr() + storage.nbytes()]
    return torch.tensor(words, dtype=torch.int64)


def finding(
    words: torch.Tensor,
    name: str,
    names: tuple[str, ...],
    owners: list[torch.Tensor | None],
    moved: Mapping[int, int] = NOT_MOVED,
) -> str:
    """Describe the address out of bounds that a checking launch recorded; empty if there is none.
    `moved` maps arguments that were replaced by other memory to the address of that memory."""
    line, arg, address = words[:BOUNDS].tolist()
    if not line:
        return ""
    owner: Any = owners[arg] if 0 <= arg < len(owners) else None
    if owner is None:
        return f"{name}, line {line}: an address outside of every tensor"
    element = (address - moved.get(arg, owner.data_ptr())) // owner.element_size()
    shape = tuple(owner.shape)
    return (
        f"{name}, line {line}: {names[arg]}: element {element}, counted from the first, lies "
        f"outside of the tensor's storage; shape {shape}, strides {owner.stride()}"
    )
