"""Calls over the pages of a cache: their checks, their form as kernels see it, and their run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegen.bounded_cache import BoundedCache
from tilegen.emit.identity import is_aligned
from tilegen.environment import current
from tilegen.errors import InvalidProblem
from tilegen.kernels.layout import Laid, strides_like
from tilegen.kernels.split_kv import Requests, Views
from tilegen.launch.autograd import addressable, empty_lse, refuse_gradients
from tilegen.launch.changes import Changes, Pages
from tilegen.launch.kernels import READABLE, Kernels
from tilegen.masks.form import Shape
from tilegen.masks.tensors import tensors_of
from tilegen.masks.values import is_checked
from tilegen.problem import PAGES
from tilegen.runtime.call import DTYPES, check_axes, form_of, shown, values_in_keys

PAGE_AXES = {"NHD": "pages, keys, heads, head_dim", "HND": "pages, heads, keys, head_dim"}
"""Dimensions of the pages, by layout."""
QUERY_AXES = "requests, heads, seqlen, head_dim", "total, heads, head_dim"
"""Dimensions of the queries without `q_starts`, and with them."""


@dataclass(slots=True, kw_only=True)
class PagedForm:
    """What the facts of a call over pages determine: sizes, views, and which tensors are copied.
    Forms are never changed, but not frozen: a frozen dataclass takes longer to make."""

    views: Views
    shape: Shape
    """Requests, query heads, and the most queries and keys of a request."""
    is_aligned: bool
    """True if addresses, strides and rows of q, the pages and the result are multiples of 16
    bytes."""
    latent: bool
    """True if values are the first columns of the keys: see `values_in_keys`."""
    integers: tuple[torch.dtype, ...]
    """The dtypes of the block table, the lengths and the starts of queries, as kernels read
    them."""
    q_starts: torch.Tensor | None
    """The start of each request's queries, unless the caller passes `q_starts`."""
    copies_q: bool
    converts: bool
    """True if kernels cannot read the caller's tables and lengths as they are."""
    writes_out: bool
    """True if kernels can write the caller's tensor for the result."""

    @classmethod
    def of(cls, q: Any, k: Any, v: Any, pages: Pages) -> PagedForm | None:
        """Make the form of a call; None if it surely has no queries or no keys. Raises
        InvalidProblem if the arguments do not fit together."""
        k, v = checked_pages(q, k, v, pages)
        sizes = q.numel(), k.shape[0], *pages.block_table.shape, pages.max_kv_length
        if 0 in sizes:
            return None
        table, lengths = readable(pages.block_table), readable(pages.lengths)
        converts = table is not pages.block_table or lengths is not pages.lengths
        made, longest_q = None, pages.max_q_length or 0
        if pages.q_starts is None:
            longest_q = q.shape[2]
            starts = made = even_starts(lengths.shape[0], longest_q, q.device, lengths.dtype)
        else:
            starts = readable(pages.q_starts)
            converts |= starts is not pages.q_starts
        rows = rows_of(q)
        result = None if pages.out is None else _view_of_result(pages, rows, v)
        seen = (rows, k, v) if result is None else (rows, k, v, result)
        shape = Shape(
            *(lengths.shape[0], rows.shape[1], longest_q),
            _longest_kv(table.shape[1] * k.shape[2], pages.max_kv_length),
        )
        return cls(
            views=_views(*seen, requests=None if made is None else lengths.shape[0]),
            shape=shape,
            is_aligned=all(map(is_aligned, seen)),
            latent=values_in_keys(rows, k, v),
            integers=(table.dtype, lengths.dtype, starts.dtype),
            q_starts=made,
            copies_q=rows.data_ptr() != q.data_ptr(),
            converts=converts,
            writes_out=result is not None,
        )

    def seen(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v in the form that kernels read."""
        q = rows_of(q) if self.copies_q else q
        of_q, of_k, of_v = zip(self.views.inputs[:3], self.views.inputs[3:], strict=True)
        return q.as_strided(*of_q), k.as_strided(*of_k), v.as_strided(*of_v)

    def key(self, q: torch.Tensor, changes: Changes) -> Any:
        """Return the plan-cache key of a call. The numbers of requests, queries and keys enter as
        power-of-two buckets."""
        shape, score = self.shape, None if changes.score is None else form_of(changes)
        (_, heads, _, width), _, (_, heads_kv, page, v_width) = self.views.inputs[:3]
        sizes = (shape.batch, shape.seqlen_q, shape.seqlen_kv)
        return (
            *("paged", heads, heads_kv, width, v_width, page),
            *((size - 1).bit_length() for size in sizes),
            *(q.dtype, q.device, self.is_aligned, self.latent, *self.integers),
            *(changes.kind, score, current()),
        )


def run_pages(
    kernels: Kernels | None,
    form: PagedForm,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call over pages, as `attention_paged` returns them. Without kernels
    PyTorch computes them."""
    pages, shape, views = changes.pages, form.shape, form.views
    assert pages is not None
    refuse_gradients(q, k, v, changes.score)
    table, lengths = pages.block_table, pages.lengths
    starts: Any = pages.q_starts if form.q_starts is None else form.q_starts
    if form.converts:
        table, lengths, starts = readable(table), readable(lengths), readable(starts)
    out = pages.out if form.writes_out else None
    requests = Requests(table, lengths, starts, shape.seqlen_q, shape.seqlen_kv, views, out)
    if is_checked(lengths):
        _check_values(requests, views)
    if kernels is None:
        result, lse = by_request(*form.seen(q, k, v), scale, changes, requests, views)
    else:
        if form.copies_q:
            q = rows_of(q)
        if changes.score is not None:
            changes = changes.on(q.device)
        result, lse = kernels.forward(q, k, v, scale, changes, requests)
        if lse.dim() == 4:  # pairs (1, heads, 2, queries), of which the first are public
            size, (*of_requests, of_heads, _) = views.lse
            lse = lse.as_strided(size, (*of_requests, 2 * of_heads, 1))
    if pages.out is not None and result is not pages.out:
        result = pages.out.copy_(result)
    return result, lse


def run_without_pairs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, changes: Changes
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) of a call over pages without queries or without keys. Raises
    InvalidProblem for lengths above 0."""
    pages = changes.pages
    assert pages is not None
    refuse_gradients(q, k, v, changes.score)
    lengths, is_packed = pages.lengths, pages.q_starts is not None
    if q.numel() and lengths.numel() and is_checked(lengths) and int(lengths.max()) > 0:
        raise InvalidProblem(
            f"kv_lengths must be 0 where the block table has no room, got {lengths.tolist()}"
        )
    shape = (*q.shape[:-1], v.shape[3])
    if pages.out is not None:
        _view_of_result(pages, rows_of(q), v)  # for its checks
    out = q.new_zeros(shape) if pages.out is None else pages.out.zero_()
    heads, rows = (shape[1], shape[0]) if is_packed else shape[1:3]
    lse = empty_lse(changes.sinks, q.device).detach()
    return out, lse.expand(*([] if is_packed else shape[:1]), heads, rows)


def by_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    changes: Changes,
    requests: Requests,
    views: Views,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse) with PyTorch in fp32, request by request."""
    from tilegen.check.reference import attention_reference

    bounds, page = (requests.longest_q, requests.longest_kv), k.shape[2]
    shape = Shape(requests.lengths.shape[0], q.shape[1], *bounds)
    tensors_of(changes.given, shape, q.device)  # for its checks of sizes
    result = torch.empty_strided(*views.out, dtype=q.dtype, device=q.device)
    size = views.written[0]
    out = result.as_strided(size, strides_like(q, size[3])).zero_()
    lse = torch.full(q.shape[:3], float("-inf"), device=q.device)
    starts, lengths = requests.q_starts.tolist(), requests.lengths.tolist()
    for i, (first, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if first == end:
            continue
        if not length:
            if changes.sinks is not None:
                lse[0, :, first:end] = changes.sinks.float()[:, None]
            continue
        used = requests.block_table[i, : -(-length // page)].long()
        keys, values = (x[used].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (k, v))
        out[:, :, first:end], lse[:, :, first:end] = attention_reference(
            *(x.float() for x in (q[:, :, first:end], keys, values)),
            mask=changes.given,
            score=changes.score,
            scale=scale,
            entry=i,
            shared=True,
        )
    return result, lse.as_strided(*views.lse)


def rows_of(q: torch.Tensor) -> torch.Tensor:
    """Return the queries of all requests one after the other, (1, heads, queries, head dim): a view
    if the heads of a row are adjacent in memory."""
    if q.dim() == 4:
        q = q.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3])
    rows = q.transpose(0, 1).unsqueeze(0)
    return rows if addressable(rows) else rows.contiguous()


def _views(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    result: torch.Tensor | None = None,
    *,
    requests: int | None,
) -> Views:
    """Return the views of a call, from tensors as kernels see them. `requests` is their number if
    each has as many queries, None for packed queries."""
    (_, heads, rows, _), width = q.shape, v.shape[3]
    _, of_heads, of_rows, _ = strides = strides_like(q, width)
    written = (1, heads, rows, width), strides
    out: Laid = (rows, heads, width), (of_rows, of_heads, 1)
    lse: Laid = (heads, rows), (rows, 1)
    if requests is not None:
        each = rows // requests
        out = (requests, heads, each, width), (each * of_rows, of_heads, of_rows, 1)
        lse = (requests, heads, each), (each, rows, 1)
    return Views(
        inputs=(q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()),
        written=written if result is None else (result.shape, result.stride()),
        out=out,
        lse=lse,
    )


def _view_of_result(pages: Pages, q: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """View the caller's result tensor as kernels write it, (1, heads, rows, head dim). Returns
    None if no such view exists, so that the result must be copied. Raises InvalidProblem."""
    out, is_packed = pages.out, pages.q_starts is not None
    assert out is not None
    _, heads, rows, _ = q.shape
    dim, requests = v.shape[3], pages.lengths.shape[0]
    shape = (rows, heads, dim) if is_packed else (requests, heads, rows // requests, dim)
    if out.shape != shape or out.dtype != q.dtype or out.device != q.device:
        raise InvalidProblem(f"out must be {shape} {q.dtype} on {q.device}, got {shown(out)}")
    if out.stride(-1) != 1 and dim > 1:
        raise InvalidProblem(
            f"out must have a dense last dimension, got strides {out.stride()} for "
            f"{tuple(out.shape)}"
        )
    view = out if is_packed else out.transpose(1, 2)
    try:
        view = view.view(1, rows, heads, dim).transpose(1, 2)
    except RuntimeError:  # the heads of a row are not adjacent in memory
        return None
    return view if addressable(view) else None


def _longest_kv(room: int, given: int | None) -> int:
    """Return the upper bound on the keys of a request. Raises InvalidProblem."""
    if given is not None and (not isinstance(given, int) or not 1 <= given <= room):
        raise InvalidProblem(
            f"max_kv_length must be 1..{room}, what the block table has room for, got {given!r}"
        )
    return room if given is None else given


def _check_values(requests: Requests, views: Views) -> None:
    """Raise InvalidProblem for lengths, starts and pages out of range."""
    table, lengths, starts = requests.block_table, requests.lengths, requests.q_starts
    (_, _, rows, _), (pages, _, page, _) = views.inputs[:2]
    queries = starts.diff()
    if not 0 <= int(lengths.min()) <= int(lengths.max()) <= requests.longest_kv:
        raise InvalidProblem(f"kv_lengths must be 0..{requests.longest_kv}, got {lengths.tolist()}")
    if int(queries.min()) < 0 or int(queries.max()) > requests.longest_q:
        raise InvalidProblem(
            f"q_starts must rise by at most {requests.longest_q}, got {starts.tolist()}"
        )
    if int(starts[0]) < 0 or int(starts[-1]) > rows:
        raise InvalidProblem(f"q_starts must be 0..{rows}, got {starts.tolist()}")
    for row, count in zip(table, (-(-lengths // page)).tolist(), strict=True):
        used = row[:count]
        if count and not 0 <= int(used.min()) <= int(used.max()) < pages:
            raise InvalidProblem(f"block_table must name pages 0..{pages - 1}, got {used.tolist()}")


def checked_pages(q: Any, k: Any, v: Any, pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of keys and values as views (pages, heads, keys, head dim). Raises
    InvalidProblem if the arguments of a call do not fit together, naming the argument."""
    block_table, lengths, q_starts = pages.block_table, pages.lengths, pages.q_starts
    layout, longest_q = pages.layout, pages.max_q_length
    page = page_axes(layout)
    for name, x, axes in (
        ("q", q, QUERY_AXES[q_starts is not None]),
        *(("k_pages", k, page), ("v_pages", v, page)),
        ("block_table", block_table, "requests, pages of one"),
        ("kv_lengths", lengths, "requests"),
        *([] if q_starts is None else [("q_starts", q_starts, "requests + 1")]),
        *([] if pages.out is None else [("out", pages.out, QUERY_AXES[q_starts is not None])]),
    ):
        check_axes(name, x, axes)
        if x.layout is not torch.strided:
            raise InvalidProblem(f"{name} must be a dense tensor, got layout {x.layout}")
        if x.device != q.device:
            raise InvalidProblem(f"{name} must be on {q.device} as q is, got {x.device}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise InvalidProblem(
            "q, k_pages and v_pages must have one dtype, fp16, bf16 or fp32, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}; fp8 caches are not supported"
        )
    if layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    for name, x in (("q", q), ("k_pages", k), ("v_pages", v)):
        if not (x.shape[1] and x.shape[-1]):  # heads and head dim
            raise InvalidProblem(f"{name} must not be empty, got shape {tuple(x.shape)}")
    requests = lengths.shape[0]
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[-1]:
        raise InvalidProblem(
            "k_pages and v_pages must have equal keys and heads, and k_pages q's head dim, got "
            f"{tuple(k.shape)} and {tuple(v.shape)} as (pages, heads, keys, head dim)"
        )
    if k.shape[2] not in PAGES:
        raise InvalidProblem(
            f"a page must hold a power of two of at most {PAGES[-1]} keys, got {k.shape[2]}"
        )
    if block_table.shape[0] != requests:
        raise InvalidProblem(
            f"block_table must have {requests} rows, as kv_lengths has, got {block_table.shape[0]}"
        )
    if q_starts is None:
        if q.shape[0] != requests:
            raise InvalidProblem(f"q must have {requests} requests, got {q.shape[0]}")
    else:
        if q_starts.shape[0] != requests + 1:
            raise InvalidProblem(
                f"q_starts must have {requests + 1} entries, got {q_starts.shape[0]}"
            )
        least = 1 if q.numel() else 0
        if not isinstance(longest_q, int) or isinstance(longest_q, bool) or longest_q < least:
            raise InvalidProblem(
                "with q_starts max_q_length is needed, the most queries of a request, got "
                f"{longest_q!r}"
            )
    for name, x in (("k_pages", k), ("v_pages", v)):
        if not addressable(x):  # a copy would be a copy of the whole cache
            raise InvalidProblem(
                f"{name} must have a dense last dimension, got strides {x.stride()} for "
                f"{tuple(x.shape)} as (pages, heads, keys, head dim)"
            )
    return k, v


def page_axes(layout: Any) -> str:
    """Return the dimensions of pages in a layout. Raises InvalidProblem for an unknown layout."""
    if layout not in (*PAGE_AXES,):
        raise InvalidProblem(f"layout must be one of {', '.join(PAGE_AXES)}, got {layout!r}")
    return PAGE_AXES[layout]


def readable(x: torch.Tensor) -> torch.Tensor:
    """Return integers in a form that kernels can read: int32 or int64, with dense rows. Raises
    InvalidProblem for other dtypes."""
    if x.dtype in READABLE and x.stride(-1) == 1:
        return x
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise InvalidProblem(f"tables and lengths must be integers, got {x.dtype}")
    x = x if x.dtype in READABLE else x.to(torch.int32)
    return x if x.stride(-1) == 1 else x.contiguous()


def even_starts(requests: int, rows: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the starts of requests with equal numbers of rows, and the end of the last,
    (requests + 1,)."""

    def starts() -> torch.Tensor:
        return torch.arange(requests + 1, dtype=dtype, device=device) * rows

    return _starts.get((requests, rows, device, dtype), starts)


_starts: BoundedCache[Any, torch.Tensor] = BoundedCache(256)
