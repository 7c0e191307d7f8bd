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
from tilegen.kernels.arguments import factor
from tilegen.kernels.layout import empty_like
from tilegen.kernels.loops import OverRows
from tilegen.kernels.panels import Launch
from tilegen.kernels.partial_gradients import (
    BWD_DQ_SUM,
    HAS_DKDV,
    HAS_DQ,
    PARTIAL_DK,
    PARTIAL_DQ,
    PARTIAL_DV,
    TILES,
)
from tilegen.kernels.spec import FamilySpec, KernelSpec
from tilegen.kernels.tensors import DK, DV
from tilegen.kernels.two_pass import BWD_DKDV, BWD_DQ, BWD_PREPROCESS

if TYPE_CHECKING:
    import torch

WORTH_SPLITTING = 1.1
"""Factor in predicted time by which a backward with splits must beat a backward without: summing
parts takes memory and one more launch. A guess."""
_KNOBS = replace(TILES, split_kv=(128, 256, 512, 1024, 2048, 4096, 8192))

_PARTS_OF_KEYS = (PARTIAL_DK, PARTIAL_DV, HAS_DKDV)

BWD_DKDV_SPLIT = replace(
    BWD_DKDV,
    name="bwd_dkdv_split",
    title="Attention backward, queries split over programs: dk and dv of each split.",
    outputs=_PARTS_OF_KEYS,
    grid=(*BWD_DKDV.grid, ("seqlen_q", "split_q")),
    loop=replace(BWD_DKDV.loop, splits=True),
    knobs=_KNOBS,
    like=BWD_DKDV.name,
)

BWD_DKDV_SUM = replace(
    BWD_DQ_SUM,
    name="bwd_dkdv_sum",
    title="Attention backward, queries split over programs: dk and dv of all splits together.",
    inputs=(*_PARTS_OF_KEYS, DK, DV, factor("softmax_scale")),
    outputs=(DK, DV),
    grid=(("seqlen_kv", "block_m"), ("num_heads_kv", 1), ("batch", 1)),
    loop=OverRows(stationary="columns", joins=True),
    checked_by=("dk", "dv"),
)

BWD_DQ_SPLIT = replace(
    BWD_DQ,
    name="bwd_dq_split",
    title="Attention backward, keys split over programs: dq of each split.",
    outputs=(PARTIAL_DQ, HAS_DQ),
    grid=(*BWD_DQ.grid, ("seqlen_kv", "split_kv")),
    loop=replace(BWD_DQ.loop, splits=True),
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
