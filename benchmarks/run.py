"""The benchmark driver: every workload, every provider, forward and backward, into one CSV.

    python -m benchmarks.run --minutes 30
    python -m benchmarks.run --workload llama3-8b-8k --provider tilegen --provider sdpa-cudnn

A row is written as soon as it is measured. A run that is stopped, or whose time is over, goes on
where it was when started again with the same file. Without a GPU calls on the CPU are timed
instead, as by `benchmarks.cpu_calls`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from benchmarks import cpu_calls
from benchmarks.arithmetic import compulsory_bytes, flops, ideal_seconds
from benchmarks.environment import (
    Csv,
    Environment,
    Minutes,
    Seconds,
    dated,
    has_gpu,
    start_over,
)
from benchmarks.parts import Part
from benchmarks.providers import Provider, providers
from benchmarks.rows import Row, Status, append, read, same_values
from benchmarks.workloads import CATALOGUE, MASKED, Workload, head
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, detect
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import DeviceLost, Measurement, measure, survived

if TYPE_CHECKING:
    from benchmarks.check import Verdict

SAME_RUN = ("workload", "problem", "provider", "direction", "gpu", "torch", "triton", "commit")
"""Columns that say whether a row has been measured already."""

REFUSALS = ("No available kernel", "not supported", "NotImplemented", "unsupported", "Unsupported")
"""Words in the messages with which libraries refuse a problem."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row to be measured."""

    workload: Workload
    provider: Provider
    direction: Direction


def cases(workloads: Sequence[Workload], computed_by: Sequence[Provider]) -> Iterator[Case]:
    """Yield every case; the order of providers rotates, so that none always follows the same other.

    Slow starters come last: a time limit should cost detail, not whole workloads.
    """
    for slow in (False, True):
        chosen = [provider for provider in computed_by if provider.slow_to_start == slow]
        for turn, workload in enumerate(workloads):
            shift = turn % max(len(chosen), 1)
            for provider, direction in itertools.product(
                chosen[shift:] + chosen[:shift], workload.directions
            ):
                yield Case(workload=workload, provider=provider, direction=direction)


def run_case(case: Case, spec: GpuSpec | None, *, seconds: float) -> Row:
    """Return the row of one case. DeviceLost escapes: nothing can be measured after it."""
    try:
        verdict, timing = check_and_time(case, seconds)
    except DeviceLost:
        raise
    except Exception as error:  # whatever a provider raises is the result of this case
        measurement = survived(error)
        status = refusal(error) or measurement.status
        return make_row(case, status=status, detail=measurement.message)
    if timing.median_us is None:
        return make_row(case, status=timing.status, detail=timing.message)
    problem, per_second = case.workload.problem, 1e6 / timing.median_us
    return make_row(
        case,
        status="ok" if verdict.ok else "wrong",
        median_us=timing.median_us,
        p20_us=timing.p20_us,
        p80_us=timing.p80_us,
        repeats=timing.repeats,
        digest=timing.digest,
        tflops=flops(problem, case.direction) * per_second / 1e12,
        gbytes_per_s=compulsory_bytes(problem, case.direction) * per_second / 1e9,
        roofline_fraction=(
            ideal_seconds(problem, case.direction, spec) * per_second if spec else None
        ),
        max_error=verdict.error,
        allowed_error=verdict.allowed,
        detail=verdict.detail or case.provider.describe(problem, case.direction),
    )


def make_row(case: Case, **values: Any) -> Row:
    """Return a row from what names the case, what was measured, and the environment."""
    return Row(
        workload=case.workload.name,
        problem=case.workload.problem.key,
        provider=case.provider.name,
        direction=case.direction,
        **values,
    )


def refusal(error: Exception) -> Status | None:
    """Return the status of a provider that does not compute a problem, None for other errors."""
    import torch

    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, TypeError | AttributeError):  # "unsupported operand": broken, no refusal
        return None
    refused = isinstance(error, NotImplementedError)  # Unsupported is one
    return "unsupported" if refused or any(text in str(error) for text in REFUSALS) else None


def check_and_time(case: Case, seconds: float) -> tuple[Verdict, Measurement]:
    """Check the case's results and time them."""
    import torch

    from benchmarks.check import check, make_inputs

    torch.cuda.empty_cache()  # what the case before it left
    problem = with_tensors(case.workload.problem, "cuda")
    attention = case.provider.prepare(problem, "cuda")
    inputs = make_inputs(problem, rows_first=case.provider.rows_first)
    q, k, v = inputs.q, inputs.k, inputs.v
    if case.direction == "forward":
        with torch.no_grad():
            verdict = check(problem, inputs, {"out": attention(q, k, v)})
            return verdict, measure(lambda: attention(q, k, v), seconds=seconds)
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves)

    def backward() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    outputs = dict(zip(("dq", "dk", "dv"), backward(), strict=True))
    verdict = check(problem, inputs, outputs)
    del outputs  # makes room for the gradients of the timed runs
    return verdict, measure(backward, seconds=seconds)


def with_tensors(problem: AttentionProblem, device: str) -> AttentionProblem:
    """Return the problem with typical tensors in its mask, where it has any. Raises Unsupported for
    one with a score, since results are checked head by head, with no score applied."""
    if problem.score:
        raise Unsupported(f"workloads are of masks only, got {problem.score.notation}")
    if problem.dropout:
        raise Unsupported("workloads are of masks only, got dropout")
    return replace(problem, mask=problem.mask.realized(problem.shape, device))


def run(
    todo: Iterable[Case], path: Path, *, deadline: float, seconds: float, spec: GpuSpec | None
) -> int:
    """Measure the cases that `path` lacks until the deadline; return how many are left.

    `deadline` is a time of `time.monotonic`. Raises DeviceLost after writing the row it hit.
    """
    done = same_values(read(path), SAME_RUN)
    left = 0
    for case in todo:
        blank = asdict(make_row(case, status="unmeasured"))
        if tuple(blank[name] for name in SAME_RUN) in done:
            continue
        if time.monotonic() > deadline:
            left += 1
            continue
        try:
            row = run_case(case, spec, seconds=seconds)
        except DeviceLost as lost:
            append(path, make_row(case, status=lost.measurement.status, detail=str(lost)))
            raise
        append(path, row)
        print(line(row), flush=True)
    return left


def run_all(todo: Sequence[Case], csv: Path | None, *, minutes: float, seconds: float) -> None:
    """Measure cases into a result file, and say how many are left; start over after a launch that
    broke the device."""
    path, deadline = dated(csv), time.monotonic() + 60 * minutes
    print(f"{Environment().gpu}: up to {len(todo)} rows for {path}", flush=True)
    try:
        left = run(todo, path, deadline=deadline, seconds=seconds, spec=detect())
    except DeviceLost as lost:
        print(f"{lost}; starting over after the row that caused it", flush=True)
        start_over(deadline, f"--csv={path}")
    if left:
        print(f"time is over, {left} rows left; the same command goes on from here")


def line(row: Row) -> str:
    """Format a row for the terminal."""
    what = f"{row.workload:26} {row.direction:8} {row.provider:18}"
    if row.median_us is None:
        return f"{what} {row.status}: {row.detail}"
    share = "" if row.roofline_fraction is None else f"  {row.roofline_fraction:4.0%} of roofline"
    verdict = "" if row.status == "ok" else f"  {row.status.upper()}: {row.detail}"
    return f"{what} {row.median_us:10.1f} us  {row.tflops:6.1f} TFLOP/s{share}{verdict}"


def main(
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload by name; may be repeated. Default: all.")
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="A provider by name; may be repeated. Default: all.")
    ] = None,
    only_head: Annotated[
        bool, typer.Option("--head", help="Only the head of the catalogue.")
    ] = False,
    masks: Annotated[
        bool, typer.Option("--masks", help="One workload for each family of masks instead.")
    ] = False,
    minutes: Minutes = 60.0,
    seconds: Seconds = 0.3,
    csv: Csv = None,
) -> None:
    """Benchmark tilegen and what PyTorch offers; one CSV row per workload, provider, direction.

    Example: python -m benchmarks.run --head --minutes 5
    """
    if not has_gpu():
        print("no GPU that PyTorch can use: timing calls on the CPU instead")
        cpu_calls.main(out=csv or cpu_calls.OUT, minutes=min(minutes, 40.0))
        return
    workloads = named("workload", MASKED if masks else head() if only_head else CATALOGUE, workload)
    todo = list(cases(workloads, named("provider", providers(), provider)))
    run_all(todo, csv, minutes=minutes, seconds=seconds)


Named = TypeVar("Named", Workload, Provider, Part)


def named(what: str, known: Sequence[Named], names: Sequence[str] | None) -> Sequence[Named]:
    """Return those of `known` that are named, or all. Raises typer.BadParameter."""
    by_name = {item.name: item for item in known}
    if unknown := [name for name in names or () if name not in by_name]:
        raise typer.BadParameter(f"{what} must be one of {', '.join(by_name)}; got {unknown[0]}")
    return [by_name[name] for name in names] if names else known


if __name__ == "__main__":
    typer.run(main)
