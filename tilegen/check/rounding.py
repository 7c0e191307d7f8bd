"""Upper bounds on the errors that fp32 rounding causes in each result of attention.

Terms that cancel still leave their rounding errors, and the order of summation differs between
processors, GPUs and tile sizes. So the error of a correct kernel is bounded by the sum of the
absolute values of the fully expanded terms, times the number of roundings of a term. The reference
computes that sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tilegen.check.reference import Inputs, for_each_query_head, softmax_of
from tilegen.masks.dropout import Dropout
from tilegen.masks.mask import Mask
from tilegen.masks.score import Score
from tilegen.private_torch import TorchDispatchMode

UNIT = 2.0**-24
"""Half a unit in the last place of 1 in fp32; kernels compute in fp32 for inputs of any dtype."""
UNITS = 4
"""Most rounding errors of a term, in UNITs of the term's size.

A weight is exp2(s * scale_log2 - lse_log2). An absolute error of the exponent is a relative error
of the weight. Roundings in the exponent: the sum q k^T (2 a term: product and sum), the scale (2:
as a number, and times log2(e)) and the product of both; the logarithm in lse (2), lse when it is
stored, the factor between the bases (2) and the product with it; the difference. Besides, exp2 errs
by two units in the last place on NVIDIA GPUs (4). The weighted value is rounded in its product and
its sum (2), and when it is scaled (2). So each part of a term is rounded at most 8 times by up to a
unit. Errors are symmetric: their standard deviation is sqrt(8 / 3) = 1.6 units, and a bound of
4 is 2.5 sigma. Longer sums err more, but so do PyTorch's.
"""


def rounding_floors(
    inputs: Inputs,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float,
    lse_grad: torch.Tensor | None = None,
    leaves: Sequence[torch.Tensor] = (),
    dropout: Dropout | None = None,
) -> dict[str, torch.Tensor]:
    """Bound the change that fp32 rounding may cause in each element of out, lse, dq, dk and dv.

    `inputs` are in fp64. `lse_grad` is the gradient of the loss by lse, (batch, heads, seqlen_q).
    The gradients of `leaves`, the tensors that a score is made from, are keyed "leaf 0", "leaf 1"
    and so on.
    """
    sizes = _sizes(inputs, mask, score, scale, lse_grad, leaves, dropout)
    return {name: UNITS * UNIT * size for name, size in sizes.items()}


def _sizes(
    inputs: Inputs,
    mask: Mask | None,
    score: Score | None,
    scale: float,
    lse_grad: torch.Tensor | None,
    leaves: Sequence[torch.Tensor],
    dropout: Dropout | None,
) -> dict[str, torch.Tensor]:
    """Compute the sums of absolute values that UNITS * UNIT multiplies."""
    q, dout = inputs.q.detach(), inputs.dout.detach()
    k, v = (for_each_query_head(t.detach(), q) for t in (inputs.k, inputs.v))
    softmax = softmax_of(q.clone().requires_grad_(), k, mask, score, scale)
    scores, changed = softmax.scores, softmax.changed
    p, lse = softmax.weights.detach(), softmax.lse.detach()
    kept = p > 0.0

    # Scores, and the effect of a score change on their errors. `0 * scores` keeps a path for
    # gradients if the change is a constant.
    (slope,) = torch.autograd.grad((changed + 0 * scores).sum(), scores, retain_graph=True)
    slope = slope.abs().where(kept, 0.0)
    products = slope * (q.abs() @ k.mT.abs()) * abs(scale)
    exponents = (products + changed.detach().abs()).where(kept, 0.0)
    rows = (p * exponents).sum(-1) + lse.abs().where(lse.isfinite(), 0.0)
    if score is not None and score.sink_logits is not None:
        sinks = score.sink_logits.detach().to(lse)[:, None]
        rows += (sinks - lse).exp() * sinks.abs()

    # Weights, before and after dropout, and their products with v.
    weights = p * (1 + exponents + rows[..., None])
    times = 1.0 if dropout is None else dropout.factors(*p.shape).to(p)
    left = weights * times if dropout is None else (weights + p) * times  # rounded once more
    out = left @ v.abs()
    deltas = (dout.abs() * out).sum(-1)
    if lse_grad is not None:
        deltas = deltas + lse_grad.abs()

    # Gradients of scores, p (dp - delta): the difference may cancel, but its parts have errors.
    delta = (dout * (p * times @ v)).sum(-1) - (0.0 if lse_grad is None else lse_grad)
    difference = (dout @ v.mT * times - delta[..., None]).abs()
    ds = weights * difference + p * (dout.abs() @ v.mT.abs() * times + deltas[..., None])
    by_scores = ds * slope * abs(scale)
    sizes = {
        "out": out,
        "lse": 1 + rows,
        "dq": by_scores @ k.abs(),
        "dk": _of_each_group(by_scores.mT @ q.abs(), inputs.k),
        "dv": _of_each_group(left.mT @ dout.abs(), inputs.v),
    }
    if not leaves:
        return sizes
    sources: list[tuple[torch.Tensor, torch.Tensor]] = [(changed, ds)]
    if score is not None and score.sink_logits is not None:
        sinks = score.sink_logits.detach().to(lse)[:, None]
        weight = (sinks - lse).exp()
        by_sinks = weight * ((1 + sinks.abs() + rows) * delta.abs() + deltas)
        sources.append((score.sink_logits, by_sinks.sum((0, 2))))
    sources = [(tensor, size) for tensor, size in sources if tensor.requires_grad]
    with _Absolute():
        parts = torch.autograd.grad(
            [tensor for tensor, _ in sources],
            leaves,
            [size.to(tensor) for tensor, size in sources],
            materialize_grads=True,
        )
    return sizes | {f"leaf {i}": part.abs() for i, part in enumerate(parts)}


def _of_each_group(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum over the query heads of each key-value head."""
    return rows.unflatten(1, (like.shape[1], -1)).sum(2)


class _Absolute(TorchDispatchMode):
    """Makes a backward pass sum absolute values, so that nothing cancels."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_float = isinstance(result, torch.Tensor) and result.is_floating_point()
        return result.abs() if is_float else result
