"""Forward with a tile of queries on chip, keys and values streaming past: FlashAttention-2 (Dao,
arXiv 2307.08691), Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tilegen.kernels.arguments import SCALE_IN_BASE_2, pointers, sizes, strides
from tilegen.kernels.loops import Whole
from tilegen.kernels.panels import Launch
from tilegen.kernels.spec import FamilySpec, KernelSpec, read, write

if TYPE_CHECKING:
    import torch

FLOOR = (
    read("q", "g*n_q*d_qk"),
    read("k", "n_kv*d_qk"),
    read("v", "n_kv*d_v"),
    write("out", "g*N_q*d_v"),
    write("lse", "g*N_q", fp32=True),
)
ARGUMENTS = (
    pointers("q", "k", "v", "out", "lse"),
    strides("q", "batch, head and row strides"),
    strides("k"),
    strides("v"),
    strides("out"),
    sizes("num_heads_q seqlen_q seqlen_kv", "q k"),
    SCALE_IN_BASE_2,
)

FWD = KernelSpec(
    name="fwd",
    template="q_stationary/attention_fwd.py.jinja",
    title="Attention forward: out and lse.",
    given=("q", "k", "v", "softmax_scale"),
    made=("out", "lse"),
    lines=ARGUMENTS,
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(
        keeps=("q",),
        streams=("k", "v"),
        accumulates=("out",),
        products=("qk", "v"),  # S = Q K^T; O += P V
        score_tiles=1,
        takes_latent=True,
    ),
    traffic=(
        read("q", "g*N_q*d_qk"),
        read("k", "g*V_kv*d_qk"),
        read("v", "g*V_kv*d_v"),
        write("out", "g*N_q*d_v"),
        write("lse", "g*N_q", fp32=True),
    ),
    floor=FLOOR,
    shows=("out", "lse"),
    described=("k", "v"),
    supports=frozenset({"scores", "dropout", "sinks"}),
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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return launch[kernel.name](q, k, v, scale)

    return run


Q_STATIONARY = FamilySpec(
    name="q_stationary", direction="forward", kernels=(FWD,), run=one_launch(FWD)
)

FAMILIES = (Q_STATIONARY,)
