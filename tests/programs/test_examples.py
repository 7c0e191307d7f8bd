"""Every example runs as a program of its own, is short, and is linked from a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import warm
from tests.pure.test_cli import failing, run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tilegen" / "examples"
SHOWN = {
    "ahead_of_time": "out (1, 4, 256, 64)",
    "flex_port": "as written out: True",
    "mini": "; as exact as SDPA",
    "new_family": "out   ok",
    "new_gpu": "half-h200 m",
    "new_mask": "as SDPA: True",
    "packed_documents": "the first document is as if alone: True",
    "paged_decoding": "of requests with [40, 8, 83] keys",
    "small_model": "the same gradient: True",
    "tune_and_share": "4 added",
}
"""A line that each example prints if it is right."""


def test_every_example_is_tried() -> None:
    files = [*FOLDER.glob("*.py"), *FOLDER.glob("*.ipynb")]
    assert {path.stem for path in files} - {"__init__"} == set(SHOWN)
    assert sum(path.stat().st_size for path in files) < 150_000


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CPU", raising=False)
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = run("examples", name)  # of a notebook the cells
    assert SHOWN[name] in warm.output(text)
    assert text.count("\n") <= {"mini": 400, "small_model": 150}.get(name, 60)


def test_the_notebook_is_valid_and_has_no_outputs() -> None:
    """By the format's description: nbformat 4.5, where each cell has an id."""
    notebook = json.loads((FOLDER / "small_model.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        code = {"outputs": [], "execution_count": None} if cell["cell_type"] == "code" else {}
        source = {name: cell[name] for name in ("id", "source")}
        assert cell == source | {"cell_type": cell["cell_type"], "metadata": {}} | code
    assert "tilegen.explain" in "".join(cells[-1]["source"]), "it ends with the reasons"


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_linked_from_a_page(name: str) -> None:
    pages = [*(ROOT / "tilegen").rglob("*.md"), ROOT / "README.md"]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    assert any(f"examples/{name}.{end})" in text for text in texts for end in ("py", "ipynb"))


def test_the_command_lists_and_prints_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = run("examples").splitlines()
    assert [line.split()[0] for line in listed] == sorted(SHOWN)
    assert run("examples", "new_mask") == (FOLDER / "new_mask.py").read_text(encoding="utf-8")
    assert set(json.loads(run("examples", "--json"))) == set(SHOWN)
    assert "did you mean new_mask" in failing(monkeypatch, capsys, "examples", "new_msk")
