"""Caches that grow: new keys and values are written into their pages."""

from __future__ import annotations

import pytest
import torch

import tilegen
from tests.pure.calls.test_paged import call
from tilegen.errors import InvalidProblem
from tilegen.runtime.slots import write_slots


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_new_tokens_are_written_behind_the_old_ones(layout: str) -> None:
    given = call(kv_lengths=torch.tensor([80, 17, 33]))
    before = [given[name].clone() for name in ("k_pages", "v_pages")]
    pages = [given[name] for name in ("k_pages", "v_pages")]
    shown = [x.transpose(1, 2).contiguous() if layout == "HND" else x for x in pages]
    new = [torch.randn(3, 2, 2, width) for width in (32, 24)]
    where = given["block_table"], given["kv_lengths"]
    tilegen.append_paged(*new, *shown, *where, layout=layout)
    shown = [x.transpose(1, 2) if layout == "HND" else x for x in shown]
    for old, actual, x in zip(before, shown, new, strict=True):
        expected = old.clone()
        for i, length in enumerate((80, 17, 33)):
            for token in range(2):
                place = length - 2 + token
                page = given["block_table"][i, place // 16]
                expected[page, place % 16] = x[i, :, token]
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("first", [0, 2])
def test_tokens_of_no_request_are_not_written(first: int) -> None:
    given = call()
    pages = [given[name] for name in ("k_pages", "v_pages")]
    before = [x.clone() for x in pages]
    new = [torch.randn(6, 2, width) for width in (32, 24)]
    where = given["block_table"], given["kv_lengths"]
    tilegen.append_paged(*new, *pages, *where, q_starts=torch.tensor([0, 1, 1, 3]) + first)
    for old, page, x in zip(before, pages, new, strict=True):
        expected = old.clone()
        for i, place, token in ((0, 79, first), (2, 31, first + 1), (2, 32, first + 2)):
            expected[given["block_table"][i, place // 16], place % 16] = x[token]
        assert torch.equal(page, expected)
    changed = [x.clone() for x in pages]
    tilegen.append_paged(*new, *pages, *where, q_starts=torch.zeros(4, dtype=torch.int64))
    assert all(torch.equal(one, other) for one, other in zip(pages, changed, strict=True))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_tokens_go_to_the_slots_that_are_named(layout: str) -> None:
    old = torch.randn(2, 6, 4, 2, 8)  # k and v: pages, rows, heads, dim
    whole = old if layout == "NHD" else old.transpose(2, 3)
    pages = [x.clone() for x in whole]
    new = torch.randn(2, 5, 2, 8)
    slots = torch.tensor([-1, 23, 0, -1, 9])
    write_slots(*new, *pages, slots, layout=layout)
    for x, before, tokens in zip(pages, old, new, strict=True):
        expected = before.flatten(0, 1).clone()
        expected[[23, 0, 9]] = tokens[[1, 2, 4]]
        shown = x if layout == "NHD" else x.transpose(1, 2)
        assert torch.equal(shown.flatten(0, 1), expected)
    kept = [x.clone() for x in pages]
    write_slots(*new, *pages, torch.full((5,), -1), layout=layout)
    write_slots(*new[:, :0], *pages, slots[:0], layout=layout)
    assert all(map(torch.equal, pages, kept)), "tokens that go nowhere were written"
    with pytest.raises(InvalidProblem, match="slots must have a place for each of 5, got 3"):
        write_slots(*new, *pages, slots[:3], layout=layout)
    with pytest.raises(InvalidProblem, match="must be integers"):
        write_slots(*new, *pages, slots > 0, layout=layout)
    for beyond in (-2, 24):
        with pytest.raises(InvalidProblem, match=r"slots must be -1\.\.23, got"):
            write_slots(*new, *pages, slots.where(slots != 9, beyond), layout=layout)


def test_keys_that_do_not_fit_are_refused() -> None:
    given = call()
    where = given["k_pages"], given["v_pages"], given["block_table"], given["kv_lengths"]
    new = torch.randn(3, 2, 1, 32)
    with pytest.raises(InvalidProblem, match="must hold as many tokens and heads"):
        tilegen.append_paged(new, new[:, :1], *where)
    with pytest.raises(InvalidProblem, match="k must have 3 requests, got 2"):
        tilegen.append_paged(new[:2], new[:2], *where)
    with pytest.raises(InvalidProblem, match="layout must be one of"):
        tilegen.append_paged(new, new, *where, layout="NDH")
    with pytest.raises(InvalidProblem, match="block_table must have 3 rows"):
        tilegen.append_paged(new, new, *where[:2], where[2][:2], where[3])
    tokens = new[:, :, 0]
    for starts in ([-1, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 4]):
        with pytest.raises(InvalidProblem, match="q_starts must rise from at least 0 to at most"):
            tilegen.append_paged(tokens, tokens[..., :24], *where, q_starts=torch.tensor(starts))


def test_no_new_tokens_write_nothing() -> None:
    given = call()
    where = given["k_pages"], given["v_pages"], given["block_table"], given["kv_lengths"]
    before = [x.clone() for x in where[:2]]
    tilegen.append_paged(torch.randn(3, 2, 0, 32), torch.randn(3, 2, 0, 24), *where)
    assert all(map(torch.equal, where[:2], before))
