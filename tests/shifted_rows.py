"""Rows whose logits a bias shifts far from 0, as padding masks of other packages do, and the right
results: fp32 rounds the logits of such a row to one number, so that all its keys weigh the same."""

from __future__ import annotations

import torch

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
