"""Run a pass, forward or backward, as a sequence of launches. The launches given decide the
family."""

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
    """Compute (out, lse) by the forward family that `launch` contains.

    `panel_rows` bounds the memory of the small-cache family: each row takes 16 or 32 bits for each
    of seqlen_kv scores. `more` are further arguments of the family's `run`.
    """
    family = family_of(launch, "forward")
    return family.run(launch, q, k, v, scale, panel_rows=panel_rows, **more)


def gradients(
    launch: Mapping[Kernel, Launch], *given: Any, **options: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute (dq, dk, dv) by the backward family that `launch` contains; None for gradients that
    are not wanted."""
    return family_of(launch, "backward").run(launch, *given, **options)


def delta_of(
    launch: Mapping[Kernel, Launch], out: torch.Tensor, dout: torch.Tensor
) -> torch.Tensor:
    """Compute rowsum(out * dout) by the kernel that every backward starts with."""
    return launch[BWD_PREPROCESS.name](out, dout)


def gradient_of_sinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Compute the gradient of the logits of sinks, (heads,): a sink is a key with weight exp(sink -
    lse) and value 0. `delta` is that of a backward, less the gradient by lse."""
    import torch

    logits, rest = sinks.detach().float()[:, None], None
    if lse.dim() == 4:
        lse, rest = lse.unbind(2)
    weights = (logits - lse).exp()
    if rest is not None:
        weights *= torch.exp2(-rest)
    weights = weights.masked_fill(lse == float("-inf"), 0.0)  # neither keys nor a sink
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def family_of(launch: Mapping[Kernel, Any], direction: Direction) -> FamilySpec:
    """Return the family whose kernels are in `launch`."""
    given = {*launch, BWD_PREPROCESS.name}  # its result, delta, is already computed
    family = family_among(given, direction)
    assert family is not None, f"expected the launches of a {direction} family, got {list(launch)}"
    return family
