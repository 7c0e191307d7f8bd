"""Bundles at run time: `attention` takes its kernels from them, and compiles nothing."""

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
from tilegen.bundles.expected import why_not_ours
from tilegen.bundles.folder import MAX_MANIFEST, read, sha256_of
from tilegen.bundles.manifest import MANIFEST, Binary, Manifest, Served
from tilegen.disk import log
from tilegen.emit.identity import representative
from tilegen.errors import InvalidRecord, Unsupported
from tilegen.store.files import read_bytes, text_of

if TYPE_CHECKING:
    from tilegen.bundles.driver import Function
    from tilegen.gpus.spec import GpuSpec
    from tilegen.kernels.config import Kernel
    from tilegen.kernels.spec import Direction
    from tilegen.launch.binding import BoundKernel
    from tilegen.problem import AttentionProblem


class Bundle:
    """A folder of binaries that `attention` takes its kernels from."""

    path: Path
    """The folder."""
    manifest: Manifest
    """The list of the problems and binaries in the folder."""

    def __init__(self, path: Path) -> None:
        """Reads the manifest, no binary. Raises Unsupported."""
        self.path = path
        self.manifest = _read(path)
        self._classes: dict[str, list[Served]] = defaultdict(list)
        for served in self.manifest.problems:
            for direction in served.passes:
                self._classes[_class(served.serves, direction)].append(served)
        self._functions: dict[str, Function] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        many = f"{len(self.manifest.problems)} problems, {len(self.manifest.binaries)} binaries"
        return f"Bundle({str(self.path)!r}: {many} for {', '.join(self.manifest.architectures)})"

    def unload(self) -> None:
        """Have `attention` choose and compile its own kernels again."""
        if self in bundles.loaded:
            bundles.loaded.remove(self)
        _plan_anew()

    def damaged(self) -> list[str]:
        """Return the files that are not what the manifest says."""
        files = {one.file: one.sha256 for one in self.manifest.binaries}
        files |= {one.source: one.source_sha256 for one in self.manifest.binaries}
        return [name for name, digest in files.items() if sha256_of(self.path / name) != digest]

    def why_not_ours(self) -> str:
        """Return in a line why this tilegen cannot launch what is here; an empty text if it can."""
        return why_not_ours(self.path, self.manifest)

    def find(
        self, problem: AttentionProblem, gpu: GpuSpec, direction: Direction, *, aligned: bool
    ) -> list[Binary] | None:
        """Return the binaries of a pass, in the order of their launches; None where there are none.

        All of one class compute the problem; taken are those chosen for the nearest sizes, made for
        this very architecture if there are any.
        """
        best: tuple[tuple[bool, float], list[Binary]] | None = None
        for served in self._classes.get(_class(representative(problem).key, direction), ()):
            if not runs_on(served.arch, gpu.arch) or (served.aligned and not aligned):
                continue
            its = [self.manifest.by_file[x] for x in served.passes[direction].binaries.values()]
            rank = (served.arch != gpu.arch, _distance(problem, served))
            if all(one.resources.shared_bytes <= gpu.smem_per_block for one in its) and (
                best is None or rank < best[0]
            ):
                best = rank, its
        return best and best[1]

    def launches(
        self, problem: AttentionProblem, gpu: GpuSpec, direction: Direction, *, aligned: bool
    ) -> dict[Kernel, BoundKernel] | None:
        """Return the kernels of a pass, ready to be launched; None where there are none."""
        from tilegen.bundles.launching import launcher_of
        from tilegen.launch.binding import BoundKernel

        if (found := self.find(problem, gpu, direction, aligned=aligned)) is None:
            return None
        log.debug("%s for '%s': from %s", direction, problem, self)
        launchers = ((one, launcher_of(one, partial(self.function, one))) for one in found)
        return {
            one.kernel: BoundKernel(
                launcher.launch, problem.mask, one.kernel, one.config, launcher.extra_names
            )
            for one, launcher in launchers
        }

    def function(self, binary: Binary) -> Function:
        """Return a binary in the driver, loaded when first asked for. Raises Unsupported."""
        from tilegen.bundles.driver import Function

        with self._lock:
            if binary.file not in self._functions:
                self._functions[binary.file] = Function(
                    self._code(binary), binary.function, binary.resources.shared_bytes
                )
            return self._functions[binary.file]

    def _code(self, binary: Binary) -> bytes:
        """Return a binary that is what the manifest says. Raises Unsupported."""
        code = read(self.path / binary.file)
        if code is None or hashlib.sha256(code).hexdigest() != binary.sha256:
            raise Unsupported(_damage(self.path, [binary.file]))
        return code


def load_bundle(path: str | PathLike[str]) -> Bundle:
    """Have `attention` take its kernels from the bundle in a folder, and return it.

    Calls that it has no binaries for (another head dim, dtype, group size, mask or score) are
    computed as without it. Of several bundles the one loaded last is asked first. Raises
    Unsupported for a folder that is no whole bundle, for one that another tilegen made, and where
    it has no binaries for the GPUs here; on a machine without a GPU it is only checked.
    """
    bundle = Bundle(Path(path))
    if damaged := bundle.damaged():
        raise Unsupported(_damage(bundle.path, damaged))
    if why := bundle.why_not_ours():
        raise Unsupported(f"{bundle.path} cannot be served: {why}; generate the bundle again")
    _check_gpus(bundle)
    bundles.loaded[:] = [bundle, *(one for one in bundles.loaded if one.path != bundle.path)]
    _plan_anew()
    return bundle


def runs_on(arch: str, gpu_arch: str) -> bool:
    """Whether a binary for `arch` runs on a GPU: up to sm_89 also on later ones of its
    generation."""
    match, of_gpu = (re.fullmatch(r"sm_(\d+)(\d)", one) for one in (arch, gpu_arch))
    if match and of_gpu and match[1] == of_gpu[1] and int(match[1]) < 9:
        return match[2] <= of_gpu[2]
    return arch == gpu_arch  # from sm_90 on, Triton uses what only that architecture has


def _check_gpus(bundle: Bundle) -> None:
    """Raise Unsupported where there are GPUs and the bundle runs on none of them."""
    import torch

    from tilegen.bundles.driver import driver
    from tilegen.gpus.spec import detect

    here = [detect(index) for index in range(torch.cuda.device_count())]
    found = [spec for spec in here if spec]
    if not found:
        log.info("no GPU here: %s was checked, and nothing will run from it", bundle)
        return
    if found[0].arch.startswith("gfx"):
        raise Unsupported(
            f"expected an NVIDIA GPU to serve a bundle on, got {found[0].title}; attention "
            "compiles here without it, and other programs can load its hsaco files"
        )
    archs = bundle.manifest.architectures
    if not any(runs_on(arch, spec.arch) for arch in archs for spec in found):
        raise Unsupported(
            f"{bundle.path} has binaries for {', '.join(archs)}, and this GPU is an "
            f"{found[0].arch} ({found[0].title}): generate with --arch {found[0].arch}"
        )
    driver()


def _read(path: Path) -> Manifest:
    """Return the manifest of a folder. Raises Unsupported."""
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


def _damage(path: Path, names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} in {path} is missing or not what the manifest says; "
        "copy the bundle again, or generate it again"
    )


def _class(key: str, direction: Direction) -> str:
    """Return the key that all problems share which the same binaries compute. Forward kernels do
    not depend on which tensors of a score are trained."""
    return f"{direction} {re.sub(r'[+](?=[,)])', '', key) if direction == 'forward' else key}"


def _distance(problem: AttentionProblem, served: Served) -> float:
    """Return how far a problem's sizes are from those a binary was chosen for, as factors."""
    sizes = (problem.batch * problem.num_heads_q, problem.seqlen_q, problem.seqlen_kv)
    return sum(abs(math.log2(a / b)) for a, b in zip(sizes, served.sizes, strict=True))


def _plan_anew() -> None:
    from tilegen.runtime import plans

    plans.forget()
