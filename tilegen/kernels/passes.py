"""A pass, forward or backward, as a sequence of launches: by whichever family they make up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tilegen.kernels.config import Kernel
from tilegen.kernels.panels import Launch
from tilegen.kernels.registry import family_among
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.kernels.two_pass import BWD_PREPROCESS

if TYPE_CHECKING:
    import torch


def forward(
    launch: Mapping[Kernel, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) by the family of forward kernels that `launch` has.

    `panel_rows` bounds the memory of the small-cache family: 16 bits or 32 for each of its
    seqlen_kv scores. `more` are further arguments of the family's `run`.
    """
    family = family_of(launch, "forward")
    return family.run(launch, q, k, v, scale, panel_rows=panel_rows, **more)


def gradients(
    launch: Mapping[Kernel, Launch], *given: Any, **options: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return (dq, dk, dv) by the family of backward kernels that `launch` has, as its `run` does;
    None for gradients that are not wanted."""
    return family_of(launch, "backward").run(launch, *given, **options)


def delta_of(
    launch: Mapping[Kernel, Launch], out: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """Return rowsum(out * dout) by the kernel that all backward families begin with."""
    return launch[BWD_PREPROCESS.name](out, dout)


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the gradient of sinks' logits, (heads,): a sink is a key that weighs exp(sink - lse)
    and has the value 0. `delta` is that of a backward, less the gradient by lse."""
    import torch

    logits, rest = sinks.detach().float()[:, None], None
    if lse.dim() == 4:
        lse, rest = lse.unbind(2)
    weights = (logits - lse).exp()
    if rest is not None:
        weights *= torch.exp2(-rest)
    weights = weights.masked_fill(lse == float("-inf"), 0.0)  # nothing kept, and no sink
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def family_of(launch: Mapping[Kernel, Any], direction: Direction) -> FamilySpec:
    """Return the family that the kernels of a pass make up."""
    given = {*launch, BWD_PREPROCESS.name}  # whose result, delta, is there already
    family = family_among(given, direction)
    assert family is not None, f"expected the launches of a {direction} family, got {list(launch)}"
    return family
