"""Forward with a tile of queries on chip, keys and values streaming past: FlashAttention-2 (Dao,
arXiv 2307.08691), Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilegen.kernels.arguments import SCALE_IN_BASE_2
from tilegen.kernels.loops import Whole
from tilegen.kernels.panels import Launch
from tilegen.kernels.spec import FamilySpec, KernelSpec
from tilegen.kernels.tensors import LSE, OUT, K, Q, V

if TYPE_CHECKING:
    import torch

FWD = KernelSpec(
    name="fwd",
    template="q_stationary/attention_fwd.py.jinja",
    title="Attention forward: out and lse.",
    inputs=(Q, K, V, SCALE_IN_BASE_2),
    outputs=(OUT, LSE),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(
        products=("qk", "v"),  # S = Q K^T; O += P V
        score_tiles=1,
    ),
    checked_by=("out", "lse"),
    described=("k", "v"),
    supports=frozenset({"scores", "dropout", "sinks", "aliases"}),
)


def one_launch(kernel: KernelSpec) -> Callable[..., Any]:
    """Return the `run` of a forward family with a single kernel; it computes (out, lse)."""

    def run(
        launch: Mapping[str, Launch],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        *,
        panel_rows: int,
        pairs: bool = False,
        laid: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch[kernel.name](q, k, v, scale, laid=laid)

    return run


Q_STATIONARY = FamilySpec(
    name="q_stationary", direction="forward", kernels=(FWD,), run=one_launch(FWD)
)

FAMILIES = (Q_STATIONARY,)
