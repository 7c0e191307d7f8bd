"""Calls on CPU tensors run emitted kernels, which the tests of one run compile once."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.compiler.runs import TARGETS, WIDE
from tilegen.cpu import direct, target


@pytest.fixture(autouse=True, scope="module")
def _compiled_calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run kernels compiled for the CPU, kept in a folder that all workers of the run share."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tilegen-compiled"
    shared.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGEN_CACHE_DIR", str(shared))
        patch.setenv("TILEGEN_CPU", "kernels")
        if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
            # As PyTorch then, kernels run code that every x86-64 has.
            patch.setattr(target, "host", lambda: TARGETS.get("sse2", WIDE))
            patch.setattr(direct, "host", target.host)
        yield
