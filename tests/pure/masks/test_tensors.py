"""A tensor of a kernel is one record: arguments, launch, traffic and the least traffic follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilegen.emit.arguments import Arguments
from tilegen.emit.launch import EmittedLaunch
from tilegen.kernels.config import TileConfig
from tilegen.kernels.moved import read, write
from tilegen.kernels.q_stationary import FWD
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import KernelSpec
from tilegen.kernels.split_kv import FWD_SPLIT
from tilegen.kernels.tensors import ROWS, Q, Tensor
from tilegen.kernels.two_pass import BWD_DKDV
from tilegen.problem import AttentionProblem

LARGEST = Tensor("largest", ROWS, ": the largest score of each row", "fp32")
GATE = Tensor("gate", "batch num_heads_q seqlen_q head_dim_v", stride_name="g")
CONFIG = TileConfig(block_m=64, block_n=32)


def _launch(spec: KernelSpec) -> EmittedLaunch:
    arguments = Arguments.of(spec, CONFIG, {"qk": 64, "v": 64}, (), changes_scores=False)
    grid = tuple((name, 16) for name, _ in spec.grid)
    return EmittedLaunch(
        spec=spec, arguments=arguments, config=CONFIG, grid=grid, unit=8, pairs=False
    )


def test_a_result_is_allocated_returned_and_counted() -> None:
    spec = replace(FWD, outputs=(*FWD.outputs, LARGEST))
    launch = _launch(spec)
    assert spec.lines[0].names == "q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, largest_ptr"
    assert spec.lines[0].arguments[-1].type == "*fp32"
    assert launch.results == ["out", "lse", "largest"]
    assert "largest_shape = batch, num_heads_q, seqlen_q" in launch.arrangement
    assert (
        launch.allocations[-1] == "largest = empty(largest_shape, largest_strides, torch.float32)"
    )
    described = "largest  (batch, heads, seqlen_q), fp32: the largest score of each row"
    assert described in [
        " ".join(line.split(None, 1)).replace(" ", "  ", 1) for line in launch.tensors
    ]
    assert spec.traffic == (*FWD.traffic, write(LARGEST, "g*N_q"))
    assert spec.floor == (*FWD.floor, write(LARGEST, "g*N_q"))


def test_an_input_is_a_parameter_with_strides_and_is_counted_as_often_as_its_side_moves() -> None:
    stationary = replace(FWD, inputs=(Q, GATE, *FWD.inputs[1:]))
    assert stationary.parameters == ("q", "gate", "k", "v", "softmax_scale")
    assert [line.names for line in stationary.lines[1:3]] == [
        "stride_qb, stride_qh, stride_qm",
        "stride_gb, stride_gh, stride_gm",
    ]
    assert read(GATE, "g*N_q*d_v") in stationary.traffic
    assert read(GATE, "g*n_q*d_v") in stationary.floor
    split = replace(FWD_SPLIT, inputs=(Q, GATE, *FWD_SPLIT.inputs[1:]))
    assert read(GATE, "g*W_s*d_v") in split.traffic
    streamed = replace(BWD_DKDV, inputs=(*BWD_DKDV.inputs[:-1], GATE, BWD_DKDV.inputs[-1]))
    assert read(GATE, "g*V_q*d_v") in streamed.traffic
    problem = AttentionProblem.parse("hq2 q256 d64 bf16 causal")
    step, plain = (spec.step(problem, CONFIG) for spec in (streamed, BWD_DKDV))
    assert step.loaded == plain.loaded + 64 * CONFIG.block_m
    assert streamed.streamed_bytes(problem) == BWD_DKDV.streamed_bytes(problem) + 2 * 64


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_launch_says_what_it_returns_or_fills(kernel: str) -> None:
    """A tensor that a launch is given and fills is an input and an output."""
    spec = KERNELS[kernel]
    launch, names = _launch(spec), {one.name for one in spec.outputs}
    assert names
    assert names <= set(
        launch.summary.rstrip(".").replace("(", "").replace(")", "").replace(",", "").split()
    )
    assert set(spec.allocated) == names - set(spec.parameters)
