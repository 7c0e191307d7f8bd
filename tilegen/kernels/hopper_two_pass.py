"""Backward for Hopper: the kernels of `two_pass` whose warpgroups have roles. One loads, each other
one computes 64 rows of dQ, or of dK and dV. Either may also stand beside the other's plain form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tilegen.kernels.config import ROWS_OF_GROUP
from tilegen.kernels.spec import FamilySpec, Feature, KernelSpec, Knobs
from tilegen.kernels.two_pass import BWD_DKDV, BWD_DQ, BWD_PREPROCESS, run

_HOPPER = dict(
    supports=frozenset[Feature]({"scores"}),
    requires=("sm_90",),
    specialised=True,
    head_dims=((64, 64), (128, 128)),
)

BWD_DKDV_HOPPER = replace(
    BWD_DKDV,
    name="bwd_dkdv_hopper",
    template="hopper_two_pass/attention_bwd_dkdv_hopper.py.jinja",
    title="Attention backward for Hopper: dk and dv. One warpgroup loads, the others compute.",
    described=("q", "k", "v", "dout", "lse", "delta", "dk", "dv"),
    knobs=Knobs(
        block_m=(ROWS_OF_GROUP,),
        block_n=(2 * ROWS_OF_GROUP,),
        num_warps=(8,),
        num_stages=(2, 3, 4),
    ),
    head_dims_of_slopes=((64, 64),),
    **_HOPPER,
)

BWD_DQ_HOPPER = replace(
    BWD_DQ,
    name="bwd_dq_hopper",
    template="hopper_two_pass/attention_bwd_dq_hopper.py.jinja",
    title="Attention backward for Hopper: dq. One warpgroup loads, the others compute.",
    described=("q", "k", "v", "dout", "dq"),
    knobs=Knobs(
        block_m=(2 * ROWS_OF_GROUP, 3 * ROWS_OF_GROUP),
        block_n=(64, 128),
        num_warps=(8, 12),
        num_stages=(2, 3),
    ),
    **_HOPPER,
)


def _family(name: str, dkdv: KernelSpec, dq: KernelSpec) -> FamilySpec:
    return FamilySpec(
        name=name,
        direction="backward",
        kernels=(BWD_PREPROCESS, dkdv, dq),
        run=partial(run, kernels=(dkdv.name, dq.name)),
        by_record=True,
    )


FAMILIES = (
    _family("hopper_two_pass", BWD_DKDV_HOPPER, BWD_DQ_HOPPER),
    _family("hopper_dkdv", BWD_DKDV_HOPPER, BWD_DQ),
    _family("hopper_dq", BWD_DKDV, BWD_DQ_HOPPER),
)
