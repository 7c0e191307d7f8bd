"""The attention functions that are compared, and the memory that each needs by formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tilegen.check import peers
from tilegen.check.peers import AttentionFunction
from tilegen.check.reference import TORCH_DTYPES
from tilegen.comparing import memory
from tilegen.cpu.passes import by_tilegen
from tilegen.errors import Unsupported
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

BACKENDS = {
    "sdpa flash": "FLASH_ATTENTION",
    "sdpa efficient": "EFFICIENT_ATTENTION",
    "sdpa cudnn": "CUDNN_ATTENTION",
    "sdpa math": "MATH",
}
"""Back ends of SDPA, by the names of their columns."""
ON_CPU = ("tilegen", "sdpa flash", "sdpa math", "flex", "standard")
ON_GPU = ("tilegen", *BACKENDS, "flex", "standard")
"""The columns of a comparison; standard attention is two products and a softmax."""
WRITES_SCORES = ("sdpa math", "standard")
MASK_BYTES = 1
STATISTIC_BYTES = 4


def function_of(name: str, problem: AttentionProblem, device: str) -> AttentionFunction:
    """Return an attention function of q, k and v. Raises Unsupported, with the reason."""
    problem = replace(problem, mask=problem.mask.realized(problem.shape, device))
    makers: dict[str, Callable[[AttentionProblem, str], AttentionFunction]] = {
        "tilegen": by_tilegen,
        "flex": _flex,
        "standard": peers.standard,
    }
    if name in makers:
        return makers[name](problem, device)
    return peers.sdpa(problem, device, backend=BACKENDS[name])


def _flex(problem: AttentionProblem, device: str) -> AttentionFunction:
    if device == "cpu":
        raise Unsupported("its first call compiles for half a minute on a CPU; no backward there")
    return peers.flex(problem, device)


def counted_bytes(name: str, problem: AttentionProblem, direction: Direction) -> int:
    """Compute the memory of a pass [bytes]: inputs, outputs, statistics of rows, and the scores and
    weights of attention that writes them. A lower bound of a peak: copies and work space are more.

    A backward has dout, the gradients and `delta` besides. Attention that writes scores holds
    scores and weights, and in the backward the weights with both gradients.
    """
    size, heads = problem.element_bytes, problem.batch * problem.num_heads_q
    shared = problem.batch * problem.num_heads_kv
    q = heads * problem.seqlen_q * problem.head_dim_qk * size
    k = shared * problem.seqlen_kv * problem.head_dim_qk * size
    v = 0 if problem.latent else shared * problem.seqlen_kv * problem.head_dim_v * size
    out = heads * problem.seqlen_q * problem.head_dim_v * size
    rows = heads * problem.seqlen_q * STATISTIC_BYTES
    scores = heads * problem.seqlen_q * problem.seqlen_kv * size
    passes = 2 if direction == "backward" else 1
    matrices = (1 + passes) * scores if name in WRITES_SCORES else passes * rows
    total = passes * (q + k + v + out) + matrices
    needs_mask = name not in ("tilegen", "flex") and not problem.mask.is_full
    if needs_mask and (name == "standard" or not problem.mask.is_causal):
        total += problem.seqlen_q * problem.seqlen_kv * MASK_BYTES
    return total


class Measured:
    """Attention of random numbers in this process, whose peak of memory is measured."""

    def __init__(self, name: str, device: str) -> None:
        self._name, self._device = name, device

    def peak(self, problem_key: str, direction: Direction) -> int:
        """Return the peak of a pass beyond what the process had before q, k and v [bytes]."""
        problem = AttentionProblem.parse(problem_key)
        self._run(problem, direction)  # compiles
        memory.start_over(self._device)
        before = memory.in_use(self._device)
        self._run(problem, direction)
        return memory.peak(self._device) - before

    def _run(self, problem: AttentionProblem, direction: Direction) -> None:
        compute = function_of(self._name, problem, self._device)
        dtype = TORCH_DTYPES[problem.dtype]

        def made(heads: int, length: int, dim: int) -> torch.Tensor:
            shape = problem.batch, heads, length, dim
            return torch.rand(shape, device=self._device, dtype=dtype)  # no copy in fp32

        q = made(problem.num_heads_q, problem.seqlen_q, problem.head_dim_qk)
        k = made(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_qk)
        v = k[..., : problem.head_dim_v]
        if not problem.latent:
            v = made(problem.num_heads_kv, problem.seqlen_kv, problem.head_dim_v)
        if direction == "forward":
            with torch.no_grad():
                compute(q, k, v)
        else:
            out = compute(*(tensor.requires_grad_() for tensor in (q, k, v)))
            out.backward(made(problem.num_heads_q, problem.seqlen_q, problem.head_dim_v))
        if self._device == "cuda":
            torch.cuda.synchronize()
