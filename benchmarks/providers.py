"""Providers of attention in a benchmark: tilegen, and PyTorch with each of its kernels pinned.

`prepare(problem, device)` returns the function that is timed, or raises Unsupported with why not.
It takes and returns (batch, heads, seqlen, head_dim) as SDPA does, and autograd goes through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tilegen.check.peers import AttentionFunction, flex, sdpa
from tilegen.errors import Unsupported
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One way to compute attention."""

    name: str
    prepare: Callable[[AttentionProblem, str], AttentionFunction]
    """Function of the problem and the device that returns what is timed."""
    rows_first: bool = False
    """True if the provider needs (batch, seqlen, heads, head_dim) in memory; it gets transposed
    views of such tensors."""
    describe: Callable[[AttentionProblem, Direction], str] = lambda problem, direction: ""
    """Function that returns what runs on the GPU at hand, where the name does not say it."""
    slow_to_start: bool = False
    """True if the provider compiles for long before the first result: it is measured last."""


def providers() -> tuple[Provider, ...]:
    """Return every provider, in the order of the tables; tilegen first."""
    return (
        Provider(name="tilegen", prepare=_tilegen, describe=_tilegen_configs),
        Provider(name="sdpa-flash", prepare=partial(sdpa, backend="FLASH_ATTENTION")),
        Provider(name="sdpa-cudnn", prepare=partial(sdpa, backend="CUDNN_ATTENTION")),
        Provider(name="sdpa-efficient", prepare=partial(sdpa, backend="EFFICIENT_ATTENTION")),
        Provider(name="sdpa-math", prepare=partial(sdpa, backend="MATH")),
        Provider(name="flex", prepare=partial(_flex, mode="default"), slow_to_start=True),
        Provider(
            name="flex-max-autotune",
            prepare=partial(_flex, mode="max-autotune-no-cudagraphs"),
            slow_to_start=True,
        ),
        Provider(name="varlen", prepare=_varlen, rows_first=True),
        Provider(name="flashinfer", prepare=_flashinfer, rows_first=True, slow_to_start=True),
    )


def _tilegen(problem: AttentionProblem, device: str) -> AttentionFunction:
    import tilegen

    return partial(tilegen.attention, mask=problem.mask)


def _tilegen_configs(problem: AttentionProblem, direction: Direction) -> str:
    """Return the configs that `attention` uses, and whether they were measured; or the library that
    computes instead."""
    from tilegen.gpus.spec import detect
    from tilegen.pipeline import choose

    spec = detect()
    if spec is None:
        return ""
    used = choose(problem.bucket, spec, direction, may_compile=True)
    if library := next(iter(used.values())).library:
        return f"library: {library} from a record"
    return ", ".join(
        f"{kernel} {one.config.key} from "
        f"{'the model' if one.ranked.origin == 'model' else 'a record'}"
        for kernel, one in used.items()
    )


def _flex(problem: AttentionProblem, device: str, *, mode: str) -> AttentionFunction:
    import torch

    torch.compiler.reset()  # or a compilation for an earlier problem is found and made dynamic
    return flex(problem, device, mode=mode)


def _varlen(problem: AttentionProblem, device: str) -> AttentionFunction:
    """Sequences packed one after the other, which transposed views of rows-first memory are."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"window_size": varlen_window(problem)}
    if problem.head_dim_qk != problem.head_dim_v:
        raise Unsupported("takes one head dim for keys and values")
    if problem.group_size > 1 and "enable_gqa" in inspect.signature(varlen_attn).parameters:
        options["enable_gqa"] = True
    q_starts, kv_starts = (
        torch.arange(0, (problem.batch + 1) * length, length, dtype=torch.int32, device=device)
        for length in (problem.seqlen_q, problem.seqlen_kv)
    )

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
        out = varlen_attn(
            *packed, q_starts, kv_starts, problem.seqlen_q, problem.seqlen_kv, **options
        )
        return out.unflatten(0, (problem.batch, problem.seqlen_q)).transpose(1, 2)

    return attention


PAGE = 16
"""Number of keys of a page, where a library wants pages; pages of one sequence are neighbours."""
WORKSPACE_BYTES = 512 * 2**20
"""Workspace that FlashInfer gets [bytes]."""


def _flashinfer(problem: AttentionProblem, device: str) -> AttentionFunction:
    """FlashInfer as servers call it: a token over pages, more queries over packed sequences."""
    import torch

    from tilegen.check.reference import TORCH_DTYPES

    try:
        import flashinfer
    except ImportError as error:
        raise Unsupported(f"FlashInfer is not installed: {error}") from None
    if varlen_window(problem) not in ((-1, -1), (-1, 0)):
        raise Unsupported("windows are not passed on")
    if (dtype := TORCH_DTYPES[problem.dtype]) == torch.float32:
        raise Unsupported("takes fp16 and bf16")
    batch, heads = problem.batch, (problem.num_heads_q, problem.num_heads_kv)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def starts(length: int) -> Tensor:
        ends = (batch + 1) * length
        return torch.arange(0, ends, length, dtype=torch.int32, device=device)

    if problem.seqlen_q == 1 and problem.seqlen_kv % PAGE == 0:
        if problem.head_dim_qk != problem.head_dim_v:
            raise Unsupported("takes one head dim for pages of keys and values")
        pages = problem.seqlen_kv // PAGE
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=problem.group_size > 1
        )
        decode.plan(
            starts(pages),
            torch.arange(batch * pages, dtype=torch.int32, device=device),
            torch.full((batch,), PAGE, dtype=torch.int32, device=device),
            *heads,
            problem.head_dim_qk,
            PAGE,
            q_data_type=dtype,
            kv_data_type=dtype,
        )

        def over_pages(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            _refuse_gradients(q)
            rows = (one.transpose(1, 2).flatten(0, 1) for one in (k, v))
            paged = tuple(one.unflatten(0, (-1, PAGE)) for one in rows)
            return decode.run(q.squeeze(2), paged).unsqueeze(2)

        return over_pages

    prefill = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    prefill.plan(
        starts(problem.seqlen_q),
        starts(problem.seqlen_kv),
        *heads,
        problem.head_dim_qk,
        head_dim_vo=problem.head_dim_v,
        causal=problem.mask.is_causal,
        q_data_type=dtype,
        kv_data_type=dtype,
    )

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        _refuse_gradients(q)
        out = prefill.run(*(one.transpose(1, 2).flatten(0, 1) for one in (q, k, v)))
        return out.unflatten(0, (batch, problem.seqlen_q)).transpose(1, 2)

    return packed


def _refuse_gradients(q: Tensor) -> None:
    if q.requires_grad:
        raise Unsupported("computes no gradients")


def varlen_window(problem: AttentionProblem) -> tuple[int, int]:
    """Return (left, right), -1 for unbounded; varlen_attn aligns them at the bottom right."""
    mask = problem.mask
    if (window := mask.window) is None or mask.tables:
        raise Unsupported("takes one window, not an intersection of masks")
    if mask.is_full:
        return -1, -1
    if window.alignment == "top_left" and problem.seqlen_q != problem.seqlen_kv:
        raise Unsupported("aligns masks at the bottom right only")
    left, right = (-1 if side is None else side for side in window[:2])
    return left, right  # type: ignore[return-value]
