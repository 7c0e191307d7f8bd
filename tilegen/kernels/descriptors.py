"""Tensor descriptors: loading streamed tiles by coordinates instead of addresses.

A descriptor holds a tensor's sizes and strides for the GPU's tensor memory accelerator (TMA). A
single thread requests a tile, and elements outside of the tensor arrive as 0, so threads hold no
addresses and loads need no mask. Descriptors are built on the host and cover all four dimensions,
so a tile at the end of one head never reads the next head. If the rules below forbid them, tiles
are loaded by addresses, as with `TileConfig.descriptors=False`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.kernels.arguments import Argument, Line
from tilegen.kernels.config import ROWS_OF_GROUP, Dim, TileConfig, head_dim_chunks
from tilegen.kernels.spec import KernelSpec

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""Architectures with TMA."""


def why_not_described(spec: KernelSpec, dtype: str, *, aligned: bool, arch: str = "") -> str:
    """Return the reason why a kernel cannot load tiles through descriptors; empty if it can."""
    if not spec.described:
        return f"{spec.name} streams no tiles that descriptors could load"
    if arch and arch not in ARCHITECTURES:
        return f"{arch} has no tensor memory accelerator"
    if dtype == "fp32":
        return "descriptors serve tensor cores, which IEEE fp32 does not use"
    if not aligned:
        return "descriptors need addresses and strides that are multiples of 16 bytes"
    return ""


def without(config: TileConfig) -> TileConfig:
    """Return the config with tiles loaded by addresses."""
    return replace(config, descriptors=False) if config.descriptors else config


def is_describable(tensor: torch.Tensor) -> bool:
    """Return True if a descriptor can hold the strides of an aligned tensor (batch, heads, rows,
    columns): a stride of 0, as of an expanded dimension, is not allowed."""
    strides = tensor.stride()
    return 0 not in strides or all(s or n == 1 for n, s in zip(tensor.shape, strides, strict=True))


def described_lines(
    spec: KernelSpec, config: TileConfig, head_dims: Mapping[Dim, int]
) -> list[Line]:
    """Replace addresses and strides in a kernel's arguments by descriptors, one for each tile that
    covers part of a head dim."""
    addresses, *others = spec.lines
    first: list[Argument] = []
    for address in addresses.arguments:
        tensor = address.of
        if tensor not in spec.described:
            first.append(address)
            continue
        side = spec.tensors[tensor].side
        rows = config.block_n if side == "columns" else config.block_m
        rows = ROWS_OF_GROUP if spec.specialised and side == spec.stationary else rows
        dim = spec.tensors[tensor].head_dim
        if not dim:  # a number for each row, of all heads and batches after each other
            type_ = f"tensordesc<fp32[{rows}]>"
            first.append(Argument(f"{tensor}_desc", type_, tensor, "descriptor", rows=rows))
            continue
        pieces = head_dim_chunks(head_dims[dim])
        first += [
            Argument(
                f"{tensor}_desc" + (f"_{i}" if len(pieces) > 1 else ""),
                f"tensordesc<element[1, 1, {rows}, {width}]>",
                tensor,
                "descriptor",
                width,
                rows,
            )
            for i, width in enumerate(pieces)
        ]
    left = [
        line
        for line in others
        if not (line.arguments[0].taken == "stride" and line.arguments[0].of in spec.described)
    ]
    if others[0].arguments[0].taken == "stride" == left[0].arguments[0].taken:
        left[0] = replace(left[0], why=others[0].why)
    return [replace(addresses, arguments=tuple(first)), *left]
