"""Misses of emitted kernels in a simulated cache: the count, the command, the committed rows."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cache_misses
from benchmarks.rows import read
from benchmarks.study import miss_page, misses, replay
from benchmarks.study.miss_plan import plan
from benchmarks.study.misses import Point
from benchmarks.study.tiles import moved_bytes

SMALL = Point(
    direction="forward",
    mask="full",
    seqlen=256,
    head_dim=32,
    memory_kb=32,
    schedule="large",
    tiles="fwd 16x16",
)
needs_valgrind = pytest.mark.skipif(
    shutil.which("valgrind") is None, reason="valgrind is not installed"
)
needs_cc = pytest.mark.skipif(bool(replay.missing()), reason="cc or objcopy is not installed")


@pytest.mark.slow
@needs_valgrind
@needs_cc
def test_a_small_point_misses_the_words_of_the_schedule() -> None:
    """Q and out once, lse once, K and V for each of 16 tiles of rows; and the state, once."""
    columns = misses.count(SMALL)
    rows = 256 * 32
    expected = 4 * (16 * 2 * rows + 2 * rows + 256)
    assert columns["predicted_bytes"] == expected
    assert columns["fits"]
    state = 1024 * columns["state_kb"]
    assert 0.99 * expected <= columns["counted_bytes"] <= 1.01 * expected + state
    assert (
        columns["counted_load_bytes"] + columns["counted_store_bytes"] == columns["counted_bytes"]
    )
    assert columns["lower_bound_bytes"] <= columns["counted_bytes"]


@pytest.mark.slow
@needs_valgrind
@needs_cc
def test_no_input_is_in_the_cache_before_the_launch() -> None:
    """In a cache that holds everything, each input and output misses once."""
    columns = misses.count(replace(SMALL, seqlen=64, memory_kb=512))
    once = 4 * (4 * 64 * 32 + 64)
    assert once <= columns["counted_bytes"] <= 1.05 * once + 1024 * columns["state_kb"]


@needs_cc
@pytest.mark.parametrize("mask", ["full", "block_sparse(@:50,64)"])
def test_the_program_that_is_counted_computes_attention(mask: str, tmp_path: Path) -> None:
    from tilegen.cpu.target import host

    problem = replay.realized(replace(SMALL, mask=mask).problem)
    recorded = replay.record(problem, SMALL.configs, host())
    program = replay.build(recorded, tmp_path, 1 << 16)
    subprocess.run([program, "1", "after"], cwd=tmp_path, check=True)
    data = bytearray((tmp_path / "after").read_bytes())

    def tensor(argument: str) -> torch.Tensor:
        first, owner = replay.place_of(recorded, argument)
        flat = torch.frombuffer(data, dtype=torch.float32, offset=first, count=owner.numel())
        return flat.view(owner.shape)

    q, k, v = (tensor(f"{name}_ptr").double() for name in "qkv")
    kept = torch.ones(256, 256, dtype=torch.bool)
    if mask != "full":
        (layout,) = problem.mask.tables
        assert layout.tensor is not None
        kept = layout.tensor.repeat_interleave(64, 0).repeat_interleave(64, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept, scale=0.1)
    expected = torch.nan_to_num(expected)  # rows that keep nothing
    assert torch.allclose(tensor("out_ptr").double(), expected, atol=1e-5)


def test_without_valgrind_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(misses.shutil, "which", lambda _name: None)
    cache_misses.main(out=tmp_path, minutes=1)
    assert "skipped: valgrind is not installed" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are on disk as soon as they are counted, and no point is counted twice."""
    path, (row, *_) = tmp_path / "misses.csv", read(cache_misses.OUT / miss_page.FILE)
    columns: dict[str, Any] = {
        name: float(value) if value else None
        for name, value in row.items()
        if name.endswith(("bytes", "_kb", "over_m", "over_predicted")) and name != "memory_kb"
    }
    asked: list[Point] = []

    def counted(point: Point, _limit: float) -> dict[str, Any]:
        assert len(read(path)) == len(asked)
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(point)
        return {**columns, "fits": True}

    points = plan()[:4]
    monkeypatch.setattr(cache_misses, "plan", lambda: points)
    monkeypatch.setattr(cache_misses, "counted_apart", counted)
    monkeypatch.setattr(misses, "valgrind_version", lambda: "valgrind-0")
    with pytest.raises(KeyboardInterrupt):
        cache_misses.count_all(path, time.monotonic() + 60)
    assert asked == points[:2]
    monkeypatch.setattr(cache_misses, "counted_apart", lambda *_: {**columns, "fits": True})
    cache_misses.count_all(path, time.monotonic() + 60)
    assert [row["tiles"] for row in read(path)] == [point.tiles for point in points]
    cache_misses.count_all(path, time.monotonic())
    assert "4 of 4 points" in capsys.readouterr().out.splitlines()[-1]


def test_committed_rows_are_the_plan_and_today_s_formula() -> None:
    rows = read(cache_misses.OUT / miss_page.FILE)
    points = {tuple(map(str, asdict(point).values())): point for point in plan()}
    assert len(points) <= 60
    assert {tuple(row[name] for name in asdict(SMALL)) for row in rows} == set(points)
    for row in rows[::6]:
        point = points[tuple(row[name] for name in asdict(SMALL))]
        predicted = sum(moved_bytes(replay.realized(point.problem), point.configs).values())
        assert int(row["predicted_bytes"]) == predicted
        ratio = int(row["counted_bytes"]) / predicted
        assert float(row["counted_over_predicted"]) == pytest.approx(ratio, rel=1e-4)
        assert int(row["counted_bytes"]) >= int(row["lower_bound_bytes"])


def test_committed_rows_cross_where_d_squared_is_m() -> None:
    """Small-cache kernels miss less well above d^2 = M, and more well below."""
    for (direction, mask, *_), pair in miss_page.best(
        read(cache_misses.OUT / miss_page.FILE)
    ).items():
        small, large = (int(pair[name]["counted_bytes"]) for name in ("small", "large"))
        at = float(pair["large"]["d2_over_m"])
        if mask == "full" and at >= 4:
            assert small < large, (direction, at)
        if mask == "full" and at <= 0.25:
            assert small > large, (direction, at)


def test_the_page_quotes_the_committed_rows() -> None:
    """Tables are compared elsewhere; here are the numbers between them."""
    text = cache_misses.PAGE.read_text(encoding="utf-8")
    rows = read(cache_misses.OUT / miss_page.FILE)
    pairs = miss_page.best(rows)

    def ratio(memory_kb: int) -> float:
        pair = pairs["forward", "full", "256", str(memory_kb)]
        return int(pair["small"]["counted_bytes"]) / int(pair["large"]["counted_bytes"])

    quoted = [f"{ratio(256):.2f} times as much", f"{ratio(128):.2f} times at 2 M"]
    quoted.append(f"and {ratio(64):.2f} times at 4 M")
    (roomier,) = (row for row in rows if row["memory_kb"] == "152")
    quoted.append(f"at {float(roomier['counted_over_predicted']):.2f} in a cache of 152 KB")
    row = pairs["forward", "full", "64", "64"]["small"]
    repeated = 4 * 1024 * 64 * (1024 // 32 - 1)  # reads of K but the first, by tiles of 32 rows
    without = (int(row["predicted_bytes"]) - repeated) / 1e6
    counted = int(row["counted_bytes"]) / 1e6
    quoted.append(f"these reads is {without:.1f} MB, and {counted:.1f} MB were counted")
    for words in quoted:
        assert words in text, words
    for row in rows:
        if (row["direction"], row["mask"], row["schedule"]) != ("forward", "full", "large"):
            continue
        part = int(row["tiles"].split()[1].split("x")[0]) / int(row["seqlen"])
        if row["fits"] == "True":
            assert float(row["counted_over_predicted"]) <= 1.01 + part, row["tiles"]
