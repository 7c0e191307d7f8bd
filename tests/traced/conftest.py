"""Calls on CPU tensors run emitted kernels, as they do for users, compiled once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.calls import compiled_once


@pytest.fixture(autouse=True, scope="module")
def _compiled_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory):
        yield
