"""Verdicts from counters: rows of what was measured, and pass or fail per experiment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.counters import DRAM_READ, DRAM_WRITE, READ, WRITE, Counted
from benchmarks.environment import Environment
from benchmarks.study.experiments import (
    DRAM_TOLERANCE,
    EXACT_FROM,
    EXP_TOLERANCE,
    EXPERIMENTS,
    WIRE_TOLERANCE,
    Case,
    predicted,
    predicted_dram,
)
from tilegen.emit.render import render
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.problem import AttentionProblem

Verdict = Literal["pass", "fail", "measured", "failed to run"]
"""`measured`: nothing was predicted, or too short a sequence to judge."""

TIME = "gpu__time_duration.sum"
EXPS = "smsp__inst_executed_pipe_xu.sum"
LOCAL = (
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum",
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum",
)
"""Counters of spilled registers [bytes]: they cross the wire too, and no formula has them."""
NEEDED = (READ, WRITE, DRAM_READ, DRAM_WRITE)
WANTED = (*NEEDED, TIME, EXPS, *LOCAL)
OF_CASE = ("experiment", "group", "problem", "provider", "family")
"""Columns that a row shares with its case."""


@dataclass(frozen=True, kw_only=True)
class MeasureRow(Environment):
    """One quantity of one case: what the model says, what was counted, and what that means."""

    experiment: str
    group: str
    problem: str
    provider: str
    family: str
    kernel: str
    config: str
    quantity: str
    predicted: float | None
    measured: float | None
    ratio: float | None
    """Measured over predicted quantity."""
    tolerance: float | None
    verdict: Verdict
    detail: str


@dataclass(frozen=True, kw_only=True)
class VerdictRow(Environment):
    """One experiment."""

    experiment: str
    question: str
    verdict: Literal["pass", "fail", "not run"]
    passed: int
    failed: int
    measured: int
    """Number of quantities with nothing to compare with."""
    broken: int
    """Number of cases that failed to run, which are no evidence either way."""
    worst: str
    """Quantity that is furthest off."""


def totals(launches: Sequence[Counted]) -> dict[str, dict[str, float]]:
    """Return the counters of each function, all its launches summed."""
    by_function: dict[str, dict[str, float]] = {}
    for launch in launches:
        mine = by_function.setdefault(launch.function, {})
        for metric, value in launch.values.items():
            mine[metric] = mine.get(metric, 0.0) + value
    return by_function


def rows_of(case: Case, launches: Sequence[Counted], gpu: GpuSpec) -> list[MeasureRow]:
    """Return the rows of one case. Raises RuntimeError if the profiler missed something."""
    by_function = totals(launches)
    if case.provider != "tilegen":
        return list(_without_prediction(case, by_function))
    names = function_names(case)
    for function in names.values():
        if function not in by_function:
            raise RuntimeError(f"ncu saw no launch of {function}, only {', '.join(by_function)}")
        if missing := [metric for metric in NEEDED if metric not in by_function[function]]:
            raise RuntimeError(f"ncu has no value of {', '.join(missing)} for {function}")
    values: dict[Kernel, dict[str, float]] = {
        kernel: by_function[function] for kernel, function in names.items()
    }
    match case.experiment:
        case "E1":
            return list(_wire_rows(case, values))
        case "E6":
            return list(_dram_rows(case, values, gpu))
        case _:
            return list(_family_rows(case, values))


def function_names(case: Case) -> dict[Kernel, str]:
    """Return the names of the emitted functions of a case."""
    problem = AttentionProblem.parse(case.problem)
    return {k: render(problem, config, k).function for k, config in case.tiles.items()}


def group_rows(rows: Sequence[MeasureRow]) -> list[MeasureRow]:
    """Return the rows that compare the cases of a group: which family moves least, and E4's
    exponentials."""
    wires = [
        row
        for row in rows
        if row.quantity == "wire bytes, all kernels" and row.provider == "tilegen"
    ]
    group: list[MeasureRow] = []
    if len(wires) > 1:
        expected = min(wires, key=lambda row: row.predicted or 0.0)
        order = sorted(wires, key=lambda row: row.measured or 0.0)
        least = order[0].measured
        group.append(
            _row(
                expected,
                "wire bytes over the fewest measured",
                (expected.measured or 0.0) / least if least else None,
                expected=1.0,
                tolerance=WIRE_TOLERANCE,
                detail="measured: " + " < ".join(row.family for row in order),
            )
        )
    exps = {row.family: row.measured for row in rows if row.quantity == "exponentials"}
    if {"two_pass", "small_cache"} <= exps.keys():
        passes, small = exps["two_pass"], exps["small_cache"]
        ratio, what = small / passes if small and passes else None, "small cache over two passes"
        of_exps = f"exponentials, {what}"
        group.append(_row(wires[0], of_exps, ratio, expected=0.5, tolerance=EXP_TOLERANCE))
    return group


def verdicts(rows: Sequence[MeasureRow], broken: Mapping[str, int]) -> Iterator[VerdictRow]:
    """Yield one row per experiment; `broken` says how many cases of each failed to run."""
    for name, question in EXPERIMENTS.items():
        mine = [row for row in rows if row.experiment == name]
        counts = {v: sum(row.verdict == v for row in mine) for v in ("pass", "fail", "measured")}
        judged = [row for row in mine if row.ratio is not None and row.tolerance is not None]
        worst = max(judged, key=lambda row: abs((row.ratio or 0) - 1), default=None)
        yield VerdictRow(
            experiment=name,
            question=question,
            verdict="fail" if counts["fail"] else "pass" if counts["pass"] else "not run",
            passed=counts["pass"],
            failed=counts["fail"],
            measured=counts["measured"],
            broken=broken.get(name, 0),
            worst=f"{worst.group} {worst.kernel} {worst.quantity}: {worst.ratio}" if worst else "",
        )


# --------------------------------------------------------------------------------------------------
# Rows

Values = Mapping[Kernel, Mapping[str, float]]
"""Counts of each kernel by metric."""


def _wire_rows(case: Case, values: Values) -> Iterator[MeasureRow]:
    short = AttentionProblem.parse(case.problem).seqlen_q < EXACT_FROM
    for kernel, moved in predicted(case).items():
        for quantity, expected, metric in (
            ("wire read bytes", moved.read_bytes, READ),
            ("wire write bytes", moved.write_bytes, WRITE),
        ):
            yield _row(
                case,
                quantity,
                values[kernel][metric],
                kernel=kernel,
                expected=expected,
                tolerance=None if short else WIRE_TOLERANCE,
                detail=_spilled(values[kernel]),
            )


def _dram_rows(case: Case, values: Values, gpu: GpuSpec) -> Iterator[MeasureRow]:
    for kernel, expected in predicted_dram(case, gpu).items():
        counted = values[kernel]
        yield _row(
            case,
            "DRAM bytes",
            counted[DRAM_READ] + counted[DRAM_WRITE],
            kernel=kernel,
            expected=expected,
            tolerance=DRAM_TOLERANCE,
            detail=f"{counted.get(TIME, 0) / 1e3:.0f} us",
        )


def _all_kernels(
    case: Case, counted: Sequence[Mapping[str, float]], *, expected: float | None, detail: str
) -> Iterator[MeasureRow]:
    microseconds = sum(one.get(TIME, 0.0) for one in counted) / 1e3
    detail = f"{microseconds:.0f} us{detail}"
    wire = sum(one[READ] + one[WRITE] for one in counted)
    yield _row(case, "wire bytes, all kernels", wire, expected=expected, detail=detail)
    dram = sum(one[DRAM_READ] + one[DRAM_WRITE] for one in counted)
    yield _row(case, "DRAM bytes, all kernels", dram)


def _family_rows(case: Case, values: Values) -> Iterator[MeasureRow]:
    counted = list(values.values())
    expected = sum(one.read_bytes + one.write_bytes for one in predicted(case).values())
    spilled = "".join(map(_spilled, counted))
    yield from _all_kernels(case, counted, expected=expected, detail=spilled)
    if all(EXPS in one for one in counted):
        exps = sum(one[EXPS] for one in counted)
        yield _row(case, "exponentials", exps, detail="instructions of a warp")


def _without_prediction(
    case: Case, by_function: Mapping[str, Mapping[str, float]]
) -> Iterator[MeasureRow]:
    """Yield the rows of a library's kernels."""
    counted = list(by_function.values())
    if not counted or any(metric not in one for one in counted for metric in NEEDED):
        raise RuntimeError(f"ncu counted nothing of {case.name}")
    yield from _all_kernels(case, counted, expected=None, detail=f", {', '.join(by_function)}")


def _row(
    of: Case | MeasureRow,
    quantity: str,
    measured: float | None,
    *,
    kernel: str = "",
    expected: float | None = None,
    tolerance: float | None = None,
    detail: str = "",
) -> MeasureRow:
    ratio = measured / expected if expected and measured is not None else None
    verdict: Verdict = "measured"
    if tolerance is not None:
        verdict = "pass" if ratio is not None and abs(ratio - 1) <= tolerance else "fail"
    if isinstance(of, Case):
        configs = of.configs or {}
        config = configs.get(kernel, ", ".join(f"{k} {key}" for k, key in configs.items()))
    else:
        config = of.config
    return MeasureRow(
        **{name: getattr(of, name) for name in OF_CASE},
        kernel=kernel,
        config=config,
        quantity=quantity,
        predicted=expected,
        measured=measured,
        ratio=None if ratio is None else round(ratio, 4),
        tolerance=tolerance,
        verdict=verdict,
        detail=detail,
    )


def _spilled(counted: Mapping[str, float]) -> str:
    spilled = sum(counted.get(metric, 0.0) for metric in LOCAL)
    return f" spilled {spilled:.0f} bytes" if spilled else ""
