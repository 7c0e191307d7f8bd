"""Attention over the pages of a cache: requests of any lengths, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegen.bounded_cache import BoundedCache
from tilegen.check import interpreter
from tilegen.disk import say_once
from tilegen.emit.identity import is_aligned
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.kernels.split_kv import Requests
from tilegen.masks.mask import Mask, full
from tilegen.masks.score import Score
from tilegen.masks.shapes import Shape
from tilegen.masks.tensors import check_fit, score_tensors, tensors_of
from tilegen.masks.values import is_checked
from tilegen.problem import PAGES, AttentionProblem
from tilegen.runtime import plans
from tilegen.runtime.autograd import addressable
from tilegen.runtime.call import (
    ScoreFunction,
    checked_scale,
    form_of,
    score_of,
    values_in_keys,
)
from tilegen.runtime.changes import Changes
from tilegen.runtime.kernels import Kernels
from tilegen.settings import settings

_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
LAYOUTS = ("NHD", "HND")
"""Pages as (keys, heads, head dim) or (heads, keys, head dim)."""


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    kv_lengths: torch.Tensor,
    *,
    q_starts: torch.Tensor | None = None,
    max_q_length: int | None = None,
    max_kv_length: int | None = None,
    mask: Mask | None = None,
    score: Score | ScoreFunction | None = None,
    scale: float | None = None,
    layout: str = "NHD",
    return_lse: bool = False,
) -> Any:
    """Return attention of queries over the pages of a cache of keys and values, without gradients.

    Shapes: q (requests, heads_q, seqlen_q, d_qk), or (total_q, heads_q, d_qk) with `q_starts`
    (requests + 1,), which says where each request's queries start: prompts, chunks of prompts and
    decoding in one call. k_pages and v_pages are (pages, page, heads_kv, d_qk or d_v) in layout
    NHD, (pages, heads_kv, page, ...) in HND, with any strides but a dense last dimension: slices of
    one tensor that holds both will do. `block_table` (requests, most pages of a request) has the
    pages of each request, in the order of its keys, and `kv_lengths` (requests,) its number of
    keys, those of the queries among them; both are integers on the device of q, as is `q_starts`,
    and none is read on the host. A page holds a power of two of at most 256 keys.

    `mask` and `score` see positions, lengths and b of a request: `tilegen.causal("bottom_right")`
    lets its last query see its last key. `max_kv_length` bounds kv_lengths (by default what the
    block table has room for), and `max_q_length` the queries of a request, needed with `q_starts`;
    both only bound the work, so that a CUDA graph of the largest serves all lengths. out is like q,
    lse (requests, heads_q, seqlen_q) or (heads_q, total_q), fp32; rows of no request are undefined.
    Raises InvalidProblem or Unsupported, naming the call.
    """
    try:
        call = _Call.of(
            q, k_pages, v_pages, block_table, kv_lengths, q_starts, max_q_length, layout
        )
        found = None if score is None else score_of(score)
        kept = full() if mask is None else mask
        longest = call.longest_kv(max_kv_length)
        read = (*found.captured, found.sink_logits) if found else ()
        reached = (one for one in (q, k_pages, v_pages, *read) if one is not None)
        if torch.is_grad_enabled() and any(x.requires_grad for x in reached):
            raise Unsupported(
                "no gradients reach what lies in pages: call under torch.no_grad(), or detach"
            )
        factor = call.q.shape[3] ** -0.5 if scale is None else checked_scale(scale)
        if factor < 0:  # kernels take a row's maximum before scaling: the scale must keep the order
            call.q, factor = -call.q, -factor
        out, lse = _run(call, longest, Changes(kept, found), factor)
    except TilegenError as error:
        shapes = ", ".join(
            f"{name} {tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else f"{name} {x!r}"
            for name, x in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages))
        )
        raise type(error)(f"{error}; the call was paged, {shapes}, mask {mask}") from None
    if q_starts is not None:
        out, lse = out[0].transpose(0, 1), lse[0]
    else:
        out, lse = _unpacked(out, call.requests), _unpacked(lse, call.requests)
    return (out, lse) if return_lse else out


@dataclass
class _Call:
    """A call in the form that kernels take: queries of all requests one after the other, pages as
    (pages, heads, keys, head dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    q_starts: torch.Tensor
    longest_q: int

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        v: Any,
        block_table: Any,
        lengths: Any,
        q_starts: Any,
        longest_q: int | None,
        layout: str,
    ) -> _Call:
        """Return a call whose tensors fit together. Raises InvalidProblem."""
        if layout not in LAYOUTS:
            raise InvalidProblem(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
        for name, x, dims in (
            ("q", q, 4 if q_starts is None else 3),
            ("k_pages", k, 4),
            ("v_pages", v, 4),
            ("block_table", block_table, 2),
            ("kv_lengths", lengths, 1),
            *([("q_starts", q_starts, 1)] if q_starts is not None else []),
        ):
            if not isinstance(x, torch.Tensor) or x.ndim != dims or not x.numel():
                got = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
                raise InvalidProblem(f"{name} must be a tensor of {dims} dimensions, got {got}")
            if x.device != q.device:
                raise InvalidProblem(f"{name} must be on {q.device} as q is, got {x.device}")
        if q.dtype not in _DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
            raise InvalidProblem(
                "q, k_pages and v_pages must have one dtype, fp16, bf16 or fp32, got "
                f"{q.dtype}, {k.dtype} and {v.dtype}; fp8 caches are not supported"
            )
        if layout == "NHD":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        requests, heads = len(lengths), q.shape[1]
        if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[-1]:
            raise InvalidProblem(
                "pages of k and v must hold as many keys and heads, and keys of q's head dim, got "
                f"{tuple(k.shape)} and {tuple(v.shape)} as (pages, heads, keys, head dim)"
            )
        if k.shape[2] not in PAGES:
            raise InvalidProblem(
                f"a page must hold a power of two of at most {PAGES[-1]} keys, got {k.shape[2]}"
            )
        if len(block_table) != requests:
            raise InvalidProblem(
                f"block_table must have {requests} rows, as kv_lengths has, got {len(block_table)}"
            )
        tables = _int32(block_table), _int32(lengths)
        if q_starts is None:
            if len(q) != requests:
                raise InvalidProblem(f"q must have {requests} requests, got {len(q)}")
            longest = q.shape[2]
            starts = _even_starts(requests, longest, q.device)
            # A view, where heads lie inside of rows.
            packed = q.transpose(1, 2).reshape(requests * longest, heads, q.shape[3])
        else:
            if len(q_starts) != requests + 1:
                raise InvalidProblem(
                    f"q_starts must have {requests + 1} entries, got {len(q_starts)}"
                )
            if not isinstance(longest_q, int) or isinstance(longest_q, bool) or longest_q < 1:
                raise InvalidProblem(
                    "with q_starts max_q_length is needed, the most queries of a request, got "
                    f"{longest_q!r}"
                )
            starts, packed, longest = _int32(q_starts), q, longest_q
        rows = packed.transpose(0, 1)[None]
        for name, x in (("k_pages", k), ("v_pages", v)):
            if not addressable(x):  # a copy would be one of the whole cache
                raise InvalidProblem(
                    f"{name} must have a dense last dimension, got strides {x.stride()} for "
                    f"{tuple(x.shape)} as (pages, heads, keys, head dim)"
                )
        rows = rows if addressable(rows) else rows.contiguous()
        return cls(rows, k, v, *tables, starts, longest)

    def longest_kv(self, given: int | None) -> int:
        """Return what bounds the keys of a request. Raises InvalidProblem for lengths beyond it,
        where values are checked."""
        room = self.block_table.shape[1] * self.k.shape[2]
        if given is not None and (not isinstance(given, int) or not 1 <= given <= room):
            raise InvalidProblem(
                f"max_kv_length must be 1..{room}, what the block table has room for, got {given!r}"
            )
        longest = room if given is None else given
        if is_checked(self.lengths):
            most, queries = int(self.lengths.max()), self.q_starts.diff()
            if not 0 <= int(self.lengths.min()) <= most <= longest:
                raise InvalidProblem(
                    f"kv_lengths must be 0..{longest}, got {self.lengths.tolist()}"
                )
            if int(queries.min()) < 0 or int(queries.max()) > self.longest_q:
                raise InvalidProblem(
                    f"q_starts must rise by at most {self.longest_q}, got {self.q_starts.tolist()}"
                )
            if int(self.q_starts[0]) < 0 or int(self.q_starts[-1]) > self.q.shape[2]:
                raise InvalidProblem(
                    f"q_starts must be 0..{self.q.shape[2]}, got {self.q_starts.tolist()}"
                )
            pages = -(-self.lengths // self.k.shape[2])
            for row, count in zip(self.block_table, pages.tolist(), strict=True):
                used = row[:count]
                if count and not 0 <= int(used.min()) <= int(used.max()) < len(self.k):
                    raise InvalidProblem(
                        f"block_table must name pages 0..{len(self.k) - 1}, got {used.tolist()}"
                    )
        return longest


def _run(
    call: _Call, longest_kv: int, changes: Changes, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = call.q, call.k, call.v
    problem = AttentionProblem(
        batch=call.requests,
        num_heads_q=q.shape[1],
        num_heads_kv=k.shape[1],
        seqlen_q=call.longest_q,
        seqlen_kv=longest_kv,
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=_DTYPES[q.dtype],  # type: ignore[arg-type]
        mask=changes.kind.mask,
        score=form_of(changes),
        page=k.shape[2],
        invariant=settings().batch_invariant,
        latent=values_in_keys(k, v),
    )
    shape = Shape(call.requests, q.shape[1], call.longest_q, longest_kv)
    check_fit(changes.given, changes.score, shape)
    if q.device.type == "cpu" and not interpreter.is_active():
        say_once(
            "CPU tensors: computing with PyTorch; "
            "set TRITON_INTERPRET=1 before Python starts to run the emitted kernels"
        )
        return _by_request(call, changes, scale, shape)
    if q.device.type == "cpu":
        interpreter.prepare()
    aligned = all(map(is_aligned, (q, k, v)))
    key = problem.bucket, q.device, aligned, False
    kernels = plans.by_problem.get(key, lambda: Kernels(*key))
    changes = changes.on(q.device)
    reads = score_tensors(changes.captured, changes.sinks) if changes.score else {}
    tables = tensors_of(changes.given, shape, q.device)
    requests = Requests(call.block_table, call.lengths, call.q_starts, call.longest_q, longest_kv)
    return kernels.forward_paged(q, k, v, scale, requests, tables, reads)


def _by_request(
    call: _Call, changes: Changes, scale: float, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as PyTorch computes them, request after request, in fp32."""
    from tilegen.check.reference import attention_reference

    tensors_of(changes.given, shape, call.q.device)  # which checks their sizes

    q, heads, page = call.q, call.q.shape[1], call.k.shape[2]
    out = q.new_zeros((*q.shape[:3], call.v.shape[3]))
    lse = torch.full((1, heads, q.shape[2]), float("-inf"), device=q.device)
    starts, lengths = call.q_starts.tolist(), call.lengths.tolist()
    for i, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if first == end or not length:
            continue
        pages = call.block_table[i, : -(-length // page)].long()
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (call.k, call.v))
        out[:, :, first:end], lse[:, :, first:end] = attention_reference(
            *(x.float() for x in (q[:, :, first:end], k, v)),
            mask=changes.given,
            score=changes.score,
            scale=scale,
            entry=i,
        )
    return out, lse


def _unpacked(x: torch.Tensor, requests: int) -> torch.Tensor:
    """Return (requests, heads, rows, ...) of (1, heads, requests * rows, ...)."""
    return x[0].unflatten(1, (requests, -1)).transpose(0, 1)


def _int32(x: torch.Tensor) -> torch.Tensor:
    """Return integers as kernels read them, with rows that are dense. Raises InvalidProblem."""
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise InvalidProblem(f"tables and lengths must be integers, got {x.dtype}")
    x = x.to(torch.int32)
    return x if x.stride(-1) == 1 else x.contiguous()


def _even_starts(requests: int, rows: int, device: torch.device) -> torch.Tensor:
    def made() -> torch.Tensor:
        return torch.arange(0, (requests + 1) * rows, rows, dtype=torch.int32, device=device)

    return _starts.get((requests, rows, device), made)


_starts: BoundedCache[Any, torch.Tensor] = BoundedCache(256)
