"""Generation over a paged cache by emitted kernels gives the tokens that dense attention gives."""

from __future__ import annotations

import pytest

from tests.support.models import Decoder, dense, served, served_by_trees

PROMPTS = [[*range(1, 20)], [20, 5, 3], [7]]


@pytest.mark.slow
@pytest.mark.parametrize("chunk, drafts", [(5, 3), (64, 0)])
def test_prompts_in_chunks_and_drafts_that_are_verified(chunk: int, drafts: int) -> None:
    model = Decoder()
    expected = [dense(model, one, 8) for one in PROMPTS]
    assert len({token for one in expected for token in one}) > 8, "tokens that could be told apart"
    assert served(model, PROMPTS, 8, chunk=chunk, drafts=drafts) == expected


@pytest.mark.slow
def test_trees_of_drafts_that_are_verified() -> None:
    model = Decoder()
    expected = [dense(model, one, 8) for one in PROMPTS]
    actual, steps = served_by_trees(model, PROMPTS, 8)
    assert actual == expected
    assert steps <= 5, "drafts of a tree are taken over"
