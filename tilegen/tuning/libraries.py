"""Measurement of PyTorch's own kernels for a whole pass, as tilegen's kernels are measured: from a
cold L2, and with results that are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilegen.choose.libraries import why_not
from tilegen.disk import log
from tilegen.errors import Unsupported
from tilegen.kernels.spec import Direction
from tilegen.masks.mask import Causal
from tilegen.problem import AttentionProblem
from tilegen.store.library_record import BACKENDS, Backend, LibraryRecord, save_library
from tilegen.store.versions import current_versions, now
from tilegen.tuning.bench import DEVICE
from tilegen.tuning.measure import DeviceLost, Measurement, failed, measure, one_line, survived, us

if TYPE_CHECKING:
    import torch

    from tilegen.gpus.spec import GpuSpec


@dataclass(frozen=True, kw_only=True)
class LibraryBench:
    """The functions that measure and check a library; tests replace them."""

    measure: Callable[[Backend], Measurement]
    check: Callable[[Backend], Measurement | None]
    """Function that returns None if a library's results are right; otherwise a measurement, whose
    message describes the mistake."""


def tune_libraries(
    problem: AttentionProblem,
    gpu: GpuSpec,
    direction: Direction,
    *,
    bench: LibraryBench | None = None,
    command: str = "",
) -> LibraryRecord | None:
    """Measure the libraries that support a pass, and save the record of the fastest with right
    results in the local cache. Return the record; None if no library qualifies. Raises DeviceLost.
    """
    problem = problem.bucket
    timed: dict[Backend, Measurement] = {}
    supported: list[Backend] = [backend for backend in BACKENDS if not why_not(problem, backend)]
    bench = bench or _real_bench(problem, direction)
    for backend in supported:
        result = bench.measure(backend)
        if result.status == "ok" and (trouble := bench.check(backend)) is not None:
            result = trouble
        if result.median_us is None:
            log.info("%s of library %s %s: %s", direction, backend, result.status, result.message)
            continue
        log.info("%s of library %s  %s us", direction, backend, us(result.median_us))
        timed[backend] = result
    if not timed:
        return None
    fastest = min(timed, key=lambda backend: timed[backend].median_us or 0.0)
    record = LibraryRecord(
        gpu=gpu.name,
        arch=gpu.arch,
        direction=direction,
        problem=problem,
        library=fastest,
        measurement=timed[fastest],
        versions=current_versions(),
        date=now(),
        command=command,
    )
    log.info("%s written: %s", save_library(record), record.config)
    return record


def _real_bench(problem: AttentionProblem, direction: Direction) -> LibraryBench:
    return LibraryBench(
        measure=lambda backend: _measure(problem, direction, backend, DEVICE),
        check=lambda backend: check_library(problem, direction, backend, DEVICE),
    )


def _measure(
    problem: AttentionProblem, direction: Direction, backend: Backend, device: str
) -> Measurement:
    """Time a library on random inputs of the problem's shape."""
    import torch

    from tilegen.check.reference import make_inputs
    from tilegen.launch.libraries import OPERATORS

    operators, causal = OPERATORS[backend], isinstance(problem.mask, Causal)
    scale = problem.head_dim_qk**-0.5
    try:
        with torch.no_grad():
            inputs = make_inputs(problem, device=device)
            qkv = inputs.q, inputs.k, inputs.v
            saved = operators.forward(*qkv, causal, scale)

            def launch() -> object:
                if direction == "forward":
                    return operators.forward(*qkv, causal, scale)
                return operators.backward(inputs.dout, *qkv, *saved, causal, scale)

            return measure(launch)
    except (DeviceLost, Unsupported):
        raise
    except Exception as error:  # any error means that the library does not support the problem
        return survived(error) if torch.cuda.is_available() else failed(error)


def check_library(
    problem: AttentionProblem, direction: Direction, backend: Backend, device: str
) -> Measurement | None:
    """Describe a wrong result of a library at a reduced size; None if all results are right."""
    import torch

    from tilegen.check.reference import make_inputs
    from tilegen.check.sizes import reduced
    from tilegen.check.verification import judge_all
    from tilegen.launch.libraries import OPERATORS

    small, operators = reduced(problem), OPERATORS[backend]
    causal, scale = isinstance(small.mask, Causal), small.head_dim_qk**-0.5
    with torch.inference_mode(False), torch.enable_grad():
        try:
            inputs = make_inputs(small, device=device)
            qkv = inputs.q, inputs.k, inputs.v
            with torch.no_grad():
                out, lse = operators.forward(*qkv, causal, scale)
                results: dict[str, torch.Tensor] = {"out": out, "lse": lse}
                if direction == "backward":
                    gradients = operators.backward(inputs.dout, *qkv, out, lse, causal, scale)
                    results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
            checks = judge_all(results, inputs, scale, mask=small.mask)
        except Exception as error:  # as in `measure`: any error of a library is a result
            return survived(error)
    wrong = [str(check) for check in checks if not check.ok]
    return Measurement(status="wrong", message=one_line(wrong[0])) if wrong else None
