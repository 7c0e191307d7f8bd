"""Builds of bundles: emitted kernels and binaries for a list of problems, with one manifest. They
need neither the GPUs nor the processors that the binaries are for."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from tilegen.bounded_cache import BoundedCache
from tilegen.bundles.folder import Folder
from tilegen.bundles.manifest import Binary, BundledOrigin, BundledPass, Manifest, Served
from tilegen.choose.choice import Choice, Shortlist
from tilegen.choose.families import families_used, passes_of
from tilegen.choose.records import Records
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.background import Background
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.tools import nvidia_tool
from tilegen.compiling.workers import Pool
from tilegen.cpu.processors import Processor
from tilegen.cpu.shared_objects import linker_of, release_of
from tilegen.cpus.spec import spec_of_target
from tilegen.disk import say_once
from tilegen.emit.identity import (
    RenderedKernel,
    kernel_digest,
    representative,
    rows_are_aligned,
    stride_unit,
    template_digest,
)
from tilegen.emit.launch import launch_of
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, grid_of
from tilegen.kernels.spec import Direction
from tilegen.model.resources import Resources
from tilegen.pipeline import best_acceptable, choose, joined_to, rank
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled
from tilegen.version import __version__

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

MAX_COMPILED = 1024
"""Number of compiled kernels that are cached for other problems with the same kernels."""
BOTH: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel that was built for a problem."""

    problem: AttentionProblem
    binary: Binary
    problems_done: int
    """Number of problems whose kernels are all built; a problem counts once for each device."""


@dataclass(frozen=True)
class _Job:
    """A kernel of a problem on a device, with the future of its choice and its binary."""

    direction: Direction
    kernel: Kernel
    built: Future[tuple[Choice | None, Binary]]
    """The choice is None on a CPU, where a rule chooses."""


@dataclass(frozen=True)
class _Jobs:
    """All kernels of a problem on a device."""

    problem: AttentionProblem
    device: GpuSpec | Processor
    jobs: list[_Job]


def generate(
    problems: Sequence[AttentionProblem],
    devices: Sequence[GpuSpec | Processor],
    out: Path,
    *,
    directions: Sequence[Direction] = BOTH,
    on_kernel: Callable[[BuiltKernel], None] = lambda made: None,
) -> Path:
    """Write kernels, binaries and manifest into the folder `out`; return the manifest's path.

    The config of each kernel comes from its record. Without a record it is the model's best that
    compiles to an acceptable kernel, or else the config that spills least. All cores compile. The
    same inputs and versions give the same bytes, and a stopped run is continued. `on_kernel` is
    called with each kernel once it is built. Raises Unsupported without a linker for a processor,
    and BuildFailed after all other kernels are built.
    """
    folder = Folder(out, _versions(devices))
    done: list[_Jobs] = []
    failures: list[str] = []
    with (
        Pool() as pool,
        closing(Background(pool.size)) as compiling,
        closing(Background(1)) as choosing,  # one thread: only one at a time may use SymPy
    ):
        builder = _Builder(folder, pool, compiling)
        unique = dict.fromkeys(problem.normal() for problem in problems)
        pairs = [(problem, device) for device in devices for problem in unique]
        begun = [choosing.submit(builder.begin, *pair, directions) for pair in pairs]
        for number, future in enumerate(begun, 1):
            done.append(work := future.result())
            for job in work.jobs:
                try:
                    _, binary = job.built.result()
                except BuildFailed as error:
                    failures.append(f"{job.kernel} of '{work.problem}': {error}")
                    continue
                on_kernel(BuiltKernel(work.problem, binary, number - (job is not work.jobs[-1])))
    if failures:
        raise BuildFailed(
            f"{len(failures)} of {sum(len(work.jobs) for work in done)} kernels could not be "
            f"built: {failures[0]}; finished kernels are kept in {out}, without a manifest"
        )
    return folder.finish(_manifest(done, folder.versions))


def _say_left_out(problem: AttentionProblem, device: GpuSpec, direction: Direction | None) -> None:
    """Log the families that a call would use, and that bundles leave out."""
    of_call = families_used(Records(problem, device), direction)
    for family in (one for one in of_call if one.by_record):
        say_once(
            f"bundles leave out {family.name}: they load tiles by addresses, which "
            f"{', '.join(family.names)} cannot"
        )


class _Builder:
    """Chooses and compiles kernels, each binary once."""

    def __init__(self, folder: Folder, pool: Pool, threads: Background) -> None:
        self._folder, self._pool, self._threads = folder, pool, threads
        self._lock = Lock()
        self._started: dict[tuple[str, tuple[TileConfig, ...], GpuSpec], Future[Any]] = {}
        self._compiled: BoundedCache[tuple[str, str], CompiledKernel | BuildFailed]
        self._compiled = BoundedCache(MAX_COMPILED)

    def begin(
        self,
        problem: AttentionProblem,
        device: GpuSpec | Processor,
        directions: Sequence[Direction],
    ) -> _Jobs:
        """Start building the kernels of a problem."""
        if isinstance(device, Processor):
            return self._begin_on_cpu(problem, device, directions)
        records = Records(problem, device, roles=False)
        only = directions[0] if len(directions) == 1 else None
        _say_left_out(problem, device, only)
        jobs: list[_Job] = []
        for family in families_used(records, only):
            for kernel in family.names:
                task = records.task(kernel)
                # The kernel before was submitted earlier, so waiting for it is no deadlock even
                # with a single thread.
                before = jobs[-1] if task.before else None
                built = self._threads.submit(self._choose, records, task, before)
                jobs.append(_Job(family.direction, kernel, built))
        return _Jobs(problem, device, jobs)

    def _begin_on_cpu(
        self, problem: AttentionProblem, processor: Processor, directions: Sequence[Direction]
    ) -> _Jobs:
        jobs: list[_Job] = []
        spec = spec_of_target(processor.name, processor.target.name)
        for direction in directions if len(directions) == 1 else passes_of(problem):
            for kernel, choice in choose(problem, spec, direction).items():
                rendered = render(problem, choice.config, kernel)
                built = self._threads.submit(self._build_for, processor, rendered)
                jobs.append(_Job(direction, kernel, built))
        return _Jobs(problem, processor, jobs)

    def _build_for(
        self, processor: Processor, rendered: RenderedKernel
    ) -> tuple[Choice | None, Binary]:
        """Build a kernel for a processor. Raises BuildFailed."""
        if known := self._folder.known(rendered, processor.name):
            return None, known
        built = self._compile(rendered, processor.name)
        if isinstance(built, BuildFailed):
            raise built
        source = built.rendered.source.encode()
        return None, self._folder.add(binary_of(built), built.binary, source)

    def _choose(
        self, records: Records, task: KernelTask, before: _Job | None
    ) -> tuple[Choice | None, Binary]:
        """Choose and build a kernel. A kernel that joins splits depends on the choice before it."""
        if before is not None:
            made, _ = before.built.result()
            assert made is not None
            task = joined_to(task, {before.kernel: made})
        # A program that launches raw binaries would have to build descriptors itself.
        ranked = rank(records, task, describable=False, may_compile=True)
        first = ranked.configs[0]
        digest = kernel_digest(
            task.problem, first, task.kernel, aligned=rows_are_aligned(task.problem)
        )
        key = digest, ranked.configs, task.gpu
        with self._lock:
            is_first = key not in self._started
            future = self._started.setdefault(key, Future())
        if is_first:
            try:
                future.set_result(self._build(ranked))
            except BaseException as error:
                future.set_exception(error)
        choice, binary = future.result()
        return replace(choice, ranked=ranked), binary

    def _build(self, ranked: Shortlist) -> tuple[Choice, Binary]:
        """Build the best acceptable config, or else the config that spills least."""
        kept: dict[TileConfig, Binary] = {}
        compiled: dict[TileConfig, CompiledKernel] = {}
        device = ranked.task.gpu

        def compile(tiled: Tiled) -> Resources | BuildFailed:
            rendered = render(tiled.problem, tiled.config, ranked.kernel)
            if known := self._folder.known(rendered, device.arch):
                resources = self._folder.compiled(known, rendered).resources
                if acceptable(resources, device):
                    kept[tiled.config] = known
                    return resources
            built = self._compile(rendered, device.arch)
            if isinstance(built, BuildFailed):
                return built
            compiled[tiled.config] = built
            return built.resources

        choice = best_acceptable(ranked, compile)
        if choice.config in kept:
            return choice, kept[choice.config]
        built = compiled[choice.config]
        source = built.rendered.source.encode()
        return choice, self._folder.add(binary_of(built), built.binary, source)

    def _compile(self, rendered: RenderedKernel, arch: str) -> CompiledKernel | BuildFailed:
        """Compile a kernel for an architecture. Problems with the same kernel share the result."""
        return self._compiled.get(
            (rendered.digest, arch), lambda: self._pool.compile(rendered, arch, line_info=False)
        )


def binary_of(compiled: CompiledKernel) -> Binary:
    """Return the manifest's entry of a compiled kernel."""
    rendered = compiled.rendered
    problem = rendered.problem
    stem = f"{rendered.function}_{problem.dtype}_g{problem.group_size}"
    sha256 = hashlib.sha256(compiled.binary).hexdigest()
    scratch = ((f"scratch_{i}", "*u8") for i in range(compiled.scratch_pointers))
    return Binary(
        # Two kernels may have the same code: their files still differ, by the kernels' digests.
        file=f"{compiled.arch}/{stem}_{rendered.digest[:8]}_{sha256[:8]}.{compiled.extension}",
        sha256=sha256,
        source=f"kernels/{stem}_{rendered.digest[:8]}.py",
        source_sha256=hashlib.sha256(rendered.source.encode()).hexdigest(),
        launch_sha256=hashlib.sha256(launch_of(rendered.source).encode()).hexdigest(),
        kernel=rendered.kernel,
        arch=compiled.arch,
        function=rendered.function,
        config=rendered.config,
        arguments=(*rendered.signature, *scratch),
        stride_unit=stride_unit(problem, rendered.aligned),
        grid=grid_of(rendered.kernel, rendered.config, problem.group_size),
        threads=compiled.threads,
        resources=compiled.reported,
        digest=rendered.digest,
        template_digest=template_digest(rendered.kernel),
        on_cpu=compiled.on_cpu,
    )


def _manifest(done: Sequence[_Jobs], versions: dict[str, str]) -> Manifest:
    served: list[Served] = []
    binaries: dict[str, Binary] = {}
    for work in done:
        passes: dict[Direction, BundledPass] = {}
        built = {job.kernel: job.built.result() for job in work.jobs}
        binaries |= {binary.file: binary for _, binary in built.values()}
        for direction in FAMILIES:
            kernels = [job.kernel for job in work.jobs if job.direction == direction]
            if kernels:
                passes[direction] = BundledPass(
                    binaries={kernel: built[kernel][1].file for kernel in kernels},
                    config_from={kernel: _origin(built[kernel][0]) for kernel in kernels},
                )
        served.append(
            Served(
                problem=work.problem.key,
                serves=representative(work.problem).key,
                gpu=work.device.name,
                arch=_arch(work.device),
                aligned=rows_are_aligned(work.problem),
                passes=passes,
            )
        )
    return Manifest(versions=versions, problems=tuple(served), binaries=tuple(binaries.values()))


def _origin(choice: Choice | None) -> BundledOrigin:
    return "model" if choice is None or choice.ranked.origin == "model" else "record"


def _arch(device: GpuSpec | Processor) -> str:
    return device.name if isinstance(device, Processor) else device.arch


def _versions(devices: Sequence[GpuSpec | Processor]) -> dict[str, str]:
    """Return the versions of all that determines a bundle's bytes. Raises Unsupported without a
    linker for a processor."""
    import triton

    def release(tool: str) -> str:
        output = subprocess.run(
            [nvidia_tool(tool), "--version"], capture_output=True, text=True, check=True
        ).stdout
        match = re.search(r"\bV(\d+\.\d+\.\d+)", output)
        return match[1] if match else ""

    linkers = [linker_of(device) for device in devices if isinstance(device, Processor)]
    on_cpu: dict[str, str] = {}
    if linkers:
        on_cpu["llvmlite"] = version("llvmlite")
        on_cpu["linker"] = ", ".join(sorted(set(map(release_of, linkers))))
    return {
        "tilegen": __version__,
        "triton": triton.__version__,
        **on_cpu,
        "ptxas": release("ptxas"),  # up to sm_90
        "ptxas_blackwell": release("ptxas-blackwell"),  # from sm_100 on
    }
