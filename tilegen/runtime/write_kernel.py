"""The kernel that writes keys and values of new tokens into the pages of a cache."""

# pyright: basic
# Triton uses annotations of arguments as code, not as types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _write(
    from_ptr,
    to_ptr,
    stride_from,
    stride_to,
    heads,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    dims = tl.arange(0, BLOCK_D)[None, :]
    exists = (heads < num_heads)[:, None] & (dims < HEAD_DIM)
    rows = heads.to(tl.int64)[:, None]
    x = tl.load(from_ptr + rows * stride_from + dims, mask=exists)
    tl.store(to_ptr + rows * stride_to + dims, x.to(to_ptr.dtype.element_ty), mask=exists)


# Arguments that change from call to call must not specialise the kernel: it would recompile.
@triton.jit(do_not_specialize=["requests", "table_row", "room"])
def write_tokens(
    k_ptr,  # (tokens, heads, head dim), as v
    v_ptr,
    k_pages_ptr,  # (pages, rows, heads, head dim), as v_pages
    v_pages_ptr,
    slots_ptr,  # (tokens,), or None: then these, by request:
    table_ptr,  # (requests, columns), the pages of each request
    lengths_ptr,  # (requests,), the keys of each request, including the new ones
    starts_ptr,  # (requests + 1,), the start of each request's tokens
    requests,
    table_row,
    room,  # upper bound on the keys of a request
    stride_kt,  # of tokens and heads
    stride_kh,
    stride_vt,
    stride_vh,
    stride_kp,  # of pages, their rows and heads
    stride_kr,
    stride_kg,
    stride_vp,
    stride_vr,
    stride_vg,
    num_heads,
    PAGE: tl.constexpr,  # rows of a page
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_BLOCK: tl.constexpr,  # powers of two, at least the head dims
    V_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,  # heads that a program writes
    REQUESTS: tl.constexpr,  # requests that are searched at once
) -> None:
    token = tl.program_id(0).to(tl.int64)
    if slots_ptr is None:
        request = tl.full([], 0, tl.int64)  # the number of requests that end before this token
        for first in range(0, requests, REQUESTS):
            each = first + tl.arange(0, REQUESTS)
            ends = tl.load(starts_ptr + 1 + each, mask=each < requests, other=0).to(tl.int64)
            request += tl.sum(((ends <= token) & (each < requests)).to(tl.int64))
        exists = request < requests  # tokens before and after all requests are skipped
        exists &= tl.load(starts_ptr + request, mask=exists, other=0).to(tl.int64) <= token
        end = tl.load(starts_ptr + 1 + request, mask=exists, other=0).to(tl.int64)
        length = tl.load(lengths_ptr + request, mask=exists, other=0).to(tl.int64)
        at = length - end + token
        kept = exists & (at >= 0) & (at < room)
        table = table_ptr + request * table_row
        page = tl.load(table + at // PAGE, mask=kept, other=0).to(tl.int64)
        row = at % PAGE
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        kept = slot >= 0
        page, row = slot // PAGE, slot % PAGE
    if kept:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        k_row = k_pages_ptr + page * stride_kp + row * stride_kr
        _write(
            k_ptr + token * stride_kt, k_row, stride_kh, stride_kg, heads, num_heads, K_DIM, K_BLOCK
        )
        tl.debug_barrier()  # values may be columns of keys: then their bytes must win
        v_row = v_pages_ptr + page * stride_vp + row * stride_vr
        _write(
            v_ptr + token * stride_vt, v_row, stride_vh, stride_vg, heads, num_heads, V_DIM, V_BLOCK
        )
