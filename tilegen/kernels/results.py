"""The shapes of tensors that launches allocate, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tilegen.kernels.layout import empty_like

if TYPE_CHECKING:
    import torch

    from tilegen.kernels.spec import KernelSpec
    from tilegen.kernels.tensors import Tensor

By = Literal["", "keys", "unit"]
_ROUNDED: dict[str, By] = {
    **dict.fromkeys(("num_splits", "num_shares", "score_tiles"), "keys"),
    "padded_kv": "unit",
}
"""Sizes that are computed from the number of rows on the other side of the scores."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One size of a result."""

    of: str
    """The tensor that the size is read from, or a number that the launch is given."""
    axis: int | None = None
    """The dimension of the tensor; None for a number."""
    by: By = ""
    """Blank: the size itself. `keys`: the number of score tiles or splits, rounded up. `unit`: the
    size rounded up to a multiple of the elements in which strides are counted."""

    def value(self, given: Mapping[str, Any], unit: int, keys: int) -> int:
        """Compute the size from the arguments of the launch, by name."""
        size = given[self.of] if self.axis is None else given[self.of].shape[self.axis]
        if self.by == "unit":
            return -(-size // unit) * unit
        return -(-size // keys) if self.by == "keys" else size


def sources(spec: KernelSpec, name: str) -> list[Tensor]:
    """Return the inputs from which a result's sizes are read. The first has its layout."""
    result = spec.tensors[name]
    strided = (
        one for one in spec.tensors.values() if one.is_strided and one.name in spec.parameters
    )
    return sorted(
        strided,
        key=lambda one: (
            one.side != result.side,
            result.is_strided and one.head_dim != result.head_dim,
        ),
    )


def extents(spec: KernelSpec, name: str, *, pairs: bool) -> tuple[Extent | int, ...]:
    """Return the sizes of a result of a launch.

    With `pairs`, a log-sum-exp is two numbers, in the dimension before rows.
    """
    result, inputs = spec.tensors[name], sources(spec, name)

    def extent(size: str) -> Extent:
        by: By = _ROUNDED.get(size, "")
        if by:
            keys = "longest_kv" if "longest_kv" in spec.parameters else "seqlen_kv"
            size = "seqlen_q" if result.side == "columns" else keys
        of = next((one for one in inputs if size in one.sizes), None)
        return Extent(of.name, of.sizes.index(size), by) if of else Extent(size, None, by)

    *others, last = map(extent, result.sizes)
    return *others, *((2,) if pairs and result.paired else ()), last


def allocate(
    spec: KernelSpec, name: str, given: Mapping[str, Any], unit: int, keys: int, *, pairs: bool
) -> torch.Tensor:
    """Allocate an uninitialised tensor for a result of a launch.

    `given` are the launch's arguments by name. `unit` is the number of elements in which strides
    are counted. `keys` is the number of keys of a score tile, or of rows of a split.
    """
    import torch

    sizes = extents(spec, name, pairs=pairs)
    shape = [size if isinstance(size, int) else size.value(given, unit, keys) for size in sizes]
    result, first = spec.tensors[name], given[sources(spec, name)[0].name]
    if result.is_strided:
        return empty_like(first, shape[-1])
    dtype = torch.float32 if result.dtype == "fp32" else first.dtype
    return torch.empty(shape, device=first.device, dtype=dtype)
