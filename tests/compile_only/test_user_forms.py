"""Kernels of masks and scores as users write them compile for sm_90: the interpreter takes more."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from tests.support.user_forms import MASKS, SCORES
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.workers import Pool, compile_many
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import intersect, predicate
from tilegen.masks.score import Score, score
from tilegen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("hq2 hkv1 q1024 d16 fp16 full")
CONFIG = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
"""Two pairs to a thread: what the forms compute is compiled for each of them."""
KERNELS: tuple[Kernel, ...] = ("fwd", "bwd_dkdv", "bwd_dq")


COUNT = 10
"""Kernels that have all the forms: some masks each, and some scores."""


@pytest.mark.slow
def test_kernels_compile() -> None:
    """Every form in one of the kernels: how pairs are computed is the same in all."""
    asked: list[tuple[str, RenderedKernel]] = []
    for i in range(COUNT):
        masks, scores = list(MASKS.items())[i::COUNT], list(SCORES.items())[i::COUNT]
        mask = intersect(*(predicate(fn) for _, fn in masks))
        made = reduce(Score.then, (score(fn) for _, fn in scores))
        problem = replace(PROBLEM, mask=mask.stand_in, score=made.form)
        name = ", ".join(name for name, _ in (*masks, *scores))
        asked.append((name, render(problem, CONFIG, KERNELS[i % 3])))
    names = {one.digest: name for name, one in asked}
    failed = {
        names[one.digest]: str(built)
        for one, built in compile_many([one for _, one in asked], "sm_90", workers=1)
        if isinstance(built, BuildFailed)
    }
    assert not failed


def test_functions_without_a_name_are_compiled_in_another_process(compiler: Pool) -> None:
    """As a call that tunes has it done, for masks and scores of the user's lambdas."""
    mask = predicate(lambda b, h, q, k: q >= k) & predicate(lambda b, h, q, k: (q - k) % 3 == 0)
    made = score(lambda s, b, h, q, k: 2 * s).then(score(lambda s, b, h, q, k: s - q))
    problem = replace(PROBLEM, mask=mask.stand_in, score=made.form)
    assert isinstance(compiler.compile(render(problem, CONFIG), "sm_90"), CompiledKernel)
