"""Backward with streamed rows split over programs, for few stationary tiles. A program computes its
split's part of a gradient. A second kernel sums the parts in the order of the splits, so every run
gives the same bits.

With few keys (cross attention onto a short text) queries are split for dK and dV. With few queries
(onto a long prefix) keys are split for dQ. With few heads both may be split. A split is a fixed
number of rows, counted from the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilegen.kernels import two_pass
from tilegen.kernels.arguments import factor, pointers, strides
from tilegen.kernels.layout import empty_like
from tilegen.kernels.loops import OverRows
from tilegen.kernels.panels import Launch
from tilegen.kernels.partial_gradients import (
    BWD_DQ_SUM,
    NOTES,
    PARTS_OF_QUERIES,
    TILES,
    sizes_of_sum,
)
from tilegen.kernels.spec import FamilySpec, KernelSpec, read, write
from tilegen.kernels.two_pass import BWD_DKDV, BWD_DQ, BWD_PREPROCESS, INPUTS, READ_ONCE

if TYPE_CHECKING:
    import torch

WORTH_SPLITTING = 1.1
"""Factor in predicted time by which a backward with splits must beat a backward without: summing
parts takes memory and one more launch. A guess."""
_KNOBS = replace(TILES, split_kv=(128, 256, 512, 1024, 2048, 4096, 8192))

_PARTS_OF_KEYS = {
    "partial_dk": ("k", "q", "k"),
    "partial_dv": ("k", "q", "v"),
    "has_dkdv": ("k", "q"),
}

BWD_DKDV_SPLIT = replace(
    BWD_DKDV,
    name="bwd_dkdv_split",
    title="Attention backward, queries split over programs: dk and dv of each split.",
    made=tuple(_PARTS_OF_KEYS),
    parts=_PARTS_OF_KEYS,
    notes=NOTES,
    lines=(
        pointers(*INPUTS, *_PARTS_OF_KEYS, fp32=_PARTS_OF_KEYS),
        *(line for line in BWD_DKDV.lines[1:] if line.arguments[0].of not in ("dk", "dv")),
    ),
    grid=(*BWD_DKDV.grid, ("seqlen_q", "split_q")),
    loop=replace(BWD_DKDV.loop, splits=True),
    traffic=(
        read("k", "W_s*d_qk"),
        read("v", "W_s*d_v"),
        *(one for one in BWD_DKDV.traffic if one.tensor in ("q", "dout", "lse", "delta")),
        write("partial_dk", "W_s*d_qk", fp32=True),
        write("partial_dv", "W_s*d_v", fp32=True),
        write("has_dkdv", "N_kv*n_s", fp32=True),
    ),
    floor=(*READ_ONCE, write("has_dkdv", "N_kv", fp32=True)),
    knobs=_KNOBS,
    like=BWD_DKDV.name,
)

BWD_DKDV_SUM = replace(
    BWD_DQ_SUM,
    name="bwd_dkdv_sum",
    title="Attention backward, queries split over programs: dk and dv of all splits together.",
    given=(*_PARTS_OF_KEYS, "dk", "dv", "softmax_scale"),
    lines=(
        pointers(*_PARTS_OF_KEYS, "dk", "dv", fp32=_PARTS_OF_KEYS),
        strides("dk", "batch, head and row strides"),
        strides("dv"),
        sizes_of_sum("num_heads_kv seqlen_kv", "dk", splits_of="has_dkdv"),
        factor("softmax_scale"),
    ),
    grid=(("seqlen_kv", "block_m"), ("num_heads_kv", 1), ("batch", 1)),
    loop=OverRows(stays="columns", works_on=("dk", "dv"), joins=True),
    traffic=(
        read("has_dkdv", "N_kv*n_s", fp32=True),
        read("partial_dk", "W_s*d_qk", fp32=True),
        read("partial_dv", "W_s*d_v", fp32=True),
        write("dk", "N_kv*d_qk"),
        write("dv", "N_kv*d_v"),
    ),
    floor=(write("dk", "N_kv*d_qk"), write("dv", "N_kv*d_v")),
    shows=("dk", "dv"),
)

BWD_DQ_SPLIT = replace(
    BWD_DQ,
    name="bwd_dq_split",
    title="Attention backward, keys split over programs: dq of each split.",
    made=tuple(PARTS_OF_QUERIES),
    parts=PARTS_OF_QUERIES,
    notes=NOTES,
    lines=(
        pointers(*INPUTS, *PARTS_OF_QUERIES, fp32=PARTS_OF_QUERIES),
        *(line for line in BWD_DQ.lines[1:] if line.arguments[0].of != "dq"),
    ),
    grid=(*BWD_DQ.grid, ("seqlen_kv", "split_kv")),
    loop=replace(BWD_DQ.loop, splits=True),
    traffic=(
        read("q", "g*W_s*d_qk"),
        read("dout", "g*W_s*d_v"),
        read("lse", "g*W_s", fp32=True),
        read("delta", "g*W_s", fp32=True),
        read("k", "g*V_kv*d_qk"),
        read("v", "g*V_kv*d_v"),
        write("partial_dq", "g*W_s*d_qk", fp32=True),
        write("has_dq", "g*N_q*n_s", fp32=True),
    ),
    floor=(*READ_ONCE, write("has_dq", "g*N_q", fp32=True)),
    knobs=_KNOBS,
    like=BWD_DQ.name,
)


def run(launch: Mapping[str, Launch], *given: Any, **options: Any) -> Any:
    """Compute (dq, dk, dv) as `run` of two_pass.py does, with each gradient by the kernels that
    `launch` contains."""

    def dq(q: torch.Tensor, *others: Any) -> torch.Tensor:
        result = empty_like(q, q.shape[3])
        launch[BWD_DQ_SUM.name](*launch[BWD_DQ_SPLIT.name](q, *others), result, others[-1])
        return result

    def dkdv(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        results = empty_like(k, k.shape[3]), empty_like(v, v.shape[3])
        parts = launch[BWD_DKDV_SPLIT.name](q, k, v, *others)
        launch[BWD_DKDV_SUM.name](*parts, *results, others[-1])
        return results

    both = {BWD_DQ.name: dq, BWD_DKDV.name: dkdv}
    return two_pass.run({**both, **launch}, *given, **options)


def _family(name: str, *kernels: KernelSpec) -> FamilySpec:
    return FamilySpec(
        name=name,
        direction="backward",
        kernels=(BWD_PREPROCESS, *kernels),
        run=run,
        margin=WORTH_SPLITTING,
        few_programs_only=True,
    )


FAMILIES = (
    _family("split_dkdv", BWD_DKDV_SPLIT, BWD_DKDV_SUM, BWD_DQ),
    _family("split_dq", BWD_DKDV, BWD_DQ_SPLIT, BWD_DQ_SUM),
    _family("split_backward", BWD_DKDV_SPLIT, BWD_DKDV_SUM, BWD_DQ_SPLIT, BWD_DQ_SUM),
)
