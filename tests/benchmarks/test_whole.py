"""The page of whole runs."""

from __future__ import annotations

from benchmarks.environment import RESULTS
from benchmarks.whole import summary


def test_the_page_has_the_tables_of_the_result_files() -> None:
    page = summary.PAGE.read_text()
    assert summary.with_tables(page, RESULTS / "cpu") == page
