"""Builds that check every address against its tensor, or count the bytes that loads and stores
move."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from tilegen.cpu.access import Access
from tilegen.cpu.ir import BYTES, Code
from tilegen.errors import Unsupported

if TYPE_CHECKING:
    from tilegen.cpu.tiles import Node

_ARGUMENTS = "i1 %bad, i64 %line, i64 %arg, i64 %address, ptr %extra"
REPORT = (
    f"define internal void @report({_ARGUMENTS}) noinline #0 {{"
    """
entry:
  br i1 %bad, label %first, label %done
first:
  %old = cmpxchg ptr %extra, i64 0, i64 %line monotonic monotonic
  %won = extractvalue { i64, i1 } %old, 1
  br i1 %won, label %write, label %done
write:
  %at_arg = getelementptr i64, ptr %extra, i64 1
  store i64 %arg, ptr %at_arg
  %at_address = getelementptr i64, ptr %extra, i64 2
  store i64 %address, ptr %at_address
  br label %done
done:
  ret void
}"""
)
"""Records the first address out of bounds: line, argument, address."""
BOUNDS = 3
"""Words before the bounds of arguments. Bounds are the first byte and the byte after the last."""


class CheckedAccess(Access):
    """Compares each address with the memory of its tensor, and skips accesses out of bounds."""

    vectors = False

    def allowed(
        self, code: Code, pointer: str, mask: str | None, elem: str, arg: int | None, line: int
    ) -> str | None:
        """Return the condition for an access, after writing code that checks its address."""
        if arg is None:
            raise Unsupported(f"line {line} of the kernel: an address whose tensor is unknown")
        code.module.functions["@report"] = REPORT
        bounds = [
            code.emit(f"load i64, ptr {code.gep('i64', '%extra', BOUNDS + 2 * arg + i)}")
            for i in (0, 1)
        ]
        first = code.emit(f"ptrtoint ptr {pointer} to i64")
        end = code.emit(f"add i64 {first}, {BYTES[elem]}")
        above = code.emit(f"icmp uge i64 {first}, {bounds[0]}")
        below = code.emit(f"icmp ule i64 {end}, {bounds[1]}")
        inside = code.emit(f"and i1 {above}, {below}")
        bad = code.emit(f"xor i1 {inside}, true")
        if mask is not None:
            bad = code.emit(f"and i1 {bad}, {mask}")
            inside = code.emit(f"and i1 {inside}, {mask}")
        code.do(f"call void @report(i1 {bad}, i64 {line}, i64 {arg}, i64 {first}, ptr %extra)")
        return inside


class CountingAccess(Access):
    """Counts the bytes of each tensor that loads and stores move, without masked elements.

    A load is counted where it stands in the kernel, however often its tile is evaluated.
    """

    def executed(
        self,
        code: Code,
        counted: Callable[[Node], str],
        kind: str,
        arg: int | None,
        elem: str,
        shape: tuple[int, ...],
        mask: Node | str | None,
    ) -> None:
        """Write code that counts a load or store of a tile or scalar."""
        number = "1"
        if isinstance(mask, str):
            number = code.emit(f"zext i1 {mask} to i64")
        elif mask is not None:
            number = counted(mask)
        else:
            count = 1
            for size in shape:
                count *= size
            number = str(count)
        place = 2 * (0 if arg is None else arg + 1) + (kind == "store")
        size = code.emit(f"mul i64 {number}, {BYTES[elem]}")
        at = code.gep("i64", "%extra", place)
        code.emit(f"atomicrmw add ptr {at}, i64 {size} monotonic, align 8")


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
