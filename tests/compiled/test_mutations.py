"""The checks notice broken kernels: every mutation of mutations.py turns at least one of them
red."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.compiled.mutations import CHANGED, MUTATIONS, Mutation, noticed
from tests.support import sliced, splits
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import check, require
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.masks import Mask, block_sparse, causal, documents, global_tokens, sliding_window, tree
from tilegen.masks.dropout import Dropout
from tilegen.masks.score import Score, relative_bias, sinks, softcap
from tilegen.masks.usual import trees_of
from tilegen.problem import AttentionProblem

# Three problems of the kind every kernel test runs: a ragged causal window in groups, the same with
# rows that keep nothing, and logits wide enough for roundings to show.
_RAGGED = AttentionProblem.parse("b1 hq4 hkv2 q52 kv52 d32/16 fp16 causal&window(20,5)")
_CAUSAL = AttentionProblem.parse("b1 hq4 hkv2 q40 kv50 d32/16 fp16 causal")
_EMPTY = AttentionProblem.parse("b1 hq2 hkv1 q60 kv20 d32/16 fp16 window(20,3)")
CASES: list[tuple[AttentionProblem, float]] = [
    (_CAUSAL, 1.0),
    (_RAGGED, 1.0),
    (_EMPTY, 1.0),
    (_CAUSAL, 16.0),
]
CONFIG = TileConfig(block_m=16, block_n=16)


# The same for kernels that share panels: sliced head dims, and rows enough for several panels.
SLICED_CASES: list[tuple[AttentionProblem, float]] = [
    (AttentionProblem.parse("b1 hq4 hkv2 q80 kv150 d72/40 fp16 causal(bottom_right)"), 1.0),
    (AttentionProblem.parse("b1 hq4 hkv2 q90 kv90 d32/64 fp16 causal&window(20,5)"), 1.0),
    (AttentionProblem.parse("b1 hq2 hkv1 q90 kv40 d32/16 fp16 window(20,3)"), 1.0),
    (AttentionProblem.parse("b1 hq2 hkv1 q300 kv90 d32/16 fp16 window(250,9)"), 4.0),
]


# Masks, scores and dropout with code of their own.
_HEADS = torch.tensor([[[i * j % 3 != 1 for j in range(5)] for i in range(5)]] * 2)
_HEADS[1] = ~_HEADS[0]
_IDS = [i // 30 for i in range(75)]
_TREES = torch.stack([torch.ones(75, 75).tril(), torch.eye(75)]) > 0
CHANGES: list[tuple[Mask, Score | None, Dropout | None]] = [
    (causal() & (global_tokens(20) | sliding_window(9)), None, None),
    (causal() & documents(_IDS), None, None),
    (block_sparse(_HEADS, 16), None, None),
    (tree(_TREES), None, None),
    (causal(), relative_bias(torch.linspace(-2, 3, 62).view(2, 31)).then(softcap(3.0)), None),
    (causal(), sinks(torch.tensor([2.0, -1.0])), None),
    (causal(), None, Dropout(0.3, torch.tensor([1 << 40, 3]))),
]


def _cases(kernel: Kernel) -> list[tuple[AttentionProblem, float]]:
    return SLICED_CASES if KERNELS[kernel].sliced else CASES


def _kernels(problem: AttentionProblem, broken: Kernel) -> dict[Kernel, RenderedKernel]:
    """Return the kernels of a forward, and of a backward if one of its kernels is broken."""
    if broken == "fwd_streamed":
        configs = sliced.STREAMED
    elif KERNELS[broken].sliced:
        configs = sliced.FORWARD if broken in sliced.FORWARD else sliced.SMALL_CACHE
    elif broken in splits.NAMES:
        configs = splits.splits(problem, rows=16, block_n=16, keys=16)
    elif broken == "bwd_one_pass":
        configs = splits.backward("one_pass", length=32)
    elif broken in splits.ALL:
        configs = splits.backward("split_backward", length=16)
    else:
        configs: Mapping[Kernel, TileConfig] = dict.fromkeys(LARGE_CACHE, CONFIG)
        configs = {"fwd": CONFIG} if broken == "fwd" else configs
    return {kernel: _rendered(problem, config, kernel) for kernel, config in configs.items()}


@cache
def _rendered(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> RenderedKernel:
    """Return a kernel that many mutations start from, or have beside them."""
    return render(problem, config, kernel, aligned=True)


def _inputs(problem: AttentionProblem, sigma: float) -> Inputs:
    return make_inputs(problem, sigma=sigma, heads_inside=True)


@pytest.mark.parametrize(
    "kernel", ["bwd_dq", "bwd_rows", "fwd_streamed", "fwd_split", "bwd_dq_split"]
)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_unbroken_kernels_pass(case: int, kernel: Kernel) -> None:
    problem, sigma = _cases(kernel)[case]
    require(check(_kernels(problem, kernel), _inputs(problem, sigma), mask=problem.mask))


@pytest.mark.sampled
@pytest.mark.parametrize("mutation", CHANGED, ids=lambda mutation: mutation.name)
def test_mutation_of_masks_scores_and_dropout_is_noticed(mutation: Mutation) -> None:
    plain = AttentionProblem.parse("b1 hq2 hkv1 q75 kv75 d16 fp32 full")
    drafted = AttentionProblem.parse("b2 hq2 hkv1 q40 kv75 d16 fp32 full")
    applied = False
    for mask, score, dropout in CHANGES:
        problem = replace(
            drafted if trees_of(mask) else plain,
            mask=mask.stand_in,
            score=score and score.form,
            dropout=dropout is not None,
        )
        kernels = _kernels(problem, mutation.kernel)
        whole = kernels[mutation.kernel]
        if mutation.old not in whole.source:
            continue
        applied = True
        source = whole.source.replace(mutation.old, mutation.new)
        kernels[mutation.kernel] = replace(
            whole, source=source, digest=f"{whole.digest}-{mutation.name}"
        )
        inputs = _inputs(problem, 1.0)
        if noticed(kernels, inputs, mutation.kernel, mask=mask, score=score, dropout=dropout):
            return
    assert applied, (
        f"the text {mutation.old!r} is in no emitted {mutation.kernel}; update the mutation"
    )
    pytest.fail("no check noticed")


@pytest.mark.sampled
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_noticed(mutation: Mutation) -> None:
    applied = False
    for problem, sigma in _cases(mutation.kernel):
        kernels = _kernels(problem, mutation.kernel)
        whole = kernels[mutation.kernel]
        if mutation.old not in whole.source:
            continue
        applied = True
        kernels[mutation.kernel] = replace(
            whole,
            source=whole.source.replace(mutation.old, mutation.new),
            digest=f"{whole.digest}-{mutation.name}",
        )
        if noticed(kernels, _inputs(problem, sigma), mutation.kernel, mask=problem.mask):
            return
    assert applied, (
        f"the text {mutation.old!r} is in no emitted {mutation.kernel}; update the mutation"
    )
    pytest.fail("no check noticed")
