"""Bundles for processors in tests: made in this process, since starting compilers takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import pytest

from tilegen.bundles.building import BOTH, generate
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.cpu import shared_objects
from tilegen.cpu.processors import PROCESSORS, runs_here
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, Unsupported
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem

RUNNABLE = [name for name in PROCESSORS if runs_here(name)]
"""The architectures whose code this machine runs, the best first."""
needs_processor = pytest.mark.skipif(not RUNNABLE, reason="no --arch is for this processor")


_lock = RLock()
"""Held by whatever compiles Python: Python 3.11 fails where two threads parse at once ("AST
constructor recursion depth mismatch"). Compilers of `generate` are processes."""


class Compiler:
    """Stands for the pool of compilers."""

    size = 1

    def compile(
        self, rendered: RenderedKernel, arch: str, *, line_info: bool = True
    ) -> CompiledKernel | BuildFailed:
        with _lock:
            try:
                return compile_for(rendered, arch, line_info=line_info)
            except BuildFailed as error:
                return error


def _render_alone(*given: Any, **options: Any) -> RenderedKernel:
    with _lock:
        return render(*given, **options)


def write_cpu_bundle(
    problems: Sequence[str | AttentionProblem],
    archs: Sequence[str],
    out: Path,
    directions: Sequence[Direction] = BOTH,
) -> Path:
    """Write a bundle for processors; skip the test if there is no linker for one of them."""
    for arch in archs:
        try:
            shared_objects.linker_of(PROCESSORS[arch])
        except Unsupported as error:
            pytest.skip(str(error))
    parsed = [
        one if isinstance(one, AttentionProblem) else AttentionProblem.parse(one)
        for one in problems
    ]
    with pytest.MonkeyPatch.context() as patch:
        pool = contextlib.nullcontext(Compiler())
        patch.setattr("tilegen.bundles.building.Pool", lambda: pool)
        patch.setattr("tilegen.bundles.building.render", _render_alone)
        return generate(parsed, [PROCESSORS[arch] for arch in archs], out, directions=directions)
