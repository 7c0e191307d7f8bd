"""Every mask of the zoo: its pairs, its tiles and its kernels against an independent oracle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests import sliced
from tests.mask_zoo import BATCH, FORMS, HEADS, ZOO, Case, dtype_of
from tests.tile_classes import brute_force, found_classes
from tilegen.check.reference import dense_mask, make_inputs
from tilegen.check.verification import check, require
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks.mask import Side
from tilegen.problem import DType

TILES = [(16, 32), (64, 8)]
FORWARD: dict[Kernel, TileConfig] = {"fwd": TileConfig(block_m=32, block_n=32)}
WHOLE_HEADS: dict[Kernel, TileConfig] = {
    **FORWARD,
    "bwd_preprocess": TileConfig(block_m=64, block_n=16),
    "bwd_dkdv": TileConfig(block_m=32, block_n=32),
    "bwd_dq": TileConfig(block_m=64, block_n=32),
}


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_pairs(case: Case) -> None:
    batch = dense_mask(case.mask, case.seqlen_q, case.seqlen_kv, batch=BATCH, heads=HEADS)
    assert (np.broadcast_to(batch.numpy(), case.oracle.shape) == case.oracle).all()


@pytest.mark.parametrize("side", ["rows", "columns"])
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_tiles(case: Case, side: Side) -> None:
    for block_m, block_n in TILES:
        actual, listed = found_classes(
            case.mask,
            side,
            seqlen_q=case.seqlen_q,
            seqlen_kv=case.seqlen_kv,
            block_m=block_m,
            block_n=block_n,
        )
        expected = brute_force(case.oracle, side, block_m, block_n, listed=listed)
        if case.exact:
            assert (actual == expected).all(), (block_m, block_n)
        else:  # no kept pair is missed, no dropped one is called full
            assert ((actual > 0) >= (expected > 0)).all(), (block_m, block_n)
            assert ((actual == 2) <= (expected == 2)).all(), (block_m, block_n)


def agrees(case: Case, configs: Mapping[Kernel, TileConfig], dtype: DType) -> None:
    problem = case.problem(dtype)
    kernels = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
    judged = case.judged(problem.batch)
    require(check(kernels, make_inputs(problem), mask=judged))


@pytest.mark.slow
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_kernels_of_whole_heads(case: Case) -> None:
    """Each form in a backward, too: masks of a form are alike there."""
    backward = any(case is form for form, _ in FORMS)
    agrees(case, WHOLE_HEADS if backward else FORWARD, dtype_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("case, dtype", FORMS[::2], ids=str)
def test_small_cache_kernels(case: Case, dtype: DType) -> None:
    """In a forward and in a whole pass in turn."""
    turn = FORMS.index((case, dtype)) // 2 % 2
    agrees(case, (sliced.SMALL_CACHE, sliced.FORWARD)[turn], dtype)


@pytest.mark.parametrize("case, dtype", FORMS[1::2], ids=str)
def test_streamed_kernel(case: Case, dtype: DType) -> None:
    agrees(case, sliced.STREAMED, dtype)
