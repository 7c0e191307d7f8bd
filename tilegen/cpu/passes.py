"""The passes of a problem as functions to time: kernels compiled for the CPU beside PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from tilegen.check.peers import Attention, sdpa
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import launch_of
from tilegen.emit.identity import RenderedKernel
from tilegen.errors import TilegenError
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel
from tilegen.problem import AttentionProblem

Function = Callable[[], object]


def passes_to_time(
    problem: AttentionProblem,
    rendered: Mapping[Kernel, RenderedKernel],
    peers: Mapping[str, Attention] | None = None,
) -> dict[str, dict[str, Function]]:
    """Return functions for `forward` and `backward`: tilegen's first, then those of peers.

    `rendered` are the kernels of both passes, in the families q_stationary and two_pass. `peers`
    defaults to SDPA, if it has the problem's mask.
    """
    x = make_inputs(problem, device="cpu")
    problem = replace(problem, mask=problem.mask.realized(problem.shape, "cpu"))
    functions = _kernels(problem, rendered, x)
    if peers is None:
        try:
            peers = {"SDPA": sdpa(problem, "cpu")}
        except TilegenError:  # SDPA changes no scores
            peers = {}
    for name, attention in peers.items():
        forward, backward = _peer(attention, x)
        functions["forward"][name], functions["backward"][name] = forward, backward
    return functions


def _kernels(
    problem: AttentionProblem, rendered: Mapping[Kernel, RenderedKernel], x: Inputs
) -> dict[str, dict[str, Function]]:
    scale = x.q.shape[-1] ** -0.5
    read = problem.mask, {}, x.q, x.k
    launches = {kernel: launch_of(one, *read) for kernel, one in rendered.items()}
    forward = {"fwd": launches["fwd"]}
    backward = {kernel: launch for kernel, launch in launches.items() if kernel != "fwd"}
    out, lse = passes.forward(forward, x.q, x.k, x.v, scale, panel_rows=1)

    def gradients() -> object:
        delta = passes.delta_of(launches, out, x.dout)
        given: Sequence[torch.Tensor] = (x.q, x.k, x.v, x.dout, lse, delta)
        return passes.gradients(backward, *given, scale, panel_rows=1)

    return {
        "forward": {
            "tilegen": partial(passes.forward, forward, x.q, x.k, x.v, scale, panel_rows=1)
        },
        "backward": {"tilegen": gradients},
    }


def _peer(attention: Attention, x: Inputs) -> tuple[Function, Function]:
    leaves = [one.detach().clone().requires_grad_() for one in (x.q, x.k, x.v)]
    results: list[torch.Tensor] = []

    def forward() -> object:
        with torch.no_grad():
            return attention(x.q, x.k, x.v)

    def backward() -> object:
        if not results:  # a forward that is not timed, the first time
            results.append(attention(*leaves))
        return torch.autograd.grad(results[0], leaves, x.dout, retain_graph=True)

    return forward, backward
