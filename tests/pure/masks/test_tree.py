"""Masks of trees of drafted tokens: what they keep, how they are solved, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilegen
from tilegen.check.reference import dense_mask
from tilegen.errors import InvalidProblem
from tilegen.masks import parse_mask
from tilegen.masks.mask import Side
from tilegen.masks.source import ranges_source
from tilegen.masks.tiles.tile_ranges import tile_ranges

PARENTS = torch.tensor([-1, 0, 0, 1, 1, 2])
SEEN = {0: {0}, 1: {0, 1}, 2: {0, 2}, 3: {0, 1, 3}, 4: {0, 1, 4}, 5: {0, 2, 5}}


def test_ancestors_of_a_small_tree() -> None:
    table = tilegen.ancestors(PARENTS)
    assert {i: set(row.nonzero()[:, 0].tolist()) for i, row in enumerate(table)} == SEEN


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 9, 33, 64, 65])
def test_ancestors_of_chains_and_of_random_trees(width: int) -> None:
    """Also where a parent comes after its child; a chain is as deep as a tree can be."""
    draw = random.Random(width)
    order = draw.sample(range(width), width)
    chain = dict(zip(order, [-1, *order], strict=False))
    tree = {one: draw.choice([-1, *order[:i]]) for i, one in enumerate(order)}
    parents = torch.tensor([[up[i] for i in range(width)] for up in (chain, tree)])
    tables = tilegen.ancestors(parents)
    for up, table in zip((chain, tree), tables, strict=True):
        for i, row in enumerate(table.tolist()):
            seen, at = set[int](), i
            while at >= 0:
                seen.add(at)
                at = up[at]
            assert {j for j, one in enumerate(row) if one} == seen


def test_parents_and_their_table_are_one_mask() -> None:
    by_parents = tilegen.tree(PARENTS)
    by_table = tilegen.tree(tilegen.ancestors(PARENTS))
    assert by_parents.stand_in == by_table.stand_in
    for rows, columns in ((6, 20), (4, 9), (1, 1)):
        actual = dense_mask(by_parents, rows, columns)
        assert torch.equal(actual, dense_mask(by_table, rows, columns))
        assert actual[:, : columns - rows].all()
        assert [set(one.nonzero()[:, 0].tolist()) for one in actual[:, columns - rows :]] == [
            SEEN[i] for i in range(rows)
        ]


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_the_prefix_is_full_in_closed_form(side: Side) -> None:
    """However long it is: no list of tiles is built, and tiles before the tree run unmasked."""
    tree = tilegen.tree(PARENTS)
    form = ranges_source(tree.general, side).form
    assert form == ("single" if side == "rows" else "several")
    ranges = tile_ranges(tree, side, seqlen_q=6, seqlen_kv=2**26 + 6, block_m=16, block_n=64)
    if side == "rows":
        assert (ranges.visited_tiles, ranges.full_tiles) == (2**20 + 1, 2**20)
    else:  # a program for each key tile, which visits the one tile of queries, cut off at its end
        assert ranges.visited_tiles == 2**20 + 1


@pytest.mark.parametrize(
    "other", [tilegen.sliding_window(300, None, "bottom_right"), tilegen.kv_lengths([900])]
)
def test_joined_with_others_the_form_stays(other: tilegen.Mask) -> None:
    mask = tilegen.tree(PARENTS) & other
    assert ranges_source(mask.general, "rows").form == "single"
    ranges = tile_ranges(mask, "rows", seqlen_q=6, seqlen_kv=1000, block_m=16, block_n=32)
    keep = dense_mask(mask, 6, 1000).reshape(6, 1000)
    keep = torch.nn.functional.pad(keep, (0, 24)).unflatten(1, (32, 32))
    assert ranges.visited_tiles == int(keep.any((0, 2)).sum())
    assert ranges.full_tiles == int(keep.all(2).all(0).sum())


def test_parents_may_change() -> None:
    parents = PARENTS.clone()
    mask = tilegen.tree(parents)
    before = dense_mask(mask, 6, 10)
    parents[5] = 4
    assert dense_mask(mask, 6, 10)[5].tolist() == [True] * 6 + [False] * 2 + [True] * 2
    assert not torch.equal(before, dense_mask(mask, 6, 10))


def test_notations() -> None:
    for text in ("tree(@:64)", "tree(@b:8)", "tree(@b:8,@b:1024)", "tree(@:4)&window(9,0)"):
        assert parse_mask(text).notation == text
    drafted = tilegen.tree(PARENTS.expand(2, 6), [7, 9])
    assert parse_mask(drafted.notation) == drafted.stand_in
    assert tilegen.tree(PARENTS).notation == "tree(@:8)", "as wide as a power of two"


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "floats": (lambda: tilegen.tree(torch.zeros(3)), "a tree must be integers"),
    "a number": (lambda: tilegen.tree(3), r"got torch.int64 \(\)"),
    "nothing": (lambda: tilegen.tree(PARENTS[:0]), r"got torch.int64 \(0,\)"),
    "not square": (lambda: tilegen.tree(torch.ones(3, 4) > 0), r"got torch.bool \(3, 4\)"),
    "a circle": (lambda: tilegen.tree([1, 2, 0]), r"parents must lead to a root, got \[1, 2, 0\]"),
    "its own parent": (lambda: tilegen.tree([0]), "parents must lead to a root"),
    "no token": (lambda: tilegen.ancestors([-1, 2]), r"parents must be -1\.\.1, got \[-1, 2\]"),
    "below -1": (lambda: tilegen.ancestors([-2, 0]), r"parents must be -1\.\.1, got \[-2, 0\]"),
    "lengths": (lambda: tilegen.tree(PARENTS, [0.5]), "kv_lengths must be integers"),
    "queries": (
        lambda: tilegen.attention(*torch.zeros(3, 1, 1, 7, 8), mask=tilegen.tree(PARENTS)),
        "a tree of 6 tokens has rows for as many queries, got 7",
    ),
    "requests": (
        lambda: tilegen.attention(
            *torch.zeros(3, 2, 1, 6, 8), mask=tilegen.tree(torch.ones(3, 6, 6) > 0)
        ),
        "must have size 2 along batch, got 3",
    ),
    "notation": (lambda: parse_mask("tree(@q:4)"), "expected values such as @:64"),
    "no tokens": (lambda: parse_mask("tree(@:0)"), r"expected a tree of 1\.\.16384 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_trees_are_refused(name: str) -> None:
    make, message = WRONG[name]
    with pytest.raises(InvalidProblem, match=message):
        make()


def test_lengths_say_where_the_tree_lies() -> None:
    """In padded batches each request has its tree at its own end."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 6, 16, generator=generator)
    k, v = torch.randn(2, 3, 2, 40, 16, generator=generator)
    lengths = [40, 11, 6]
    for i, length in enumerate(lengths):
        k[i, :, length:], v[i, :, length:] = float("nan"), float("inf")
    out = tilegen.attention(q, k, v, mask=tilegen.tree(PARENTS, lengths))
    for i, length in enumerate(lengths):
        part = slice(i, i + 1)
        expected = tilegen.attention(
            q[part], k[part, :, :length], v[part, :, :length], mask=tilegen.tree(PARENTS)
        )
        torch.testing.assert_close(out[part], expected)


def test_pages_with_a_tree_for_each_request() -> None:
    """Computed by PyTorch; a request with fewer queries takes the first rows of its table."""
    generator = torch.Generator().manual_seed(2)
    tables = (torch.rand(3, 6, 6, generator=generator) < 0.5) | torch.eye(6).bool()
    k, v = torch.randn(2, 12, 8, 2, 16, generator=generator)
    pages, lengths = torch.randperm(12, generator=generator).view(3, 4), torch.tensor([32, 9, 5])
    q = torch.randn(13, 4, 16, generator=generator)
    starts, slope = torch.tensor([0, 6, 10, 13]), torch.tensor([0.0, 0.1, -0.2])

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + slope[b] * j

    out = tilegen.attention_paged(
        *(q, k, v, pages, lengths),
        q_starts=starts,
        max_q_length=6,
        mask=tilegen.tree(tables),
        score=score,
    )
    for i, (first, end) in enumerate([(0, 6), (6, 10), (10, 13)]):
        keys, values = (x[pages[i]].flatten(0, 1)[: lengths[i]].transpose(0, 1) for x in (k, v))
        expected = tilegen.attention(
            *(q[first:end].transpose(0, 1)[None], keys[None], values[None]),
            mask=tilegen.tree(tables[i]),
            score=lambda s, b, h, x, j, i=i: s + slope[i] * j,
        )
        torch.testing.assert_close(out[first:end], expected[0].transpose(0, 1))
