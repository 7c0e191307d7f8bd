"""The list of benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.__main__ import FOLDER, benchmarks


def test_the_page_lists_the_commands() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    table = page.partition("## Commands")[2]
    named = {row.split()[0] for row in re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)}
    assert named - {"python"} <= {name for name, _ in benchmarks()}
    assert {name for name, _ in benchmarks()} <= {*re.findall(r"\w+", page)}


def test_each_has_a_sentence() -> None:
    for name, first in benchmarks():
        assert first.endswith((".", ":")), name
        assert Path(FOLDER / name).is_dir() or (FOLDER / f"{name}.py").is_file()
