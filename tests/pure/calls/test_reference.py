"""The API reference: a public name without a docstring is found. CI makes the whole."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pdoc = pytest.importorskip("pdoc", reason="needs pdoc; pip install 'tilegen[dev]'")
SCRIPT = Path(__file__).parents[3] / ".ci" / "reference.py"


CODE = '''
"""A module."""
__all__ = ["Record", "said", "silent"]
class Record:
    """A record."""
    field: int
    known: int
    """A field."""
    def method(self): pass
    def _private(self): pass
def said():
    """Return nothing."""
def silent(): pass
'''


def module_of(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that a file holds, as an import would."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_names_without_a_docstring_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tilegen_sample.py").write_text(CODE)
    page = pdoc.doc.Module(module_of(tmp_path / "tilegen_sample.py", monkeypatch))
    missing = list(module_of(SCRIPT, monkeypatch).undocumented(page))
    names = ("Record.field", "Record.method", "silent")
    assert missing == [f"tilegen_sample.{name}" for name in names]
