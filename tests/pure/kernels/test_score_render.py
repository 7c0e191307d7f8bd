"""Emitted kernels of masks and scores as text: goldens, line lengths, nothing unneeded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilegen
from tests.support import sliced, splits
from tilegen.emit.render import RenderedKernel, render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE, smallest_config
from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    documents,
    full,
    global_tokens,
    sliding_window,
    tree,
)
from tilegen.masks.score import Score, alibi, bias, relative_bias, sinks, softcap
from tilegen.masks.tracing.trace import MAX_LEVELS
from tilegen.masks.tracing.tracer import MAX_ELEMENTS
from tilegen.problem import AttentionProblem

WHOLE = TileConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
SLICES = TileConfig(block_m=64, block_n=64, block_d=64)
PROBLEM = AttentionProblem.parse("b4 hq32 hkv8 q4096 d128 bf16 causal")
TABLE, SLOPES = (torch.zeros(sizes, requires_grad=True) for sizes in ((32, 257), (32,)))

MASKS: dict[str, Mask] = {
    "full": full(),
    "dropped": causal(),  # with dropout of weights
    "causal": causal(),
    "several_ranges": causal() & (global_tokens(64) | sliding_window(255)),
    "documents": causal() & documents(cu_seqlens=[0, 1000, 4096]),
    "tree": tree(torch.eye(64).bool().expand(4, 64, 64)),
    "lists": block_sparse(torch.eye(32).bool(), 128),
    "lists_by_head": block_sparse(torch.eye(32).bool().expand(4, 32, 32, 32), 128),
}
SCORES: dict[str, Score | None] = {
    "": None,
    "softcap": softcap(20.0),
    "relative_bias": relative_bias(TABLE),
    "sinks": sinks(torch.zeros(32)),
    "alibi": alibi(SLOPES).then(softcap(30.0)),
    "bias": bias(torch.zeros(1).expand(4, 32, 4096, 4096)),  # 8 GiB if it were not expanded
}


def rendered(kernel: Kernel, mask: str, score: str = "") -> RenderedKernel:
    form = (made := SCORES[score]) and made.form
    drops = mask == "dropped"
    problem = replace(PROBLEM, mask=MASKS[mask].stand_in, score=form, dropout=drops)
    config = splits.ALL.get(kernel) or (WHOLE if kernel in LARGE_CACHE else SLICES)
    if KERNELS[kernel].specialised:
        config = smallest_config(kernel)
    return render(problem, config, kernel)


PAIRS = [
    *((mask, "") for mask in MASKS),
    *(("several_ranges", score) for score in SCORES),
    ("dropped", "relative_bias"),
]


@pytest.mark.parametrize("mask, score", PAIRS)
def test_emitted_files_are_well_formed(mask: str, score: str) -> None:
    for kernel in ("fwd", "bwd_dkdv", "bwd_dq", *(k for k, c in sliced.ALL.items() if c.block_d)):
        text = rendered(kernel, mask, score)
        compile(text.source, kernel, "exec")
        for line in text.source.splitlines():
            assert len(line) <= 120, (text.function, line)
        assert "\n\n\n\n" not in text.source
        used = Counter(re.findall(r"\w+", text.source))
        for name, kind in text.signature:
            again = used[name] > 1
            assert again or re.fullmatch(r"[tc]\d+_n\d", name) or name == "num_heads", name
            assert kind
        for name in re.findall(r"^ +(\w+) = ", text.source, re.MULTILINE):
            assert used[name] > 1, (text.function, name)


@pytest.mark.parametrize("mask, score", PAIRS)
def test_nothing_a_mask_or_a_score_reads_is_specialised_on(mask: str, score: str) -> None:
    for kernel in ("fwd", "bwd_dkdv", "bwd_dq", *(k for k, c in sliced.ALL.items() if c.block_d)):
        text = rendered(kernel, mask, score)
        match = re.search(r"do_not_specialize=range\((\d+), (\d+)\)", text.source)
        assert match
        first, last = int(match[1]), int(match[2])
        assert all(kind.startswith("*") for _, kind in text.signature[:first]), kernel
        assert all(kind == "fp32" for _, kind in text.signature[last:]), kernel
        assert last <= len(text.signature)


def test_each_mask_brings_only_its_own_code() -> None:
    sources = {mask: rendered("bwd_columns", mask).source for mask in MASKS}
    assert {mask for mask, source in sources.items() if "tiles_ptr" in source} == {
        "lists",
        "lists_by_head",
    }
    assert {mask for mask, source in sources.items() if "for member in" in source} == {
        "lists_by_head"
    }
    assert {mask for mask, source in sources.items() if "num_partial" in source} == {
        "several_ranges",
        "tree",  # by columns
        "lists",
        "lists_by_head",
    }


def test_each_score_brings_only_its_own_code() -> None:
    for score in ("softcap", "relative_bias", "alibi", "bias"):
        for kernel in [name for name, one in KERNELS.items() if "scores" in one.supports]:
            source = rendered(kernel, "causal", score).source
            trains = score in ("relative_bias", "alibi")
            trains &= kernel in ("bwd_dq", "bwd_dq_split", "bwd_scores", "bwd_one_pass")
            assert ("atomic_add" in source) == trains
            adds_only = score in ("relative_bias", "bias")
            assert ("slope = " in source) == (kernel.startswith("bwd") and not adds_only)
            in_full_tiles = "\n    k_idx = " in source  # not under `if MASKED`
            assert in_full_tiles or score == "softcap"
    for kernel in ("bwd_dkdv", "bwd_columns", "bwd_dq"):
        assert "sink" not in rendered(kernel, "causal", "sinks").source.split('"""')[2]


def test_tanh_is_precise_for_fp32_alone() -> None:
    quick = rendered("fwd", "causal", "softcap").source
    problem = replace(PROBLEM, dtype="fp32", score=softcap(20.0).form)
    precise = render(problem, WHOLE, "fwd").source
    assert quick.count("tl.abs") == 0
    assert precise.count("tl.abs") == 1


def test_the_header_says_how_to_render_again() -> None:
    for mask, score in PAIRS:
        kernel = rendered("fwd", mask, score)
        match = re.search(r'rerender  tilegen show "([^"]*)"', kernel.source)
        assert match
        again = AttentionProblem.parse(match[1])
        assert render(again, WHOLE, "fwd").source == kernel.source


@pytest.mark.slow
def test_the_longest_rows_and_chains_are_rendered() -> None:
    """With their derivatives, below the recursion limit of Python."""
    rows = torch.zeros(4096, MAX_ELEMENTS)

    def of_rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - (rows[q] - rows[k]).pow(2).sum(-1)

    def of_chain(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for i in range(MAX_LEVELS - 2):
            s = s + torch.sin(0.5 * i + q)
        return s

    for function in (of_rows, of_chain):
        problem = replace(PROBLEM, score=tilegen.score(function).form)
        for kernel in ("fwd", "bwd_dq"):
            assert "tl.dot" in render(problem, WHOLE, kernel).source
