"""Compare tilegen with PyTorch's attention, length by length.

Functions of a length are timed in turns on this machine; their memory is measured in a process for
each attention, which may not take more than the machine has. For another device tilegen's times are
predicted, and the others have none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilegen import api
from tilegen.calls.warm import lengths_of, with_length
from tilegen.check.peers import AttentionFunction
from tilegen.choose.families import kernels_of, passes_of
from tilegen.choose.ranker import joining, propose
from tilegen.comparing import memory
from tilegen.comparing.attentions import ON_CPU, ON_GPU, Measured, counted_bytes, function_of
from tilegen.comparing.children import DoesNotFit, Failed, Worker
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.timing import MIN_ROUNDS, timed_in_turns
from tilegen.device import Device
from tilegen.devices import HERE, device_of
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.measure import measure, one_line
from tilegen.units import memory_text, seconds_text

LENGTHS = "512..8192"
MINUTES = 2.0
SECONDS = 0.5
"""Time to measure a function [s]."""
ROOM = 0.5
"""Part of the free memory that a process may take."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attention at one length."""

    attention: str
    seconds: float | None = None
    """Median time, or the predicted time [s]."""
    predicted: bool = False
    ratio: float | None = None
    """Time over tilegen's, the median over rounds in which both ran."""
    peak_bytes: int | None = None
    """Peak of a process beyond what it had before q, k and v."""
    counted_bytes: int
    """The same by formula, a lower bound: see `counted_bytes` in attentions.py."""
    reason: str = ""
    """The reason for a missing time."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """All attentions at one length."""

    problem: str
    direction: Direction
    length: int
    """Number of keys, and of queries if both are equal in the problem."""
    device: str
    threads: int
    """Threads of PyTorch and of tilegen on a processor; 0 for a GPU."""
    cells: tuple[Cell, ...]


def compare(
    problem: AttentionProblem | str,
    lengths: Iterable[int] | str = LENGTHS,
    gpu: Device | str | None = None,
    *,
    backward: bool = False,
    minutes: float = MINUTES,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compare time and memory of tilegen, SDPA's back ends, FlexAttention and standard attention.

    `lengths` are integers, or a text: `512..8192` doubles from 512 to 8192. A length is that of
    keys, and of queries too unless the problem has another number of queries. `backward` adds rows
    of the backward. Without a `gpu` everything is measured here, in `minutes`; cases that would
    take longer, or more memory than there is, have a reason instead of a time. For another device
    times are predicted. `on_row` is called with each row once it is done. Raises InvalidProblem and
    Unsupported.
    """
    rows: list[Row] = []
    for row in rows_of(api.problem_of(problem), lengths, gpu, backward=backward, minutes=minutes):
        rows.append(row)
        on_row(row)
    return rows


def rows_of(
    problem: AttentionProblem,
    lengths: Iterable[int] | str = LENGTHS,
    gpu: Device | str | None = None,
    *,
    backward: bool = False,
    minutes: float = MINUTES,
) -> Iterator[Row]:
    """Yield the rows of `compare` as they are measured."""
    if problem.page:
        raise Unsupported(f"expected whole keys, got pages of {problem.page}; leave the page out")
    directions = passes_of(problem)
    if backward and "backward" not in directions:
        raise Unsupported(f"expected a problem with a backward, got {problem}; leave it out")
    device, wanted = device_of(gpu), directions if backward else directions[:1]
    place = "cuda" if isinstance(device, GpuSpec) else "cpu"
    is_here = gpu == HERE or device.name == device_of(None).name
    with _Table(device, place if is_here else "", minutes) as table:
        for length in doubled(lengths):
            yield from table.rows(with_length(problem, length), wanted)


def doubled(lengths: Iterable[int] | str) -> list[int]:
    """Return the lengths of an argument, ascending; `512..8192` doubles. Raises InvalidProblem."""
    if not isinstance(lengths, str) or ".." not in lengths:
        return sorted(set(lengths_of(lengths)))
    first, _, last = lengths.partition("..")
    ends = lengths_of(f"{first},{last}")
    if ends[0] > ends[1]:
        raise InvalidProblem(f"lengths must ascend, such as {LENGTHS}; got {lengths!r}")
    results = [ends[0]]
    while 2 * results[-1] <= ends[1]:
        results.append(2 * results[-1])
    return results


class _Table(ExitStack):
    """Rows of a device, with the processes that measure memory and the time that is left."""

    def __init__(self, device: Device, place: str, minutes: float) -> None:
        """`place` is the device of PyTorch on which cases are measured; empty if none are."""
        super().__init__()
        self.device, self.place = device, place
        self._end = time.monotonic() + 60 * minutes
        self._names = ON_GPU if isinstance(device, GpuSpec) else ON_CPU
        self._children: dict[str, Worker | None] = {}
        """The process of each attention, None once a case did not fit."""
        self._took: dict[tuple[str, Direction], tuple[int, float]] = {}
        """The pairs of the last length, and the time of a case there [s]."""

    def rows(self, problem: AttentionProblem, directions: tuple[Direction, ...]) -> Iterator[Row]:
        """Yield the rows of a length."""
        functions, reasons = self._functions(problem)
        for direction in directions:
            cells = self._cells(problem, direction, functions, dict(reasons))
            yield Row(
                problem=problem.key,
                direction=direction,
                length=problem.seqlen_kv,
                device=self.device.name,
                threads=torch.get_num_threads() if self.place == "cpu" else 0,
                cells=tuple(cells),
            )

    def _functions(
        self, problem: AttentionProblem
    ) -> tuple[dict[str, dict[str, Callable[[], object]]], dict[str, str]]:
        """Make the functions to time, by pass and name, and the reasons for those that are
        missing."""
        reasons: dict[str, str] = {}
        if not self.place:
            why = f"nothing is measured for {self.device.name} here"
            return {"forward": {}, "backward": {}}, dict.fromkeys(self._names[1:], why)
        made: dict[str, AttentionFunction] = {}
        free = _free(self.place)
        for name in self._names[1:]:
            if (needed := counted_bytes(name, problem, "backward")) > ROOM * free:
                reasons[name] = f"needs {memory_text(needed)} of {memory_text(free)}"
                continue
            try:
                made[name] = function_of(name, problem, self.place)
            except TilegenError as error:
                reasons[name] = one_line(error)
        return passes_to_time(problem, made, self.place), reasons

    def _cells(
        self,
        problem: AttentionProblem,
        direction: Direction,
        functions: dict[str, dict[str, Callable[[], object]]],
        reasons: dict[str, str],
    ) -> Iterator[Cell]:
        pairs = problem.seqlen_q * problem.seqlen_kv
        timed: dict[str, Callable[[], object]] = {}
        for name, function in functions[direction].items():
            if why := self._too_long(name, direction, pairs):
                reasons[name] = why
                continue
            start = time.monotonic()
            try:
                function()  # compiles, and shows whether a back end takes the problem
            except Exception as error:  # PyTorch's back ends raise errors of many classes
                reasons[name] = one_line(error)
                continue
            timed[name] = function
            self._took[name, direction] = pairs, time.monotonic() - start
        times = self._timed(timed)
        for name in self._names:
            seconds, ratio = times.get(name, (None, None))
            if name in times and seconds is not None:
                self._took[name, direction] = pairs, seconds
            counted = counted_bytes(name, problem, direction)
            if not self.place and name == "tilegen":
                seconds = _predicted(problem, self.device, direction)
            yield Cell(
                attention=name,
                seconds=seconds,
                predicted=not self.place and name == "tilegen",
                ratio=ratio,
                peak_bytes=None if name in reasons else self._peak(name, problem, direction),
                counted_bytes=counted,
                reason=reasons.get(name, ""),
            )

    def _too_long(self, name: str, direction: Direction, pairs: int) -> str:
        """Return the reason why a case is not tried; empty if it is. Its time is guessed to grow
        with the pairs."""
        before, seconds = self._took.get((name, direction), (pairs, 0.0))
        expected = seconds * pairs / before
        left = max(0.0, self._end - time.monotonic())
        if left and expected * (MIN_ROUNDS + 2) <= left:
            return ""
        return f"no time left: {left:.0f} s, and {seconds_text(expected)} for each call"

    def _timed(
        self, functions: dict[str, Callable[[], object]]
    ) -> dict[str, tuple[float | None, float | None]]:
        """Measure functions; return the time of each, and its ratio to the first."""
        if not functions:
            return {}
        if self.place == "cpu":
            timings = timed_in_turns(functions, seconds=SECONDS)
            return {name: (timing.median, timing.ratio) for name, timing in timings.items()}
        medians = {name: measure(function).median_us for name, function in functions.items()}
        first = next(iter(medians.values()))
        return {
            name: (us and 1e-6 * us, us / first if us and first else None)
            for name, us in medians.items()
        }

    def _peak(self, name: str, problem: AttentionProblem, direction: Direction) -> int | None:
        """Measure the peak of an attention in its process; None where it has none."""
        if not self.place:
            return None
        try:
            if name not in self._children:
                self._children[name] = self.enter_context(
                    Worker(
                        partial(Measured, name, self.place),
                        gib=ROOM * _free(self.place) / memory.GIB,
                        device=self.place,
                        threads=torch.get_num_threads(),
                    )
                )
            if (child := self._children[name]) is None:
                return None
            peak: Any = child.call("peak", problem.key, direction)
        except (DoesNotFit, Failed):
            self._children[name] = None  # longer cases need more
            return None
        return int(peak)


def _free(place: str) -> int:
    return torch.cuda.mem_get_info()[0] if place == "cuda" else memory.available()


def _predicted(problem: AttentionProblem, device: Device, direction: Direction) -> float:
    """Return the model's time of a pass [s]."""
    normal = problem.normal()
    tasks = (KernelTask.of(k, normal, device) for k in kernels_of(normal, device, direction))
    return sum(propose(joining(task), top=1)[0].estimate.seconds for task in tasks)
