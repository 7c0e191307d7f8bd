"""A clock that only tests move."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


class Clock:
    """Seconds since it was made; `sleep` moves it at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        """Move on."""
        self.now += seconds

    def replaces_time_of(self, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have a module that imports `time` read this clock."""
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(f"{module}.time", fake)
