"""Ahead of time: emitted kernels and binaries for a list of problems, with one manifest. No GPU
needed."""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilegen.bounded_cache import BoundedCache
from tilegen.bundles.folder import Folder
from tilegen.bundles.manifest import Binary, Manifest, Origin, Pass, Served
from tilegen.choose.families import kernels_used, passes_of
from tilegen.choose.known import Known
from tilegen.compiling.acceptable import acceptable
from tilegen.compiling.background import Background
from tilegen.compiling.compiler import CompiledKernel
from tilegen.compiling.tools import nvidia_tool
from tilegen.compiling.workers import Pool
from tilegen.emit.identity import (
    RenderedKernel,
    kernel_digest,
    representative,
    rows_are_aligned,
    stride_unit,
    template_digest,
)
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, grid_of
from tilegen.kernels.spec import Direction
from tilegen.model.resources import Resources
from tilegen.pipeline import Ranked, best_acceptable, rank
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

MAX_COMPILED = 1024
"""Number of kernels that are remembered for other problems that may ask for them."""
BOTH: tuple[Direction, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Made:
    """One kernel of one problem that has been built."""

    problem: AttentionProblem
    binary: Binary
    problems_done: int
    """Number of problems that are built; one counts once for each architecture."""


@dataclass(frozen=True)
class _Choice:
    """A kernel of a problem, and the binary that it will have."""

    direction: Direction
    kernel: Kernel
    origin: Origin
    binary: Future[Binary]


@dataclass(frozen=True)
class _Chosen:
    """All kernels of a problem on a GPU."""

    problem: AttentionProblem
    gpu: GpuSpec
    choices: list[_Choice]


def generate(
    problems: Sequence[AttentionProblem],
    gpus: Sequence[GpuSpec],
    out: Path,
    *,
    directions: Sequence[Direction] = BOTH,
    on_kernel: Callable[[Made], None] = lambda made: None,
) -> Path:
    """Write kernels, binaries and manifest under `out` and return the manifest's path.

    The config of each kernel is that of its record, else the model's best that compiles without
    spilling. All cores compile. The same inputs and versions give the same bytes, and a run that
    was stopped goes on where it was. Raises BuildFailed once all else is built.
    """
    folder = Folder(out, _versions())
    chosen: list[_Chosen] = []
    failures: list[str] = []
    with (
        Pool() as pool,
        closing(Background(pool.size)) as compiling,
        closing(Background(1)) as choosing,  # one: it is SymPy's
    ):
        builder = _Builder(folder, pool, compiling)
        wanted = dict.fromkeys(problem.normal() for problem in problems)
        asked = [(problem, gpu) for gpu in gpus for problem in wanted]
        begun = [choosing.submit(builder.begin, *one, directions) for one in asked]
        for done, future in enumerate(begun, 1):
            chosen.append(one := future.result())
            for choice in one.choices:
                try:
                    binary = choice.binary.result()
                except BuildFailed as error:
                    failures.append(f"{choice.kernel} of '{one.problem}': {error}")
                    continue
                on_kernel(Made(one.problem, binary, done - (choice is not one.choices[-1])))
    if failures:
        raise BuildFailed(
            f"{len(failures)} of {sum(len(one.choices) for one in chosen)} kernels could not be "
            f"built: {failures[0]}; what was built is kept in {out}, without a manifest"
        )
    return folder.finish(_manifest(chosen, folder.versions))


class _Builder:
    """Chooses and compiles kernels, each binary once."""

    def __init__(self, folder: Folder, pool: Pool, threads: Background) -> None:
        self._folder, self._pool, self._threads = folder, pool, threads
        self._started: dict[tuple[str, tuple[TileConfig, ...], GpuSpec], Future[Binary]] = {}
        self._compiled: BoundedCache[tuple[str, str], CompiledKernel | BuildFailed]
        self._compiled = BoundedCache(MAX_COMPILED)

    def begin(
        self, problem: AttentionProblem, gpu: GpuSpec, directions: Sequence[Direction]
    ) -> _Chosen:
        """Start to build the kernels of a problem."""
        choices: list[_Choice] = []
        known = Known(problem, gpu)
        passes = passes_of(known.problem)
        for direction in passes if len(directions) > 1 else directions:
            for kernel in kernels_used(known, direction):
                # A program that launches raw binaries would have to build descriptors itself.
                ranked = rank(known, kernel, describable=False, may_compile=True)
                key = (
                    kernel_digest(problem, ranked.configs[0], kernel, rows_are_aligned(problem)),
                    ranked.configs,
                    gpu,
                )
                if key not in self._started:
                    self._started[key] = self._threads.submit(self._build, problem, ranked, gpu)
                origin: Origin = "model" if ranked.origin == "model" else "record"
                choices.append(_Choice(direction, kernel, origin, self._started[key]))
        return _Chosen(problem, gpu, choices)

    def _build(self, problem: AttentionProblem, ranked: Ranked, gpu: GpuSpec) -> Binary:
        """Return the best that is acceptable, else the one that spills least."""

        kept: dict[TileConfig, Binary] = {}
        compiled: dict[TileConfig, CompiledKernel] = {}

        def compile(config: TileConfig) -> Resources | BuildFailed:
            rendered = render(problem, config, ranked.kernel)
            if known := self._folder.known(rendered, gpu.arch):
                resources = self._folder.compiled(known, rendered).resources
                if acceptable(resources, gpu):
                    kept[config] = known
                    return resources
            built = self._compile(rendered, gpu.arch)
            if isinstance(built, BuildFailed):
                return built
            compiled[config] = built
            return built.resources

        config = best_acceptable(problem, gpu, ranked, compile).config
        if config in kept:
            return kept[config]
        built = compiled[config]
        return self._folder.add(binary_of(built), built.binary, built.rendered.source.encode())

    def _compile(self, rendered: RenderedKernel, arch: str) -> CompiledKernel | BuildFailed:
        """Return what compiling gives; problems with the same kernel wait for each other."""
        return self._compiled.get(
            (rendered.digest, arch), lambda: self._pool.compile(rendered, arch, line_info=False)
        )


def binary_of(compiled: CompiledKernel) -> Binary:
    """Return what the manifest says of a kernel."""
    rendered = compiled.rendered
    problem = rendered.problem
    stem = f"{rendered.function}_{problem.dtype}_g{problem.group_size}"
    sha256 = hashlib.sha256(compiled.binary).hexdigest()
    scratch = ((f"scratch_{i}", "*u8") for i in range(compiled.scratch_pointers))
    return Binary(
        # Two kernels may have the same code; each has a binary of its own, with its own digest.
        file=f"{compiled.arch}/{stem}_{rendered.digest[:8]}_{sha256[:8]}.{compiled.extension}",
        sha256=sha256,
        source=f"kernels/{stem}_{rendered.digest[:8]}.py",
        source_sha256=hashlib.sha256(rendered.source.encode()).hexdigest(),
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
    )


def _manifest(chosen: Sequence[_Chosen], versions: dict[str, str]) -> Manifest:
    served: list[Served] = []
    binaries: dict[str, Binary] = {}
    for one in chosen:
        passes: dict[Direction, Pass] = {}
        for direction in FAMILIES:
            its = [choice for choice in one.choices if choice.direction == direction]
            if its:
                passes[direction] = Pass(
                    binaries={choice.kernel: choice.binary.result().file for choice in its},
                    config_from={choice.kernel: choice.origin for choice in its},
                )
        binaries |= {made.file: made for made in (choice.binary.result() for choice in one.choices)}
        served.append(
            Served(
                problem=one.problem.key,
                serves=representative(one.problem).key,
                gpu=one.gpu.name,
                arch=one.gpu.arch,
                aligned=rows_are_aligned(one.problem),
                passes=passes,
            )
        )
    return Manifest(versions=versions, problems=tuple(served), binaries=tuple(binaries.values()))


def _versions() -> dict[str, str]:
    import triton

    from tilegen.version import __version__

    def release(tool: str) -> str:
        said = subprocess.run(
            [nvidia_tool(tool), "--version"], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(r"\bV(\d+\.\d+\.\d+)", said)
        return found[1] if found else ""

    return {
        "tilegen": __version__,
        "triton": triton.__version__,
        "ptxas": release("ptxas"),  # up to sm_90
        "ptxas_blackwell": release("ptxas-blackwell"),  # from sm_100 on
    }
