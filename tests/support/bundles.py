"""Bundles for tests: entries made without compiling, a driver's function that runs in Python, and
bundles for processors, made in this process, since starting compilers takes seconds."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

import pytest

from tests.support.problems import used
from tilegen.bundles.building import BOTH, generate
from tilegen.bundles.manifest import Binary
from tilegen.choose.choice import Shortlist
from tilegen.choose.records import Records
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.workers import Pool
from tilegen.cpu import shared_objects
from tilegen.cpu.processors import PROCESSORS, runs_here
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.registry import smallest_config
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

PROBLEMS = [
    "b1 hq8 hkv2 q512 d64 bf16 causal",
    "b1 hq8 hkv2 q65536 d64 bf16 causal",
    "b1 hq8 hkv2 q512 d512 bf16 causal",
    "b1 hq8 q512 d64 bf16 window(127,0) score(s+t0[h,k-q+512],float32+)",
]
FORMATS = {"i32": "i", "fp32": "f"}


def not_compiled(rendered: RenderedKernel, arch: str = "sm_90") -> Binary:
    """Return a kernel's entry in the manifest."""
    from tilegen.bundles.building import binary_of

    return binary_of(as_if_compiled(rendered, arch))


def as_if_compiled(rendered: RenderedKernel, arch: str) -> CompiledKernel:
    """Return a kernel whose binary is its digest."""
    return CompiledKernel(
        rendered=rendered,
        arch=arch,
        binary=f"{arch} {rendered.digest}".encode(),
        reported=used(registers=64),
        scratch_pointers=2,
        seconds=0.0,
    )


def write_bundle(
    problems: Sequence[AttentionProblem],
    gpus: Sequence[GpuSpec],
    out: Path,
    directions: Sequence[Direction] = ("forward", "backward"),
) -> Path:
    """Write a bundle as `generate` does, but for the compiler: its binaries are empty."""
    from tilegen.bundles.building import generate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Pool,
            "compile",
            lambda self, rendered, arch, **_: as_if_compiled(rendered, arch),
        )
        return generate(problems, gpus, out, directions=directions)


def rank_small_tile(records: Records, task: KernelTask, **_: object) -> Shortlist:
    """Replace `rank` in tests that do not depend on the tile: compiling the model's tiles takes 5
    to 25 seconds per kernel."""
    return Shortlist(
        task, (replace(smallest_config(task.kernel), num_stages=2),), "model", "the smallest tile"
    )


class StandIn:
    """Stands where a kernel in the driver would be: reads the arguments back from the memory that
    the driver would read, and hands them on."""

    def __init__(self, binary: Binary, launched: Callable[[int, list[Any]], None]) -> None:
        self._types = [type_ for _, type_ in binary.arguments]
        self._launched = launched

    def launch(self, grid: int, threads: int, parameters: int, *, device: int, stream: int) -> None:
        addresses = (ctypes.c_void_p * len(self._types)).from_address(parameters)
        values: list[Any] = []
        for type_, address in zip(self._types, addresses, strict=True):
            form = FORMATS.get(type_, "P")
            assert address is not None
            memory = ctypes.string_at(address, struct.calcsize(form))
            values += struct.unpack(form, memory)
        self._launched(grid, values)


def copy(folder: Path, to: Path) -> None:
    """Copy a bundle into a folder that exists."""
    for path in folder.rglob("*.*"):
        (to / path.relative_to(folder)).parent.mkdir(exist_ok=True)
        (to / path.relative_to(folder)).write_bytes(path.read_bytes())


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
