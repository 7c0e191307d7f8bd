"""Calls on CPU tensors run emitted kernels, compiled once for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.compiled_once import compile_for, compiled_once
from tilegen import cpu
from tilegen.bounded_cache import BoundedCache
from tilegen.cpu import target


@pytest.fixture(autouse=True, scope="module")
def _compiled_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory):
        yield


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled as for users."""
    compile_for(replace(target.host(), level=2), monkeypatch)
    monkeypatch.setattr(cpu, "_kernels", BoundedCache(cpu.MAX_KERNELS))
