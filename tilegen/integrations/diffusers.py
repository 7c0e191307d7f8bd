"""tilegen in diffusers' attention dispatcher.

diffusers has a closed list of back ends. Within `attention()` tilegen replaces the back end
"native", which otherwise is PyTorch; outside of it nothing changes.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from diffusers.models import attention_dispatch
from torch.nn.attention.flex_attention import BlockMask

from tilegen.calls import attention as runtime
from tilegen.calls.flex import from_block_mask
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations.given import is_mask, of_tensor, score_of
from tilegen.masks.mask import Mask, causal, full
from tilegen.runtime.call import shown


@contextmanager
def attention() -> Generator[None]:
    """Make tilegen the "native" back end of diffusers, which models use by default. Raises
    Unsupported if diffusers' registry has another form."""
    registry: Any = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    names: Any = getattr(attention_dispatch, "AttentionBackendName", None)
    tables = ("_backends", "_constraints", "_supported_arg_names")
    if any(getattr(registry, table, None) is None for table in (*tables, "_active_backend")):
        raise Unsupported(
            f"expected the registers of back ends of diffusers 0.42, got {diffusers.__version__}"
        )
    native = names.NATIVE
    before = {table: getattr(registry, table)[native] for table in tables}
    parallel, active = registry._supports_context_parallel, registry._active_backend
    had_parallel = native.value in parallel
    registry.register(native)(backend)
    parallel.discard(native.value)
    registry.set_active_backend(native)
    try:
        yield
    finally:
        registry.set_active_backend(active)
        for table in tables:
            getattr(registry, table)[native] = before[table]
        if had_parallel:
            parallel.add(native.value)


def backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Compute out (batch, seqlen, heads, dim), with `return_lse` also lse (batch, seqlen, heads).

    q, k and v are (batch, seqlen, heads, dim). `attn_mask` marks the keys that are tokens (batch,
    seqlen_kv), or is a bool or additive mask of four dimensions, or a BlockMask. diffusers drops
    arguments that are not in this signature. Raises InvalidProblem and Unsupported.
    """
    if _parallel_config is not None:
        raise Unsupported(
            "context parallelism needs diffusers' own back ends; turn one of the two off"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise InvalidProblem(
            f"query has {q.shape[1]} heads and key {k.shape[1]}; pass enable_gqa=True"
        )
    lengths = q.shape[2], k.shape[2]
    mask, added = _mask_of(attn_mask, q.shape[0], lengths)
    out, lse = runtime.attention(
        *(q, k, v),
        mask=mask & causal() if is_causal else mask,
        score=score_of(None, added, None, lengths),
        scale=scale,
        dropout_p=dropout_p,
        return_lse=True,
    )
    out = out.transpose(1, 2)
    return (out, lse.transpose(1, 2)) if return_lse else out


def _mask_of(given: Any, batch: int, lengths: tuple[int, int]) -> tuple[Mask, torch.Tensor | None]:
    if given is None:
        return full(), None
    if isinstance(given, BlockMask):
        return from_block_mask(given), None
    if is_mask(given) and given.shape == (batch, lengths[1]):
        return of_tensor(given[:, None, None], batch, lengths)
    if not is_mask(given) or given.ndim not in (2, 3, 4):
        raise InvalidProblem(
            "expected attn_mask to be a bool or floating tensor (batch, seqlen_kv) or (batch, "
            f"heads, seqlen_q, seqlen_kv), or a BlockMask; got {shown(given)}"
        )
    return of_tensor(given[(None,) * (4 - given.ndim)], batch, lengths)
