"""Calls with tensors that are sharded over devices (DTensor): each device attends to its shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tilegen.errors import Unsupported
from tilegen.operators.crossing import crossing

NAMES = {0: "b", 1: "h"}
"""Names of the dimensions along which calls can be sharded, as masks and scores use them."""


def is_sharded(q: Any) -> bool:
    """Check whether a tensor is a DTensor, without importing torch.distributed.tensor.

    `sys.modules` is not searched, since torch.compile would wrap each of its thousands of modules.
    """
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and isinstance(q, module.DTensor)


def on_each_device(
    run: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Any,
    score: Any,
    kv_lengths: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) by `run(q, k, v)` on each device, for its batch entries or heads.

    Raises Unsupported if q, k and v are sharded differently. Raises it also if mask or score use
    the index of a sharded dimension, or tensors: each shard counts from 0.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    given: Any = (q, k, v)
    placements = tuple(q.placements)  # type: ignore[attr-defined]
    if any(getattr(tensor, "placements", None) != placements for tensor in given):
        shown = ", ".join(str(getattr(tensor, "placements", None)) for tensor in given)
        raise Unsupported(f"expected q, k and v with the same placements, got {shown}")
    text = crossing(mask, score, kv_lengths).text
    for placement in placements:
        dim = placement.dim if isinstance(placement, Shard) else None
        if not isinstance(placement, Replicate) and dim not in NAMES:
            raise Unsupported(
                f"expected q, k and v replicated, or sharded along batch or heads, got {placement}"
            )
        if dim is not None and (
            kv_lengths is not None or re.search(rf"(?<![a-z_]){NAMES[dim]}(?![a-z_])|@", text)
        ):
            raise Unsupported(
                f"expected a mask and a score without tensors and without {NAMES[dim]} beside "
                f"tensors that are sharded along it, got {text}"
            )
    spread: Any = local_map(  # pyright: ignore[reportCallIssue]
        run, out_placements=(placements,) * 2, in_placements=(placements,) * 3
    )
    return spread(q, k, v)
