"""Numbers in a mask that a kernel reads at run time: one scalar, or one per batch, head, row or
column."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilegen.errors import InvalidProblem, Unsupported

if TYPE_CHECKING:
    import numpy as np

Kind = Literal["bool", "int", "int64", "float", "float64"]
Pattern = Literal["constant", "firsts", "ends", "ids", "layout", "table"]
AXES = ("", "b", "h", "bh", "q", "k", "bq", "bk", "bhq", "bhk")
LIMIT = 2**30
"""Values stay below it in size, so that sums with positions fit into 32 bits."""


@dataclass(frozen=True, eq=False)
class Values:
    """A tensor that a mask reads, or a stand-in that knows only what is typical of one.

    Stand-ins are equal when they say the same; values with a tensor only to themselves.
    """

    axes: str | None
    """Which of b, h, q and k index it, in this order; None where an expression says how."""
    typical: int
    """What stands for an element where only the kind of mask is known: in records, and in the
    model's choice."""
    tensor: Any = None
    """On any device, contiguous; None for a stand-in."""
    kind: Kind = "int"
    pattern: Pattern = "constant"
    """What a stand-in looks like: `typical` everywhere; first or one past the last index of
    consecutive documents of `typical`, or their ids; a layout of blocks, `typical` percent of
    them kept; or nothing that is known: a table, in a mask that keeps `typical` percent."""
    block: int = 1
    """Rows and columns that an element of a layout stands for."""
    copies: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """Of the tensor by device, and the SymPy name."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values) or not self.is_stand_in or not other.is_stand_in:
            return self is other
        return self._facts == other._facts

    def __hash__(self) -> int:
        return hash(self._facts) if self.is_stand_in else id(self)

    @property
    def _facts(self) -> tuple[Any, ...]:
        return (self.axes, self.typical, self.kind, self.pattern, self.block)

    @property
    def elements(self) -> str:
        """PyTorch's name for the elements that a kernel reads."""
        return {"int": "int32", "float": "float32"}.get(self.kind, self.kind)

    @property
    def rising(self) -> bool:
        """Whether elements never fall along the last axis."""
        return self.pattern in ("firsts", "ends")

    @property
    def is_stand_in(self) -> bool:
        """Whether no tensor belongs to it."""
        return self.tensor is None

    @property
    def notation(self) -> str:
        """`@h:128`: one value per head, typically 128."""
        return f"@{self.axes or ''}:{self.typical}"

    @property
    def symbol(self) -> Any:
        """The SymPy name by which an expression looks values up."""
        if "symbol" not in self.copies:
            import sympy

            facts = {"real": True} if self.kind.startswith("float") else {"integer": True}
            if self.rising or self.kind == "bool":
                facts["nonnegative"] = True
            self.copies["symbol"] = sympy.Dummy("values", **facts)
        return self.copies["symbol"]

    def on(self, device: Any) -> Any:
        """Return the tensor on a device; copied there once."""
        if self.tensor.device == device:
            return self.tensor
        version = 0 if self.tensor.is_inference() else self.tensor._version
        known, copy = self.copies.get(device, (None, None))
        if known != version:  # the tensor may have been changed in place
            copy = self.tensor.to(device)
            self.copies[device] = version, copy
        return copy

    def at(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        """Return the element for a pair: a number, a tensor, or a SymPy look-up."""
        if is_symbolic(b, h, q, k):
            from tilegen.masks.symbols import Lookup

            chosen = {"b": b, "h": h, "q": q, "k": k}
            return Lookup(self.symbol, *(chosen[axis] for axis in self.axes or ""))
        if self.tensor is None:
            raise InvalidProblem(
                f"expected a mask with its tensors, got {self.notation}, which only describes one"
            )
        indices = tuple({"b": b, "h": h, "q": q, "k": k}[axis] for axis in self.axes or "")
        tensor = self._beside((b, h, q, k))
        return tensor[indices] if indices else tensor

    def look_up(self, leading: tuple[Any, Any], *indices: Any) -> Any:
        """Return the element at `indices`, after those of b and h in `leading` that `axes` names;
        0 beyond the end."""
        b, h = leading
        chosen = [{"b": b, "h": h}[axis] for axis in self.axes or ""] + list(indices)
        if is_symbolic(*chosen):
            import sympy

            from tilegen.masks.symbols import Lookup

            found = Lookup(self.symbol, *chosen)
            return sympy.Ne(found, 0) if self.kind == "bool" else found
        if self.tensor is None:
            raise InvalidProblem(
                f"expected a mask with its tensors, got {self.notation}, which only describes one"
            )
        import torch

        tensor = self._beside(chosen)
        chosen = [torch.as_tensor(index, device=tensor.device) for index in chosen]
        sizes = list(zip(chosen, tensor.shape, strict=True))
        inside = [(index >= 0) & (index < size) for index, size in sizes]
        found = tensor[tuple(index.clamp(0, size - 1).long() for index, size in sizes)]
        for one in inside:
            found = torch.where(one, found, torch.zeros_like(found))
        return found

    def _beside(self, indices: Sequence[Any]) -> Any:
        """Return the tensor on the device of the indices, where those are tensors."""
        device = next((index.device for index in indices if hasattr(index, "device")), None)
        return self.tensor if device is None else self.on(device)

    def sample(self, shape: dict[str, int]) -> np.ndarray[Any, Any]:
        """Return the elements on the host, or typical ones for a `shape` in b, h, q and k."""
        import numpy as np

        if self.tensor is not None:
            return np.asarray(self.tensor.detach().cpu().numpy())
        axes = self.axes or ""
        if self.pattern == "table":
            raise Unsupported(
                f"expected a mask with its tensors, got {self.notation}, which can be anything"
            )
        if self.pattern == "layout":
            blocks = (-(-shape["q"] // self.block), -(-shape["k"] // self.block))
            size = (*(shape[axis] for axis in axes), *blocks)
            return np.random.default_rng(0).random(size) * 100 < self.typical
        size = tuple(shape[axis] for axis in axes)
        if self.pattern == "constant":
            return np.full(size, self.typical)
        length, width = shape[axes[-1]], max(1, self.typical)
        first = np.arange(length) // width * width
        return np.broadcast_to(first + width if self.pattern == "ends" else first, size)


def is_symbolic(*indices: Any) -> bool:
    """Whether any index is a SymPy expression; loads nothing."""
    sympy = sys.modules.get("sympy")
    return bool(sympy) and any(isinstance(index, sympy.Basic) for index in indices)


def values(tensor: Any, axes: str) -> Values:
    """Return run-time values of a mask: an integer tensor with one dimension for each of `axes`.

    `axes` is "" for one scalar, or of b, h, q and k in this order: `values(lengths, "b")`.
    Raises InvalidProblem for other shapes and dtypes.
    """
    import torch

    tensor = torch.as_tensor(tensor)
    if axes not in AXES:
        raise InvalidProblem(f"axes must be one of {', '.join(map(repr, AXES))}; got {axes!r}")
    if tensor.dtype not in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8):
        raise InvalidProblem(f"values of a mask must be integers, got {tensor.dtype}")
    if tensor.ndim != len(axes):
        raise InvalidProblem(
            f"values must have one dimension for each of {axes!r}, got shape {tuple(tensor.shape)}"
        )
    if not tensor.numel():
        raise InvalidProblem("values must not be empty")
    typical = int(tensor.float().mean().round().clamp(0, 2**28).item())
    return Values(axes=axes, typical=power_of_two_near(typical), tensor=_int32(tensor))


def _int32(tensor: Any) -> Any:
    import torch

    if tensor.numel() and not -LIMIT < int(tensor.min()) <= int(tensor.max()) < LIMIT:
        raise InvalidProblem("values of a mask must be below 2**30 in size")
    return tensor.to(torch.int32).contiguous()


def power_of_two_near(value: int) -> int:
    """Return the power of two that stands for a value in records, so that few kinds exist."""
    return 1 << (value - 1).bit_length() if value > 1 else value
