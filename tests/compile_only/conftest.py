"""A stand-in for the GPU: launches compile, and go no further. One process compiles for all
tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget

from tests.support.bundles import rank_small_tile
from tilegen.compiling.workers import Pool


class FakeDriver:
    """Stands where Triton looks for a GPU: kernels compile for an H200, and are not launched."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compile_instead_of_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, "run", warm_up)
    monkeypatch.setattr(driver, "_active", FakeDriver())


@pytest.fixture(scope="session")
def compiler() -> Iterator[Pool]:
    """A process that compiles, which takes seconds to start."""
    with Pool(1) as pool:
        yield pool


@pytest.fixture
def shared_compiler(compiler: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `generate` compile there, and leave it running."""
    monkeypatch.setattr("tilegen.bundles.building.Pool", lambda: contextlib.nullcontext(compiler))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `generate` compile the smallest tile of each kernel."""
    monkeypatch.setattr("tilegen.bundles.building.rank", rank_small_tile)
