"""What several tests of the tuner share."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest


@pytest.fixture
def own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An own directory that starts empty, and a log that hears everything."""
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path / "cache"))
    caplog.set_level(logging.INFO, logger="tilegen")
    return tmp_path / "cache"
