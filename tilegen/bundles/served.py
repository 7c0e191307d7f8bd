"""Bundles at run time: `attention` takes its kernels from them instead of compiling."""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from functools import partial
from os import PathLike
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from tilegen import bundles
from tilegen.bundles.devices import check_devices, runs_on
from tilegen.bundles.expected import why_not_ours
from tilegen.bundles.folder import MAX_MANIFEST, damage, read, sha256_of
from tilegen.bundles.manifest import MANIFEST, Binary, Manifest, Served
from tilegen.bundles.on_cpu import opened, read_whole, starting
from tilegen.cpu.processors import PROCESSORS, runs_here
from tilegen.disk import log
from tilegen.emit.identity import representative
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.store.files import read_bytes, text_of

if TYPE_CHECKING:
    import torch

    from tilegen.bundles.driver import DriverFunction
    from tilegen.cpu.function import CpuFunction
    from tilegen.gpus.spec import GpuSpec
    from tilegen.kernels.config import Kernel
    from tilegen.kernels.spec import Direction
    from tilegen.launch.binding import BoundKernel
    from tilegen.problem import AttentionProblem


class Bundle:
    """A folder of binaries from which `attention` takes kernels; `load_bundle` returns it."""

    path: Path
    """The folder."""
    manifest: Manifest
    """The problems and binaries in the folder."""

    def __init__(self, path: Path) -> None:
        """Read the manifest of a folder, but no binaries. Raises Unsupported."""
        self.path = path
        self.manifest = _read(path)
        self._classes: dict[str, list[Served]] = defaultdict(list)
        for served in self.manifest.problems:
            for direction in served.passes:
                self._classes[_class(served.serves, direction)].append(served)
        self._functions: dict[str, DriverFunction] = {}
        self._on_cpu: dict[str, CpuFunction] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        many = f"{len(self.manifest.notations)} problems, {len(self.manifest.binaries)} binaries"
        return f"Bundle({str(self.path)!r}: {many} for {', '.join(self.manifest.architectures)})"

    def unload(self) -> None:
        """Stop `attention` from using this bundle; other loaded bundles stay in use."""
        if self in bundles.loaded:
            bundles.loaded.remove(self)
        _plan_anew()

    def damaged(self) -> list[str]:
        """Return the files that are missing, or do not have the digest in the manifest."""
        binaries = self.manifest.binaries
        files = {binary.file: binary.sha256 for binary in binaries}
        files |= {binary.source: binary.source_sha256 for binary in binaries}
        return [name for name, digest in files.items() if sha256_of(self.path / name) != digest]

    def why_not_ours(self) -> str:
        """Explain in one line why this tilegen cannot launch the binaries; empty if it can."""
        return why_not_ours(self.path, self.manifest)

    def find(
        self,
        problem: AttentionProblem,
        gpu: GpuSpec | None,
        direction: Direction,
        *,
        aligned: bool,
    ) -> list[Binary] | None:
        """Find the binaries of a pass, in the order of launches; None if the bundle has none.

        Of the entries that serve the problem and run on the GPU, entries for its own architecture
        come first, and then the entry whose tiles were chosen for the nearest sizes. Without a
        `gpu` the entries are for this machine's processor, those with most of its features first.
        `aligned` is True if addresses and strides are multiples of 16 bytes.
        """
        best: tuple[tuple[int, float], list[Binary]] | None = None
        for served in self._classes.get(_class(representative(problem).key, direction), ()):
            runs = runs_here(served.arch) if gpu is None else runs_on(served.arch, gpu.arch)
            if not runs or (served.aligned and not aligned):
                continue
            files = served.passes[direction].binaries.values()
            binaries = [self.manifest.by_file[file] for file in files]
            if gpu is None:
                fits, order = True, [*PROCESSORS].index(served.arch)
            else:
                most = gpu.smem_per_block
                fits = all(binary.resources.shared_bytes <= most for binary in binaries)
                order = int(served.arch != gpu.arch)
            rank = (order, _distance(problem, served))
            if fits and (best is None or rank < best[0]):
                best = rank, binaries
        return best and best[1]

    def launches(
        self,
        problem: AttentionProblem,
        gpu: GpuSpec | None,
        direction: Direction,
        device: torch.device,
        *,
        aligned: bool,
    ) -> dict[Kernel, BoundKernel] | None:
        """Return the kernels of a pass, ready to be launched on a device; None if the bundle has
        none. Without a `gpu` they are for this machine's processor."""
        from tilegen.bundles.launching import Packed
        from tilegen.launch.binding import BoundKernel
        from tilegen.launch.launcher import launch_by

        if (binaries := self.find(problem, gpu, direction, aligned=aligned)) is None:
            return None
        log.debug("%s for '%s': from %s", direction, problem, self)
        kernels: dict[Kernel, BoundKernel] = {}
        for binary in binaries:
            if gpu is None:
                start = starting(binary, partial(self.on_cpu, binary, problem))
            else:
                start = Packed(binary, partial(self.function, binary)).start
            launch = launch_by(start, self._launch(binary, problem), device, binary.file)
            kernels[binary.kernel] = BoundKernel(launch, problem.mask, binary.kernel, binary.config)
        return kernels

    def function(self, binary: Binary) -> DriverFunction:
        """Return a binary as a function of the driver, loaded at first use. Raises Unsupported."""
        from tilegen.bundles.driver import DriverFunction

        with self._lock:
            if binary.file not in self._functions:
                self._functions[binary.file] = DriverFunction(
                    self._code(binary), binary.function, binary.resources.shared_bytes
                )
            return self._functions[binary.file]

    def on_cpu(self, binary: Binary, problem: AttentionProblem) -> CpuFunction:
        """Return a binary as a function of this machine's processor, opened at first use. Raises
        Unsupported."""

        with self._lock:
            if binary.file not in self._on_cpu:
                self._on_cpu[binary.file] = opened(self.path, binary, problem)
            return self._on_cpu[binary.file]

    def _launch(self, binary: Binary, problem: AttentionProblem) -> str:
        """Return the text of a binary's launch. Raises Unsupported."""
        source = read_whole(self.path, binary.source, binary.source_sha256).decode()
        if binary.launch_sha256:
            text = launch_of(source)
            if hashlib.sha256(text.encode()).hexdigest() != binary.launch_sha256:
                raise Unsupported(damage(self.path, [binary.source]))
            return text

        aligned = binary.stride_unit > 1
        rendered = render(problem, binary.config, binary.kernel, aligned=aligned)
        if binary.arguments[: len(rendered.signature)] != rendered.signature:
            raise Unsupported(
                f"{binary.file} in {self.path} has other arguments than this tilegen's "
                f"{binary.kernel}; generate the bundle again"
            )
        return launch_of(rendered.source)

    def _code(self, binary: Binary) -> bytes:
        """Read a binary and check its digest. Raises Unsupported."""
        code = read(self.path / binary.file)
        if code is None or hashlib.sha256(code).hexdigest() != binary.sha256:
            raise Unsupported(damage(self.path, [binary.file]))
        return code


def load_bundle(path: str | PathLike[str]) -> Bundle:
    """Load the bundle in the folder `path`, so that `attention` takes its kernels from the bundle.

    Calls without a binary in the bundle (another head dim, dtype, group size, mask or score) are
    computed as usual. If several bundles are loaded, the last is searched first. On a machine
    without a GPU a bundle for GPUs is only checked.

    Raises Unsupported if the folder holds no bundle or a damaged one, if another tilegen made it,
    if it has no binaries for the GPUs or the processor of this machine, or if another user could
    have written binaries for processors.
    """
    bundle = Bundle(Path(path))
    if damaged := bundle.damaged():
        raise Unsupported(damage(bundle.path, damaged))
    if why := bundle.why_not_ours():
        raise Unsupported(f"{bundle.path} cannot be served: {why}; generate the bundle again")
    check_devices(bundle.path, bundle.manifest)
    others = [other for other in bundles.loaded if other.path != bundle.path]
    bundles.loaded[:] = [bundle, *others]
    _plan_anew()
    return bundle


def _read(path: Path) -> Manifest:
    """Read the manifest of a folder. Raises Unsupported."""
    file = path / MANIFEST
    try:
        if (data := read_bytes(file, MAX_MANIFEST)) is None:
            raise Unsupported(
                f"expected a bundle in {path}, found no {MANIFEST} there; "
                f"make one with: tilegen generate --catalog FILE --arch ARCH --out {path}"
            )
        return Manifest.from_json(text_of(data))
    except InvalidRecord as error:
        raise Unsupported(f"{file}: {error}; generate the bundle again") from None


def _class(key: str, direction: Direction) -> str:
    """Return the key that is shared by all problems with the same binaries."""
    # A `+` marks trained tensors of a score, on which forward kernels do not depend.
    return f"{direction} {re.sub(r'[+](?=[,)])', '', key) if direction == 'forward' else key}"


def _distance(problem: AttentionProblem, served: Served) -> float:
    """Return the distance between a problem's sizes and a served problem's, in powers of 2."""
    sizes = (problem.batch * problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
    return sum(abs(math.log2(a / b)) for a, b in zip(sizes, served.sizes, strict=True))


def _plan_anew() -> None:
    from tilegen.runtime import plans

    plans.forget()
