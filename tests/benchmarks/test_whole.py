"""Benchmarks of block-sparse attention, at small sizes, and the page of whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import sparse_share, train, whole_summary
from benchmarks.environment import RESULTS
from benchmarks.rows import read
from benchmarks.whole.lines import fitted


def test_times_of_blocks_and_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_share, "SHARES", (0.25, 0.5, 1.0))
    monkeypatch.setattr(sparse_share, "DTYPES", {"fp32": torch.float32})
    out = tmp_path / "sparse.csv"
    for _ in range(2):
        sparse_share.main(out=out, minutes=5.0, seconds=0.001, length=[512], figure=False)
    rows = read(out)
    assert len(rows) == 3 * 2 * 2
    assert len(list(sparse_share.described(rows))) == 2
    sparse_share.main(out=out, minutes=5.0, seconds=0.001, length=[512], figure=True)
    assert out.with_suffix(".svg").exists()


def test_the_page_has_the_tables_of_the_result_files() -> None:
    page = whole_summary.PAGE.read_text()
    assert whole_summary.with_tables(page, RESULTS / "cpu") == page


def test_claims_name_cases_that_are_trained() -> None:
    for claim in whole_summary.CLAIMS:
        assert claim.case in train.ON_CPU
        assert claim.over in train.ATTENTIONS


def test_a_line_through_times() -> None:
    line = fitted([(x, 2.0 + 30.0 * x) for x in (0.1, 0.5, 1.0)])
    assert line.overhead == pytest.approx(2.0)
    assert line.slope == pytest.approx(30.0)
    assert line.apart < 1e-9
    bent = fitted([(0.1, 5.0), (0.5, 30.0), (1.0, 32.0)])
    assert bent.apart > 0.1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_both_attentions_compute_the_same(direction: sparse_share.Direction) -> None:
    passes = sparse_share.passes(512, 2, "fp32", 0.5, "cpu")[direction]
    ours, theirs = (passes[name]() for name in ("tilegen", "sdpa"))
    pairs = [(ours, theirs)] if direction == "forward" else zip(ours, theirs, strict=True)  # type: ignore
    for left, other in pairs:
        torch.testing.assert_close(left, other, atol=1e-5, rtol=1e-4)
