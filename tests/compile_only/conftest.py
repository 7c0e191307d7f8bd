"""A stand-in for the GPU: what is launched is compiled, and goes no further."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget


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
