"""Attention by kernels that tilegen emitted, a set of kernels for each problem of a catalogue.

This package needs only torch and triton. It computes the problems listed in table.json, for any
batch, number of heads and length. Other problems raise a ValueError of one line.
"""

from __future__ import annotations

import importlib
import json
import math
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

_TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "table.json").read_text())
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_VECTOR = 16
"""Alignment of addresses and strides that aligned kernels require [bytes]."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: str = "full",
    softcap: float = 0.0,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute out (batch, heads, seqlen, dim), with `return_lse` also lse (batch, heads, seqlen).

    q, k and v are (batch, heads, seqlen, dim); `mask` is in tilegen's notation, such as
    "causal(bottom_right)" or "window(127,0)". Differentiable if the package has backward kernels
    for the problem. Raises ValueError for problems that are not in the table.
    """
    row = _row(q, k, v, (mask,), softcap)
    out, lse = _run(q, k, v, scale, row)
    return (out, lse) if return_lse else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Compute out (batch, seqlen, heads, dim) from tensors in that layout, as FlashAttention does.
    Raises ValueError for problems that are not in the table."""
    if dropout_p or alibi_slopes is not None or return_attn_probs:
        raise ValueError("expected no dropout, alibi_slopes or return_attn_probs: not in the table")
    left, right = (None if side < 0 else side for side in window_size)
    right = 0 if causal else right
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    row = _row(q, k, v, _notations(left, right, q.shape[2] == k.shape[2]), softcap)
    return _run(q, k, v, softmax_scale, row)[0].transpose(1, 2)


def problems() -> list[str]:
    """List the supported problems in tilegen's notation, with their architectures."""
    return [f"{row['arch']}: {row['serves']}" for row in _TABLE]


def _notations(left: int | None, right: int | None, same_length: bool) -> tuple[str, ...]:
    """Return the notations of a window that is aligned to the last key."""
    if left is None and right is None:
        return ("full",)
    if left is None and right == 0:
        return ("causal(bottom_right)", *["causal"] * same_length)
    sides = ",".join(str(-1 if side is None else side) for side in (left, right))
    spellings = [f"window({sides},bottom_right)", *[f"window({sides})"] * same_length]
    if right == 0:
        before = f"causal(bottom_right)&window({left},-1,bottom_right)"
        spellings += [before, f"causal(bottom_right)&window({sides},bottom_right)"]
        spellings += [f"causal&window({left},-1)", f"causal&window({sides})"] * same_length
    return tuple(spellings)


# --------------------------------------------------------------------------------------------------
# The table


def _row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: tuple[str, ...], softcap: float
) -> dict[str, Any]:
    """Return the row of the call's kind with the nearest sizes. Raises ValueError."""
    if not q.ndim == k.ndim == v.ndim == 4 or not q.numel() or not k.numel():
        raise ValueError("expected q, k and v of four dimensions, none of them empty")
    if k.shape[:3] != v.shape[:3] or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            "expected k and v of one batch, heads and length, and k of q's batch and head dim; got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype or q.shape[1] % k.shape[1]:
        raise ValueError("expected one dtype, and query heads a multiple of key heads")
    arch = _arch(q.device)
    dtype = _DTYPES.get(q.dtype, str(q.dtype))
    kind = [q.shape[3], v.shape[3], dtype, q.shape[1] // k.shape[1], float(softcap)]
    rows = [
        row
        for row in _TABLE
        if row["kind"] == kind and row["mask"] in masks and arch in (None, row["arch"])
    ]
    if not rows:
        raise ValueError(
            f"expected one of the {len(_TABLE)} problems in table.json, got d{kind[0]}/{kind[1]} "
            f"{dtype}, group size {kind[3]}, mask {masks[0]}, softcap {softcap:g} on "
            f"{arch or q.device}; problems() lists them"
        )
    sizes = q.shape[0] * q.shape[1], q.shape[2], k.shape[2]

    def distance(row: dict[str, Any]) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(sizes, row["sizes"], strict=True))

    return min(rows, key=distance)


@lru_cache(maxsize=64)
def _arch(device: torch.device) -> str | None:
    """Return a GPU's architecture; None for a CPU, where Triton's interpreter runs any kernel."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


# --------------------------------------------------------------------------------------------------
# Launches


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, row: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
        q, factor = -q, -factor
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        if row["backward"] is None:
            raise ValueError(f"expected no gradients: {row['serves']} has no backward kernels here")
        return _Attention.apply(q, k, v, factor, row)  # type: ignore
    out, lse = _forward(q, k, v, factor, row)
    return out, _public(lse)


def _public(lse: torch.Tensor) -> torch.Tensor:
    """Return lse (batch, heads, rows) from the kernels' lse, which may be in pairs."""
    return lse if lse.dim() == 3 else lse.select(2, 0)


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, row: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (_ready(x, row) for x in (q, k, v))
    return _kernel(row["forward"]).launch(q, k, v, scale)


def _ready(tensor: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """Return a tensor that kernels can address, copying it if necessary."""
    unit = _VECTOR // tensor.element_size() if row["aligned"] else 1
    strides = (n for n, size in zip(tensor.stride()[:3], tensor.shape, strict=False) if size > 1)
    in_place = not row["aligned"] or tensor.data_ptr() % _VECTOR == 0
    if in_place and tensor.stride(3) == 1 and not any(stride % unit for stride in strides):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@cache
def _kernel(name: str) -> Any:
    return importlib.import_module(f".emitted.{name}", __name__)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, row: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _forward(q, k, v, scale, row)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = scale, row
        ctx.set_materialize_grads(False)
        return out, _public(lse)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[Any, ...]:
        scale, row = ctx.call
        q, k, v, out = (_ready(x, row) for x in ctx.saved_tensors[:4])
        lse = ctx.saved_tensors[4]
        dout = _ready(torch.zeros_like(out) if dout is None else dout, row)
        preprocess, dkdv, dq = (_kernel(name) for name in row["backward"])
        delta = preprocess.launch(out, dout)
        if dlse is not None:  # d lse / d s = p: the same as subtracting dlse from delta
            delta -= dlse
        given = (q, k, v, dout, lse, delta, scale)
        dk, dv = dkdv.launch(*given)
        return dq.launch(*given), dk, dv, None, None


__all__ = ["attention", "flash_attn_func", "problems"]
