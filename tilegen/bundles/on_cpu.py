"""Binaries of a bundle on this machine's processor: checked, opened and launched without LLVM.

Opening a shared object runs what it holds, as executing the text of a launch does, so only files
that no other user can have written are opened.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilegen.bundles.folder import damage
from tilegen.bundles.manifest import Binary, Manifest
from tilegen.cpu.processors import missing
from tilegen.errors import Unsupported
from tilegen.kernels.registry import KERNELS
from tilegen.private_files import NotPrivate, check_private, read_private

if TYPE_CHECKING:
    import torch

    from tilegen.cpu.function import CpuFunction
    from tilegen.launch.launcher import Run, Start
    from tilegen.problem import AttentionProblem


def check_files(path: Path, manifest: Manifest) -> None:
    """Check that no other user can have written the launches and shared objects of a folder. Raises
    Unsupported."""
    for binary in manifest.binaries:
        _private(path, binary.source, check_private)
        if binary.on_cpu is not None:
            _private(path, binary.file, check_private)


def opened(path: Path, binary: Binary, problem: AttentionProblem) -> CpuFunction:
    """Open a shared object of the folder `path`, whose kernel serves a problem. Raises
    Unsupported."""
    from tilegen.cpu.function import CpuFunction
    from tilegen.cpu.shared_objects import SharedObject, as_compiled
    from tilegen.cpu.work import Work

    facts = binary.on_cpu
    assert facts is not None
    if lacking := missing(facts.features):
        raise Unsupported(
            f"{path / binary.file} is for {binary.arch}, and this processor lacks "
            f"{' '.join(lacking)}; generate for another --arch"
        )
    read_whole(path, binary.file, binary.sha256)
    made = as_compiled(binary.function, binary.arguments, facts)
    work = Work.of(binary.kernel, binary.config, problem, made.names)
    return CpuFunction(made, work=work, code=SharedObject(path / binary.file, binary.function))


def read_whole(path: Path, name: str, sha256: str) -> bytes:
    """Read a file of the folder `path` that no other user can have written, and check its digest.
    Raises Unsupported."""
    code = _private(path, name, read_private)
    if code is None or hashlib.sha256(code).hexdigest() != sha256:
        raise Unsupported(damage(path, [name]))
    return code


def _private(path: Path, name: str, read: Callable[[Path], bytes | None]) -> bytes | None:
    try:
        return read(path / name)
    except NotPrivate as doubt:
        raise Unsupported(
            f"{name} in {path} is not opened, since another user could have written it: "
            f"{doubt}; copy the bundle to a folder that only you can write to"
        ) from None


def starting(binary: Binary, load: Callable[[], CpuFunction]) -> Start:
    """Return the function for `launch_by` of a binary, which is loaded at the first launch.

    A kernel that adds to copies is launched with a look at every argument; else only tensors that
    the launch does not allocate are looked at.
    """
    made = {f"{name}_ptr" for name in KERNELS[binary.kernel].allocated}
    facts = binary.on_cpu
    assert facts is not None
    names = [name for name, _ in binary.arguments]
    written = [names.index(name) for name in facts.written if name not in made]

    def too_large(grid: int, arguments: list[Any], device: torch.device) -> None:
        raise Unsupported(f"{binary.function}: a size or stride is too large: {arguments}")

    def start(grid: int, arguments: list[Any], device: torch.device) -> Run:
        function = load()

        def with_checks(grid: int, arguments: list[Any], device: torch.device) -> None:
            try:
                function[(grid,)](*arguments)
            except struct.error:
                too_large(grid, arguments, device)

        run = with_checks
        if not facts.added:
            run = function.by_address(arguments, too_large, written, with_checks)
        run(grid, arguments, device)
        return run

    return start
