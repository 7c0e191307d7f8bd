"""Pictures of pages: they show what they are of, and the committed ones are up to date."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import pictures
from tilegen.comparing.compare import Cell, Row

SVG = "{http://www.w3.org/2000/svg}"


def test_the_gallery_is_up_to_date() -> None:
    assert pictures.GALLERY.read_text(encoding="utf-8") == pictures.gallery(), (
        "python -m benchmarks.pictures"
    )


def test_the_gallery_shows_the_pairs_of_each_mask() -> None:
    """Kept pairs are green, dropped ones in visited tiles grey, and no other pair is drawn."""
    q, k = torch.arange(32)[:, None], torch.arange(32)[None, :]
    ids = torch.tensor([0] * 9 + [1] * 15 + [2] * 8)
    expected = {
        "causal": k <= q,
        "window": (k <= q) & (q - k <= 9),
        "documents": (k <= q) & (ids[q] == ids[k]),
        "streaming": (k <= q) & ((q - k <= 9) | (k < 4)),
        "prefix": (k <= q) | (k < 10),
        "dilated": (k <= q) & ((q - k) % 4 == 0),
    }
    groups = ElementTree.fromstring(pictures.gallery()).findall(f"{SVG}g")
    assert [group.findtext(f"{SVG}text") for group in groups] == list(expected)
    for group, kept in zip(groups, expected.values(), strict=True):
        colours = dict.fromkeys(colour for colour, _ in pictures.FILLS.values())
        drawn = {colour: torch.zeros(32, 32, dtype=torch.int) for colour in colours}
        for path in group.findall(f"{SVG}path"):
            for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", path.attrib["d"]):
                drawn[path.attrib["fill"]][int(y), int(x) : int(x) + int(width)] += 1
        green, grey = drawn.values()
        assert torch.equal(green, kept.int())
        tiles = kept.unflatten(0, (8, 4)).unflatten(2, (8, 4)).any(3).any(1)
        visited = tiles.repeat_interleave(4, 0).repeat_interleave(4, 1)
        assert torch.equal(grey, (visited & ~kept).int())


@pytest.mark.slow
def test_comparisons_are_read_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    cell = Cell(attention="tilegen", seconds=1e-3, peak_bytes=2**20, counted_bytes=2**20)
    names = {"problem": "b1 hq2 q64 kv64 d16 fp32 full", "device": "zen3", "threads": 2}
    rows = [Row(direction="forward", length=64, cells=(cell,), **names)]
    file = tmp_path / "cpu" / "compare.json"
    file.parent.mkdir()
    file.write_text(json.dumps([asdict(row) for row in rows]))
    assert pictures.comparison(file) == rows
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    monkeypatch.setattr(pictures, "GALLERY", tmp_path / "masks.svg")
    pictures.main()
    assert "forward: time, ms" in file.with_suffix(".svg").read_text()


def test_each_committed_comparison_has_its_picture() -> None:
    for file in pictures.RESULTS.glob(pictures.COMPARISONS):
        assert pictures.comparison(file)
        drawn = file.with_suffix(".svg").read_text(encoding="utf-8")
        assert "<!-- forward: time, ms -->" in drawn, "python -m benchmarks.pictures"
