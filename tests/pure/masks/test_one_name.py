"""Masks that keep the same pairs have one form, and so one key of records, however they are
written; masks that differ have different forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import tilegen
from tests.support.mask_zoo import ZOO
from tilegen.masks import (
    Mask,
    causal,
    dilated,
    full,
    global_tokens,
    prefix_lm,
    sliding_window,
    streaming,
)
from tilegen.masks.notation import parse_mask
from tilegen.masks.usual import kv_prefix

Keeps = Callable[[Any, Any, Any, Any], Any]
NAMED: dict[str, tuple[Mask, list[Any]]] = {
    "causal": (
        causal(),
        [
            lambda b, h, q, k: q >= k,
            lambda b, h, q, k: k <= q,
            lambda b, h, q, k: k < q + 1,
            lambda b, h, q, k: ~(k > q),
            lambda b, h, q, k: ~~(q - k >= 0),
            lambda b, h, q, k: torch.where(q >= k, True, False),
            lambda b, h, q, k: torch.logical_not(torch.lt(q, k)),
            lambda b, h, q, k: (k <= q) & ((k <= q) | (h == 3)),
            lambda b, h, q, k: 2 * k <= 2 * q + 1,
            sliding_window(None, 0),
            causal() & full(),
            causal() & sliding_window(None, 5),
            prefix_lm(0),
            ~~causal(),
            "keep(k<=q)",
        ],
    ),
    "window": (
        sliding_window(127, 0),
        [
            causal() & sliding_window(127, 0),
            sliding_window(127, 0) & causal(),
            causal() & sliding_window(127, None),
            sliding_window(200, 0) & sliding_window(127, 3),
            lambda b, h, q, k: (q >= k) & (q - k <= 127),
            lambda b, h, q, k: (q - k < 128) & (k <= q),
            lambda b, h, q, k: (k >= q - 127) & (k <= q),
            lambda b, h, q, k: torch.logical_and(q >= k, q - k <= 127),
            lambda b, h, q, k: ~((k > q) | (q - k > 127)),
            lambda b, h, q, k: torch.where(q >= k, q - k < 128, False),
            "causal&window(127,-1)",
            "keep((k<=q)&(q-k<=127))",
        ],
    ),
    "bottom right": (
        sliding_window(9, 0, "bottom_right"),
        [
            causal("bottom_right") & sliding_window(9, 4, "bottom_right"),
            sliding_window(None, 0, "bottom_right") & sliding_window(9, None, "bottom_right"),
            "keep((k<=q+seqlen_kv-seqlen_q)&(q+seqlen_kv<=k+seqlen_q+9))",
        ],
    ),
    "around": (
        sliding_window(9, 9),
        [
            lambda b, h, q, k: (q - k).abs() <= 9,
            lambda b, h, q, k: abs(k - q) < 10,
            lambda b, h, q, k: (k - q <= 9) & (q - k <= 9),
        ],
    ),
    "future": (~causal(), [lambda b, h, q, k: k > q, lambda b, h, q, k: q + 1 <= k]),
    "band": (
        causal() & ~sliding_window(5, None),
        [lambda b, h, q, k: q - k > 5, ~sliding_window(5, None)],
    ),
    "outside": (
        ~sliding_window(3, 1),
        [
            lambda b, h, q, k: (k < q - 3) | (k > q + 1),
            ~sliding_window(3, None) | ~sliding_window(None, 1),
        ],
    ),
    "prefix": (
        prefix_lm(37),
        [
            causal() | kv_prefix(37),
            lambda b, h, q, k: (q >= k) | (k < 37),
            lambda b, h, q, k: (k <= 36) | ~(k > q),
            lambda b, h, q, k: torch.where(k < 37, True, k <= q),
        ],
    ),
    "global": (
        global_tokens(5) | sliding_window(9, 9),
        [
            lambda b, h, q, k: (q < 5) | (k < 5) | ((q - k).abs() < 10),
            lambda b, h, q, k: ~((q >= 5) & (k > 4)) | (abs(q - k) <= 9),
        ],
    ),
    "streaming": (
        streaming(4, 15),
        [
            lambda b, h, q, k: (k <= q) & ((q - k <= 15) | (k < 4)),
            lambda b, h, q, k: (k <= q) & (((q - k <= 15) & (k <= q)) | (k < 4)),
        ],
    ),
    "dilated": (
        dilated(4) & sliding_window(24),
        [
            lambda b, h, q, k: (q >= k) & (q - k <= 24) & ((q - k) % 4 == 0),
            lambda b, h, q, k: ((k - q) % 4 == 0) & (q - k < 25) & (q - k >= 0),
            lambda b, h, q, k: (q % 4 == k % 4) & (q - k < 25) & (q - k >= 0),
        ],
    ),
    "nothing": (
        ~full(),
        [kv_prefix(0), global_tokens(0), lambda b, h, q, k: k < 0, causal() & ~causal()],
    ),
}


def _mask(written: Any) -> Mask:
    if isinstance(written, str):
        return parse_mask(written)
    return written if isinstance(written, Mask) else tilegen.predicate(written)


@pytest.mark.parametrize("name", NAMED)
def test_spellings_share_a_key(name: str) -> None:
    mask, spellings = NAMED[name]
    for written in spellings:
        assert _mask(written) == mask, written
        assert (full() & _mask(written)).stand_in == mask


@pytest.mark.parametrize("name", NAMED)
def test_functions_of_block_masks_share_it(name: str) -> None:
    mask, spellings = NAMED[name]
    for function in (one for one in spellings if callable(one) and not isinstance(one, Mask)):
        block_mask = create_block_mask(function, None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
        assert tilegen.from_block_mask(block_mask) == mask


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_masks_keep_their_form(case: Any) -> None:
    """However they are joined and negated."""
    mask = case.mask
    other = parse_mask("keep(h<k)")
    for same in (~~mask, full() & mask, ~(~mask | ~full()), mask & (mask | other)):
        assert same.stand_in == mask.stand_in
    assert (mask & other).stand_in == (other & mask).stand_in
    assert (~mask | other).stand_in == (~(mask & ~other)).stand_in
    if not mask.tables:
        assert parse_mask(mask.notation) == mask


IDS = torch.tensor([0, 0, 3, 1, 1, 0, 2, 2, 3, 3] * 7)  # documents in several places
WEIGHTS = torch.arange(70) % 9


def _swapped(*parts: Keeps) -> list[Keeps]:
    first, second, third = parts
    return [
        lambda *at: first(*at) & second(*at) & third(*at),
        lambda *at: third(*at) & (second(*at) & first(*at)),
        lambda *at: torch.logical_and(second(*at), first(*at) & third(*at)),
    ]


@pytest.mark.parametrize(
    "parts",
    [
        (
            lambda b, h, q, k: IDS[q] == IDS[k],
            lambda b, h, q, k: k <= q,
            lambda b, h, q, k: q % 5 != k % 3,
        ),
        (
            lambda b, h, q, k: WEIGHTS[q] + WEIGHTS[k] < 9,
            lambda b, h, q, k: IDS[k] < 3,
            lambda b, h, q, k: k < 60,
        ),
    ],
    ids=["documents", "two tables"],
)
def test_the_order_of_conditions_over_tables_does_not_matter(parts: Any) -> None:
    masks = [tilegen.predicate(function) for function in _swapped(*parts)]
    joined = tilegen.predicate(parts[0])
    for part in parts[1:]:
        joined = tilegen.predicate(part) & joined
    assert {mask.notation for mask in (*masks, joined)} == {masks[0].notation}
    expected = _swapped(*parts)[0](0, 0, *_grid(70))
    for mask in (*masks, joined):
        assert torch.equal(torch.from_numpy(mask.pairs(70, 70)), expected)


def _grid(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)[None, :]


def test_documents_in_several_places_share_their_key_with_functions() -> None:
    function = tilegen.predicate(lambda b, h, q, k: IDS[q] == IDS[k])
    assert function.stand_in == tilegen.documents(IDS).stand_in


def test_masks_that_differ_have_different_keys() -> None:
    """At three pairs of lengths, by the pairs that they keep."""
    lengths = [(1, 50), (33, 70), (70, 33)]
    masks = [_mask(written) for mask, others in NAMED.values() for written in (mask, *others)]
    masks += [case.mask for case in ZOO if not case.mask.tables and not case.mask.is_tied]
    masks += [parse_mask(f"window({left},{right})") for left in (-1, 0, 1) for right in (-1, 0, 1)]
    masks += [parse_mask(f"{form}({n})") for form in ("global", "prefix_lm") for n in (1, 2, 38)]
    kept: dict[str, bytes] = {}
    for mask in masks:
        pairs = b"".join(mask.pairs(*sizes).tobytes() for sizes in lengths)
        assert kept.setdefault(mask.notation, pairs) == pairs, mask


def test_two_tables_of_one_notation_stay_two() -> None:
    first, second = tilegen.values(torch.tensor([3, 40]), "b"), tilegen.values([5, 30], "b")
    mask = sliding_window(first, None) & sliding_window(None, second)
    assert [value.tensor.tolist() for value in mask.tables] == [[3, 40], [5, 30]]
    rows, columns = _grid(70)
    for b in range(2):
        kept = mask.kept(rows, columns, 70, 70, b=b)
        expected = (rows - [3, 40][b] <= columns) & (columns <= rows + [5, 30][b])
        assert torch.equal(kept, expected)
    either = parse_mask("kv_prefix(@b:4)|~global(@b:4)")
    assert len(either.tables) == 2


NEAR_THE_END = torch.tensor([2**63 - 6, 2**63 - 5, -(2**63) + 2, 3, -9])


@pytest.mark.parametrize(
    "keeps",
    [
        lambda b, h, q, k: (NEAR_THE_END[q] + k + 6 <= 3) | (NEAR_THE_END[q] + k + 5 <= 3),
        lambda b, h, q, k: (NEAR_THE_END[q] - k < 2) & ((NEAR_THE_END[q] - k < 9) | (k == 2)),
        lambda b, h, q, k: 3 * NEAR_THE_END[q] <= 3 * NEAR_THE_END[k] + 6 * k,
    ],
)
def test_sums_that_wrap_around_are_not_rewritten(keeps: Keeps) -> None:
    """`x + 6 <= 3` implies `x + 5 <= 3` only where neither sum wraps around."""
    mask = full() & tilegen.predicate(keeps) & parse_mask("keep(h<=k)")
    expected = torch.broadcast_to(keeps(0, 0, *_grid(5)), (5, 5))
    assert torch.equal(torch.from_numpy(mask.pairs(5, 5).copy()), expected)


def test_the_density_of_a_condition_does_not_depend_on_what_stands_beside_it() -> None:
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((WEIGHTS[q % 70] + WEIGHTS[k % 70]) % 5 == 0) & (q // 8 == k // 8)

    alone = tilegen.predicate(near)
    beside = tilegen.predicate(lambda b, h, q, k: (k <= q) & near(b, h, q, k))
    joined = causal() & alone
    percents = {value.typical for mask in (alone, beside, joined) for value in mask.tables}
    assert len(percents) == 1
    assert beside.stand_in == joined.stand_in
    assert percents.pop() < 100
