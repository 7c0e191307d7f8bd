"""Facts of a call: its score, its problem, its plan-cache key and its description in errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from numbers import Real
from operator import or_
from typing import Any

import torch

from tilegen import environment
from tilegen.emit.identity import VECTOR_BYTES
from tilegen.environment import current
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import shares_columns
from tilegen.kernels.layout import MAX_ROW_STRIDE
from tilegen.launch.changes import Changes
from tilegen.masks import score as scores
from tilegen.masks.dropout import Dropout
from tilegen.masks.form import Shape
from tilegen.masks.mask import Mask
from tilegen.masks.plain import check_plain, plain_number
from tilegen.masks.score import Score, ScoreForm
from tilegen.masks.tensors import check_kv_lengths
from tilegen.masks.tracing.reads import Traces
from tilegen.problem import MIN_HEAD_DIM, AttentionProblem, DType

DTYPES: dict[torch.dtype, DType] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
AXES = "batch, heads, seqlen, head_dim"
"""The dimensions of q, k and v."""
MAX_PROGRAMS = 2**31 - 1  # CUDA's limit on a one-dimensional grid
MAX_SCALE = torch.finfo(torch.float32).max / math.log2(math.e)
"""Largest scale that fp32 still holds after kernels have multiplied it by log2(e)."""
ScoreFunction = Callable[..., Any]
"""A function of (score, b, h, q_idx, kv_idx), like FlexAttention's score_mod."""


def score_of(score: Score | ScoreFunction | None) -> Score | None:
    """Return the score of a call, tracing functions. A trace is reused while what the function
    reads is the same."""
    if score is None:
        return None
    if isinstance(score, Score):
        return (score if score.follows is None else score.follows.now(score)).anew()
    scores.check_function(score)
    return _traces(score).anew()


_traces = Traces(scores.traced)


def facts_of(q: Any, k: Any, v: Any, changes: Changes) -> tuple[Any, ...]:
    """Return everything that the plan of a call depends on, first the shapes and the strides.
    Raises InvalidProblem if q, k or v is not a dense tensor, or the mask is not a mask."""
    kind, form = changes.kind, None if changes.score is None else form_of(changes)
    lengths = changes.kv_lengths
    try:
        laid = q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride()
        dtypes, devices = (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
        k_at, v_at = k.data_ptr(), v.data_ptr()
        offset = (q.data_ptr() | k_at | v_at) % VECTOR_BYTES
        where = "cuda" if q.is_cuda else "cpu"
        padding = lengths is not None and (
            lengths.dtype,
            lengths.shape,
            lengths.device,
            lengths.is_contiguous(),
        )
        pages = changes.pages and changes.pages.facts
    except (AttributeError, RuntimeError):  # RuntimeError: sparse and nested tensors
        if lengths is not None:
            check_kv_lengths(lengths)
        names = ", ".join(kind_shown(x) for x in (q, k, v))
        raise InvalidProblem(f"q, k and v must be dense torch tensors, got {names}") from None
    cast = torch.is_autocast_enabled(where) and torch.get_autocast_dtype(where)
    # As `current` does, whose call would take twice as long.
    settings = environment.chosen() or environment.of_process or current()
    options = kind, form, cast, changes.dropout is None, padding, pages, settings
    return laid, dtypes, devices, offset, k_at == v_at, options


def call_key(facts: tuple[Any, ...]) -> Any:
    """Return the plan-cache key of a call from its facts. Lengths enter as power-of-two buckets.
    Strides and addresses enter only as far as kernels depend on them."""
    laid, dtypes, devices, offset, is_shared, options = facts
    q_shape, k_shape, v_shape, *strides = laid
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        return facts  # not a usual call: never shares a plan
    batch, heads, rows, width = q_shape
    k_batch, heads_kv, columns, k_width = k_shape
    v_batch, v_heads, v_columns, v_width = v_shape
    (qb, qh, qm, q_dense), (kb, kh, kn, k_dense), (vb, vh, vn, v_dense) = strides
    if not (
        batch == k_batch == v_batch
        and heads_kv == v_heads
        and columns == v_columns
        and width == k_width
        and q_dense == k_dense == v_dense == 1
        and (qm | kn | vn) < MAX_ROW_STRIDE
        and rows
        and columns
        and dtypes[0] is dtypes[1] is dtypes[2]
        and devices[0] == devices[1] == devices[2]
        and batch * heads * (rows | columns) <= MAX_PROGRAMS
    ):
        return facts
    unit = (qb | qh | qm | kb | kh | kn | vb | vh | vn) % VECTOR_BYTES
    if unit:  # ignore strides of dimensions of size 1: they are arbitrary
        sizes = (size for shape in laid[:3] for size in shape[:3])
        pairs = zip(sizes, (qb, qh, qm, kb, kh, kn, vb, vh, vn), strict=True)
        unit = reduce(or_, (0 if n == 1 else stride for n, stride in pairs)) % VECTOR_BYTES
    expanded = not (qb and qh and qm and kb and kh and kn and vb and vh and vn)
    sizes = batch, heads, heads_kv, width, v_width
    lengths = (rows - 1).bit_length(), (columns - 1).bit_length()
    in_keys = is_shared and strides[1] == strides[2]
    return sizes, lengths, unit, offset, expanded, in_keys, dtypes[0], devices[0], options


def form_of(changes: Changes) -> ScoreForm | None:
    """Return the part of a score that kernels are specialised on. If gradients are off, no tensor
    of the score is trained."""
    if changes.score is None:
        return None
    form = changes.score.form
    if torch.is_grad_enabled() or not form.trained:
        return form
    return ScoreForm(form.text, form.elements, form.sinks)


def problem_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, changes: Changes
) -> AttentionProblem:
    """Return the problem of a call, with sizes of 1 for those of 0. Raises InvalidProblem and
    Unsupported."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_axes(name, tensor, AXES)
        if not (tensor.shape[1] and tensor.shape[3]):
            raise InvalidProblem(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise InvalidProblem(f"{name} must be fp16, bf16 or fp32, got {tensor.dtype}")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise InvalidProblem(
                f"q, k and v must have one dtype and device, got {q.dtype} on {q.device} for q "
                f"and {tensor.dtype} on {tensor.device} for {name}"
            )
    expected_k = (q.shape[0], k.shape[1], k.shape[2], q.shape[3])
    if k.shape != expected_k:
        raise InvalidProblem(f"k must have q's batch and head_dim, got {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        raise InvalidProblem(f"v must have k's batch, heads and seqlen, got {tuple(v.shape)}")
    batch, heads, rows, _ = q.shape
    shape = Shape(max(1, batch), heads, max(1, rows), max(1, k.shape[2]))
    return problem_of_sizes(shape, q, k, v, changes, page=0)


def problem_of_sizes(
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    changes: Changes,
    *,
    page: int,
) -> AttentionProblem:
    """Return the problem of a call with tensors that fit together. With keys in pages, `shape` has
    the requests and the most queries and keys that a request has."""
    return AttentionProblem(
        batch=shape.batch,
        num_heads_q=shape.heads,
        num_heads_kv=k.shape[1],
        seqlen_q=shape.seqlen_q,
        seqlen_kv=shape.seqlen_kv,
        head_dim_qk=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=DTYPES[q.dtype],
        mask=changes.kind.mask,
        score=form_of(changes),
        dropout=changes.dropout is not None,
        page=page,
        invariant=current().batch_invariant,
        latent=values_in_keys(q, k, v),
    )


def check_axes(name: str, x: Any, axes: str) -> None:
    """Raise InvalidProblem unless x is a tensor with one dimension per name in the comma-separated
    `axes`."""
    if not isinstance(x, torch.Tensor) or x.ndim != axes.count(",") + 1:
        raise InvalidProblem(f"{name} must be a tensor ({axes}), got {shown(x)}")
    if type(x) is not torch.Tensor or x.is_nested:
        check_plain(**{name: x})


def values_in_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Check whether values are the first columns of one head's keys, shared by several query heads.

    Absorbed multi-head latent attention passes such values, `k[..., :512]`. Kernels load them once.
    """
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    return same and k.shape[1] == 1 < q.shape[1] and shares_columns(k.shape[-1], v.shape[-1])


def checked_scale(scale: float) -> float:
    """Return the scale as a float. Raises InvalidProblem unless it is a finite number that fp32
    holds after a multiplication by log2(e)."""
    if not isinstance(scale, float):
        scale = plain_number(scale)
    if isinstance(scale, bool) or not isinstance(scale, Real) or not math.isfinite(scale):
        raise InvalidProblem(f"scale must be a finite number, got {scale!r}")
    if abs(scale) > MAX_SCALE:
        raise InvalidProblem(f"scale must be at most {MAX_SCALE:.3g} in size, got {scale!r}")
    return float(scale)


def dropout_of(dropout_p: float, q: Any) -> Dropout | None:
    """Draw the dropout of a call; None if nothing is dropped. Raises InvalidProblem unless the
    probability is a number 0..1."""
    dropout_p = plain_number(dropout_p)
    is_number = isinstance(dropout_p, Real) and not isinstance(dropout_p, bool)
    if not is_number or not 0 <= dropout_p <= 1:
        raise InvalidProblem(
            "dropout_p must be a number 0..1, the probability that a weight is dropped, "
            f"got {dropout_p!r}"
        )
    if not dropout_p or not isinstance(q, torch.Tensor):  # a q of another type is rejected later
        return None
    return Dropout.drawn(float(dropout_p), q.device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of torch.autocast on a device; None if autocast is off."""
    kind = device.type
    if (kind == "cpu" or kind == "cuda") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def autocast(x: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor as torch.autocast casts inputs of PyTorch's attention: all floats except
    fp64."""
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in DTYPES else x


def is_narrow(q: Any, k: Any, v: Any) -> bool:
    """Check whether the head dims of q, k and v match, but are smaller than kernels support."""
    try:
        width, values = q.shape[3], v.shape[3]
        return 0 < min(width, values) < MIN_HEAD_DIM and width == k.shape[3]
    except (AttributeError, IndexError):  # not tensors of four dimensions, rejected later
        return False


def widened(x: torch.Tensor) -> torch.Tensor:
    """Pad the head dim of a tensor with zeros to the smallest that kernels support."""
    return torch.nn.functional.pad(x, (0, max(0, MIN_HEAD_DIM - x.shape[3])))


def kind_shown(value: Any) -> str:
    """Describe the class of an argument for a message, with the layout of a tensor."""
    name = type(value).__name__
    return f"{name} ({value.layout})" if isinstance(value, torch.Tensor) else name


def shown(value: Any) -> str:
    """Describe an argument for a message: shape, dtype and device of a tensor, else the type."""
    if isinstance(value, torch.Tensor) and not value.is_nested:
        return f"{tuple(value.shape)} {value.dtype} on {value.device}"
    return kind_shown(value)


def describe(
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    score: Any,
    kv_lengths: Any,
    scale: Any,
    dropout_p: Any = 0,
    is_paged: bool = False,
) -> str:
    """Describe a call in one line, for errors."""
    names = ("paged, q", "k_pages", "v_pages") if is_paged else ("q", "k", "v")
    shapes = (f"{name} {shown(x)}" for name, x in zip(names, (q, k, v), strict=True))
    named = mask if mask is None or isinstance(mask, Mask) else type(mask).__name__
    changed = "" if score is None else f", score {getattr(score, '__name__', score)}"
    if kv_lengths is not None:
        changed += f", kv_lengths {shown(kv_lengths)}"
    changed += f", scale {scale}"
    if not isinstance(dropout_p, Real) or dropout_p:
        changed += f", dropout_p {dropout_p}"
    return f"{', '.join(shapes)}, mask {named}{changed}"
