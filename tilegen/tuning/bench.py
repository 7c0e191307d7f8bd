"""The tuner's machine, which compiles ahead, measures and checks configs. Tests replace it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from tilegen import cpu
from tilegen.check import in_child
from tilegen.compiling.acceptable import why_not_run, why_not_spilled, why_not_used
from tilegen.compiling.workers import compile_many
from tilegen.device import Device
from tilegen.emit.render import render
from tilegen.errors import BuildFailed, TilegenError, Unsupported, WrongResult
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import SCORE_WIDTH, Launch
from tilegen.kernels.passes import delta_of
from tilegen.kernels.registry import KERNELS, partners, smallest_config
from tilegen.kernels.results import allocate
from tilegen.kernels.spec import KernelSpec
from tilegen.model.resources import Resources
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.measure import Measurement, failed, measure, one_line, survived

if TYPE_CHECKING:
    import torch

    from tilegen.compiling.workers import Pool
    from tilegen.masks.mask import Mask


Measure = Callable[[TileConfig], Measurement]
CompileAll = Callable[[Sequence[TileConfig]], Iterable[tuple[TileConfig, Resources | BuildFailed]]]
"""Function that compiles configs without the GPU, and yields each as it finishes, in any order."""
CheckConfig = Callable[[TileConfig], Measurement | None]
"""Function that returns None if a config's results are right; otherwise a measurement, whose
message describes the mistake."""

DEVICE = "cuda:0"
"""Device on which configs are timed."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The functions that compile, measure and check configs; a step that is None is left out."""

    measure: Measure
    compile: CompileAll | None = None
    check: CheckConfig | None = None
    confirm: Callable[[TileConfig], bool] | None = None
    """Compares a config with `in_hand` once more; False if it is not surely faster."""
    resume: Callable[[Measurement], None] | None = None
    """Takes the measurement of `in_hand` in an earlier run, to which further times are scaled."""
    in_hand: TileConfig | None = None
    """The config that the others must beat: the choice without tuning."""


def real_bench(task: KernelTask, pool: Pool) -> Bench:
    """Return the bench of the local GPU, or of the processor. On a GPU it compiles in `pool`, never
    in the process that measures. Raises Unsupported if the task is for another device."""
    from tilegen.gpus.spec import detect

    if not isinstance(task.device, GpuSpec):
        return cpu_bench(task)
    here, gpu = detect(), task.device
    if here is None or (here.name, here.arch) != (gpu.name, gpu.arch):
        detected = f"found {here.name} ({here.arch})" if here else "found no GPU"
        raise Unsupported(
            f"tuning for {gpu.name} ({gpu.arch}) needs that GPU at hand, {detected}; "
            "without it, take the model's choice: tilegen propose"
        )
    return Bench(
        measure=_measure_with(task),
        compile=lambda configs: compile_ahead(task, configs, pool),
        check=lambda config: check_config(task.problem, task.kernel, config),
    )


def cpu_bench(task: KernelTask) -> Bench:
    """Return the bench of this machine's processor. Raises Unsupported if the task is for another
    processor."""
    from tilegen.choose.on_cpu import chosen_config
    from tilegen.cpus.host import current_cpu
    from tilegen.tuning.in_turns import InTurns
    from tilegen.tuning.judged_rates import judge

    if reason := cpu.why_not():
        raise Unsupported(f"tuning for a processor measures compiled kernels, but {reason}")
    here = current_cpu()
    if here.name != task.device.name:
        raise Unsupported(
            f"tuning for {task.device.name} needs that processor, found {here.name}; "
            "elsewhere, take the choice of the model"
        )
    turns = InTurns(chosen_config(task), lambda: Timed.of(task, "cpu").runs)

    def measure_config(config: TileConfig) -> Measurement:
        measured = turns.measure(config)
        if config == turns.in_hand and measured.median_us is not None:
            judge(task, config, 1e-6 * measured.median_us)
        return measured

    return Bench(
        measure=measure_config,
        check=lambda config: check_config(task.problem, task.kernel, config, device="cpu"),
        confirm=turns.confirm,
        resume=turns.resume,
        in_hand=turns.in_hand,
    )


def refused(built: Resources | BuildFailed, gpu: Device) -> Measurement | None:
    """Return a failed measurement if a compiled config is not worth GPU time, otherwise None."""
    if isinstance(built, BuildFailed):
        return failed(built)
    assert isinstance(gpu, GpuSpec), gpu  # configs for a processor are compiled as they are timed
    if reason := why_not_run(built, gpu):
        return Measurement(status="out_of_resources", message=reason)
    if reason := why_not_used(built, gpu):
        return Measurement(status="declined", message=reason)
    return None


def as_tuned(measurement: Measurement, spill_bytes: int) -> Measurement:
    """Replace the time of a kernel that spills much by a failure. The tuner times such kernels only
    if no other config runs."""
    reason = why_not_spilled(spill_bytes)
    return Measurement(status="declined", message=reason) if reason else measurement


class Ahead:
    """A thread that compiles the configs to be measured next."""

    def __init__(self, compile_all: CompileAll) -> None:
        self._compile_all = compile_all
        self._built: dict[TileConfig, Future[Resources | BuildFailed]] = {}
        self._batches: SimpleQueue[Sequence[TileConfig] | None] = SimpleQueue()
        self._stopped = False
        threading.Thread(target=self._work, name="tilegen-compile", daemon=True).start()

    def submit(self, configs: Sequence[TileConfig]) -> None:
        """Queue `configs` for compilation, after the configs of earlier calls."""
        self._built |= {config: Future() for config in configs}
        self._batches.put(list(configs))

    def result(self, config: TileConfig, timeout: float | None = None) -> Resources | BuildFailed:
        """Wait for a submitted config. Raises TimeoutError, or the error that ended its batch."""
        return self._built[config].result(timeout)

    def close(self) -> None:
        """Stop after the present compilation."""
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
            except BaseException as raised:  # `result` raises it in its caller
                error = raised
            for config in batch:
                if not self._built[config].done():
                    self._built[config].set_exception(error)


def _generator(compile_all: CompileAll, batch: Sequence[TileConfig]) -> Any:
    yield from compile_all(batch)


def compile_ahead(
    task: KernelTask, configs: Sequence[TileConfig], pool: Pool
) -> Iterable[tuple[TileConfig, Resources | BuildFailed]]:
    """Compile configs, and yield each as it finishes; a failure is yielded as a value."""

    kernels = [render(task.problem, config, task.kernel) for config in configs]
    for rendered, built in compile_many(kernels, task.device.arch, pool=pool):
        is_failure = isinstance(built, BuildFailed)
        yield rendered.config, built if is_failure else built.resources


def _measure_with(task: KernelTask) -> Measure:
    """Return a function that times a config of a kernel on inputs of the problem's shape."""
    inputs: list[Timed] = []

    def measure_config(config: TileConfig) -> Measurement:
        if not inputs:
            try:
                inputs.append(Timed.of(task, DEVICE))
            except TilegenError:
                raise
            except RuntimeError as error:  # such as torch.OutOfMemoryError
                raise Unsupported(f"no inputs for '{task.problem}': {one_line(error)}") from error
        if task.spec.specialised and (reason := in_child.check(task.tiled(config))):
            return Measurement(status="wrong", message=one_line(reason))
        try:
            run = inputs[0].runs(config)
        except TilegenError as error:
            return failed(error)
        return measure(run)

    return measure_config


@dataclass(frozen=True, kw_only=True)
class Timed:
    """A kernel of a problem, with the inputs on which it is timed."""

    problem: AttentionProblem
    kernel: Kernel
    device: torch.device
    launches: list[tuple[Any, ...]]
    """Arguments of each launch."""
    mask: Mask
    """Mask of the problem, with typical tensors in place of the tensors that it reads."""
    reads: dict[str, Any]
    """Typical tensors of score and dropout, by the names of the parameters of launches."""

    @classmethod
    def of(cls, task: KernelTask, device: str) -> Timed:
        """Create the inputs. Raises RuntimeError if there is too little memory."""

        from tilegen.masks.dropout import Dropout
        from tilegen.masks.tensors import score_tensors, typical_score

        problem, launches = task.problem, make_launches(task, device)
        score = typical_score(problem.score, problem.shape, device)
        dropout = Dropout.typical(problem.dropout, torch.device(device))
        reads: dict[str, Any] = dropout.given if dropout else {}
        if score:
            trained = score.form.trained if "training" in task.spec.supports else ()
            sizes = {slot: score.captured[slot].shape for slot in trained}
            sums = {slot: torch.zeros(size, device=device) for slot, size in sizes.items()}
            reads |= score_tensors(score.captured, score.sink_logits, sums)
        return cls(
            problem=problem,
            kernel=task.kernel,
            device=torch.device(device),
            launches=launches,
            mask=problem.mask.realized(problem.shape, device),
            reads=reads,
        )

    def runs(self, config: TileConfig) -> Callable[[], None]:
        """Return a function that makes all launches of the kernel once, with a config. Raises
        TilegenError."""
        from tilegen.launch.bound_module import bound_kernel

        bound = bound_kernel(render(self.problem, config, self.kernel), self.device)
        launch = bound.given(self.mask, self.problem.shape, self.device, self.reads)

        def run() -> None:
            for arguments in self.launches:
                launch(*arguments)

        return run


def make_launches(task: KernelTask, device: str) -> list[tuple[Any, ...]]:
    """Create random arguments for each `launch` of a kernel: a single launch, or one per panel.

    The kernel's family runs with functions that record arguments. Times depend little on values.
    """

    from tilegen.check.paging import in_pages
    from tilegen.check.reference import TORCH_DTYPES
    from tilegen.model.splits import usual_split

    problem, kernel = task.problem, task.kernel
    generator = torch.Generator(device).manual_seed(0)
    dtype = TORCH_DTYPES[problem.dtype]
    rows = (problem.batch, problem.num_heads_q, problem.seqlen_q)
    columns = (problem.batch, problem.num_heads_kv, problem.seqlen_kv)
    qk, v_dim = problem.head_dim_qk, problem.head_dim_v

    def random(shape: Sequence[int], dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    keys = usual_split(problem).split_kv
    recorded: list[tuple[Any, ...]] = []
    outputs: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def recording(spec: KernelSpec) -> Launch:
        def launch(*arguments: Any, laid: None = None) -> Any:
            if spec.name == kernel:
                recorded.append(arguments)
            named = dict(zip(spec.parameters, arguments, strict=True))
            results: list[Any] = []
            for name in spec.allocated:
                width = keys if spec.parts else SCORE_WIDTH
                like = allocate(spec, name, named, 8, width, pairs=problem.pair_lse)
                # Panels of the same size share a tensor.
                if (key := (name, like.shape)) not in outputs:
                    outputs[key] = random(like.shape, like.dtype)
                results.append(outputs[key])
            results += [SCORE_WIDTH] if spec.returns else []
            return results[0] if len(results) == 1 else tuple(results)

        return launch

    family = task.family
    launches = {spec.name: recording(spec) for spec in family.kernels}
    q, k = random((*rows, qk)), random((*columns, qk))
    v = k[..., :v_dim] if problem.latent else random((*columns, v_dim))
    if family.direction == "forward":
        options: dict[str, Any] = {"pairs": True} if problem.pair_lse else {}
        if problem.page:
            q, k, v, options["requests"] = in_pages(q, k, v, problem.page)
        family.run(launches, q, k, v, qk**-0.5, panel_rows=task.panel_rows, **options)
        return recorded
    out, dout = random((*rows, v_dim)), random((*rows, v_dim))
    delta = delta_of(launches, out, dout)
    if "delta" not in task.spec.allocated:
        # The lse of a dense forward on such inputs, whose logits are normal with variance 1.
        pair = (2,) if problem.pair_lse else ()
        shape = *rows[:2], *pair, rows[2]
        lse = torch.full(shape, math.log(problem.seqlen_kv) + 0.5, device=device)
        family.run(launches, q, k, v, dout, lse, delta, qk**-0.5, panel_rows=task.panel_rows)
    return recorded


def check_config(
    problem: AttentionProblem, kernel: Kernel, config: TileConfig, device: str | None = None
) -> Measurement | None:
    """Describe a wrong result of a config at a reduced size; None if all results are right.

    A kernel runs together with its partners, which use their smallest tiles. Raises WrongResult if
    the results are wrong even with the kernel's own smallest tile, since the config is then not to
    blame. Raises DeviceLost.
    """
    from tilegen.check.sizes import reduced

    small = reduced(problem)
    others: dict[Kernel, TileConfig] = {
        name: smallest_config(name) for name in partners(kernel, problem)
    }
    mistake = _mistake(small, {**others, kernel: config}, kernel, device)
    if len(others) == 1 or mistake is None:
        return mistake
    if (theirs := _mistake(small, others, kernel, device)) is not None:
        raise WrongResult(
            "expected kernels that are right with the smallest tiles "
            f"({smallest_config(kernel).key}), to check {kernel} with; "
            f"for '{small}' they are {theirs.failure}; look closer: tilegen verify '{small}'"
        )
    return mistake


def _mistake(
    problem: AttentionProblem,
    configs: dict[Kernel, TileConfig],
    kernel: Kernel,
    device: str | None = None,
) -> Measurement | None:
    """Describe a wrong result among the tensors that check `kernel`; None if all are right."""
    from tilegen.check.verification import verify

    try:
        checks = verify(problem, configs, device=device)
    except Exception as error:  # as in `measure`: any error of a kernel is a result
        return survived(error)
    shown = KERNELS[kernel].checked_by
    own = (check for check in checks if check.tensor.rstrip("0123456789") in shown)
    wrong = [str(check) for check in own if not check.ok]
    return Measurement(status="wrong", message=one_line(wrong[0])) if wrong else None
