"""Binaries of a bundle on this machine's processor: checked, opened and launched without LLVM.

Opening a shared object runs what it holds, so only files that no other user can have written are
opened.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
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
    from tilegen.launch.launcher import Run
    from tilegen.problem import AttentionProblem


def check_files(path: Path, manifest: Manifest) -> None:
    """Check that no other user can have written the shared objects of a folder. Raises
    Unsupported."""
    for binary in manifest.binaries:
        if binary.on_cpu is not None:
            _code(path, binary, check_private)


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
    code = _code(path, binary, read_private)
    if code is None or hashlib.sha256(code).hexdigest() != binary.sha256:
        raise Unsupported(damage(path, [binary.file]))
    made = as_compiled(binary.function, binary.arguments, facts)
    work = Work.of(binary.kernel, binary.config, problem, made.names)
    return CpuFunction(made, work=work, code=SharedObject(path / binary.file, binary.function))


def _code(path: Path, binary: Binary, read: Callable[[Path], bytes | None]) -> bytes | None:
    try:
        return read(path / binary.file)
    except NotPrivate as doubt:
        raise Unsupported(
            f"{binary.file} in {path} is not opened, since another user could have written it: "
            f"{doubt}; copy the bundle to a folder that only you can write to"
        ) from None


class OnCpuFunction:
    """The function of a binary, for its launcher.

    A kernel that writes only tensors that the launch allocates is launched with addresses. Other
    kernels take tensors, since their memory may overlap and threads may add to copies of them.
    """

    def __init__(self, binary: Binary, load: Callable[[], CpuFunction]) -> None:
        """`load` is called at the first launch."""
        made = {f"{name}_ptr" for name in KERNELS[binary.kernel].allocated}
        facts = binary.on_cpu
        assert facts is not None
        self.takes_tensors = bool(facts.added) or not {*facts.written} <= made
        self._where = binary.function
        self._load = load
        self._loaded: CpuFunction | None = None

    def prepare(self, grid: int, arguments: Sequence[Any]) -> Run:
        """Return the function that launches the binary; it is the same for all arguments."""
        return self._run

    def _run(self, grid: int, values: list[Any], device: torch.device) -> None:
        function = self._loaded
        if function is None:
            function = self._loaded = self._load()
        try:
            if self.takes_tensors:
                function[(grid,)](*values)
            else:
                function.run(grid, values, device)
        except struct.error as error:
            raise Unsupported(f"{self._where}: a size or stride is too large: {error}") from None
