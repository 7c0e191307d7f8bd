"""Check of a provider's results at the full size: the rule of `tilegen verify` on some heads.

The first and the last key-value head are judged, with all their query heads. The reference runs one
query head at a time, because its score matrix has 8 GiB at a length of 32k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilegen.check.reference import TORCH_DTYPES, Inputs, attention_reference, torch_attention
from tilegen.check.verification import Check, judge  # the rule; there is one
from tilegen.masks.form import Form
from tilegen.masks.mask import Mask
from tilegen.problem import AttentionProblem


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All checks of one result; error and limit are those of the tensor nearest to its limit."""

    ok: bool
    error: float
    allowed: float
    detail: str
    """Failed checks; empty if all are ok."""


def make_inputs(
    problem: AttentionProblem, *, rows_first: bool = False, seed: int = 0, device: str = "cuda"
) -> Inputs:
    """Return random normal inputs, made on the device; the same values in both layouts.

    `rows_first` lays them out (batch, seqlen, heads, head_dim) in memory, behind a transpose.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def tensor(heads: int, seqlen: int, dim: int) -> Tensor:
        values = torch.randn(
            (problem.batch, heads, seqlen, dim),
            generator=generator,
            device=device,
            dtype=TORCH_DTYPES[problem.dtype],
        )
        return values.transpose(1, 2).contiguous().transpose(1, 2) if rows_first else values

    q = tensor(problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk)
    k = tensor(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk)
    v = tensor(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_v)
    return Inputs(
        q=q,
        k=k,
        v=k[..., : problem.head_dim_v] if problem.latent else v,
        dout=tensor(problem.num_heads_q, problem.seqlen_q, problem.head_dim_v),
    )


def check(problem: AttentionProblem, inputs: Inputs, results: Mapping[str, Tensor]) -> Verdict:
    """Return the verdict on `found`: out alone, or dq, dk and dv."""
    checks: list[Check] = []
    last = (problem.batch - 1, problem.num_heads_kv - 1)
    for batch, head_kv in sorted({(0, 0), last}):
        heads = slice(head_kv * problem.group_size, (head_kv + 1) * problem.group_size)
        q_side = (slice(batch, batch + 1), heads)
        kv_side = (slice(batch, batch + 1), slice(head_kv, head_kv + 1))
        some = Inputs(
            q=inputs.q[q_side],
            k=inputs.k[kv_side],
            v=inputs.v[kv_side],
            dout=inputs.dout[q_side],
        )
        masks = [_of_head(problem.mask, batch, head) for head in range(heads.start, heads.stop)]
        expected = _expected(some, masks, results)
        own = [_own(some, masks, results, plain=plain) for plain in (False, True)]
        for name, tensor in results.items():
            part = tensor[q_side if name in ("out", "dq") else kv_side].detach()
            checks.append(judge(name, part, expected[name], [result[name] for result in own]))
    nearest = max(checks, key=lambda c: c.error / c.allowed if c.allowed else c.error)
    return Verdict(
        ok=all(c.ok for c in checks),
        error=nearest.error,
        allowed=nearest.allowed,
        detail="; ".join(str(c) for c in checks if not c.ok),
    )


_OF_HEAD = Form(
    "of_head",
    lambda at, side, mask, batch, head: mask.keep(at._replace(b=at.b + batch, h=at.h + head), side),
    spelt=lambda mask, *_: mask.notation,
)
"""A mask restricted to one query head of one batch entry."""


def _of_head(mask: Mask, batch: int, head: int) -> Mask:
    return mask if mask.is_full else Mask.of(_OF_HEAD, mask, batch, head)


def _expected(inputs: Inputs, masks: Sequence[Mask], names: Iterable[str]) -> dict[str, Tensor]:
    def reference(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask) -> Tensor:
        return attention_reference(q, k, v, mask=mask)[0]

    return _head_by_head(reference, inputs.to(torch.float64), masks, names)


def _own(
    inputs: Inputs, masks: Sequence[Mask], names: Iterable[str], *, plain: bool
) -> dict[str, Tensor]:
    """Compute PyTorch's own results at the inputs' precision: by its usual choice, or its plain
    kernels."""
    with sdpa_kernel(SDPBackend.MATH) if plain else nullcontext():
        own = _head_by_head(torch_attention, inputs, masks, names)
    return {name: tensor.to(inputs.q.dtype) for name, tensor in own.items()}


def _head_by_head(
    attention: Callable[..., Tensor], inputs: Inputs, masks: Sequence[Mask], names: Iterable[str]
) -> dict[str, Tensor]:
    """Compute out, or dq, dk and dv, of one group whose heads have `masks`; dk and dv are summed in
    fp32 or wider."""
    results: dict[str, list[Tensor]] = {name: [] for name in names}
    for head, mask in enumerate(masks):
        part = slice(head, head + 1)
        leaves = [
            t.detach().requires_grad_("dq" in results)
            for t in (inputs.q[:, part], inputs.k, inputs.v)
        ]
        out = attention(*leaves, mask=mask)
        if "dq" in results:
            grads = torch.autograd.grad(out, leaves, inputs.dout[:, part])
            of_heads = dict(zip(("dq", "dk", "dv"), grads, strict=True))
        else:
            of_heads = {"out": out}
        for name, tensor in of_heads.items():
            wide = torch.promote_types(tensor.dtype, torch.float32)
            is_sum = name in ("dk", "dv") and results[name]
            if is_sum:
                results[name][0] += tensor.to(wide)
            else:
                results[name].append(tensor.to(wide))
    return {name: torch.cat(parts, dim=1) for name, parts in results.items()}
