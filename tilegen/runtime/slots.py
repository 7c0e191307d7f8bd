"""Write into the pages of a cache: behind the keys of requests, or to given slots."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilegen import cpu
from tilegen.errors import InvalidProblem
from tilegen.masks.values import is_checked
from tilegen.runtime.call import check_axes
from tilegen.runtime.paged_call import even_starts, page_axes, readable

PagePair = tuple[torch.Tensor, torch.Tensor]
"""Pages of keys and of values, each (pages, rows, heads, head dim)."""
TOKEN_AXES = "tokens, heads, dim"
WRITTEN_AT_ONCE, REQUESTS_AT_ONCE = 4096, 1024
"""Elements of keys that a program writes, and requests that it searches per step."""


def append(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    q_starts: torch.Tensor | None,
    layout: str,
) -> None:
    """Write keys and values as described in `append_paged`. Raises InvalidProblem."""
    _check_tokens(k, v, "requests, heads, new, dim" if q_starts is None else TOKEN_AXES)
    check_axes("block_table", block_table, "requests, pages of one")
    check_axes("kv_lengths", kv_lengths, "requests")
    if q_starts is not None:
        check_axes("q_starts", q_starts, "requests + 1")
    requests = len(kv_lengths)
    if q_starts is None:
        if len(k) != requests:
            raise InvalidProblem(f"k must have {requests} requests, got {len(k)}")
        q_starts = even_starts(requests, k.shape[2], k.device, torch.int32)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    if len(block_table) != requests or len(q_starts) != requests + 1:
        raise InvalidProblem(
            f"block_table must have {requests} rows, as kv_lengths has, and q_starts one more, got "
            f"{len(block_table)} and {len(q_starts)}"
        )
    pages = _fitting(k, v, k_pages, v_pages, layout)
    where = readable(block_table), readable(kv_lengths), readable(q_starts)
    for name, x in zip(("block_table", "kv_lengths", "q_starts"), where, strict=True):
        _check_device(name, x, k)
    if not len(k) or not requests:
        return
    if not _runs_kernel(k):
        _compute(k, v, pages, _slots(*where, len(k), pages))
        return
    if is_checked(k):
        _slots(*where, len(k), pages)
    _launch(k, v, pages, where=where)


def write_slots(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    layout: str = "NHD",
) -> None:
    """Write keys and values of tokens to slots of a cache, in place.

    Shapes: k and v (tokens, heads_kv, d), slots (tokens,). A slot is `page * keys of a page + row`
    and may occur once; a token with slot -1 is skipped. Pages and `layout` are those of
    `attention_paged`. Nothing is read on the host, so a CUDA graph can capture the call. Raises
    InvalidProblem.
    """
    _check_tokens(k, v, TOKEN_AXES)
    check_axes("slots", slots, "tokens")
    if len(slots) != len(k):
        raise InvalidProblem(f"slots must have a place for each of {len(k)}, got {len(slots)}")
    pages = _fitting(k, v, k_pages, v_pages, layout)
    _check_device("slots", slots, k)
    slots = readable(slots)
    if is_checked(slots):
        _check_slots(slots, pages)
    if _runs_kernel(k):
        _launch(k, v, pages, slots=slots.contiguous())
    else:
        _compute(k, v, pages, slots)


def _check_tokens(k: torch.Tensor, v: torch.Tensor, axes: str) -> None:
    check_axes("k", k, axes)
    check_axes("v", v, axes)
    if k.shape[:-1] != v.shape[:-1]:
        raise InvalidProblem(
            f"k and v must hold as many tokens and heads, got {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _fitting(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, layout: str
) -> PagePair:
    """Return the pages as views (pages, rows, heads, head dim). Raises InvalidProblem if they
    cannot hold these keys and values."""
    axes = page_axes(layout)
    for name, x, cache in (("k", k, k_pages), ("v", v, v_pages)):
        check_axes(f"{name}_pages", cache, axes)
        if cache.stride(3) != 1:
            raise InvalidProblem(
                f"{name}_pages must have a dense last dimension, got strides {cache.stride()}"
            )
        held = cache.shape[1 if layout == "HND" else 2], cache.shape[3]
        if x.shape[-2:] != held:
            raise InvalidProblem(
                f"{name} must have the heads and the head dim of {name}_pages, {held}, got "
                f"{tuple(x.shape[-2:])}"
            )
        _check_device(f"{name}_pages", cache, k)
    if layout == "HND":
        k_pages, v_pages = k_pages.transpose(1, 2), v_pages.transpose(1, 2)
    if k_pages.shape[:2] != v_pages.shape[:2]:
        raise InvalidProblem(
            "k_pages and v_pages must have as many pages of as many keys, got "
            f"{tuple(k_pages.shape[:2])} and {tuple(v_pages.shape[:2])}"
        )
    return k_pages, v_pages


def _check_device(name: str, x: torch.Tensor, k: torch.Tensor) -> None:
    if x.device != k.device:
        raise InvalidProblem(f"{name} must be on {k.device} as k is, got {x.device}")


def _check_slots(slots: torch.Tensor, pages: PagePair) -> None:
    room = pages[0].shape[0] * pages[0].shape[1]
    if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < room:
        raise InvalidProblem(f"slots must be -1..{room - 1}, got {slots.tolist()}")


def _slots(
    table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, tokens: int, pages: PagePair
) -> torch.Tensor:
    """Return the slot of each token, behind the keys of its request; -1 for tokens outside all
    requests. Raises InvalidProblem for slots beyond the block table, and for decreasing starts."""
    if int(starts[0]) < 0 or int(starts[-1]) > tokens or int(starts.diff().min()) < 0:
        raise InvalidProblem(
            f"q_starts must rise from at least 0 to at most the {tokens} tokens of k, got "
            f"{starts.tolist()}"
        )
    page, ends, requests = pages[0].shape[1], starts[1:].long(), len(lengths)
    token = torch.arange(tokens, device=table.device)
    request = torch.searchsorted(ends, token, right=True)
    kept = request < requests
    request = request.clamp(max=requests - 1)
    kept &= starts[request] <= token
    at = ((lengths - ends)[request] + token).where(kept, 0)
    room = table.shape[1] * page
    if tokens and not 0 <= int(at.min()) <= int(at.max()) < room:
        raise InvalidProblem(
            "kv_lengths must count the new tokens, and be at most what block_table has room for, "
            f"{room}, got {lengths.tolist()} with tokens that end at {ends.tolist()}"
        )
    slots = (table[request, at // page].long() * page + at % page).where(kept, -1)
    _check_slots(slots, pages)
    return slots


@functools.cache
def _compiled() -> Any:
    """Return the kernel compiled for the CPU; v may be a view of k."""
    from tilegen.cpu.direct import DirectFunction
    from tilegen.runtime.write_kernel import write_tokens

    return DirectFunction(write_tokens, aliases=True)


def _runs_kernel(k: torch.Tensor) -> bool:
    if k.device.type != "cpu":
        return k.is_cuda
    return cpu.serves_calls()


def _compute(k: torch.Tensor, v: torch.Tensor, pages: PagePair, slots: torch.Tensor) -> None:
    """Write keys and values to slots with PyTorch."""
    kept = slots >= 0
    at, page = slots[kept].long(), pages[0].shape[1]
    for cache, x in zip(pages, (k, v), strict=True):
        cache.detach()[at // page, at % page] = x.detach()[kept].to(cache.dtype)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    pages: PagePair,
    *,
    slots: torch.Tensor | None = None,
    where: tuple[torch.Tensor, ...] | None = None,
) -> None:
    """Write keys and values with one kernel: to `slots`, or behind the keys of requests, by
    `where`: the block table, the lengths and the starts."""
    from tilegen.runtime.write_kernel import write_tokens

    tokens, heads, k_dim = k.shape
    if not tokens:
        return
    # Triton launches on the current device.
    if k.is_cuda and k.device.index != torch.cuda.current_device():
        with torch.cuda.device(k.device):
            return _launch(k, v, pages, slots=slots, where=where)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    k_pages, v_pages = pages
    page, v_dim = k_pages.shape[1], v.shape[2]
    k_block, v_block = (1 << (dim - 1).bit_length() for dim in (k_dim, v_dim))
    at_once = min(1 << (heads - 1).bit_length(), max(1, WRITTEN_AT_ONCE // max(k_block, v_block)))
    of_requests: tuple[Any, ...] = (None, None, None, 0, 0, 0)
    if where is not None:
        requests, columns = where[0].shape
        of_requests = *where, requests, where[0].stride(0), columns * page
    kernel: Any = _compiled() if cpu.runs_compiled(k.device) else write_tokens
    kernel[tokens, -(-heads // at_once)](
        *(k, v, k_pages, v_pages, slots, *of_requests),
        *(*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], heads),
        *(page, k_dim, v_dim, k_block, v_block, at_once, REQUESTS_AT_ONCE),
    )
