"""Make functions that time the passes of a problem: tilegen's calls, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from tilegen.calls.attention import attention
from tilegen.check.peers import AttentionFunction, sdpa
from tilegen.check.reference import Inputs, make_inputs
from tilegen.errors import TilegenError
from tilegen.masks.tensors import typical_score
from tilegen.problem import AttentionProblem

PassFunction = Callable[[], object]
DROPOUT = 0.1
"""Probability that a weight is dropped, in calls of problems with dropout."""


def passes_to_time(
    problem: AttentionProblem,
    peers: Mapping[str, AttentionFunction] | None = None,
    device: str = "cpu",
) -> dict[str, dict[str, PassFunction]]:
    """Make functions that compute `forward` and `backward`, by tilegen and by its peers.

    `peers` defaults to SDPA if SDPA can compute the problem.
    """
    x = make_inputs(problem, device=device)
    problem = replace(problem, mask=problem.mask.realized(problem.shape, device))
    if peers is None:
        try:
            peers = {"SDPA": sdpa(problem, device)}
        except TilegenError:  # for example a score, which SDPA does not support
            peers = {}
    functions: dict[str, dict[str, PassFunction]] = {"forward": {}, "backward": {}}
    for name, computed_by in {"tilegen": by_tilegen(problem, device), **peers}.items():
        forward, backward = _passes(computed_by, x)
        functions["forward"][name], functions["backward"][name] = forward, backward
    return functions


def by_tilegen(problem: AttentionProblem, device: str) -> AttentionFunction:
    """Return `tilegen.attention` for a problem without stand-ins in its mask."""
    score = problem.score and typical_score(problem.score, problem.shape, device)
    dropped = DROPOUT if problem.dropout else 0.0
    return partial(attention, mask=problem.mask, score=score, dropout_p=dropped)


def _passes(computed_by: AttentionFunction, x: Inputs) -> tuple[PassFunction, PassFunction]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x.q, x.k, x.v)]
    results: list[torch.Tensor] = []

    def forward() -> object:
        with torch.no_grad():
            return computed_by(x.q, x.k, x.v)

    def backward() -> object:
        if not results:  # the first call runs the forward too; it warms up and is not timed
            results.append(computed_by(*leaves))
        return torch.autograd.grad(results[0], leaves, x.dout, retain_graph=True)

    return forward, backward
