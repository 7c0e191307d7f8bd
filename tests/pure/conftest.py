"""What several tests of the tuner, and of remote stores, share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tilegen.disk import say_once
from tilegen.store import reach


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
    monkeypatch.setattr(reach, "_down", {})
    say_once.cache_clear()
    caplog.set_level(logging.INFO, logger="tilegen")
