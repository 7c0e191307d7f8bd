"""Triton's interpreter for all tests in this folder, however they come to run kernels."""

from __future__ import annotations

import pytest

from tests.support import interpreting


@pytest.fixture(autouse=True, scope="session")
def _interpreter() -> None:
    interpreting.prepare()
