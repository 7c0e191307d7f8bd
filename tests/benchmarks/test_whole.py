"""The page of whole runs."""

from __future__ import annotations

import pytest

from benchmarks import train, whole_summary
from benchmarks.environment import RESULTS
from benchmarks.whole.lines import fitted


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
