"""The machine behind the tuner: compile ahead, measure and check one config. Tests replace it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from tilegen.config import KERNELS, Kernel, TileConfig
from tilegen.errors import BuildFailed, TilegenError, Unsupported, WrongResult
from tilegen.measure import Measurement, failed, measure, one_line, survived
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.device import GpuSpec
    from tilegen.workers import Pool


class Usage(Protocol):
    """What the compiler says a kernel uses; `CompiledKernel` is one."""

    @property
    def shared_bytes(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...


Measure = Callable[[TileConfig], Measurement]
Compile = Callable[[Sequence[TileConfig]], Iterable[tuple[TileConfig, Usage | BuildFailed]]]
"""Compiles configs without the GPU and yields each as it finishes, in any order."""
Check = Callable[[TileConfig], Measurement | None]
"""None if the kernel's results are right, else the measurement that says what is wrong."""

SAFE = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
"""Needs the least of everything: runs on every GPU, whatever the problem."""
MAKES: dict[Kernel, tuple[str, ...]] = {
    "fwd": ("out", "lse"),
    "bwd_preprocess": ("dq", "dk", "dv"),  # its delta is seen in all of them
    "bwd_dkdv": ("dk", "dv"),
    "bwd_dq": ("dq",),
}
"""The tensors that are right only if a kernel is."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How configs are compiled, measured and checked; a part that is None is left out."""

    measure: Measure
    compile: Compile | None = None
    check: Check | None = None


def real_bench(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, pool: Pool) -> Bench:
    """Return the bench of the GPU at hand, which compiles in `pool`: never in the process that
    measures. Raises Unsupported if that GPU is not `gpu`."""
    from tilegen.device import detect

    here = detect()
    if here is None or (here.name, here.arch) != (gpu.name, gpu.arch):
        found = f"found {here.name} ({here.arch})" if here else "found no GPU"
        raise Unsupported(
            f"tuning for {gpu.name} ({gpu.arch}) needs that GPU at hand, {found}; "
            "without it, take the model's choice: tilegen propose"
        )
    return Bench(
        measure=_measure_with(problem, kernel),
        compile=lambda configs: compile_ahead(problem, gpu, kernel, configs, pool),
        check=lambda config: check_config(problem, kernel, config),
    )


def refused(built: Usage | BuildFailed, gpu: GpuSpec) -> Measurement | None:
    """Return why a compiled config is not worth GPU time, None if it is."""
    if isinstance(built, BuildFailed):
        return failed(built)
    if built.shared_bytes > gpu.smem_per_block:
        sizes = (f"{size / 1024:.4g} KiB" for size in (built.shared_bytes, gpu.smem_per_block))
        return Measurement(status="out_of_resources", message=" > ".join(sizes))
    if built.spill_bytes > 0:
        message = f"{built.spill_bytes} bytes of registers spilled a thread"
        return Measurement(status="out_of_resources", message=message)
    return None


class Ahead:
    """Compiles, in a thread of its own, what will be measured next."""

    def __init__(self, compile_all: Compile) -> None:
        self._compile_all = compile_all
        self._built: dict[TileConfig, Future[Usage | BuildFailed]] = {}
        self._batches: SimpleQueue[Sequence[TileConfig] | None] = SimpleQueue()
        self._stopped = False
        threading.Thread(target=self._work, name="tilegen-compile", daemon=True).start()

    def submit(self, configs: Sequence[TileConfig]) -> None:
        """Have `configs` compiled after those of earlier calls."""
        self._built |= {config: Future() for config in configs}
        self._batches.put(list(configs))

    def result(self, config: TileConfig, timeout: float | None = None) -> Usage | BuildFailed:
        """Wait for a submitted config. Raises TimeoutError, or what broke the compiler itself."""
        return self._built[config].result(timeout)

    def close(self) -> None:
        """Stop after what is being compiled now."""
        self._stopped = True
        self._batches.put(None)

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            error: BaseException = BuildFailed("the compiler gave no result")
            try:
                with closing(_generator(self._compile_all, batch)) as results:
                    for config, built in results:
                        self._built[config].set_result(built)
                        if self._stopped:
                            return
            except BaseException as raised:  # belongs to whoever waits for a result
                error = raised
            for config in batch:
                if not self._built[config].done():
                    self._built[config].set_exception(error)


def _generator(compile_all: Compile, batch: Sequence[TileConfig]) -> Any:
    yield from compile_all(batch)


def compile_ahead(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    configs: Sequence[TileConfig],
    pool: Pool,
) -> Iterable[tuple[TileConfig, Usage | BuildFailed]]:
    """Yield each config as its compilation for `gpu` finishes; a failure is a value."""
    from tilegen.build import compile_many
    from tilegen.render import render

    wanted = [render(problem, config, kernel) for config in configs]
    for rendered, built in compile_many(wanted, gpu.arch, pool=pool):
        yield rendered.config, built


def _measure_with(problem: AttentionProblem, kernel: Kernel) -> Measure:
    """Return a function that times one config of a kernel on inputs of the problem's shape."""
    arguments: list[Any] = []

    def measure_config(config: TileConfig) -> Measurement:
        from tilegen.emitted import load
        from tilegen.render import render

        if not arguments:
            try:
                arguments.extend(make_arguments(problem, kernel, "cuda"))
            except RuntimeError as error:  # torch's error for too little memory is one
                raise Unsupported(f"no inputs for '{problem}': {one_line(error)}") from error
        try:
            module = load(render(problem, config, kernel))
        except TilegenError as error:
            return failed(error)
        return measure(lambda: module.launch(*arguments))

    return measure_config


def make_arguments(problem: AttentionProblem, kernel: Kernel, device: str) -> list[Any]:
    """Return random arguments for `launch`; times depend little on the values."""
    import torch

    from tilegen.reference import TORCH_DTYPES

    generator = torch.Generator(device).manual_seed(0)
    dtype = TORCH_DTYPES[problem.dtype]
    rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    columns = (problem.batch, problem.num_heads_kv, problem.seqlen_kv)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    if kernel == "bwd_preprocess":
        return [random((*rows, problem.head_dim_v), dtype) for _ in ("out", "dout")]
    q = random((*rows, problem.head_dim_qk), dtype)
    k = random((*columns, problem.head_dim_qk), dtype)
    v = random((*columns, problem.head_dim_v), dtype)
    scale = problem.head_dim_qk**-0.5
    if kernel == "fwd":
        return [q, k, v, scale]
    dout = random((*rows, problem.head_dim_v), dtype)
    # What a dense forward would give on such inputs: logits are normal with variance 1.
    lse = torch.full(rows, math.log(problem.seqlen_kv) + 0.5, device=device)
    return [q, k, v, dout, lse, random(rows, torch.float32), scale]


def check_config(
    problem: AttentionProblem, kernel: Kernel, config: TileConfig
) -> Measurement | None:
    """Return what is wrong with a config at a reduced size, None if nothing is.

    A backward kernel runs together with the others, which take SAFE. Raises WrongResult where they
    fail by themselves, which says nothing about the config; DeviceLost.
    """
    from tilegen.verify import reduced

    small = reduced(problem)
    if kernel == "fwd":
        return _trouble(small, {kernel: config}, kernel)
    safe: dict[Kernel, TileConfig] = {name: SAFE for name in KERNELS}
    trouble = _trouble(small, {**safe, kernel: config}, kernel)
    if trouble is not None and (theirs := _trouble(small, safe, kernel)) is not None:
        raise WrongResult(
            f"expected kernels that are right with the smallest tiles ({SAFE.key}), to check "
            f"{kernel} with; for '{small}' they are {theirs.status.replace('_', ' ')}: "
            f"{theirs.message}; look closer: tilegen verify '{small}'"
        )
    return trouble


def _trouble(
    problem: AttentionProblem, configs: dict[Kernel, TileConfig], kernel: Kernel
) -> Measurement | None:
    """Return what is wrong with the tensors that `kernel` makes, None if nothing is."""
    from tilegen.verify import verify

    try:
        checks = verify(problem, configs)
    except Exception as error:  # as in `measure`: what a kernel raises is a result
        return survived(error)
    wrong = [str(check) for check in checks if check.tensor in MAKES[kernel] and not check.ok]
    return Measurement(status="wrong", message=one_line(wrong[0])) if wrong else None
