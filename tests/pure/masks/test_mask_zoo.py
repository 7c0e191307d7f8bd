"""Every mask of the zoo: its pairs and its tiles against its oracle, at lengths of its own and at
three random ones, others for each commit."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import seed
from tests.support.mask_zoo import BATCH, HEADS, ZOO, Case
from tests.support.tiles import brute_force, found_classes
from tilegen.check.reference import dense_mask

TILES = [(16, 32), (64, 8), (8, 8), (32, 16)]
FIXED = ("window_by_row", "rising_columns", "tree_of_lengths")
"""Their tables or numbers are for one length."""
PACKED = ("documents_cu", "documents_window", "documents_prefix", "documents_predicate",
          "packed_cross", "packed_cross_causal", "packed_cross_window")  # fmt: skip


def _lengths(case: Case, draw: random.Random) -> Case:
    """Return the case at random lengths whose difference is that of the case, so that masks that
    end at the last row keep their oracle."""
    if case.name not in PACKED:
        less = draw.randrange(min(case.seqlen_q, case.seqlen_kv))
        return replace(case, seqlen_q=case.seqlen_q - less, seqlen_kv=case.seqlen_kv - less)
    # Packed sequences cannot lose tokens. Tokens after the last document are padding.
    more = draw.randrange(40)
    q_end, kv_end = case.seqlen_q, case.seqlen_kv

    def keeps(b: int, h: int, q: int, k: int) -> bool:
        return q < q_end and k < kv_end and case.keeps(b, h, q, k)

    lengths = {"seqlen_q": q_end + more, "seqlen_kv": kv_end + more}
    # A tile of the last document and of padding may count as partial.
    return replace(case, **lengths, keeps=keeps, exact=False)


@pytest.mark.parametrize("case", ZOO, ids=str)
def test_pairs_and_tiles(case: Case) -> None:
    draw = random.Random(f"{seed()} {case}")
    count = 0 if case.name in FIXED else 3
    for at in (case, *(_lengths(case, draw) for _ in range(count))):
        lengths = {"seqlen_q": at.seqlen_q, "seqlen_kv": at.seqlen_kv}
        pairs = dense_mask(at.mask, **lengths, batch=BATCH, heads=HEADS)
        assert (np.broadcast_to(pairs.numpy(), at.oracle.shape) == at.oracle).all(), lengths
        for side in ("rows", "columns"):
            block_m, block_n = draw.choice(TILES)
            where = (lengths, side, block_m, block_n)
            actual, listed = found_classes(
                at.mask, side, **lengths, block_m=block_m, block_n=block_n
            )
            expected = brute_force(at.oracle, side, block_m, block_n, listed=listed)
            if at.exact:
                assert (actual == expected).all(), where
            else:  # no kept pair is missed, no dropped one is called full
                assert ((actual > 0) >= (expected > 0)).all(), where
                assert ((actual == 2) <= (expected == 2)).all(), where
