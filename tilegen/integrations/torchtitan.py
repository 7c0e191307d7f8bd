"""tilegen as the inner attention of torchtitan's models.

Use `FlexAttention.Config()` and `VarlenAttention.Config()` of this module instead of torchtitan's,
as `inner_attention=` of a layer's configuration. They are subclasses of torchtitan's, since models
decide by the class which masks they make; both accept both kinds of masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask

# Not installed with the development tools, whose requirements conflict.
from torchtitan.models.common import attention as theirs  # pyright: ignore[reportMissingImports]
from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]

from tilegen.calls.flex import flex_attention
from tilegen.calls.varlen import attention_varlen
from tilegen.errors import InvalidProblem
from tilegen.integrations import windows

OutTransform = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class FlexAttention(theirs.FlexAttention):
    """Attention under a BlockMask. Kernel options are ignored: tilegen chooses the tiles."""

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.FlexAttention.Config):
        """The options of torchtitan's class."""

    def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **named: Any) -> torch.Tensor:  # noqa: N803
        """Compute out (batch, seqlen, heads, dim), transformed if requested."""
        return inner_attention(q_BLNH, k_BLNH, v_BLNH, **named)


class VarlenAttention(theirs.VarlenAttention):
    """Attention within packed documents, in the dtype of the inputs."""

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.VarlenAttention.Config):
        """The options of torchtitan's class."""

    def __init__(self, config: Config) -> None:
        # Skips the parent class, whose __init__ activates another implementation.
        Module.__init__(self)
        self.window_size = config.window_size

    def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **named: Any) -> torch.Tensor:  # noqa: N803
        """Compute out (batch, seqlen, heads, dim), transformed if requested."""
        return inner_attention(q_BLNH, k_BLNH, v_BLNH, window_size=self.window_size, **named)


def inner_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attention_masks: Any,
    score_mod: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    out_transform: OutTransform | None = None,
    window_size: tuple[int, int] = (-1, 0),
    **_: Any,
) -> torch.Tensor:
    """Compute out (batch, seqlen, heads, dim) of q, k and v in that layout, or `out_transform(out,
    lse)` with lse (batch, seqlen, heads); differentiable in both.

    `window_size` applies only within documents: tokens before a query and after it, -1 for all.
    Raises InvalidProblem and Unsupported.
    """
    if q.shape[2] != k.shape[2] and not enable_gqa:
        raise InvalidProblem(f"q has {q.shape[2]} heads and k {k.shape[2]}; pass enable_gqa=True")
    if isinstance(attention_masks, BlockMask):
        out, lse = flex_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=score_mod,
            block_mask=attention_masks,
            scale=scale,
            enable_gqa=enable_gqa,
            return_lse=True,
        )
        out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    elif isinstance(attention_masks, theirs.VarlenMetadata):
        out, lse = attention_varlen(
            *(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)),
            *(attention_masks.cu_seq_q, attention_masks.cu_seq_k),
            mask=windows.flash_attn(*window_size),
            score=score_mod,
            scale=scale,
            return_lse=True,
        )
        out, lse = (x.unflatten(0, q.shape[:2]) for x in (out, lse.transpose(0, 1)))
    else:
        raise InvalidProblem(
            "expected attention_masks to be a BlockMask or VarlenMetadata, got "
            f"{type(attention_masks).__name__}"
        )
    return out if out_transform is None else out_transform(out, lse)
