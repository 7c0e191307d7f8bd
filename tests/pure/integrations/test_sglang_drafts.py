"""Drafts that sglang verifies by tilegen's back end: trees and chains, in CUDA graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilegen
from tests.support.engine_batches import (
    Kept,
    Pool,
    Tokens,
    sglang_drafts,
    sglang_layer,
    sglang_new,
    sglang_runner,
)
from tests.support.engine_classes import FORMS, fill_captured, sglang_classes
from tilegen.errors import Unsupported

TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


@pytest.fixture(params=FORMS)
def sglang(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    return sglang_classes(request.param, monkeypatch)


def check(out: torch.Tensor, tokens: Tokens, kept: Kept) -> None:
    torch.testing.assert_close(out.double(), tokens.expected(kept).flatten(1), **TOLERANCE)


PARENTS = torch.tensor(
    [[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [3, -1, 0, 1, 5, 1], [-1, 0, 0, 0, 0, 0]]
)
"""Parents of six drafts of each request: branches, a chain, some before theirs, a fan."""
DRAFTED = [37, 50, 6, 30]
"""Lengths of the requests, drafts included: one is all drafts."""


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("layer_id, left, cap", [(0, float("inf"), 0.0), (0, 4, 1.5), (1, 7, 0.0)])
@pytest.mark.parametrize("form", ["trees", "chains"])
def test_drafts_are_verified(
    sglang: Any, form: str, layer_id: int, left: float, cap: float, page: int
) -> None:
    """Without a mask of sglang's, drafts are chains."""
    tokens = Tokens.drafts(DRAFTED, 6)
    trees = list(tilegen.ancestors(PARENTS)) if form == "trees" else None
    runner = sglang_runner(tokens, page, sglang.Windows if layer_id else Pool)
    backend = sglang.Backend(runner)
    batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, trees)
    window = -1 if left == float("inf") else int(left)
    layer = sglang_layer(layer_id, sglang.Type.DECODER, sliding_window_size=window, logit_cap=cap)
    for known in (batch.seq_lens_cpu, None):
        batch.seq_lens_cpu = known
        backend.init_forward_metadata(batch)
        out = backend.forward_extend(*sglang_new(tokens), layer, batch)
        right = float("inf") if trees else 0  # what a tree keeps may lie behind
        check(out, tokens, Kept(left=left, right=right, cap=cap, trees=trees or []))


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("form", ["trees", "chains"])
def test_a_verifying_graph_reads_filled_tensors(sglang: Any, form: str, windows: bool) -> None:
    """Graphs are captured without trees, of requests of one key."""
    tokens = Tokens.drafts(DRAFTED, 6)
    trees = list(tilegen.ancestors(PARENTS)) if form == "trees" else None
    runner = sglang_runner(tokens, 16, sglang.Windows if windows else Pool)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 24)
    batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, trees)
    fill_captured(backend, batch)
    results = {"sliding_window_size": 7} if windows else {}
    layer = sglang_layer(int(windows), sglang.Type.DECODER, **results)
    out = backend.forward_extend(*sglang_new(tokens), layer, batch)
    left, right = 7 if windows else float("inf"), float("inf") if trees else 0
    check(out, tokens, Kept(left=left, right=right, trees=trees or []))


def test_graphs_of_other_sizes_share_no_masks(sglang: Any) -> None:
    """Graphs of many sizes are captured in turn, from the largest on."""
    whole = Tokens.drafts(DRAFTED, 6)
    trees = list(tilegen.ancestors(PARENTS))
    runner = sglang_runner(whole, 1)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 24)
    layer = sglang_layer(0, sglang.Type.DECODER)
    for requests in (4, 2, 3):
        tokens = Tokens(*(one[:requests] for one in (whole.q, whole.k, whole.v)))
        own_trees = trees[:requests]
        batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, own_trees)
        backend.init_forward_metadata_out_graph(batch)
        out = backend.forward_extend(*sglang_new(tokens), layer, batch)
        check(out, tokens, Kept(right=float("inf"), trees=own_trees))


def test_idle_requests_of_a_graph_have_no_part_in_the_mask(sglang: Any) -> None:
    """A batch is filled up with requests of one key, of which sglang's mask says nothing."""
    tokens = Tokens.drafts([37, 50], 6)
    trees = list(tilegen.ancestors(PARENTS[:2]))
    runner = sglang_runner(tokens, 1)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 24)
    batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, trees)
    pad = torch.nn.functional.pad
    batch.batch_size = 4
    batch.seq_lens = pad(batch.seq_lens, (0, 2), value=1)
    batch.req_pool_indices = pad(batch.req_pool_indices, (0, 2))
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata.lengths.tolist() == [37, 50, 7, 7]
    assert torch.equal(backend.forward_metadata.seen[:2], torch.stack(trees))


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"ragged_verify_layout": object()}, "numbers of drafts that differ by request"),
        ({"custom_mask": torch.ones(78, dtype=torch.uint8)}, "no bools"),
    ],
)
def test_drafts_that_are_refused(sglang: Any, changed: dict[str, Any], named: str) -> None:
    tokens = Tokens.drafts([20, 9], 3)
    runner = sglang_runner(tokens, 1)
    batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, None)
    vars(batch.spec_info).update(changed)
    with pytest.raises(Unsupported, match=named):
        sglang.Backend(runner).init_forward_metadata(batch)


def test_graphs_are_of_as_many_drafts_as_was_said(sglang: Any) -> None:
    tokens = Tokens.drafts([20, 9], 3)
    runner = sglang_runner(tokens, 1)
    backend = sglang.Backend(runner)
    backend.init_cuda_graph_state(4, 16)
    batch = sglang_drafts(runner, tokens, sglang.Mode.TARGET_VERIFY, None)
    with pytest.raises(Unsupported, match=r"expected 4 tokens of each request.*got 3"):
        backend.init_forward_metadata_out_graph(batch)
