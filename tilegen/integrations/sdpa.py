"""SDPA: `scaled_dot_product_attention` with PyTorch's signature, and `everywhere`, which computes
PyTorch's own SDPA with tilegen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, has_torch_function_unary

from tilegen.calls.attention import attention
from tilegen.calls.masks import causal_bias
from tilegen.disk import say_once
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.integrations import tables, windows
from tilegen.integrations.given import is_mask
from tilegen.masks.made import is_traced, made_once
from tilegen.masks.mask import Mask
from tilegen.masks.plain import check_plain
from tilegen.masks.score import Score, bias
from tilegen.masks.snapshots import TensorCache
from tilegen.runtime.call import shown

MAX_MASKS = 64
"""Masks of bool tensors cached for further layers."""


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` with tilegen's kernels.

    Shapes: query (..., heads, L, E), key (..., heads_kv, S, E), value (..., heads_kv, S, Ev).
    Leading dimensions broadcast as in PyTorch; heads_kv may differ from heads with `enable_gqa`.
    `attn_mask` broadcasts to (..., heads, L, S). A bool mask is True where a pair is kept; a
    floating mask is added to the scaled logits and gets gradients. Kernels read it without a copy
    if it is contiguous except for expanded dimensions. `causal_upper_left` and `causal_lower_right`
    of torch.nn.attention.bias are the causal masks. `is_causal` starts at the top left corner, and
    drops pairs of an `attn_mask` too.
    A row without kept keys has out 0 and zero gradients, where some of PyTorch's back ends give
    NaN. `dropout_p` drops other weights than PyTorch, reproducibly by torch.manual_seed. Raises
    InvalidProblem or Unsupported, naming the call.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise InvalidProblem(f"{name} must be a tensor, got {shown(x)}")
        if (type(x) is not torch.Tensor or x.is_nested) and x.layout is not torch.jagged:
            check_plain(**{name: x})
    heads = query.shape[-3:-2]
    leading = query.shape[:-3]
    plain = (
        query.ndim == key.ndim == value.ndim == 4
        and key.shape[:2] == value.shape[:2]
        and leading == key.shape[:1]
        and (enable_gqa or heads == key.shape[1:2])
    )
    if not plain:
        query, key, value, leading, heads = _in_four_dimensions(query, key, value, enable_gqa)
    changes: Mapping[str, Any] = {"mask": windows.sdpa(is_causal)}
    if attn_mask is not None:
        changes = _explicit(attn_mask, query, key, leading, is_causal)
    out = attention(query, key, value, scale=scale, dropout_p=dropout_p, **changes)
    return out if plain else out.reshape(*leading, *heads, *out.shape[2:])


def _in_four_dimensions(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]:
    """Return query, key and value as (batch, heads, length, dim), and the leading dimensions and
    heads of out. Raises InvalidProblem."""
    given = query, key, value
    if any(x.ndim < 2 for x in given):
        sizes = ", ".join(f"{tuple(x.shape)}" for x in given)
        raise InvalidProblem(
            f"query, key and value must have at least 2 dimensions (..., length, dim), got {sizes}"
        )
    tensors = [x if x.ndim > 2 else x[None] for x in given]
    counts = [x.shape[-3] for x in tensors]
    try:
        leading = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
        if not enable_gqa and (counts[0] == 1 or counts[1:] != [1, 1]):
            counts = [*torch.broadcast_shapes(*((count,) for count in counts))] * 3
    except RuntimeError:
        sizes = ", ".join(f"{tuple(x.shape[:-2])}" for x in given)
        raise InvalidProblem(
            "query, key and value must have leading dimensions and heads that broadcast, or "
            f"enable_gqa=True for heads that are shared; got {sizes}"
        ) from None
    query, key, value = (
        x.expand(*leading, count, -1, -1).reshape(math.prod(leading), count, *x.shape[-2:])
        for x, count in zip(tensors, counts, strict=True)
    )
    return query, key, value, leading, counts[:1] if max(x.ndim for x in given) > 2 else ()


# --------------------------------------------------------------------------------------------------
# Explicit masks


def _explicit(
    attn_mask: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    leading: Sequence[int],
    is_causal: bool = False,
) -> Mapping[str, Any]:
    """Return the arguments of `attention` for a mask tensor. Raises InvalidProblem and
    Unsupported."""
    if isinstance(attn_mask, torch.Tensor) and has_torch_function_unary(attn_mask):
        known = _of_causal_bias(attn_mask, (query.shape[2], key.shape[2]))
        if known is not None:
            return {"mask": known & windows.sdpa(True) if is_causal else known}
    if not is_mask(attn_mask):
        raise InvalidProblem(f"attn_mask must be bool or floating, got {shown(attn_mask)}")
    needed = (*leading, query.shape[1], query.shape[2], key.shape[2])
    _check_sizes(attn_mask.shape, needed)
    if attn_mask.dtype is torch.bool:
        return _of_bool(attn_mask, query.shape[0], leading, is_causal)
    return {"mask": windows.sdpa(is_causal), "score": bias(_table(attn_mask, leading))}


def _of_causal_bias(attn_mask: torch.Tensor, lengths: tuple[int, int]) -> Mask | None:
    """Return the mask of a causal bias, None for a plain tensor. Raises InvalidProblem for other
    lengths than its own, and Unsupported for other classes of tensors."""
    mask = causal_bias(attn_mask)
    if mask is None:
        check_plain(attn_mask=attn_mask)
    elif mask.args == ("bottom_right",):
        known: Any = attn_mask
        _check_sizes((int(known.seq_len_q), int(known.seq_len_kv)), lengths)
    return mask


def _of_bool(
    attn_mask: torch.Tensor, batch: int, leading: Sequence[int], is_causal: bool
) -> Mapping[str, Any]:
    """Return the arguments for a bool tensor. All layers share the mask of one tensor."""
    if is_traced():
        return _of_table(_table(attn_mask.detach(), leading), batch, is_causal)
    many = tuple(leading) if len(leading) > 1 else ()
    known = _masks.get(
        (many, batch, is_causal),
        (attn_mask,),
        lambda: _aliased(attn_mask, batch, leading, is_causal),
    )
    return known or _of_table(_table(attn_mask.detach(), leading), batch, is_causal)


def _aliased(
    attn_mask: torch.Tensor, batch: int, leading: Sequence[int], is_causal: bool
) -> Mapping[str, Any] | None:
    """Return the arguments for a bool tensor if they read the tensor's own memory at each call."""
    table = _table(attn_mask.detach(), leading)
    # A copy, and what is computed from elements now, would miss later changes.
    is_alias = table.data_ptr() == attn_mask.data_ptr() and 1 not in table.shape[-2:]
    return _of_table(table, batch, is_causal) if is_alias else None


def _of_table(table: torch.Tensor, batch: int, is_causal: bool) -> Mapping[str, Any]:
    causal = windows.sdpa(is_causal)
    if 1 in table.shape[-2:]:
        return {"mask": causal, **_by_row_or_column(table, batch)}
    kept = tables.dense(table)
    return {"mask": causal & kept if is_causal else kept}


@made_once
def _check_sizes(sizes: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Raise InvalidProblem if a mask does not broadcast to the pairs of a call."""
    padded = (1,) * (len(needed) - len(sizes)) + sizes[-len(needed) :]
    fits = all(axis in (1, size) for axis, size in zip(padded, needed, strict=True))
    if not fits or any(size != 1 for size in sizes[: -len(needed)]):
        raise InvalidProblem(f"attn_mask must broadcast to {needed}, got {tuple(sizes)}")


_masks: TensorCache[Mapping[str, Any] | None] = TensorCache(MAX_MASKS, elements=False)


def _table(tensor: torch.Tensor, leading: Sequence[int]) -> torch.Tensor:
    """Return a mask as (batch, heads, L, S), with size 1 for expanded dimensions."""
    if 0 in tensor.stride() and not tensor.requires_grad:  # each element has its own gradient
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if size > 1 and stride == 0:
                tensor = tensor.narrow(axis, 0, 1)
    if tensor.ndim == 4 and len(leading) == 1:
        return tensor
    ahead = max(3 + len(leading), 4)
    tensor = tensor.reshape((1,) * (ahead - tensor.ndim) + tensor.shape)
    batches = tensor.shape[:-3]
    if len(batches) > 1 and any(size != 1 for size in batches):
        tensor = tensor.expand(*leading, *tensor.shape[-3:])
    return tensor.flatten(0, -4)


def _by_row_or_column(keep: torch.Tensor, batch: int) -> Mapping[str, Any]:
    """Return the arguments of `attention` for a mask of whole rows or columns, as in padded
    batches: O(length) numbers, and lengths, so that tiles after the last kept column are
    skipped."""
    nothing: Score = bias(torch.where(keep, 0.0, -torch.inf))
    columns = keep.shape[3]
    if columns < 2:
        return {"score": nothing}
    places = torch.arange(1, columns + 1, dtype=torch.int32, device=keep.device)
    lengths = (places * keep).amax((1, 2, 3))
    return {"score": nothing, "kv_lengths": lengths.expand(batch)}


# --------------------------------------------------------------------------------------------------
# PyTorch's own name


class everywhere(TorchFunctionMode):  # noqa: N801 - `with everywhere():`, as a function is called
    """Within a `with` block, compute `torch.nn.functional.scaled_dot_product_attention` with
    tilegen, including explicit masks, fp32, head dims above 256, and calls on a CPU.

    PyTorch computes calls that tilegen does not support, with a warning once per reason.
    `torch.nn.MultiheadAttention` in evaluation does not call that function, so it is not affected.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        try:
            return _of_plain_tensors(*args, **kwargs)
        except TilegenError as error:
            reason, *_ = str(error).split("; the call was")
            say_once(f"scaled_dot_product_attention: PyTorch computes instead: {reason}")
        return func(*args, **kwargs)


def _of_plain_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute the call with tilegen. Raises Unsupported if an argument is not a plain tensor."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_nested:
            raise Unsupported(f"expected {name} to be a plain tensor, got {type(x).__name__}")
    return scaled_dot_product_attention(query, key, value, *args, **kwargs)
