"""Random masks and scores over all dtypes, against PyTorch on real indices, pair by pair."""

from __future__ import annotations

from random import Random

import pytest

from tests.differential.pairs import FLOATS, INTEGERS, run, source

pytestmark = pytest.mark.filterwarnings("ignore")
COUNT = 240


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 11])
def test_random_functions_agree_with_pytorch(seed: int) -> None:
    report = run(seed, COUNT)
    assert not report.wrong, str(report)
    assert not report.crashed, str(report)
    assert sum(report.refused.values()) <= COUNT // 50, str(report)
    assert report.judged > COUNT // 2, "PyTorch computes most of them"


def test_functions_read_tables_of_all_dtypes() -> None:
    text = " ".join(source(Random(seed), is_score=False) for seed in range(300))
    assert all(f"t_{dtype}" in text for dtype in (*INTEGERS, *FLOATS))
    assert all(sign in text for sign in ("<<", "//", ".add_(", ".sum()", ".to(torch.int8)"))
