"""Calls on CPU tensors that run emitted kernels, which are compiled once until the compiler or a
template changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.runs import TARGETS, WIDE
from tilegen.cpu import direct, target
from tilegen.cpu.objects import compiler_digest
from tilegen.cpu.target import Target
from tilegen.emit.identity import generator_digest
from tilegen.environment import current
from tilegen.runtime import dispatch, paged_call, plans


@contextmanager
def compiled_once(tmp_path_factory: pytest.TempPathFactory, level: int = 0) -> Iterator[None]:
    """Run kernels compiled for the CPU, in a cache that all workers of the run share.

    `level` is LLVM's level of optimisation; users have level 2.
    """
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tilegen-compiled"
    shared.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError):
        (shared / "kernels").symlink_to(_kept())
    processor = target.host()
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        # As PyTorch then, kernels run code that every x86-64 has.
        processor = TARGETS.get("sse2", WIDE)
    plans.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEGEN_CACHE_DIR", str(shared))
        patch.delenv("TILEGEN_CPU")  # kernels are the default
        for module, name in ((dispatch, "torch_run"), (paged_call, "by_request")):
            patch.setattr(module, name, partial(_refuse, getattr(module, name)))
        # Compiling is most of the work of these tests, and which instructions LLVM chooses does not
        # follow from an emitted kernel.
        compile_for(replace(processor, level=level), patch)
        yield
    plans.forget()


def compile_for(processor: Target, patch: pytest.MonkeyPatch) -> None:
    """Have kernels compiled for a processor, and for a level of optimisation."""
    patch.setattr(target, "host", lambda: processor)
    patch.setattr(direct, "host", target.host)


def _kept() -> Path:
    """Return the folder of kernels that earlier runs compiled by the same code. Records of earlier
    runs are not kept: a test would take its choice from them."""
    name = f"kernels-{compiler_digest()}-{generator_digest()[:12]}"
    folder = Path(__file__).parents[1] / ".pytest_cache" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in folder.parent.glob("kernels-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _refuse(by_torch: Callable[..., Any], *given: Any) -> Any:
    """Let PyTorch compute a call only if the setting requests it."""
    assert current().cpu == "torch"
    return by_torch(*given)
