"""Check calls over the pages of a cache and bring them into the form that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilegen.bounded_cache import BoundedCache
from tilegen.emit.identity import VECTOR_BYTES, is_aligned
from tilegen.errors import InvalidProblem
from tilegen.launch.autograd import addressable
from tilegen.launch.changes import Changes
from tilegen.launch.kernels import READABLE
from tilegen.masks.values import is_checked
from tilegen.problem import PAGES
from tilegen.runtime.call import DTYPES, check_axes, form_of, shown, values_in_keys

PAGE_AXES = {"NHD": "pages, keys, heads, head_dim", "HND": "pages, heads, keys, head_dim"}
"""Dimensions of the pages, by layout."""
QUERY_AXES = "requests, heads, seqlen, head_dim", "total, heads, head_dim"
"""Dimensions of the queries without `q_starts`, and with them."""


@dataclass(frozen=True, slots=True)
class Form:
    """Views that bring the tensors of a call into the form that kernels take; shared by calls
    whose tensors have the same sizes and strides."""

    q: tuple[tuple[int, ...], tuple[int, ...]]
    """Size and strides."""
    k: tuple[tuple[int, ...], tuple[int, ...]]
    v: tuple[tuple[int, ...], tuple[int, ...]]
    out: tuple[tuple[int, ...], tuple[int, ...]] | None
    q_starts: torch.Tensor | None
    """Start of each request's queries, unless the caller passes `q_starts`."""
    longest_q: int

    def applied(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_table: torch.Tensor,
        lengths: torch.Tensor,
        q_starts: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> PagedCall:
        """Return the call for other tensors of the same sizes and strides."""
        starts = self.q_starts if q_starts is None else q_starts
        assert starts is not None
        return PagedCall(
            q.as_strided(*self.q),
            k.as_strided(*self.k),
            v.as_strided(*self.v),
            block_table,
            lengths,
            starts,
            self.longest_q,
            None if out is None or self.out is None else out.as_strided(*self.out),
        )


@dataclass(slots=True)
class PagedCall:
    """A call in the form that kernels take: the queries of all requests one after the other, pages
    as (pages, heads, keys, head dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor
    q_starts: torch.Tensor
    longest_q: int
    out: torch.Tensor | None = None
    """View of the caller's result tensor as kernels write it, (1, heads, queries, d_v)."""

    @property
    def requests(self) -> int:
        """The number of requests."""
        return self.lengths.shape[0]

    @property
    def integers(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the block table, the lengths and the starts of queries."""
        return self.block_table.dtype, self.lengths.dtype, self.q_starts.dtype

    @property
    def is_aligned(self) -> bool:
        """Whether addresses, strides and rows of q, the pages and the result are multiples of 16
        bytes."""
        q, k, v = self.q, self.k, self.v
        if self.out is not None and not is_aligned(self.out):
            return False
        qh, qm = q.stride()[1:3]
        kb, kh, kn, _ = k.stride()
        vb, vh, vn, _ = v.stride()
        sizes = qh | qm | kb | kh | kn | vb | vh | vn | q.shape[3] | v.shape[3]
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        if not (sizes * q.element_size() | addresses) % VECTOR_BYTES:
            return True
        return all(map(is_aligned, (q, k, v)))  # which ignores strides of dimensions of size 1

    def key(self, longest_kv: int, changes: Changes) -> Any:
        """Return the plan-cache key of a call. The numbers of requests, queries and keys enter as
        power-of-two buckets."""
        q, v = self.q, self.v
        score = None if changes.score is None else form_of(changes)
        _, heads, _, width = q.shape
        _, heads_kv, page, v_width = v.shape
        return (
            *("paged", heads, heads_kv, width, v_width, page),
            *((self.requests - 1).bit_length(), (self.longest_q - 1).bit_length()),
            *((longest_kv - 1).bit_length(), q.dtype, q.device, self.is_aligned),
            *self.integers,
            *(changes.kind, score, values_in_keys(q, self.k, v)),
        )

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
    ) -> PagedCall:
        """Make a call from the arguments of `attention_paged`. Raises InvalidProblem if they do not
        fit together."""
        _check(q, k, v, block_table, lengths, q_starts, longest_q, layout)
        if layout == "NHD":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        tables = readable(block_table), readable(lengths)
        if q_starts is None:
            requests, heads, longest, width = q.shape
            q_starts = even_starts(requests, longest, q.device, tables[1].dtype)
            # A view if the heads of a row lie together in memory.
            q = q.transpose(1, 2).reshape(requests * longest, heads, width)
        else:
            q_starts, longest = readable(q_starts), longest_q or 0
        rows = q.transpose(0, 1).unsqueeze(0)
        rows = rows if addressable(rows) else rows.contiguous()
        return cls(rows, k, v, *tables, q_starts, longest)

    def rows_of(self, out: torch.Tensor, *, is_packed: bool) -> torch.Tensor | None:
        """View the caller's result tensor as kernels write it, (1, heads, rows, head dim). Returns
        None if no such view exists, so that the result must be copied. Raises InvalidProblem."""
        check_axes("out", out, QUERY_AXES[is_packed])
        rows, heads, dim = self.q.shape[2], self.q.shape[1], self.v.shape[3]
        shape = (rows, heads, dim)
        if not is_packed:
            shape = (self.requests, heads, rows // self.requests, dim)
        if out.shape != shape or out.dtype != self.q.dtype or out.device != self.q.device:
            raise InvalidProblem(
                f"out must be {shape} {self.q.dtype} on {self.q.device}, got {shown(out)}"
            )
        if out.stride(-1) != 1 and dim > 1:
            raise InvalidProblem(
                f"out must have a dense last dimension, got strides {out.stride()} for "
                f"{tuple(out.shape)}"
            )
        view = out if is_packed else out.transpose(1, 2)
        try:
            view = view.view(1, rows, heads, dim).transpose(1, 2)
        except RuntimeError:  # the heads of a row do not lie together in memory
            return None
        return view if addressable(view) else None

    def form_of(
        self,
        q: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        starts: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> Form | None:
        """Return the views to reuse for tensors of the same sizes and strides as those that the
        caller passed. Returns None if a tensor was copied."""
        is_view = self.q.data_ptr() == q.data_ptr()
        same = self.block_table is table and self.lengths is lengths
        if not (is_view and same and (starts is None or self.q_starts is starts)):
            return None
        if out is not None and self.out is None:
            return None
        q_form, k_form, v_form = ((x.shape, x.stride()) for x in (self.q, self.k, self.v))
        written = None if self.out is None else (self.out.shape, self.out.stride())
        return Form(
            q_form,
            k_form,
            v_form,
            written,
            self.q_starts if starts is None else None,
            self.longest_q,
        )

    def longest_kv(self, given: int | None) -> int:
        """Return the upper bound on the keys of a request. Where values are checked, raises
        InvalidProblem for lengths, starts and pages out of range."""
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


def facts_of_pages(
    tensors: tuple[Any, ...], bounds: tuple[Any, ...], changes: Changes
) -> tuple[Any, ...] | None:
    """Return everything that the plan and the views of a call depend on. Returns None if they also
    depend on values, or if an argument is not a tensor."""
    q, k, v, table, lengths, starts, out = tensors
    try:
        if changes.score is not None or changes.given.values or is_checked(lengths):
            return None
        k_at, v_at = k.data_ptr(), v.data_ptr()
        offset = (
            q.data_ptr() | k_at | v_at | (0 if out is None else out.data_ptr())
        ) % VECTOR_BYTES
        laid = [
            (x.shape, x.stride(), x.dtype, x.device)
            for x in (q, k, v, table, lengths, *(x for x in (starts, out) if x is not None))
        ]
    except (AttributeError, RuntimeError):  # not tensors: checks raise an error that names them
        return None
    given = starts is None, out is None
    return "paged", changes.kind, laid, offset, k_at == v_at, bounds, given  # differs early: kind


def _check(
    q: Any,
    k: Any,
    v: Any,
    block_table: Any,
    lengths: Any,
    q_starts: Any,
    longest_q: int | None,
    layout: str,
) -> None:
    """Raise InvalidProblem if the arguments do not fit together, naming the argument."""
    page = page_axes(layout)
    for name, x, axes in (
        ("q", q, QUERY_AXES[q_starts is not None]),
        *(("k_pages", k, page), ("v_pages", v, page)),
        ("block_table", block_table, "requests, pages of one"),
        ("kv_lengths", lengths, "requests"),
        *([("q_starts", q_starts, "requests + 1")] if q_starts is not None else []),
    ):
        check_axes(name, x, axes)
        if not x.numel():
            raise InvalidProblem(f"{name} must not be empty, got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise InvalidProblem(f"{name} must be on {q.device} as q is, got {x.device}")
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise InvalidProblem(
            "q, k_pages and v_pages must have one dtype, fp16, bf16 or fp32, got "
            f"{q.dtype}, {k.dtype} and {v.dtype}; fp8 caches are not supported"
        )
    if layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    requests = len(lengths)
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
    if q_starts is None:
        if len(q) != requests:
            raise InvalidProblem(f"q must have {requests} requests, got {len(q)}")
    else:
        if len(q_starts) != requests + 1:
            raise InvalidProblem(f"q_starts must have {requests + 1} entries, got {len(q_starts)}")
        if not isinstance(longest_q, int) or isinstance(longest_q, bool) or longest_q < 1:
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
