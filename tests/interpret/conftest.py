"""A quicker interpreter for all tests in this folder, however they come to run kernels."""

from __future__ import annotations

import pytest

from tilegen.check import interpreter


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> None:
    interpreter.skip_idle_work()
