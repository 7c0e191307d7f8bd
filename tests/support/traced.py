"""Calls that torch.compile traces: all kinds of masks and scores, made inside and outside of
it, and masks in forms of PyTorch code that a trace must follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

import tilegen

BATCH, HEADS, HEADS_KV, ROWS, WIDTH = 2, 4, 2, 24, 16
Tensors = tuple[torch.Tensor, ...]


@dataclass
class Call:
    """A function of q, k, v and what it is given besides, of which floats are trained."""

    run: Callable[..., Any]
    given: tuple[Any, ...] = ()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def qkv(rows: int = ROWS, *, trained: bool = True) -> Tensors:
    shapes = (HEADS, WIDTH), (HEADS_KV, WIDTH), (HEADS_KV, WIDTH)
    generator = torch.Generator().manual_seed(rows)
    return tuple(
        torch.randn(BATCH, heads, rows, width, generator=generator).requires_grad_(trained)
        for heads, width in shapes
    )


def gradients(run: Callable[..., Any], given: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the results of a call, and the gradients of all that it is given that is trained."""
    results = run(*given)
    results = results if isinstance(results, tuple) else (results,)
    trained = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    loss = sum((x.cos() * x).nan_to_num(0, 0, 0).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, trained)]


IDS = torch.arange(ROWS) // 7
CU = torch.tensor([0, 5, 13, ROWS], dtype=torch.int32)


def _attention(**arguments: Any) -> Callable[..., Any]:
    return lambda q, k, v: tilegen.attention(q, k, v, return_lse=True, **arguments)


def _varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, **rest: Any
) -> Any:
    return tilegen.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu, **rest)


def calls() -> dict[str, Call]:
    """Return the calls by name."""
    causal = tilegen.causal()
    outside = {
        "nothing": {},
        "causal": dict(mask=causal),
        "window": dict(mask=causal & tilegen.sliding_window(5, 0)),
        "either": dict(mask=tilegen.sliding_window(2, 0) | ~tilegen.prefix_lm(9)),
        "documents": dict(mask=tilegen.documents(IDS) & causal),
        "scattered documents": dict(mask=tilegen.documents(IDS % 2)),
        "cu_seqlens": dict(mask=tilegen.documents(cu_seqlens=CU)),
        "blocks": dict(mask=tilegen.block_sparse(normal(HEADS, 3, 3) < 0.5, 8)),
        "values": dict(mask=tilegen.sliding_window(tilegen.values([1, 2, 3, 4], "h"), 0)),
        "predicate": dict(mask=tilegen.predicate(lambda b, h, i, j: ((IDS * 2)[i] > j) & (i >= j))),
        "ranked": dict(mask=tilegen.predicate(lambda b, h, i, j: IDS[j] <= IDS[i])),
        "tree": dict(mask=tilegen.tree(torch.arange(ROWS).sub(1).div(2, rounding_mode="floor"))),
        "dilated": dict(mask=tilegen.dilated(2)),
        "lengths": dict(kv_lengths=torch.tensor([5, 20])),
        "negative scale": dict(scale=-0.3),
        "chained": dict(score=tilegen.softcap(3.0).then(tilegen.alibi(torch.rand(HEADS)))),
        "function": dict(score=tilegen.score(lambda s, b, h, i, j: s + (IDS * 0.5)[i] * j)),
    }
    out = {f"{name} outside": Call(_attention(**one)) for name, one in outside.items()}

    def inside(name: str, run: Callable[..., Any], *given: Any) -> None:
        out[f"{name} inside"] = Call(run, given)

    def call(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
        return tilegen.attention(q, k, v, return_lse=True, **arguments)

    ids = IDS.clone()
    inside("window", lambda *x: call(*x, mask=tilegen.causal() & tilegen.sliding_window(5, 0)))
    inside(
        "inverted",
        lambda *x: call(*x, mask=(tilegen.sliding_window(2, 2) & tilegen.causal()).inverted()),
    )
    inside(
        "documents", lambda *x: call(*x[:3], mask=tilegen.documents(x[3]) | tilegen.causal()), ids
    )
    inside("cu_seqlens", lambda *x: call(*x[:3], mask=tilegen.documents(cu_seqlens=x[3])), CU)
    trees = torch.stack([torch.arange(ROWS) - 1, torch.arange(ROWS) // 3 - 1])
    inside(
        "trees",
        lambda *x: call(*x[:3], mask=tilegen.tree(x[3], x[4]) & tilegen.sliding_window(20, 3)),
        *(trees, torch.tensor([ROWS, ROWS - 9])),
    )
    inside(
        "table of a tree", lambda *x: call(*x[:3], mask=tilegen.tree(x[3])), normal(ROWS, ROWS) > 0
    )
    inside(
        "blocks",
        lambda *x: call(*x[:3], mask=tilegen.block_sparse(x[3] > 0, 8)),
        normal(3, 3).detach(),
    )
    inside(
        "predicate",
        lambda *x: call(
            *x[:3], mask=tilegen.predicate(lambda b, h, i, j: ~((x[3][i] == x[3][j]) & (j > i)))
        ),
        ids,
    )
    bias = normal(BATCH, HEADS, ROWS, ROWS).requires_grad_()
    inside("bias", lambda *x: call(*x[:3], score=tilegen.bias(x[3])), bias)
    inside(
        "function",
        lambda *x: call(*x[:3], score=lambda s, b, h, i, j: s + (x[3] * 2)[b, h, i, j]),
        bias,
    )
    table = normal(HEADS, 3).requires_grad_()
    inside(
        "rows of a table",
        lambda *x: call(*x[:3], score=lambda s, b, h, i, j: s * x[3][h].sum() + 0 * x[3][h, 0]),
        table,
    )
    inside(
        "choices",
        lambda *x: call(*x, score=lambda s, b, h, i, j: torch.where(i % 3 == j % 3, s.abs(), -s)),
    )
    sinks = normal(HEADS).requires_grad_()
    inside(
        "sinks",
        lambda *x: call(*x[:3], score=tilegen.softcap(3.0).then(tilegen.sinks(x[3]))),
        sinks,
    )
    inside("narrow heads", lambda q, k, v: call(q[..., :4], k[..., :4], v))
    inside(
        "lengths",
        lambda *x: call(*x[:3], kv_lengths=x[3]),
        torch.tensor([24, 3], dtype=torch.int32),
    )
    inside("packed", lambda *x: _varlen(*x, mask=tilegen.causal(), return_lse=True), CU)
    inside(
        "packed with a score",
        lambda *x: _varlen(*x, score=lambda s, b, h, i, j: s + b - 0.1 * (i - j)),
        CU,
    )
    block_mask = create_block_mask(
        lambda b, h, i, j: (IDS[i] == IDS[j]) & (j <= i), None, None, ROWS, ROWS, device="cpu"
    )
    out["FlexAttention's"] = Call(
        lambda q, k, v, mask: tilegen.flex_attention(
            q, k, v, lambda s, b, h, i, j: s * 2 + (i - j), mask, enable_gqa=True
        ),
        (block_mask,),
    )
    return out


N = 9
BOUNDS = torch.tensor([[1, 5], [3, 8]])
PICKED = torch.arange(3 * N).reshape(N, 3) % 7


class Given(torch.autograd.Function):
    """Returns its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:  # type: ignore[override]
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        return gradient


def same_dtype(b: Any, h: Any, q: Any, k: Any) -> Any:
    same = k.long()
    same += 2
    other = q.to(torch.int32)
    other += 3
    return k + other > 2 * q


def view(b: Any, h: Any, q: Any, k: Any) -> Any:
    row = k.unsqueeze(0)
    row *= 2
    return k > q


def choice_in_place(b: Any, h: Any, q: Any, k: Any) -> Any:
    x, y = q - k, k - q
    kept = (functional.relu(x, inplace=True) < 3) & (x >= 0) & (functional.relu(x) == x)
    functional.relu(y, True)
    return kept & (y < 2)


def unpacked(b: Any, h: Any, q: Any, k: Any) -> Any:
    low, high = BOUNDS[h]
    first, *_, last = PICKED[q]
    return (q >= low) & (k < high) & (first + last > k)


def new_tensors(b: Any, h: Any, q: Any, k: Any) -> Any:
    zero = torch.zeros((), dtype=q.dtype, device=q.device)
    steps = torch.arange(N, device=k.device)
    return (q + zero > k) | (steps[k] == 4)


def read_again(b: Any, h: Any, q: Any, k: Any) -> Any:
    """A value that was used before it changes keeps what it was used for."""
    before = q > k
    q -= 3
    return before & (q < k)


MASKS: dict[str, Callable[..., Any]] = {
    "the same dtype is the same tensor": same_dtype,
    "a view": view,
    "inplace=True": choice_in_place,
    "an argument given back": lambda b, h, q, k: Given.apply(q) > Given.apply(k),
    "unpacking": unpacked,
    "new tensors where a value is": new_tensors,
    "used before": read_again,
    "keywords": lambda b, h, q, k: torch.where(q > k, input=q, other=torch.clamp(k, max=h)) > 2,
    "parts of rows": lambda b, h, q, k: (PICKED[q][1:] == k % 7).any() | PICKED[q][..., 0].bool(),
    "rows of shapes": lambda b, h, q, k: (PICKED[q][:, None] == PICKED[k]).any(),
    "columns": lambda b, h, q, k: (PICKED[q][:, None] >= PICKED[k]).all(0).any(-1),
    "other dimensions": lambda b, h, q, k: (
        (PICKED[q].unsqueeze(1).unbind(dim=1)[0] == PICKED[k].squeeze(0)).any()
        | torch.squeeze(input=PICKED[q] > PICKED[k]).all()
    ),
    "metadata": lambda b, h, q, k: q + q.dim() + len(PICKED[q]) + q.numel() > k,
    "names": lambda b, h, q, k: q > k if f"{q}" and q in {q: 1} else k > q,
}
