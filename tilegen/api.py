"""The verbs of tilegen: the main commands of the command line as functions that return records.

Every verb takes a problem (an `AttentionProblem` or its notation) and a GPU: a name of the
catalogue, a `GpuSpec`, or None for the local GPU. On a machine without a GPU, None stands for its
processor, and for the H200 in `generate` and `verify`. Bad input raises a `TilegenError` with a
one-line message. Slow modules are imported only when a verb is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tilegen.catalog import read_catalogue
from tilegen.devices import device_of, gpu_of
from tilegen.disk import log
from tilegen.environment import current
from tilegen.errors import InvalidProblem, Unsupported, did_you_mean
from tilegen.gpus.spec import GpuSpec, gpu_for
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, KERNELS, family_among
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

if TYPE_CHECKING:
    from tilegen.bundles.building import BuiltKernel
    from tilegen.bundles.manifest import Manifest
    from tilegen.check.verification import Check
    from tilegen.cpu.processors import Processor
    from tilegen.device import Device
    from tilegen.emit.identity import RenderedKernel
    from tilegen.explaining.explanation import Explanation
    from tilegen.model.estimate import Candidate
    from tilegen.store import TuningRecord

T = TypeVar("T")
ALL = "all"
"""Name for all kernels that a problem needs, forward and backward."""
LEAST_SECONDS = 0.001
"""Budget of a kernel once others have taken all of the command's: it still measures a tile [s]."""
FORWARD = "forward"
"""Name for the first kernel of a problem's forward."""


def propose(
    problem: AttentionProblem | str,
    gpu: Device | str | None = None,
    *,
    kernel: Kernel = FORWARD,
    top: int = 10,
    fast_memory: int | str | None = None,
    compile: bool = False,
) -> list[Candidate]:
    """Rank the tiles of a kernel by the cost model; return the best `top`, each with its reason.

    `kernel` defaults to the first kernel of the forward. Nothing is compiled, but each candidate's
    `compiled` holds the result of an earlier compilation, if there is one.

    With `compile`, the head of the ranking is compiled, which needs no GPU. Compiled configs come
    first, ranked by machine code, or last if they are not usable. The first is the choice of a call
    without a record. `fast_memory` ([bytes], or text such as `48KiB`) replaces the GPU's shared
    memory per program.

    Raises Unsupported, and BuildFailed if no config compiles and fits.
    """
    from tilegen.choose.compiled_candidates import with_verdicts
    from tilegen.choose.ranker import propose as ranked
    from tilegen.pipeline import choose_by_model

    device = device_of(gpu, fast_memory)
    task = _task(kernel, problem, device)
    if not isinstance(device, GpuSpec):
        if compile:
            raise Unsupported(
                f"compile is for GPUs, got the processor {device.name}; leave compile out"
            )
        return ranked(task, top=top)
    if not compile:
        return with_verdicts(task, ranked(task, top=top), {})
    choice = choose_by_model(task)
    task = choice.ranked.task  # the splits that this kernel joins are settled now
    return with_verdicts(task, ranked(task, top=top), choice.tried)[:top]


def explain(
    problem: AttentionProblem | str,
    gpu: Device | str | None = None,
    *,
    kernel: Kernel = ALL,
    config: TileConfig | str | None = None,
    fast_memory: int | str | None = None,
    by_model: bool = False,
) -> Explanation:
    """Explain the tiles that a call would launch, on a GPU or a processor: time, limit, lower
    bound, formulas, and what would change the choice.

    Without a record, a few tiles are compiled for a GPU, as a call does. With `by_model`, or with
    another `fast_memory` (see `propose`), the model's first tile is explained, nothing is compiled
    and no record is read. A `config` replaces either choice. `kernel` defaults to all kernels of
    the problem. Raises Unsupported.
    """
    from tilegen.explaining.explained import explain_all
    from tilegen.explaining.explanation import Explanation

    spec, parsed, tile = device_of(gpu, fast_memory), problem_of(problem), config_of(config)
    by_model = by_model or fast_memory is not None
    named = kernels_named if by_model else kernels_in_use
    kernels = named(kernel, parsed, spec)
    explained = explain_all(parsed, spec, kernels, tile, by_model=by_model)
    return Explanation(problem=parsed, gpu=spec, explained=explained, with_passes=kernel == ALL)


def read_code(
    problem: AttentionProblem | str,
    gpu: GpuSpec | str | None = None,
    *,
    kernel: Kernel = ALL,
    config: TileConfig | str | None = None,
    fast_memory: int | str | None = None,
) -> list[dict[str, Any]]:
    """Read the machine code of kernels, loop by loop, as values that can be written as JSON.

    Compiles `config`, or else the configs that a call would choose; needs no GPU. Raises
    Unsupported and BuildFailed.
    """
    from tilegen.explaining.machine_code import read

    spec, parsed, tile = gpu_of(device_of(gpu, fast_memory)), problem_of(problem), config_of(config)
    kernels = kernels_in_use(kernel, parsed, spec)
    return [read(_task(name, parsed, spec), tile) for name in kernels]


def show(
    problem: AttentionProblem | str,
    gpu: Device | str | None = None,
    *,
    kernel: Kernel = FORWARD,
    config: TileConfig | str | None = None,
    unaligned: bool = False,
    by_model: bool = False,
) -> RenderedKernel:
    """Emit a kernel, by default the first of the forward. Its `source` is the text of a Python file
    that needs only torch and triton.

    The config is that of a call. If there is no record, a few tiles are compiled, as a call does;
    with `by_model`, the model's first tile is taken instead and nothing is compiled. A `config`
    replaces either choice. With `unaligned`, addresses and strides need not be multiples of 16
    bytes.
    """
    from tilegen.choose.ranker import joining, propose
    from tilegen.emit.render import render
    from tilegen.pipeline import choose_kernel

    task, tile = _task(kernel, problem, device_of(gpu)), config_of(config)
    if tile is None and by_model:
        tile = propose(joining(task), top=1)[0].config
    tile = tile or choose_kernel(task, may_compile=True).config
    return render(task.problem, tile, task.kernel, aligned=False if unaligned else None)


def generate(
    problem: AttentionProblem | str | Sequence[AttentionProblem | str] = (),
    gpu: GpuSpec | Processor | str | Sequence[GpuSpec | Processor | str] | None = None,
    *,
    out: Path | str = "dist",
    catalog: Path | str | None = None,
    arch: str | Sequence[str] = (),
    forward_only: bool = False,
    on_kernel: Callable[[BuiltKernel], None] = lambda made: None,
) -> Manifest:
    """Write a bundle of kernels and binaries to the folder `out`; return its manifest. Needs no
    GPU.

    `problem` is a single problem or several; a `catalog` file of problems may replace it. `gpu` is
    a single GPU or several; an `arch` such as `sm_90` or `x86-64-v3` may replace it, and takes the
    GPU that stands for the architecture. `forward_only` leaves out the backward. `on_kernel` is
    called with each binary once it is built. To continue a stopped run, call the function again.
    Raises Unsupported, and BuildFailed after all other kernels are built.
    """
    from tilegen.bundles.building import BOTH
    from tilegen.bundles.building import generate as write_bundle
    from tilegen.bundles.served import Bundle

    problems, devices, out = problems_of(problem, catalog), devices_of(gpu, arch), Path(out)
    directions = ("forward",) if forward_only else BOTH
    path = write_bundle(problems, devices, out, directions=directions, on_kernel=on_kernel)
    return Bundle(path.parent).manifest


def tune(
    problem: AttentionProblem | str,
    gpu: Device | str | None = None,
    *,
    kernel: Kernel = ALL,
    seconds: float | None = None,
    trials: int | None = None,
    confirm: bool = False,
) -> list[TuningRecord]:
    """Measure configs on the local GPU, or on the processor of a machine without a GPU; return the
    record of the best config of each kernel.

    Records and trials are saved in the local cache. The budget is `seconds` for all kernels of this
    run together, `trials` of each kernel over all runs, or both. Without a budget all configs are
    tried, on a processor for CPU_SECONDS a kernel. By default all kernels of a problem are tuned,
    but no backward of a problem with one query. A `gpu` must be the local GPU.

    With `confirm` nothing is searched: winners of other machines are timed in turns with the own
    choices, without a budget, and the records of what this machine found are returned.

    With TILEGEN_LIBRARIES=1 PyTorch's own kernels are measured too, for each pass whose kernels are
    all tuned. Raises Unsupported without the device, and NoRecord if no config runs.
    """
    from tilegen.tuning.here import tuned_device
    from tilegen.tuning.jobs import jobs_of
    from tilegen.tuning.tuner import CPU_SECONDS
    from tilegen.tuning.tuner import tune as tuned

    parsed = problem_of(problem)
    spec = tuned_device() if gpu is None else device_of(gpu)
    named = None if kernel == ALL else kernels_named(kernel, parsed, spec)
    jobs = jobs_of([parsed.normal()], spec, named)
    if confirm:
        from tilegen.tuning.confirming import confirm as confirmed

        return [record for job in jobs if (record := confirmed(job.task))]
    if not isinstance(spec, GpuSpec) and seconds is None and trials is None:
        seconds = CPU_SECONDS * len(jobs)
    started = time.monotonic()
    records: list[TuningRecord] = []
    for i, job in enumerate(jobs):
        share = None
        if seconds is not None:  # what a kernel leaves is for those after it
            left = started + seconds - time.monotonic()
            share = max(left / (len(jobs) - i), LEAST_SECONDS)
        records.append(tuned(job.task, seconds=share, trials=trials))
    if current().libraries and isinstance(spec, GpuSpec):
        from tilegen.tuning.libraries import tune_libraries

        for direction in FAMILIES:
            if family_among([job.kernel for job in jobs], direction):
                tune_libraries(parsed, spec, direction, command=f"tilegen tune '{parsed.bucket}'")
    return records


def verify(
    problem: AttentionProblem | str,
    gpu: GpuSpec | str | None = None,
    *,
    config: TileConfig | str | None = None,
) -> tuple[Check, ...]:
    """Compare each output of forward and backward with the reference; return a `Check` for each.

    The kernels are those chosen for `gpu`. They run on the local GPU, or compiled for the CPU on a
    machine without a GPU. A `config` replaces the choice for every kernel. A wrong output has a
    `Check` that is not `ok`. If the problem is too large for this machine, a reduced size is
    checked, which is logged.
    """
    from tilegen.check import verification
    from tilegen.check.sizes import checkable
    from tilegen.pipeline import choose

    parsed, spec, tile = problem_of(problem).normal(), gpu_of(gpu), config_of(config)
    chosen = choose(parsed, spec)
    if (smaller := checkable(parsed)) != parsed:
        log.info("problem too large to check here; checking the same kernels on '%s'", smaller)
    configs = {kernel: tile or choice.config for kernel, choice in chosen.items()}
    return verification.verify(smaller, configs)


# --------------------------------------------------------------------------------------------------
# Parsing the arguments of verbs and commands


def problem_of(given: AttentionProblem | str) -> AttentionProblem:
    """Return a problem unchanged, or parse its notation. Raises InvalidProblem and Unsupported."""
    if isinstance(given, AttentionProblem):
        return given
    if not isinstance(given, str):
        raise InvalidProblem(
            "problem must be an AttentionProblem or its notation, such as "
            f"'hq32 hkv8 q4096 d128 bf16 causal'; got {given!r}"
        )
    return AttentionProblem.parse(given)


def problems_of(
    given: AttentionProblem | str | Sequence[AttentionProblem | str],
    catalog: Path | str | None = None,
) -> list[AttentionProblem]:
    """Return the problems of an argument, or else of a catalogue file. Raises InvalidProblem and
    Unsupported."""

    several = _several(given)
    if bool(several) == bool(catalog):
        raise Unsupported("expected problems or a catalog (--catalog FILE), got both or neither")
    return read_catalogue(Path(catalog)) if catalog else [problem_of(item) for item in several]


def devices_of(
    given: GpuSpec | Processor | str | Sequence[GpuSpec | Processor | str] | None,
    arch: str | Sequence[str] = (),
) -> list[GpuSpec | Processor]:
    """Return the GPUs of an argument, or else the processors, and the GPUs that stand for
    architectures. Raises Unsupported."""
    from tilegen.cpu.processors import PROCESSORS, Processor

    archs = _several(arch)
    if given is not None and archs:
        raise Unsupported("expected an arch such as sm_90 or a GPU, got both")
    if archs:
        try:
            return [PROCESSORS.get(name) or gpu_for(name) for name in archs]
        except Unsupported as error:
            raise Unsupported(f"{error}; for CPUs one of {', '.join(PROCESSORS)}") from None
    several = _several(given)
    return [item if isinstance(item, Processor) else gpu_of(item) for item in several]


def _several(given: T | Sequence[T]) -> list[T]:
    """Return the argument as a list; a text or a record is a single item."""
    if isinstance(given, list | tuple):
        return list(cast("Sequence[T]", given))
    return [cast("T", given)]


def config_of(given: TileConfig | str | None) -> TileConfig | None:
    """Return a config unchanged, or parse a text such as `m128n64w8s3`. Raises Unsupported."""
    if given is None or isinstance(given, TileConfig):
        return given
    if not isinstance(given, str):
        raise Unsupported(f"config must be a TileConfig or text such as m128n64w8s3, got {given!r}")
    return TileConfig.parse(given)


def kernel_named(name: str) -> Kernel:
    """Check the name of a kernel and return it. Raises Unsupported."""
    if name in KERNELS:
        return name
    hint = did_you_mean(name, KERNELS)
    raise Unsupported(f"kernel must be one of {', '.join(KERNELS)}; got {name!r}{hint}")


def kernel_for(name: str, problem: AttentionProblem, gpu: Device) -> Kernel:
    """Return the kernel with a name; for `forward`, the first kernel that a call uses. Raises
    Unsupported."""
    return kernels_in_use(ALL, problem, gpu)[0] if name == FORWARD else kernel_named(name)


def _task(kernel: str, problem: AttentionProblem | str, device: Device) -> KernelTask:
    """Return the task of a kernel by its name; for `forward`, of the first that a call uses."""

    parsed = problem_of(problem).normal()
    return KernelTask.of(kernel_for(kernel, parsed, device), parsed, device)


def kernels_in_use(name: str, problem: AttentionProblem, gpu: Device) -> tuple[Kernel, ...]:
    """Return the kernel with a name; for `all`, the kernels that a call uses, which depend on
    records. Raises Unsupported."""
    from tilegen.choose.families import kernels_used
    from tilegen.choose.records import Records

    return kernels_used(Records(problem, gpu)) if name == ALL else (kernel_named(name),)


def kernels_named(name: str, problem: AttentionProblem, gpu: Device) -> tuple[Kernel, ...]:
    """Return the kernel with a name; for `all`, the kernels that the problem needs. Raises
    Unsupported."""
    from tilegen.choose.families import kernels_of

    return kernels_of(problem, gpu) if name == ALL else (kernel_named(name),)
