"""Fixtures shared by tests of the tuner and of remote stores."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.libraries import BACKWARD, FORWARD, PROBLEM, SPEC
from tests.support.records import place, record
from tilegen.disk import say_once
from tilegen.kernels.config import TileConfig
from tilegen.store import current_versions, remote


@pytest.fixture
def own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An own directory that starts empty, and a log that hears everything."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="tilegen")
    return tmp_path / "cache"


@pytest.fixture
def first_contact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An own directory without copies; nothing is down, and everything is said again."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "mine"))
    monkeypatch.setattr(remote, "_down", {})
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")


@pytest.fixture
def measured(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting, and records of all kernels of the problem, each of 30 us."""
    monkeypatch.setenv("TILEGEN_LIBRARIES", "1")
    for kernel in (*FORWARD, *BACKWARD):
        config = TileConfig(block_m=32, block_n=32)
        finding = record(
            gpu=SPEC.name, arch=SPEC.arch, kernel=kernel, problem=PROBLEM, config=config, us=30.0,
            versions=current_versions(),
        )  # fmt: skip
        place(own_cache, finding)
