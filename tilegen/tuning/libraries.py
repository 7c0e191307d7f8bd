"""Measurement of PyTorch's own kernels for a whole pass, as tilegen's kernels are measured: from a
cold L2, and with results that are checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from tilegen.choose.libraries import why_not
from tilegen.disk import log
from tilegen.errors import Unsupported
from tilegen.kernels.spec import BACKENDS, Backend, Direction
from tilegen.problem import AttentionProblem
from tilegen.store.library_record import LibraryRecord, save_library
from tilegen.store.versions import current_versions
from tilegen.tuning.bench import DEVICE
from tilegen.tuning.measure import DeviceLost, Measurement, measure, one_line, survived
from tilegen.units import us_text

if TYPE_CHECKING:
    import torch

    from tilegen.check.reference import Inputs
    from tilegen.gpus.spec import GpuSpec

RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
"""The results of a pass, by the direction."""


def tune_libraries(
    problem: AttentionProblem, gpu: GpuSpec, direction: Direction, *, command: str = ""
) -> LibraryRecord | None:
    """Measure the libraries that support a pass, and save the record of the fastest with right
    results in the local cache. Return the record; None if no library qualifies. Raises DeviceLost.
    """
    problem = problem.bucket
    timed: list[LibraryRecord] = []
    supported: list[Backend] = [backend for backend in BACKENDS if not why_not(problem, backend)]
    for backend in supported:
        result = measure_library(problem, direction, backend)
        if result.status == "ok":
            result = check_library(problem, direction, backend, DEVICE) or result
        if result.status == "ok":
            log.info("%s of library %s  %s", direction, backend, us_text(result.median_us))
            versions = current_versions()
            timed.append(LibraryRecord(library=backend, measurement=result, versions=versions))
        else:
            log.info("%s of library %s %s", direction, backend, result.failure)
    if not timed:
        return None
    fastest = min(timed, key=lambda record: record.seconds)
    file = save_library(fastest, problem, gpu, direction, command)
    log.info("%s written: library %s", file, fastest.library)
    return fastest


def measure_library(
    problem: AttentionProblem, direction: Direction, backend: Backend
) -> Measurement:
    """Time a library on random inputs of the problem's shape."""

    from tilegen.check.reference import make_inputs

    try:
        with torch.no_grad():
            return measure(_run(direction, backend, problem, make_inputs(problem, device=DEVICE)))
    except (DeviceLost, Unsupported):
        raise
    except Exception as error:  # any error means that the library does not support the problem
        return survived(error)


def check_library(
    problem: AttentionProblem, direction: Direction, backend: Backend, device: str
) -> Measurement | None:
    """Describe a wrong result of a library at a reduced size; None if all results are right."""

    from tilegen.check.reference import make_inputs
    from tilegen.check.sizes import reduced
    from tilegen.check.verification import judge_all

    small = reduced(problem)
    with torch.inference_mode(False), torch.enable_grad():
        try:
            inputs = make_inputs(small, device=device)
            with torch.no_grad():
                results = _run(direction, backend, small, inputs)()
            named = dict(zip(RESULTS[direction], results, strict=True))
            checks = judge_all(named, inputs, small.head_dim_qk**-0.5, mask=small.mask)
        except Exception as error:  # as in `measure`: any error of a library is a result
            return survived(error)
    wrong = [str(check) for check in checks if not check.ok]
    return Measurement(status="wrong", message=one_line(wrong[0])) if wrong else None


def _run(
    direction: Direction, backend: Backend, problem: AttentionProblem, inputs: Inputs
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a function that computes a pass with a library. For a backward the library's forward
    runs first."""
    from tilegen.launch.libraries import OPERATORS

    operators, qkv = OPERATORS[backend], (inputs.q, inputs.k, inputs.v)
    causal, scale = problem.mask.is_causal, problem.head_dim_qk**-0.5
    forward = partial(operators.forward, *qkv, causal, scale)
    if direction == "forward":
        return forward
    return partial(operators.backward, inputs.dout, *qkv, *forward(), causal, scale)
