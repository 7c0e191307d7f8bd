"""The benchmark of mask creation: both sides make the same masks, and every failure is a row."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import mask_creation
from benchmarks.mask_cases import cases
from benchmarks.mask_creation import Creation, creations, measure
from tilegen.masks.tiles import tile_lists


@pytest.mark.parametrize("name", cases())
def test_both_make_the_same_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_creation, "REPEATS", 1)
    case = replace(cases()[name], is_closed=False)
    ours, theirs = (measure(case, provider, 1024, "cpu") for provider in ("tilegen", "flex"))
    assert ours.status == theirs.status == "ok", (ours.detail, theirs.detail)
    assert ours.live_tiles == theirs.live_tiles
    assert ours.live_tiles is not None
    assert 0 < ours.live_tiles <= 64
    assert ours.mask_bytes == 2 * (4 * ours.live_tiles + 8 * 17)


def test_the_closed_form_takes_no_memory() -> None:
    creation = measure(cases()["causal window"], "tilegen", 1 << 20, "cpu")
    assert (creation.status, creation.mask_bytes) == ("ok", 0)


@pytest.mark.parametrize(
    "error, status",
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "out_of_memory"),
        (ValueError("no such mask"), "build_failed"),
    ],
)
def test_failures_are_rows(error: Exception, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(tile_lists, "lists_of", fail)
    creation = measure(cases()["documents"], "tilegen", 128, "cpu")
    assert creation.status == status
    assert type(error).__name__ in creation.detail


def test_longer_ones_than_a_failure_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = iter([Creation(first_ms=1.0), Creation(status="out_of_memory", detail="no memory")])
    monkeypatch.setattr(mask_creation, "_received", lambda connection, seconds: next(sent))
    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "start", lambda self: None)
    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "kill", lambda self: None)
    monkeypatch.setattr(multiprocessing.get_context("spawn").Process, "join", lambda self: None)
    results = list(creations("documents", "flex", [1, 2, 3, 4], seconds=1, gib=1))
    assert [seqlen for seqlen, _ in results] == [1, 2, 3, 4]
    assert [one.status for _, one in results] == ["ok"] + ["out_of_memory"] * 3
    assert results[1][1].detail == "no memory"
    assert results[3][1].detail == "not tried: 2 did not work"


def test_timeouts_and_crashes_are_rows() -> None:
    here, there = multiprocessing.Pipe(duplex=False)
    assert mask_creation._received(here, 0.01).status == "unmeasured"
    there.close()
    assert mask_creation._received(here, 0.01).status == "out_of_memory"


def test_masks_are_named_once() -> None:
    assert all(name == case.name for name, case in cases().items())
    assert all(case.expression().is_condition for case in cases().values())
