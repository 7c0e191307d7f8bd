"""Builds that check every address against its tensor, or count the bytes that loads and stores
move."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tilegen.cpu.access import Access
from tilegen.cpu.ir import BYTES, Code
from tilegen.cpu.reports import BOUNDS
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
