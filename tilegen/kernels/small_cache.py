"""Forward and backward that write scores to a panel, for head dims that are large beside on-chip
memory: Saha and Ye's Algorithm 1 (arXiv 2402.07443), with each tile's maximum kept so that it is
numerically safe, and a backward of five matrix products in the same spirit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilegen.kernels.arguments import SCALE_IN_BASE_2, factor, flags, numbers, sizes
from tilegen.kernels.layout import empty_like
from tilegen.kernels.loops import Sliced
from tilegen.kernels.moved import read, write
from tilegen.kernels.panels import Launch, panels
from tilegen.kernels.spec import FamilySpec, KernelSpec, Knobs
from tilegen.kernels.tensors import DK, DOUT, DQ, DV, LSE, OUT, K, Number, Q, Tensor, V
from tilegen.kernels.two_pass import BWD_PREPROCESS, INPUTS

if TYPE_CHECKING:
    import torch

_PANEL = "the panel; heads are numbered through all batches"
_SHAPE, _OF_TILES = "num_heads num_rows padded_kv", "num_heads score_tiles num_rows"
_STRIDES = "of the panel, whose rows are padded to stride_wm"


def _panel(name: str, note: str, *, strides: str = _STRIDES) -> Tensor:
    return Tensor(name, _SHAPE, note, stride_name="w", stride_note=strides)


_ROWS_OF_TILES = ": rows from a multiple of BLOCK_M; heads of all batches are numbered"
WEIGHTS, DS = _panel("weights", _ROWS_OF_TILES), _panel("ds", ": gradients of scores")
PANEL = _panel("panel", ": weights, or gradients of scores")
MAXIMA, SUMS = (Tensor(name, _OF_TILES, dtype="fp32") for name in ("maxima", "sums"))
Y = Tensor(
    name="y",
    shape="batch num_heads_q seqlen_q _",
    note="q or dout: grad gains factor * panel^T y",
    stride_note="of q or dout",
)
GRAD = Tensor(
    name="grad",
    shape="batch num_heads_kv seqlen_kv head_dim",
    stride_name="g",
    stride_note="of dk or dv",
)
_SUM = ": the sum so far, where a key/value head has several panels"
ACC = Tensor("acc", "seqlen_kv head_dim", _SUM, "fp32")
_SO_FAR = Tensor("dk, dv so far", "_", dtype="fp32")
_OF_PANEL = numbers("head_first", "num_heads", "row_first", "num_rows", why=_PANEL)
_SLICES_QK, _SLICES_V = "ceiling(d_qk/B_e)", "ceiling(d_v/B_e)"

FWD_SCORES = KernelSpec(
    name="fwd_scores",
    template="small_cache/attention_fwd_scores.py.jinja",
    title="Attention forward, small cache: the weights of a panel of query rows.",
    inputs=(Q, K, _OF_PANEL, SCALE_IN_BASE_2),
    outputs=(WEIGHTS, MAXIMA, SUMS),
    returns="block_n",
    grid=(("num_rows", "block_m"), ("seqlen_kv", "block_n"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_n",
        depth="block_d",
        slices=("qk",),
        loops=True,
        panel="writes",
    ),
    checked_by=("out", "lse"),
    # A score tile is at least as wide as any step of the values kernel.
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(64, 128, 256), block_d=(32, 64, 128)),
    supports=frozenset({"scores", "dropout"}),
)

FWD_VALUES = KernelSpec(
    name="fwd_values",
    template="small_cache/attention_fwd_values.py.jinja",
    title="Attention forward, small cache: out and lse of a panel of query rows.",
    inputs=(
        *(WEIGHTS, MAXIMA, SUMS, Number("score_width", "keys of a score tile"), V, OUT, LSE),
        sizes("head_first row_first num_rows", [WEIGHTS], _PANEL),
        sizes(
            "score_tiles score_width",
            [MAXIMA],
            "how many score tiles a row has, and the keys of one: a multiple of BLOCK_N",
        ),
    ),
    outputs=(OUT, LSE),
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
    own_traffic=(
        read(MAXIMA, f"{_SLICES_V}*(T_s*g*N_q + g*W_q)"),
        read(SUMS, f"{_SLICES_V}*T_s*g*N_q"),
        read(WEIGHTS, f"{_SLICES_V}*g*A_w"),
        read(V, "g*V_kv*d_v"),
        write(OUT, "g*N_q*d_v"),
        write(LSE, "g*N_q"),
    ),
    checked_by=("out", "lse"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(16, 32, 64), block_d=(32, 64, 128, 256)),
    supports=frozenset({"sinks"}),
)

BWD_SCORES = KernelSpec(
    name="bwd_scores",
    template="small_cache/attention_bwd_scores.py.jinja",
    title="Attention backward, small cache: weights and score gradients of a panel.",
    inputs=(*INPUTS, _OF_PANEL, SCALE_IN_BASE_2),
    outputs=(
        _panel("weights", WEIGHTS.note, strides=_STRIDES.replace("the panel", "both panels")),
        DS,
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
    checked_by=("dq", "dk", "dv", "dt"),
    knobs=Knobs(block_m=(16, 32, 64, 128), block_n=(32, 64, 128), block_d=(32, 64)),
    supports=frozenset({"scores", "dropout", "training"}),
)

BWD_COLUMNS = KernelSpec(
    name="bwd_columns",
    template="small_cache/attention_bwd_columns.py.jinja",
    title="Attention backward, small cache: what a panel adds to dk or dv.",
    inputs=(
        *(PANEL, Y, ACC, GRAD),
        sizes("head_first num_heads row_first num_rows", [PANEL], _PANEL),
        flags(
            "begins",
            "ends",
            why="whether the panel is the first, and the last, of its key/value heads",
        ),
        factor("factor", "of the result"),
    ),
    outputs=(GRAD,),
    own_sizes=sizes(
        "num_heads_q seqlen_q seqlen_kv head_dim_units",
        [Y, GRAD],
        "the head dim divided by STRIDE_UNIT",
    ),
    grid=(("head_dim", "block_d"), ("seqlen_kv", "block_n"), ("num_heads", "group_size")),
    loop=Sliced(
        stationary="columns",
        rows="block_n",
        columns="block_d",
        depth="block_m",
        slices=("qk", "v"),
        loops=False,
        panel="reads",
        launches=2,  # dV from weights, dK from score gradients
    ),
    own_traffic=(
        read(WEIGHTS, f"{_SLICES_V}*g*A_w"),
        read(DOUT, "g*V_q*d_v"),
        read(DS, f"{_SLICES_QK}*g*A_w"),
        read(Q, "g*V_q*d_qk"),
        read(_SO_FAR, "(n_p - 1)*N_kv*(d_qk + d_v)"),
        write(_SO_FAR, "(n_p - 1)*N_kv*(d_qk + d_v)"),
        write(DV, "N_kv*d_v"),
        write(DK, "N_kv*d_qk"),
    ),
    own_floor=(
        read(WEIGHTS, "g*nnz"),
        read(DS, "g*nnz"),
        read(Q, "g*n_q*d_qk"),
        read(DOUT, "g*n_q*d_v"),
        write(DK, "N_kv*d_qk"),
        write(DV, "N_kv*d_v"),
    ),
    checked_by=("dk", "dv"),
    knobs=Knobs(block_m=(16, 32, 64), block_n=(32, 64, 128), block_d=(32, 64, 128)),
)

BWD_ROWS = KernelSpec(
    name="bwd_rows",
    template="small_cache/attention_bwd_rows.py.jinja",
    title="Attention backward, small cache: dq of a panel of query rows.",
    inputs=(
        *(DS, K, DQ),
        sizes("head_first row_first num_rows", [DS], _PANEL),
        factor("softmax_scale"),
    ),
    outputs=(DQ,),
    grid=(("num_rows", "block_m"), ("head_dim_qk", "block_d"), ("num_heads", 1)),
    loop=Sliced(
        rows="block_m",
        columns="block_d",
        depth="block_n",
        slices=("qk",),
        loops=False,
        panel="reads",
    ),
    own_traffic=(
        read(DS, f"{_SLICES_QK}*g*A_w"),
        read(K, "g*V_kv*d_qk"),
        write(DQ, "g*N_q*d_qk"),
    ),
    checked_by=("dq",),
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
