"""Counts what emitted kernels load and store, by builds for the CPU that count.

Compiling takes most of the time and holds Python's lock, so the study starts processes (`Counters`)
and sends them questions, a line of JSON each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from benchmarks.environment import ROOT
from tilegen.compiling import workers
from tilegen.kernels.config import Kernel, TileConfig

if TYPE_CHECKING:
    from tilegen.check.reference import Inputs
    from tilegen.cpu.emitted import EmittedFunction
    from tilegen.kernels.panels import Launch
    from tilegen.problem import AttentionProblem

Moved = dict[Kernel, tuple[int, int]]
"""Read and written bytes of each kernel, all its launches together."""
Question = tuple["AttentionProblem", Mapping[Kernel, TileConfig]]

ONE_PANEL = 1 << 30
"""Rows of a panel: all of them, as the schedules of the papers have it."""


class Counters:
    """Processes that count; use it in a `with`."""

    def __init__(self, size: int | None = None) -> None:
        """`size` defaults to the cores this process may use."""
        self.size = size or len(os.sched_getaffinity(0))
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        environment = workers.environment(TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
        command = workers.python("from benchmarks.study.counting import serve; serve()")
        pipe = subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=ROOT)
            for _ in range(self.size)
        ]
        for process in self._processes:
            self._idle.put(process)

    def count(self, questions: Iterable[Question]) -> list[Moved]:
        """Count the bytes that each question's kernels move. Raises RuntimeError if a process
        dies."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(self._ask, questions))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: Question) -> Moved:
        problem, configs = question
        process = self._idle.get()
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(
                json.dumps([problem.key, {name: one.key for name, one in configs.items()}]) + "\n"
            )
            process.stdin.flush()
            line = process.stdout.readline()
        finally:
            self._idle.put(process)
        if not line:
            raise RuntimeError(f"the process that counted {problem.key} died")
        return {kernel: (read, written) for kernel, (read, written) in json.loads(line).items()}


def serve() -> None:
    """The other end of `Counters`: answer questions until there are no more."""
    from tilegen.problem import AttentionProblem

    warnings.simplefilter("ignore")  # of numbers too large: only their places are counted
    for line in sys.stdin:
        key, configs = json.loads(line)
        moved = count(
            AttentionProblem.parse(key),
            {kernel: TileConfig.parse(text) for kernel, text in configs.items()},
        )
        print(json.dumps(moved), flush=True)


def count(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> Moved:
    """Count the bytes that every kernel of a pass moves."""
    from tilegen.check.reference import make_inputs

    inputs = make_inputs(problem)
    moved: Moved = {}
    launch: dict[Kernel, Launch] = {
        kernel: _watched(problem, kernel, config, moved) for kernel, config in configs.items()
    }
    run_pass(launch, inputs, panel_rows=ONE_PANEL)
    return moved


def run_pass(launch: Mapping[Kernel, Launch], inputs: Inputs, *, panel_rows: int) -> None:
    """Run all kernels of one pass once; their results are dropped.

    Of a backward only its own kernels run: lse is zero, which changes values, not addresses.
    """
    import torch

    from tilegen.kernels import passes

    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    if any(kernel.startswith("fwd") for kernel in launch):
        passes.forward(launch, q, k, v, 0.1, panel_rows=panel_rows)
    else:
        lse = torch.zeros(q.shape[:3], device=q.device)
        delta = launch["bwd_preprocess"](dout, dout)
        passes.gradients(launch, q, k, v, dout, lse, delta, 0.1, panel_rows=panel_rows)


def _watched(problem: AttentionProblem, kernel: Kernel, config: TileConfig, moved: Moved) -> Any:
    """Return the kernel's launch function; each call adds to `moved`."""
    from tilegen import cpu
    from tilegen.emit.render import render

    return partial(_counted, cpu.load(render(problem, config, kernel), "count"), kernel, moved)


def _counted(
    made: EmittedFunction, kernel: Kernel, moved: Moved, *arguments: Any, **laid: Any
) -> Any:
    counted = made.traffic
    counted.read.clear()
    counted.written.clear()
    result = made.launch(*arguments, **laid)
    read, written = moved.get(kernel, (0, 0))
    moved[kernel] = read + counted.read_bytes, written + counted.write_bytes
    return result
