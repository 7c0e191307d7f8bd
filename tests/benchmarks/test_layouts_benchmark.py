"""The cost of layouts of paged caches: rows follow from strides, model and compiler, and the table
of the repository is the command's output."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import layouts
from benchmarks.layouts import LAYOUTS, OUT, cache_of, contiguous
from tests.result_files import own_columns
from tilegen.gpus.spec import gpu
from tilegen.problem import PAGES, AttentionProblem
from tilegen.tuning.measure import DeviceLost, Measurement

ROOT = Path(__file__).parents[2]
BY_COMPILER = ("registers", "spill_bytes", "instructions", "compiled_us")
SMALL = AttentionProblem.parse("b2 hq4 hkv2 q1 kv40 d40 fp16 page8")


@pytest.mark.parametrize(
    "layout, stride, run",
    [("NHD", 160, 80), ("HND", 80, 640), ("vLLM LBNHC", 320, 80), ("vLLM LBHNC", 160, 80)],
)
def test_contiguous_bytes_follow_from_strides(layout: str, stride: int, run: int) -> None:
    k, v = cache_of(layout, 8, 3, SMALL, "cpu")
    assert k.shape == v.shape == (3, 8, 2, 40)
    actual = contiguous(k)
    assert (actual["row_bytes"], actual["row_stride_bytes"], actual["run_bytes"]) == (
        80,
        stride,
        run,
    )
    # Keys of 80 bytes start a sector, or are in the midst of one, which their neighbour shares.
    held = {(key * stride + byte) // layouts.SECTOR for key in range(8) for byte in range(80)}
    assert actual["sectors_per_key"] == len(held) / 8
    assert (len(held) == 20) == (layout == "HND")


def test_keys_and_values_of_one_tensor_share_its_memory() -> None:
    for layout in LAYOUTS:
        k, v = cache_of(layout, 8, 3, SMALL, "cpu")
        shared = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert shared == layout.startswith("vLLM")
        if shared:
            assert v.storage_offset() == 40


def test_rows_of_the_repository_equal_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All columns but those of the compiler."""
    monkeypatch.setattr(layouts, "compiled", lambda problem: dict.fromkeys(BY_COMPILER, 0))
    monkeypatch.setattr(layouts, "has_gpu", lambda: False)
    made = list(layouts.rows())
    layouts.write(tmp_path / "table.csv", made)
    (names, *rows), (_, *kept) = (
        own_columns(path, layouts.Row) for path in (tmp_path / "table.csv", OUT)
    )
    assert len(rows) == len(kept) == len(PAGES) * len(LAYOUTS)
    for row, line in zip(rows, kept, strict=True):
        for name, value, shown in zip(names, row, line, strict=True):
            assert name in BY_COMPILER or value == shown, name
    assert len({row.predicted_us for row in made}) == 1, "README says that the model sees none"
    assert {row.tables_bytes for row in made if row.page >= 128} != {
        row.tables_bytes for row in made if row.page < 128
    }


def test_the_page_on_integrations_shows_these_numbers() -> None:
    page = (ROOT / "tilegen" / "integrations" / "README.md").read_text(encoding="utf-8")
    with OUT.open(encoding="utf-8", newline="") as file:
        kept = list(csv.DictReader(file))
    for row in kept:
        tables = f"{int(row['tables_bytes']) / 2**20:.2f} MiB"
        shown = (row["page"], tables, row["registers"], row["instructions"])
        assert f"| {' | '.join(shown)} |" in page
        assert f" | {row['row_stride_bytes']} bytes |" in page
    predicted = f"{float(kept[0]['predicted_us']):.4g}"
    assert f"predicted time is {predicted} us for all {len(kept)} rows" in page


def test_calls_over_each_layout_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def measure(launch: Callable[[], Any]) -> Measurement:
        given.append(launch())
        return Measurement(status="ok", median_us=7.0)

    monkeypatch.setattr(layouts, "measure", measure)
    for layout in LAYOUTS:
        assert layouts.measured(SMALL, layout, "cpu") == 7.0
    assert all(out.shape == (2, 4, 1, 40) and out.isfinite().all() for out in given)


@pytest.mark.parametrize("there, is_measured", [("h200", True), ("a100", False), (None, False)])
def test_calls_are_measured_on_the_gpu_that_rows_are_of(
    there: str | None, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "PAGES", (16,))
    monkeypatch.setattr(layouts, "compiled", lambda problem: dict.fromkeys(BY_COMPILER, 0))
    monkeypatch.setattr(layouts, "measured", lambda problem, layout: 7.0)
    monkeypatch.setattr(layouts, "has_gpu", lambda: there is not None)
    monkeypatch.setattr(layouts, "detect", lambda: gpu(there))
    times = [row.measured_us for row in layouts.rows()]
    assert times == [7.0 if is_measured else None] * len(LAYOUTS)


def test_rows_before_one_that_fails_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = DeviceLost(Measurement(status="launch_failed", message="illegal address"))
    times = iter([7.0, 8.0])

    def measured(*_: object) -> float:
        if (us := next(times, None)) is None:
            raise lost
        return us

    monkeypatch.setattr(layouts, "compiled", lambda problem: dict.fromkeys(BY_COMPILER, 0))
    monkeypatch.setattr(layouts, "measured", measured)
    monkeypatch.setattr(layouts, "is_here", lambda: True)
    with pytest.raises(DeviceLost):
        layouts.main(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        assert [row["measured_us"] for row in csv.DictReader(file)] == ["7.0", "8.0"]


def test_the_command_writes_the_printed_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layouts, "PAGES", (16,))
    monkeypatch.setattr(layouts, "has_gpu", lambda: False)
    layouts.main(tmp_path / "table.csv")
    printed = capsys.readouterr().out.splitlines()
    written = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert [one.split()[2] for one in printed] == ["NHD", "HND", "vLLM", "vLLM"]
    assert len(written) == 5
