"""Unusual inputs: masks and scores whose sizes differ from the call's, rows far from 0, and tensors
that change in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tilegen.errors import InvalidProblem
from tilegen.masks import Mask


def _ones(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


def _kept(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, dtype=torch.bool)


def _looks_up(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + _PER_HEAD[h]


_PER_HEAD = _ones(1)
SCORES: dict[str, tuple[Any, str]] = {
    "few sinks": (tilegen.sinks(_ones(1)), "sinks must have size 2 along query heads, got 1"),
    "many sinks": (tilegen.sinks(_ones(3)), "size 2 along query heads, got 3"),
    "few slopes": (tilegen.alibi(_ones(1)), "size 2 along query heads, got 1"),
    "many slopes": (tilegen.alibi(_ones(5)), "size 2 along query heads, got 5"),
    "temperature": (tilegen.temperature(_ones(7)), "size 2 along query heads, got 7"),
    "relative bias": (tilegen.relative_bias(_ones(3, 5)), "size 2 along query heads, got 3"),
    "joined": (tilegen.softcap(3).then(tilegen.alibi(_ones(5))), "size 2 along query heads, got 5"),
    "a function's": (_looks_up, "size 2 along query heads, got 1"),
}
"""For 2 heads."""
BIASES: dict[str, tuple[Any, str]] = {
    "bias": (tilegen.bias(_ones(3, 3)), "got 3"),
    "bias of heads": (tilegen.bias(_ones(1, 5, 48, 48)), "size 2 along query heads, got 5"),
    "one column": (tilegen.bias(_ones(48, 47)), "got 47"),
}
"""For 48 rows and columns."""
MASKS: dict[str, tuple[Any, str]] = {
    "a smaller bool": (tilegen.from_bool(_kept(32, 32)), r"\(48, 48\), got \(32, 32\)"),
    "a larger bool": (tilegen.from_bool(_kept(64, 48)), r"\(48, 48\), got \(64, 48\)"),
    "layout": (tilegen.block_sparse(_kept(2, 3), 16), "with 3 x 3 blocks, got 2 x 3"),
    "in a combination": (
        tilegen.causal() & ~tilegen.block_sparse(_kept(3, 1), 16),
        "with 3 x 3 blocks, got 3 x 1",
    ),
}


def refused_by_attention(name: str) -> None:
    """Expect the error, in the forward and in training."""
    what, said = (SCORES | BIASES | MASKS)[name]
    q = torch.ones(1, 2, 48, 16, requires_grad=True)
    mask, score = (what, None) if name in MASKS else (None, what)
    with pytest.raises(InvalidProblem, match=said):
        tilegen.attention(q, q, q, mask=mask, score=score)


SHIFTS = {"-1e9": -1e9, "1e9": 1e9, "least": torch.finfo(torch.float32).min}
ROWS, COLUMNS, DIM = 37, 45, 16


def shifted_bias(name: str) -> torch.Tensor:
    """Return a bias (ROWS, COLUMNS) that shifts rows 5, 6, 20 and the last, and all but 10 keys of
    row 7."""
    made = torch.zeros(ROWS, COLUMNS)
    made[[5, 6, 20, -1]] = SHIFTS[name]
    made[7, 10:] = SHIFTS[name]
    return made


def expected(
    *given: torch.Tensor,
    bias: torch.Tensor,
    sink: float | None = None,
    keep: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Return the results of q, k, v and dout (batch, heads, rows, dim), whose key-value heads are
    one, in fp64; d_bias is the gradient of the bias. `keep` (rows, columns) is a mask. Logits are
    rounded to fp32 as they are there, which their gradients do not see."""
    q, k, v = (x.double().clone().requires_grad_() for x in given[:3])
    bias = bias.double().requires_grad_()
    exact = q @ k.mT * DIM**-0.5 + bias
    logits = exact + (exact.detach().float().double() - exact.detach())
    if keep is not None:
        logits = logits.masked_fill(~keep, -torch.inf)
    if sink is not None:
        column = torch.full_like(logits[..., :1], sink)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1)[..., : bias.shape[-1]]
    out = weights @ v
    grads = torch.autograd.grad(out, (q, k, v, bias), given[3].double())
    named = dict(zip(("dq", "dk", "dv", "d_bias"), grads, strict=True))
    return {"out": out.detach(), "lse": logits.logsumexp(-1).detach()} | named


def _operation(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.copy_(new)


def _data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.data.copy_(new)


def _numpy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    tensor.numpy()[...] = new.numpy()


def _inference(tensor: torch.Tensor, new: torch.Tensor) -> None:
    with torch.inference_mode():
        tensor.copy_(new)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "operation": _operation,
    "data": _data,
    "numpy": _numpy,
    "inference": _inference,
}
"""Autograd's version counter sees the first of them alone."""


def given(way: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as `WAYS[way]` changes it: inference tensors have no version counter."""
    if way != "inference":
        return tensor
    with torch.inference_mode():
        return tensor.clone(memory_format=torch.preserve_format)


LENGTH = 70
_GENERATOR = torch.Generator().manual_seed(11)


def _random(*sizes: int) -> torch.Tensor:
    return torch.randint(0, LENGTH, sizes, generator=_GENERATOR)


def _documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


Case = tuple[Callable[[torch.Tensor], Mask], torch.Tensor, torch.Tensor]
"""A mask of a tensor, and the tensor before and after."""
CASES: dict[str, Case] = {
    "int64": (
        lambda t: tilegen.predicate(lambda b, h, q, k: k <= t[q]),
        *(_random(LENGTH), _random(LENGTH)),
    ),
    "not contiguous": (
        lambda t: tilegen.predicate(lambda b, h, q, k: k <= t[q, h]),
        *(_random(2, LENGTH).int().mT, _random(2, LENGTH).int().mT),
    ),
    "bool": (
        lambda t: tilegen.predicate(lambda b, h, q, k: t[q] & (k <= q)),
        *(_random(LENGTH) < 20, _random(LENGTH) < 50),
    ),
    "times": (  # which rise before, and neither rise nor fall after
        lambda t: tilegen.predicate(lambda b, h, q, k: t[k] <= t[q]),
        *(_random(LENGTH).sort().values, _random(LENGTH)),
    ),
    "two tables": (
        lambda t: tilegen.predicate(lambda b, h, q, k: t[0, q] == t[1, k]),
        *(_random(2, LENGTH).sort().values, _random(2, LENGTH) // 9),
    ),
    "whole documents": (tilegen.documents, _documents(30, 1, 39), _documents(9, 41, 20)),
    "whole documents, traced": (
        lambda t: tilegen.predicate(lambda b, h, q, k: (t[q] == t[k]) & (k <= q)),
        *(_documents(30, 1, 39), _documents(9, 41, 20)),
    ),
    "scattered documents": (tilegen.documents, _random(LENGTH) % 3, _random(LENGTH) % 5),
    "cu_seqlens": (
        lambda t: tilegen.documents(cu_seqlens=t),
        *(torch.tensor([0, 30, 31, 70]), torch.tensor([0, 9, 50, 70])),
    ),
    "lengths": (tilegen.kv_lengths, torch.tensor([70, 12]), torch.tensor([3, 50])),
    "layout": (
        lambda t: tilegen.block_sparse(t, 14),
        *(_random(5, 5).T < 30, _random(5, 5).T < 50),
    ),
    "window": (
        lambda t: tilegen.sliding_window(tilegen.values(t, "h")),
        *(torch.tensor([3, 40]), torch.tensor([25, 0])),
    ),
}


def inputs() -> list[Any]:
    """Return q, k and v, 70 tokens of 2 batches and heads."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, LENGTH, 16, generator=generator) for _ in range(3)]
