"""Calls with tensors that are spread over devices (DTensor): each device attends to what it has."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from tilegen.errors import Unsupported

NAMES = {0: "b", 1: "h"}
"""Names that masks and scores have for the dimensions along which calls fall apart."""


def is_sharded(q: Any) -> bool:
    """Whether a tensor is spread over devices. Loads nothing: the module is there once imported.

    `sys.modules` is not searched: torch.compile would wrap each of some thousand modules.
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
    """Return (out, lse) of `run(q, k, v)` on each device with its part of batch entries or heads.

    Raises Unsupported where the parts are others, or where mask and score read what is numbered
    anew in each part.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import local_map

    from tilegen.operators.crossing import crossing

    given: Any = (q, k, v)
    placements = tuple(q.placements)  # type: ignore[attr-defined]
    if any(getattr(one, "placements", None) != placements for one in given):
        shown = ", ".join(str(getattr(one, "placements", None)) for one in given)
        raise Unsupported(f"expected q, k and v with the same placements, got {shown}")
    text = crossing(mask, score, kv_lengths).text
    for one in placements:
        dim = one.dim if isinstance(one, Shard) else None
        if not isinstance(one, Replicate) and dim not in NAMES:
            raise Unsupported(
                f"expected q, k and v replicated, or sharded along batch or heads, got {one}"
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
