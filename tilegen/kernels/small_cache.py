"""Forward and backward that write scores to a panel, for head dims that are large beside on-chip
memory: Saha and Ye's Algorithm 1 (arXiv 2402.07443), with each tile's maximum kept so that it is
numerically safe, and a backward of five matrix products in the same spirit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilegen.kernels.arguments import (
    SCALE_IN_BASE_2,
    factor,
    flags,
    numbers,
    pointers,
    sizes,
    strides,
)
from tilegen.kernels.layout import empty_like
from tilegen.kernels.loops import Sliced
from tilegen.kernels.panels import Launch, panels
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs, read, write
from tilegen.kernels.two_pass import BWD_PREPROCESS, READ_ONCE

if TYPE_CHECKING:
    import torch

_OF_PANEL = "of the panel, whose rows are padded to stride_wm"
_PANEL = "the panel; heads are numbered through all batches"
_SLICES_QK, _SLICES_V = "ceiling(d_qk/B_e)", "ceiling(d_v/B_e)"

FWD_SCORES = KernelSpec(
    name="fwd_scores",
    template="small_cache/attention_fwd_scores.py.jinja",
    title="Attention forward, small cache: the weights of a panel of query rows.",
    given=("q", "k", "head_first", "num_heads", "row_first", "num_rows", "softmax_scale"),
    made=("weights", "maxima", "sums"),
    tells="block_n",
    lines=(
        pointers("q", "k", "weights", "maxima", "sums"),
        strides("q", "batch, head and row strides"),
        strides("k"),
        strides("weights", _OF_PANEL),
        sizes("num_heads_q seqlen_q seqlen_kv", "q k"),
        numbers("head_first", "num_heads", "row_first", "num_rows", why=_PANEL),
        SCALE_IN_BASE_2,
    ),
    grid=(("num_rows", "block_m"), ("seqlen_kv", "block_n"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_n",
        depth="block_d",
        slices=("qk",),
        loops=True,
        panel="writes",
    ),
    traffic=(
        read("q", "g*W_q*d_qk"),
        read("k", "g*V_kv*d_qk"),
        write("weights", "g*A_w"),
        write("maxima", "T_s*g*N_q", fp32=True),
        write("sums", "T_s*g*N_q", fp32=True),
    ),
    floor=(read("q", "g*n_q*d_qk"), read("k", "n_kv*d_qk"), write("weights", "g*nnz")),
    shows=("out", "lse"),
    # A score tile is at least as wide as any step of the values kernel.
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(64, 128, 256), block_d=(32, 64, 128)),
    supports=frozenset({"scores", "dropout"}),
)

FWD_VALUES = KernelSpec(
    name="fwd_values",
    template="small_cache/attention_fwd_values.py.jinja",
    title="Attention forward, small cache: out and lse of a panel of query rows.",
    given=(
        *("weights", "maxima", "sums", "score_width", "v", "out", "lse"),
        *("head_first", "row_first"),
    ),
    made=(),
    lines=(
        pointers("weights", "maxima", "sums", "v", "out", "lse"),
        strides("v", "batch, head and row strides"),
        strides("out"),
        strides("weights", _OF_PANEL),
        sizes("num_heads_q seqlen_q seqlen_kv", "out v"),
        sizes("head_first row_first num_rows", "weights", _PANEL),
        sizes(
            "score_tiles score_width",
            "maxima",
            "how many score tiles a row has, and the keys of one: a multiple of BLOCK_N",
        ),
    ),
    grid=(("num_rows", "block_m"), ("head_dim_v", "block_d"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_d",
        depth="block_n",
        slices=("v",),
        loops=False,
        panel="reads",
        weighs=True,
    ),
    traffic=(
        read("maxima", f"{_SLICES_V}*(T_s*g*N_q + g*W_q)", fp32=True),
        read("sums", f"{_SLICES_V}*T_s*g*N_q", fp32=True),
        read("weights", f"{_SLICES_V}*g*A_w"),
        read("v", "g*V_kv*d_v"),
        write("out", "g*N_q*d_v"),
        write("lse", "g*N_q", fp32=True),
    ),
    floor=(read("weights", "g*nnz"), read("v", "n_kv*d_v"), write("out", "g*N_q*d_v")),
    shows=("out", "lse"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), block_d=(32, 64, 128, 256)),
    supports=frozenset({"sinks"}),
)

BWD_SCORES = KernelSpec(
    name="bwd_scores",
    template="small_cache/attention_bwd_scores.py.jinja",
    title="Attention backward, small cache: weights and score gradients of a panel.",
    given=(
        *("q", "k", "v", "dout", "lse", "delta"),
        *("head_first", "num_heads", "row_first", "num_rows", "softmax_scale"),
    ),
    made=("weights", "ds"),
    lines=(
        pointers("q", "k", "v", "dout", "lse", "delta", "weights", "ds"),
        strides("q", "batch, head and row strides"),
        strides("k"),
        strides("v"),
        strides("dout"),
        strides("weights", "of both panels, whose rows are padded to stride_wm"),
        sizes("num_heads_q seqlen_q seqlen_kv", "q k"),
        numbers("head_first", "num_heads", "row_first", "num_rows", why=_PANEL),
        SCALE_IN_BASE_2,
    ),
    grid=(("num_rows", "block_m"), ("seqlen_kv", "block_n"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_n",
        depth="block_d",
        results=2,
        slices=("qk", "v"),
        loops=True,
        panel="writes",
    ),
    traffic=(
        read("q", "g*W_q*d_qk"),
        read("k", "g*V_kv*d_qk"),
        read("dout", "g*W_q*d_v"),
        read("v", "g*V_kv*d_v"),
        read("lse", "g*W_q", fp32=True),
        read("delta", "g*W_q", fp32=True),
        write("weights", "g*A_w"),
        write("ds", "g*A_w"),
    ),
    floor=(*READ_ONCE, write("weights", "g*nnz"), write("ds", "g*nnz")),
    shows=("dq", "dk", "dv", "dt"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(32, 64, 128), block_d=(32, 64)),
    supports=frozenset({"scores", "dropout", "training"}),
)

BWD_COLUMNS = KernelSpec(
    name="bwd_columns",
    template="small_cache/attention_bwd_columns.py.jinja",
    title="Attention backward, small cache: what a panel adds to dk or dv.",
    given=("panel", "y", "acc", "grad", "head_first", "row_first", "begins", "ends", "factor"),
    made=(),
    lines=(
        pointers("panel", "y", "acc", "grad"),
        strides("y", "batch, head and row strides of q or dout"),
        strides("grad", "of dk or dv"),
        strides("panel", _OF_PANEL),
        sizes(
            "num_heads_q seqlen_q seqlen_kv head_dim_units",
            "y grad",
            "the head dim divided by STRIDE_UNIT",
        ),
        sizes("head_first num_heads row_first num_rows", "panel", _PANEL),
        flags(
            "begins",
            "ends",
            why="whether the panel is the first, and the last, of its key/value heads",
        ),
        factor("factor", "of the result"),
    ),
    grid=(("head_dim", "block_d"), ("seqlen_kv", "block_n"), ("num_heads", "group_size")),
    loop=Sliced(
        stays="columns",
        rows="block_n",
        columns="block_d",
        depth="block_m",
        slices=("qk", "v"),
        loops=False,
        panel="reads",
        launches=2,  # dV from weights, dK from score gradients
    ),
    traffic=(
        read("weights", f"{_SLICES_V}*g*A_w"),
        read("dout", "g*V_q*d_v"),
        read("ds", f"{_SLICES_QK}*g*A_w"),
        read("q", "g*V_q*d_qk"),
        read("dk, dv so far", "(n_p - 1)*N_kv*(d_qk + d_v)", fp32=True),
        write("dk, dv so far", "(n_p - 1)*N_kv*(d_qk + d_v)", fp32=True),
        write("dv", "N_kv*d_v"),
        write("dk", "N_kv*d_qk"),
    ),
    floor=(
        read("weights", "g*nnz"),
        read("ds", "g*nnz"),
        read("q", "g*n_q*d_qk"),
        read("dout", "g*n_q*d_v"),
        write("dk", "N_kv*d_qk"),
        write("dv", "N_kv*d_v"),
    ),
    shows=("dk", "dv"),
    knobs=Knobs(block_m=(16, 32, 64), block_n=(32, 64, 128), block_d=(32, 64, 128)),
)

BWD_ROWS = KernelSpec(
    name="bwd_rows",
    template="small_cache/attention_bwd_rows.py.jinja",
    title="Attention backward, small cache: dq of a panel of query rows.",
    given=("ds", "k", "dq", "head_first", "row_first", "softmax_scale"),
    made=(),
    lines=(
        pointers("ds", "k", "dq"),
        strides("k", "batch, head and row strides"),
        strides("dq"),
        strides("ds", _OF_PANEL),
        sizes("num_heads_q seqlen_q seqlen_kv", "dq k"),
        sizes("head_first row_first num_rows", "ds", _PANEL),
        factor("softmax_scale"),
    ),
    grid=(("num_rows", "block_m"), ("head_dim_qk", "block_d"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_d",
        depth="block_n",
        slices=("qk",),
        loops=False,
        panel="reads",
    ),
    traffic=(
        read("ds", f"{_SLICES_QK}*g*A_w"),
        read("k", "g*V_kv*d_qk"),
        write("dq", "g*N_q*d_qk"),
    ),
    floor=(read("ds", "g*nnz"), read("k", "n_kv*d_qk"), write("dq", "g*N_q*d_qk")),
    shows=("dq",),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), block_d=(32, 64, 128, 256)),
)


def forward(
    launch: Mapping[str, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    pairs: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (out, lse). `panel_rows` bounds the memory: each row takes 16 or 32 bits for each of
    seqlen_kv scores. With `pairs`, lse is two numbers."""
    import torch

    out = empty_like(q, v.shape[3])
    batch, num_heads_q, seqlen_q, _ = q.shape
    shape = batch, num_heads_q, *((2,) if pairs else ()), seqlen_q
    lse = torch.empty(shape, device=q.device, dtype=torch.float32)
    group_size = num_heads_q // k.shape[1]
    for p in panels(batch * num_heads_q, group_size, seqlen_q, panel_rows):
        scores = launch[FWD_SCORES.name](
            q, k, p.head_first, p.num_heads, p.row_first, p.num_rows, scale
        )
        launch[FWD_VALUES.name](*scores, v, out, lse, p.head_first, p.row_first)
        del scores  # the next panel reuses its memory
    return out, lse


def backward(
    launch: Mapping[str, Launch],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    *,
    panel_rows: int,
    wants_dq: bool = True,
    wants_dkdv: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Compute (dq, dk, dv); None for gradients that are not wanted."""
    import torch

    dq = dk = dv = None
    batch, num_heads_q, seqlen_q, head_dim_qk = q.shape
    _, num_heads_kv, seqlen_kv, head_dim_v = v.shape
    group_size = num_heads_q // num_heads_kv
    parts = list(panels(batch * num_heads_q, group_size, seqlen_q, panel_rows))
    if wants_dq:
        dq = empty_like(q, head_dim_qk)
    columns: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
    if wants_dkdv:
        dk, dv = empty_like(k, head_dim_qk), empty_like(v, head_dim_v)
        carried = 0 if all(p.begins and p.ends for p in parts) else seqlen_kv
        for which, y, grad, times in ((0, dout, dv, 1.0), (1, q, dk, scale)):
            acc = torch.empty((carried, grad.shape[3]), device=q.device, dtype=torch.float32)
            columns.append((which, y, acc, grad, times))
    for p in parts:
        made = launch[BWD_SCORES.name](
            *(q, k, v, dout, lse, delta),
            *(p.head_first, p.num_heads, p.row_first, p.num_rows, scale),
        )
        for which, y, acc, grad, times in columns:
            launch[BWD_COLUMNS.name](
                made[which], y, acc, grad, p.head_first, p.row_first, p.begins, p.ends, times
            )
        if dq is not None:
            launch[BWD_ROWS.name](made[1], k, dq, p.head_first, p.row_first, scale)
        del made  # the next panel reuses its memory
    return dq, dk, dv


SMALL_CACHE_FORWARD = FamilySpec(
    name="small_cache",
    direction="forward",
    kernels=(FWD_SCORES, FWD_VALUES),
    run=forward,
    large_heads_only=True,
)
SMALL_CACHE_BACKWARD = FamilySpec(
    name="small_cache",
    direction="backward",
    kernels=(BWD_PREPROCESS, BWD_SCORES, BWD_COLUMNS, BWD_ROWS),
    run=backward,
    large_heads_only=True,
)

FAMILIES = (SMALL_CACHE_FORWARD, SMALL_CACHE_BACKWARD)
