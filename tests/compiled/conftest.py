"""Calls on CPU tensors run emitted kernels, compiled once for all tests; in a tenth of the files as
for users, in other files for each commit."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.conftest import seed
from tests.support.calls import compile_for, compiled_once
from tilegen import cpu
from tilegen.bounded_cache import BoundedCache
from tilegen.cpu import target


@pytest.fixture(autouse=True, scope="module")
def _compiled_calls(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    number = zlib.crc32(f"{seed()}:{request.path.name}".encode())
    with compiled_once(tmp_path_factory, level=0 if number % 10 else 2):
        yield


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled as for users."""
    compile_for(replace(target.host(), level=2), monkeypatch)
    monkeypatch.setattr(cpu, "_kernels", BoundedCache(cpu.MAX_KERNELS))
