"""A family of kernels that nothing but tests knows: this module, its template beside it, a golden,
and one line that registers it.

It computes a forward in two sweeps over the keys: maxima and sums first, then the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilegen.choose.ranker import best_of
from tilegen.kernels.loops import Whole
from tilegen.kernels.moved import read, write
from tilegen.kernels.q_stationary import FWD, one_launch
from tilegen.kernels.registry import FORWARD, KERNELS, register
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs
from tilegen.kernels.tensors import LSE, OUT, K, Q, V

FWD_TWO_SWEEPS = KernelSpec(
    name="fwd_two_sweeps",
    template="attention_fwd_two_sweeps.py.jinja",
    title="Attention forward in two sweeps: out and lse.",
    inputs=FWD.inputs,
    outputs=(OUT, LSE),
    grid=(("seqlen_q", "block_m"), ("num_heads_q", 1), ("batch", 1)),
    loop=Whole(
        products=("qk", "qk", "v"),  # S in either sweep; O += P V
        score_tiles=1,
    ),
    own_traffic=(
        read(Q, "g*N_q*d_qk"),
        read(K, "2*g*V_kv*d_qk"),  # in either sweep
        read(V, "g*V_kv*d_v"),
        write(OUT, "g*N_q*d_v"),
        write(LSE, "g*N_q"),
    ),
    checked_by=("out", "lse"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(32, 64), num_stages=(1, 2)),
    like="fwd",
    folder=Path(__file__).parent,
)


TWO_SWEEPS = FamilySpec(
    name="two_sweeps",
    direction="forward",
    kernels=(FWD_TWO_SWEEPS,),
    run=one_launch(FWD_TWO_SWEEPS),
)


@contextmanager
def registered(*, alone: bool = False) -> Iterator[None]:
    """Have tilegen know the family while the context lasts; with `alone` no other forward."""
    families, kernels = dict(FORWARD), dict(KERNELS)
    if alone:
        FORWARD.clear()
    register(TWO_SWEEPS)
    best_of.cache_clear()
    try:
        yield
    finally:
        FORWARD.clear()
        FORWARD.update(families)
        KERNELS.clear()
        KERNELS.update(kernels)
        best_of.cache_clear()
