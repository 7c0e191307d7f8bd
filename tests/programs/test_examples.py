"""Every example runs as a program of its own, is short, and is linked from a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pure.cli.test_cli import failing, run
from tests.support import warm

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
    "tune_and_share": "4 added",
}
"""A line that each example prints if it is right."""


def test_every_example_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == set(SHOWN)


@pytest.mark.parametrize("name", SHOWN)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CPU", raising=False)
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert SHOWN[name] in warm.output(text)
    assert text.count("\n") <= (400 if name == "mini" else 60)


@pytest.mark.parametrize("name", SHOWN)
def test_it_is_linked_from_a_page(name: str) -> None:
    pages = [*(ROOT / "tilegen").rglob("*.md"), ROOT / "README.md"]
    assert any(f"examples/{name}.py)" in page.read_text(encoding="utf-8") for page in pages)


def test_the_command_lists_and_prints_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = run("examples").splitlines()
    assert [line.split()[0] for line in listed] == sorted([*SHOWN, "tour"])
    assert run("examples", "new_mask") == (FOLDER / "new_mask.py").read_text(encoding="utf-8")
    assert set(json.loads(run("examples", "--json"))) == {*SHOWN, "tour"}
    assert "did you mean new_mask" in failing(monkeypatch, capsys, "examples", "new_msk")


def test_the_cells_of_the_notebook_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEGEN_CPU", raising=False)
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cells = json.loads((FOLDER / "tour.ipynb").read_text(encoding="utf-8"))["cells"]
    programs = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in cells)
    shown = warm.output("\n".join(programs))
    assert float(shown.partition("largest difference: ")[2].split()[0]) < 1e-5
    assert "query rows stationary" in shown
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 150_000
