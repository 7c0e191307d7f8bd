"""An emitted Gluon file, run as it is: `run`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tests.gluon.memory_model import language
from tests.gluon.memory_model.faults import Fault, NotModelled
from tests.gluon.memory_model.language import Twins
from tests.gluon.memory_model.machine import Machine
from tests.gluon.memory_model.memory import GlobalTensor, Pointer, described
from tests.gluon.memory_model.modules import modules
from tests.gluon.memory_model.schedules import RandomSchedule, Schedule
from tests.gluon.memory_model.values import Int

FILE = "<emitted Gluon>"
_OPTIONS = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion")


@dataclass
class Report:
    """Traffic of the launches of a file, and the length of their schedules."""

    read_bytes: dict[str, int] = field(default_factory=dict)
    """Traffic loaded from each tensor [bytes], by the name of the argument."""
    written_bytes: dict[str, int] = field(default_factory=dict)
    """Traffic stored to each tensor [bytes], by the name of the argument."""
    steps: int = 0
    """Number of choices of who goes on, in all programs together."""


def run(
    source: str,
    *given: Any,
    seed: int = 0,
    schedule: Callable[[int], Schedule] | None = None,
    twins: Twins | None = None,
    bind: Callable[[Any], Any] = lambda launch: launch,
) -> tuple[Any, Report]:
    """Call `launch(*given)` of a Gluon file with CPU tensors, and return its results and a report.
    `bind` returns the launch with more of its arguments, from the file's own.

    The programs of a launch run one after the other; `schedule` makes the schedule of a program by
    its number, by default a random one of `seed`; `twins` say what inline assembly computes, by its
    text. Where a kernel is launched, each element of the tensors that `launch` returns must be
    written exactly once. Raises Fault, which names the seed, and NotModelled.
    """
    module, lines = _loaded(source)
    launches = _Launches(lines, seed, schedule, twins)
    _now.append(launches)
    try:
        results = bind(module["launch"])(*given)
    finally:
        _now.pop()
    if launches.report.steps:
        for item in results if isinstance(results, tuple) else (results,):
            launches.check_written(item)
    return results, launches.report


class _Launches:
    """The launches of one call."""

    def __init__(
        self,
        lines: list[str],
        seed: int,
        schedule: Callable[[int], Schedule] | None,
        twins: Twins | None,
    ) -> None:
        self.report = Report()
        self._twins = twins
        self._lines, self._seed = lines, seed
        self._schedule = schedule or (lambda program: RandomSchedule(seed + program))
        self._tensors: dict[str, GlobalTensor] = {}

    def launch(
        self, function: Any, grid: int, arguments: Mapping[str, Any], num_warps: int
    ) -> None:
        """Run the programs of a kernel."""
        kinds = function.__annotations__
        for program in range(grid):
            told = f"seed {self._seed}, program {program}"
            machine = Machine(FILE, self._lines, self._schedule(program), told)
            machine.program_id, machine.num_programs = program, grid
            given = {
                name: tensor
                if "constexpr" in str(kinds.get(name, ""))
                else self._argument(machine, name, tensor)
                for name, tensor in arguments.items()
            }
            language.use(machine, self._twins)
            try:
                machine.run(lambda given=given: function(**given), num_warps)
            finally:
                language.use(None)
            self.report.steps += machine.steps
        for name, tensor in self._tensors.items():
            self.report.read_bytes[name] = tensor.read_bytes
            self.report.written_bytes[name] = tensor.written_bytes

    def _argument(self, machine: Machine, name: str, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            tensor = self._tensor(name, given)
            return Pointer(machine, tensor, np.zeros((), np.int64))
        if hasattr(given, "block_shape"):
            tensor = self._tensor(name, given.base)
            return described(machine, name, tensor, given, language.dtype_of(given.base.dtype))
        if isinstance(given, bool) or not isinstance(given, int | float):
            raise NotModelled(
                f"expected a tensor, a descriptor or a number for {name}, got {given!r}"
            )
        return Int(given) if isinstance(given, int) else float(np.float32(given))

    def _tensor(self, name: str, tensor: torch.Tensor) -> GlobalTensor:
        if name not in self._tensors:
            self._tensors[name] = GlobalTensor(name, tensor)
        return self._tensors[name]

    def check_written(self, result: torch.Tensor) -> None:
        """Raise Fault unless each element of a result was written exactly once."""
        mine = [one for one in self._tensors.values() if one.tensor.data_ptr() == result.data_ptr()]
        counts = sum((one.writes for one in mine), np.zeros(result.numel(), np.int64))
        wrong = np.flatnonzero(counts != 1)
        if wrong.size:
            at = tuple(map(int, np.unravel_index(int(wrong[0]), tuple(result.shape))))
            name = mine[0].name if mine else "a result"
            raise Fault(
                f"{wrong.size} elements of {name} are not written exactly once, the first at {at}, "
                f"written {int(counts[wrong[0]])} times; seed {self._seed}"
            )


_now: list[_Launches] = []


class _Kernel:
    """A jitted function: called by others of the file, or launched as kernel[grid](...)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__ = function.__name__

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self._function(*given, **named)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        count, *others = grid
        if any(one != 1 for one in others):
            raise NotModelled(f"expected a grid of one dimension, got {grid}")

        def launch(*given: Any, **named: Any) -> None:
            options = {name: named.pop(name) for name in _OPTIONS if name in named}
            if options.get("num_ctas", 1) != 1:
                raise NotModelled("clusters are not modelled")
            arguments = dict(zip(_names(self._function), given, strict=False)) | named
            _now[-1].launch(self._function, int(count), arguments, options.get("num_warps", 4))

        return launch


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return a jitted function, or a decorator with options, which change no results."""
    return _Kernel if function is None else _Kernel(function)


def _names(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


@lru_cache(maxsize=256)
def _loaded(source: str) -> tuple[dict[str, Any], list[str]]:
    """Return the names of a file that is run with the model's Gluon, and its lines."""
    models = modules(_jit)

    def imported(name: str, *given: Any) -> Any:
        wanted = given[2] if len(given) > 2 else ()
        if name in models and wanted:
            return models[name]
        if name.startswith("triton.experimental.gluon") and ".gluon.nvidia" not in name:
            raise NotModelled(f"expected an import out of {', '.join(models)}, got {name}")
        return builtins.__import__(name, *given)

    names: dict[str, Any] = {
        "__builtins__": vars(builtins) | {"__import__": imported, "range": _range},
        "__name__": "emitted",
    }
    exec(compile(source, FILE, "exec"), names)
    return names, source.splitlines()


def _range(*bounds: int) -> Iterator[Int]:
    """Yield the counts of a kernel's loop: integers as in C."""
    return map(Int, range(*bounds))
