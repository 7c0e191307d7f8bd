"""Masks by name, each with an oracle: its definition written again, pair by pair, in plain Python.

The names are those of attention-gym's and FlashAttention-4's lists, and what users combine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tilegen.masks import (
    Mask,
    bigbird,
    block_sparse,
    causal,
    dilated,
    documents,
    from_bool,
    full,
    global_tokens,
    kv_lengths,
    neighborhood,
    predicate,
    prefix_lm,
    random_blocks,
    sliding_window,
    streaming,
    tree,
    values,
)
from tilegen.masks.packed import packed
from tilegen.masks.usual import kv_prefix
from tilegen.problem import AttentionProblem, DType

BATCH, HEADS = 2, 2
Pairs = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Case:
    """A mask and its oracle at one pair of lengths, for BATCH batches of HEADS query heads."""

    name: str
    mask: Mask
    keeps: Callable[[int, int, int, int], Any]
    """True if batch b, head h keeps (q, k)."""
    seqlen_q: int = 70
    seqlen_kv: int = 70
    varies: bool = False
    """True if b or h matters."""
    exact: bool = True
    """True if tiles are classified exactly, not only on the safe side."""

    def __str__(self) -> str:
        return self.name

    @cached_property
    def oracle(self) -> Pairs:
        """Every pair, (batch, heads, seqlen_q, seqlen_kv)."""
        batch, heads = (BATCH, HEADS) if self.varies else (1, 1)
        sizes = (batch, heads, self.seqlen_q, self.seqlen_kv)
        pairs = [bool(self.keeps(*index)) for index in itertools.product(*map(range, sizes))]
        return np.broadcast_to(np.array(pairs).reshape(sizes), (BATCH, HEADS, *sizes[2:]))

    def problem(self, dtype: DType) -> AttentionProblem:
        """Return the problem of small heads, two of which share a key-value head."""
        return AttentionProblem(
            batch=BATCH if self.varies else 1,
            num_heads_q=HEADS,
            num_heads_kv=HEADS // 2,
            seqlen_q=self.seqlen_q,
            seqlen_kv=self.seqlen_kv,
            head_dim_qk=16,
            head_dim_v=16,
            dtype=dtype,
            mask=self.mask,
        )

    def judged(self, batch: int) -> Mask:
        """Return the mask for kernels, the oracle for everything that computes pairs."""
        return Judged(self.mask, torch.from_numpy(self.oracle[:batch].copy()))


class Judged(Mask):
    """A mask whose pairs come from elsewhere: kernels read the mask, references the oracle."""

    def __init__(self, mask: Mask, oracle: torch.Tensor) -> None:
        vars(self).update(form=mask.form, args=mask.args, oracle=oracle)

    def kept(self, q: Any, k: Any, seqlen_q: int, seqlen_kv: int, b: Any = 0, h: Any = 0) -> Any:
        return vars(self)["oracle"]


# --------------------------------------------------------------------------------------------------
# The masks


def _window(q: int, k: int, left: int, right: int) -> bool:
    return q - left <= k <= q + right


_LENGTHS = [7, 1, 30, 16, 16]  # of documents: 70 tokens
_IDS = [i for i, length in enumerate(_LENGTHS) for _ in range(length)]
_CU = [sum(_LENGTHS[:i]) for i in range(len(_LENGTHS) + 1)]
_STARTS = [_CU[i] for i in _IDS]
_MIXED = [(i * i // 9) % 4 for i in range(70)]  # every document in several places
_BATCH_IDS = [_IDS, [i // 23 for i in range(70)]]
_ROWS, _COLUMNS = [9, 20, 0, 21], [33, 5, 12, 33]  # of packed cross attention: 50 and 83 tokens
_CU_ROWS = [sum(_ROWS[:i]) for i in range(5)]
_CU_COLUMNS = [sum(_COLUMNS[:i]) for i in range(5)]
_DOC_ROWS = [i for i, length in enumerate(_ROWS) for _ in range(length)]
_DOC_COLUMNS = [i for i, length in enumerate(_COLUMNS) for _ in range(length)]
_GENERATOR = torch.Generator().manual_seed(7)


def _random(*sizes: int, share: float = 0.4) -> torch.Tensor:
    return torch.rand(sizes, generator=_GENERATOR) < share


_LAYOUT2, _LAYOUT3, _LAYOUT4 = _random(5, 5), _random(HEADS, 9, 9), _random(BATCH, HEADS, 2, 3)
_BATCH_LAYOUT = _random(BATCH, 1, 5, 5)
_BOOL2, _BOOL4 = _random(50, 83, share=0.03), _random(BATCH, HEADS, 83, 50).mT  # not contiguous
_RANDOM = random_blocks(70, 70, block=8, per_row=2, heads=HEADS, seed=3)
_HEAD_WINDOWS, _BATCH_WINDOWS = [3, 200], [5, 26]
_BOTH_WINDOWS = [[3, 0], [30, 9]]
_PREFIXES = [11, 48]
_VISIBLE = [0] * 12 + [1] * 20 + [2] * 9 + [3] * 29  # images that each text token comes after
_SPANS = [-1] * 10 + [0] * 13 + [-1] * 20 + [1] * 22 + [-1] * 5  # images inside a text


_PARENTS = [-1, -1, *(i // 3 for i in range(48))]  # two roots, three children each
_DESCENDS = [[False] * 50 for _ in range(50)]
for _i, _parent in enumerate(_PARENTS):
    _DESCENDS[_i] = [j == _i or (_parent >= 0 and _DESCENDS[_parent][j]) for j in range(50)]
_TREES = _random(BATCH, 60, 60) | torch.eye(60).bool()  # wider than there are queries


def _layout_of(mask: Mask) -> Any:
    return mask.tables[0].tensor


def _inside(at: int, seen: int, size: int, window: int) -> bool:
    """NATTEN's one dimension: a window that is moved inwards at the borders."""
    window = min(window, size)
    first = min(max(at - window // 2, 0), size - window)
    return first <= seen < first + window


def _cross(q: int, k: int, left: int | None) -> bool:
    """Causal, bottom right, in each document of packed cross attention; with a window."""
    if _DOC_ROWS[q] != _DOC_COLUMNS[k]:
        return False
    document = _DOC_ROWS[q]
    centre = q - _CU_ROWS[document] + _COLUMNS[document] - _ROWS[document]
    at = k - _CU_COLUMNS[document]
    return at <= centre and (left is None or at >= centre - left)


def _sliding_tiles(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Sliding tile attention: tiles of 8 points on 4 x 2 tiles, 3 x 1 of them seen."""
    tile_q, tile_k = q // 8, k // 8
    centre = (tile_q // 2).clamp(1, 2)
    return ((centre - tile_k // 2).abs() <= 1) & (tile_q % 2 == tile_k % 2)


def _block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
    """The noised half comes first; blocks of 6."""
    clean_q, clean_k = q >= 35, k >= 35
    block_q = torch.where(clean_q, q - 35, q) // 6
    block_k = torch.where(clean_k, k - 35, k) // 6
    own = (block_q == block_k) & (clean_q == clean_k)
    before = (block_q > block_k) & clean_k & ~clean_q
    return own | before | ((block_q >= block_k) & clean_k & clean_q)


def _diffuses(q: int, k: int) -> bool:
    (noised_q, q), (noised_k, k) = ((at < 35, at % 35 // 6) for at in (q, k))
    if noised_q:
        return q == k if noised_k else k < q
    return not noised_k and k <= q


def _zoo() -> list[Case]:
    cross = {"seqlen_q": 50, "seqlen_kv": 83}
    tall = {"seqlen_q": 83, "seqlen_kv": 50}
    same = {"seqlen_q": 64, "seqlen_kv": 64}
    visible, spans = torch.tensor(_VISIBLE), torch.tensor(_SPANS)
    big = bigbird(70, block=8, window=3, tokens=1, random=1, seed=5)
    far = next(value.tensor for value in big.tables if value.kind == "bool")
    left = values(_HEAD_WINDOWS, "h")
    by_both = values(_BOTH_WINDOWS, "bh")
    longer = _random(40, 40)
    ids, rows = documents(_IDS), [0, 0, 3, 3, 3, 7, 20, 20, 41, 60]
    return [
        Case("full", full(), lambda b, h, q, k: True, **cross),
        Case("causal", causal(), lambda b, h, q, k: k <= q),
        Case("causal_wide", causal(), lambda b, h, q, k: k <= q, **cross),
        Case("causal_last_row", causal("bottom_right"), lambda b, h, q, k: k <= q + 33, **cross),
        Case("causal_no_rows", causal("bottom_right"), lambda b, h, q, k: k <= q - 33, **tall),
        Case("decode", causal("bottom_right"), lambda b, h, q, k: True, 1, 83),
        Case("future", ~causal(), lambda b, h, q, k: k > q, **cross),
        Case("sliding", sliding_window(11), lambda b, h, q, k: _window(q, k, 11, 0)),
        Case("local", sliding_window(9, 4), lambda b, h, q, k: _window(q, k, 9, 4), **tall),
        Case("local_last_row", sliding_window(20, 2, "bottom_right"),
             lambda b, h, q, k: _window(q + 33, k, 20, 2), **cross),
        Case("local_no_rows", sliding_window(6, 2, "bottom_right"),
             lambda b, h, q, k: _window(q - 33, k, 6, 2), **tall),
        Case("dilated_sliding", sliding_window(24) & dilated(4),
             lambda b, h, q, k: 0 <= q - k <= 24 and (q - k) % 4 == 0),
        Case("dilated", dilated(3), lambda b, h, q, k: (q - k) % 3 == 0, **cross),
        Case("longformer", global_tokens(5) | sliding_window(9, 9),
             lambda b, h, q, k: q < 5 or k < 5 or abs(q - k) <= 9),
        Case("global_causal", causal() & (global_tokens(20) | sliding_window(7)),
             lambda b, h, q, k: k <= q and (q < 20 or k < 20 or q - k <= 7)),
        Case("prefix_lm", prefix_lm(37), lambda b, h, q, k: k <= q or k < 37, **cross),
        Case("prefix_by_batch", prefix_lm(values(_PREFIXES, "b")),
             lambda b, h, q, k: k <= q or k < _PREFIXES[b], varies=True),
        Case("documents", ids, lambda b, h, q, k: _IDS[q] == _IDS[k]),
        Case("documents_cu", documents(cu_seqlens=_CU), lambda b, h, q, k: _IDS[q] == _IDS[k]),
        Case("documents_mixed", documents(_MIXED), lambda b, h, q, k: _MIXED[q] == _MIXED[k]),
        Case("documents_by_batch", documents(_BATCH_IDS),
             lambda b, h, q, k: _BATCH_IDS[b][q] == _BATCH_IDS[b][k], varies=True),
        Case("documents_causal", ids & causal(),
             lambda b, h, q, k: _IDS[q] == _IDS[k] and k <= q),
        Case("documents_window", packed(_CU, mask=sliding_window(6, 0, "bottom_right")),
             lambda b, h, q, k: _IDS[q] == _IDS[k] and 0 <= q - k <= 6),
        Case("documents_prefix", packed(_CU, mask=prefix_lm(9)), lambda b, h, q, k:
             _IDS[q] == _IDS[k] and (k <= q or k - _STARTS[k] < 9)),
        Case("documents_predicate",
             packed(_CU, mask=predicate(lambda b, h, q, k: (q % 3 == k % 3) | (k < 2))),
             lambda b, h, q, k: _IDS[q] == _IDS[k]
             and ((q - _STARTS[q]) % 3 == (k - _STARTS[k]) % 3 or k - _STARTS[k] < 2)),
        Case("documents_either", ids | documents(_MIXED),
             lambda b, h, q, k: _IDS[q] == _IDS[k] or _MIXED[q] == _MIXED[k]),
        Case("other_documents", ~ids, lambda b, h, q, k: _IDS[q] != _IDS[k]),
        Case("packed_cross", packed(_CU_ROWS, _CU_COLUMNS),
             lambda b, h, q, k: _DOC_ROWS[q] == _DOC_COLUMNS[k], **cross, exact=False),
        Case("packed_cross_causal", packed(_CU_ROWS, _CU_COLUMNS, causal("bottom_right")),
             lambda b, h, q, k: _cross(q, k, None), **cross, exact=False),
        Case("packed_cross_window",
             packed(_CU_ROWS, _CU_COLUMNS, sliding_window(4, 0, "bottom_right")),
             lambda b, h, q, k: _cross(q, k, 4), **cross, exact=False),
        Case("shared_prefix", causal() & (kv_prefix(13) | ids),
             lambda b, h, q, k: k <= q and (k < 13 or _IDS[q] == _IDS[k])),
        Case("neighborhood_1d", neighborhood(70, 13),
             lambda b, h, q, k: _inside(q, k, 70, 13)),
        Case("neighborhood_2d", neighborhood((7, 10), (3, 5)), lambda b, h, q, k:
             _inside(q // 10, k // 10, 7, 3) and _inside(q % 10, k % 10, 10, 5)),
        Case("neighborhood_3d", neighborhood((3, 4, 5), (5, 3, 3)), lambda b, h, q, k:
             _inside(q // 20, k // 20, 3, 5) and _inside(q // 5 % 4, k // 5 % 4, 4, 3)
             and _inside(q % 5, k % 5, 5, 3), 60, 60),
        Case("sliding_tiles", predicate(_sliding_tiles), lambda b, h, q, k:
             _inside(q // 16, k // 16, 4, 3) and q // 8 % 2 == k // 8 % 2, **same),
        Case("block_diffusion", predicate(_block_diffusion),
             lambda b, h, q, k: _diffuses(q, k)),
        Case("block_causal", predicate(lambda b, h, q, k: k // 12 <= q // 12),
             lambda b, h, q, k: k // 12 <= q // 12),
        Case("block_diagonal", predicate(lambda b, h, q, k: q // 16 == k // 16),
             lambda b, h, q, k: q // 16 == k // 16, **cross),
        Case("mini_causal", predicate(lambda b, h, q, k: q % 16 >= k % 16),
             lambda b, h, q, k: q % 16 >= k % 16, **tall),
        Case("chunked_causal", causal() & predicate(lambda b, h, q, k: q // 30 == k // 30),
             lambda b, h, q, k: k <= q and q // 30 == k // 30),
        Case("half_rate", predicate(lambda b, h, q, k: 2 * k <= q + 9),
             lambda b, h, q, k: 2 * k <= q + 9, **tall, exact=False),
        Case("double_rate", predicate(lambda b, h, q, k: (2 * q - k).abs() <= 11),
             lambda b, h, q, k: abs(2 * q - k) <= 11, **cross, exact=False),
        Case("flamingo", predicate(lambda b, h, q, k: visible[q] == k // 20 + 1),
             lambda b, h, q, k: _VISIBLE[q] == k // 20 + 1, 70, 60),
        Case("transfusion", causal() | predicate(
             lambda b, h, q, k: (spans[q] == spans[k]) & (spans[q] >= 0)),
             lambda b, h, q, k: k <= q or _SPANS[q] == _SPANS[k] >= 0),
        Case("streaming", streaming(4, 15),
             lambda b, h, q, k: k <= q and (q - k <= 15 or k < 4), **tall),
        Case("streaming_by_head", streaming(values([4, 0], "h"), left), lambda b, h, q, k:
             k <= q and (q - k <= _HEAD_WINDOWS[h] or k < [4, 0][h]), varies=True),
        Case("bigbird", big, lambda b, h, q, k:
             abs(q - k) <= 8 or q < 8 or k < 8 or far[q // 8, k // 8]),
        Case("random_blocks", _RANDOM, lambda b, h, q, k: _layout_of(_RANDOM)[h, q // 8, k // 8],
             varies=True),
        Case("window_by_head", sliding_window(left, values(2, "")),
             lambda b, h, q, k: _window(q, k, _HEAD_WINDOWS[h], 2), **cross, varies=True),
        Case("window_by_batch", sliding_window(values(_BATCH_WINDOWS, "b"), None),
             lambda b, h, q, k: k >= q - _BATCH_WINDOWS[b], varies=True),
        Case("window_by_both", sliding_window(by_both, by_both, "bottom_right"), lambda b, h, q, k:
             abs(q - 33 - k) <= _BOTH_WINDOWS[b][h], **tall, varies=True),
        Case("window_by_row", sliding_window(values(_VISIBLE, "q"), 0),
             lambda b, h, q, k: _window(q, k, _VISIBLE[q], 0)),
        Case("kv_lengths", kv_lengths([0, 47]), lambda b, h, q, k: k < [0, 47][b], **cross,
             varies=True),
        Case("kv_lengths_causal", kv_lengths([83, 35]) & causal("bottom_right"),
             lambda b, h, q, k: k < [83, 35][b] and k <= q + 33, **cross, varies=True),
        Case("layout", block_sparse(_LAYOUT2, 16), lambda b, h, q, k: _LAYOUT2[q // 16, k // 16]),
        Case("layout_by_head", block_sparse(_LAYOUT3, 8),
             lambda b, h, q, k: _LAYOUT3[h, q // 8, k // 8], varies=True),
        Case("layout_by_both", block_sparse(_LAYOUT4, 32), lambda b, h, q, k:
             _LAYOUT4[b, h, q // 32, k // 32], **cross, varies=True),
        Case("layout_by_batch", block_sparse(_BATCH_LAYOUT, 15) & causal(), lambda b, h, q, k:
             k <= q and _BATCH_LAYOUT[b, 0, q // 15, k // 15], varies=True),
        Case("layout_too_short", block_sparse(_LAYOUT2, 12), lambda b, h, q, k:
             q < 60 and k < 60 and _LAYOUT2[q // 12, k // 12]),
        Case("from_bool", from_bool(_BOOL2), lambda b, h, q, k: _BOOL2[q, k], **cross),
        Case("from_bool_by_both", from_bool(_BOOL4), lambda b, h, q, k: _BOOL4[b, h, q, k],
             **cross, varies=True),
        Case("longer_window", sliding_window(4095, 4095), lambda b, h, q, k: True, **cross),
        Case("longer_prefix", prefix_lm(5000) & kv_lengths([300, 40]),
             lambda b, h, q, k: k < [300, 40][b], **cross, varies=True),
        Case("longer_layout", block_sparse(longer, 9), lambda b, h, q, k: longer[q // 9, k // 9]),
        Case("longer_global", ~global_tokens(500), lambda b, h, q, k: False),
        Case("nothing", ~full(), lambda b, h, q, k: False, **cross),
        Case("nothing_listed", dilated(2) & kv_prefix(0), lambda b, h, q, k: False, **same),
        Case("few_pairs", ~causal() & sliding_window(0, 5) & kv_prefix(4),
             lambda b, h, q, k: q < k < 4, **same),
        Case("checkerboard", predicate(lambda b, h, q, k: ((q // 16) + (k // 16)) % 2 == b),
             lambda b, h, q, k: (q // 16 + k // 16) % 2 == b, **same, varies=True),
        Case("by_head", predicate(lambda b, h, q, k: (k <= q) | (h % 2 == 1)),
             lambda b, h, q, k: k <= q or h % 2 == 1, **tall, varies=True),
        Case("rising_columns", kv_prefix(values(rows * 7, "q")),
             lambda b, h, q, k: k < (rows * 7)[q]),
        Case("tree", tree(torch.tensor(_PARENTS)),
             lambda b, h, q, k: k < 33 or _DESCENDS[q][k - 33], **cross, exact=False),
        Case("tree_by_batch", tree(_TREES), lambda b, h, q, k: k < 33 or _TREES[b, q, k - 33],
             **cross, varies=True, exact=False),
        Case("tree_of_lengths", tree(torch.tensor(_PARENTS), [83, 60]), lambda b, h, q, k:
             k < (base := [33, 10][b]) or (k < base + 50 and _DESCENDS[q][k - base]),
             **cross, varies=True, exact=False),
        Case("tree_of_more_tokens", tree(torch.tensor(_PARENTS)),
             lambda b, h, q, k: k >= 23 or _DESCENDS[q][k + 9], 32, 23, exact=False),
        Case("tree_window", tree(_TREES) & sliding_window(45, 45, "bottom_right"),
             lambda b, h, q, k: abs(q + 33 - k) <= 45 and (k < 33 or _TREES[b, q, k - 33]),
             **cross, varies=True, exact=False),
        Case("beside_the_tree", ~tree(torch.tensor(_PARENTS)) & causal("bottom_right"),
             lambda b, h, q, k: 33 <= k <= q + 33 and not _DESCENDS[q][k - 33], **cross,
             exact=False),
    ]  # fmt: skip


ZOO = _zoo()
_DTYPES: tuple[DType, ...] = ("fp32", "bf16", "fp32", "fp16", "fp32")
_EVERY_FORM = """
    causal_no_rows  dilated_sliding   local_last_row     longformer
    prefix_by_batch documents_causal  packed_cross_window neighborhood_2d
    flamingo        window_by_both    streaming_by_head  kv_lengths_causal
    layout_by_both  from_bool_by_both rising_columns     layout_by_head
    nothing_listed  tree_of_lengths   beside_the_tree
"""
FORMS: list[tuple[Case, DType]] = [
    (next(case for case in ZOO if case.name == name), _DTYPES[i % len(_DTYPES)])
    for i, name in enumerate(_EVERY_FORM.split())
]
"""A mask of every form that kernels have code for: ranges, steps, lists, tables by batch, head and
row, lengths, trees. Families of kernels take them in turns."""


def dtype_of(case: Case) -> DType:
    """Return a dtype for kernels of a mask, the dtypes in turn."""
    formed = [dtype for other, dtype in FORMS if other is case]
    return formed[0] if formed else _DTYPES[ZOO.index(case) % len(_DTYPES)]
