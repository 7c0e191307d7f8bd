"""Every mask of the zoo: its kernels against an independent oracle. Its pairs and tiles are in
pure/masks/test_mask_zoo.py."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.support import sliced
from tests.support.mask_zoo import FORMS, ZOO, Case, dtype_of
from tilegen.check.reference import make_inputs
from tilegen.check.verification import check, require
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import DType

FORWARD: dict[Kernel, TileConfig] = {"fwd": TileConfig(block_m=32, block_n=32)}
WHOLE_HEADS: dict[Kernel, TileConfig] = {
    **FORWARD,
    "bwd_preprocess": TileConfig(block_m=64, block_n=16),
    "bwd_dkdv": TileConfig(block_m=32, block_n=32),
    "bwd_dq": TileConfig(block_m=64, block_n=32),
}


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
