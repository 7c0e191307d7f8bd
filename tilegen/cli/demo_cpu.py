"""`tilegen demo` on a machine without a GPU: kernels are chosen, compiled for the CPU, checked,
tuned, recorded and compared with PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilegen import cpu, pipeline
from tilegen.check.sizes import checkable
from tilegen.check.verification import Check, require, verify
from tilegen.choose.families import passes_of
from tilegen.choose.on_cpu import candidates, may_tune
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.timing import timed_in_turns
from tilegen.cpus.host import current_cpu
from tilegen.emit.render import render
from tilegen.environment import current
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.tuning.tuner import tune
from tilegen.units import memory_text, seconds_text

if TYPE_CHECKING:
    from tilegen.choose.choice import Choice
    from tilegen.emit.identity import RenderedKernel
    from tilegen.store import TuningRecord

PROBLEM = "b1 hq8 hkv2 q2048 kv2048 d128 fp32 causal"
NARROW = "b1 hq8 hkv2 q2048 kv2048 d128 bf16 causal"
"""The same problem in bf16, for processors that multiply bf16."""
SECONDS = 1.0
"""Time to measure each function [s]."""
TUNE_SECONDS = 16.0
"""Time to tune all kernels together [s]."""
SHOWN = 3
"""Candidates per kernel."""


def usual_problem() -> str:
    """Return a problem for this machine's processor: about a second for everything."""
    from tilegen.cpu.target import host

    return NARROW if host().pairs else PROBLEM


@dataclass
class CpuDemo:
    """A demonstration, printed line by line."""

    say: Callable[[str], None]

    def run(self, problem: AttentionProblem, seconds: float = TUNE_SECONDS) -> dict[str, Any]:
        """Choose, compile, verify, tune and measure the kernels of a problem; return results as
        plain values. Kernels with a record are not tuned again. Raises Unsupported if kernels
        cannot be compiled."""
        import torch

        from tilegen.cpu.target import host, processor

        if reason := cpu.why_not_compiled():
            raise Unsupported(reason)
        started = time.perf_counter()
        target, threads = host(), torch.get_num_threads()
        self.say(f"problem   {problem}")
        self.say(f"CPU       {processor()}, {target.name}, {threads} threads; no GPU found")
        problem = problem.normal()
        if problem.page:
            raise Unsupported(
                f"expected whole keys, got pages of {problem.page}: the demonstration times calls "
                "of tilegen.attention; leave the page out"
            )
        chosen = pipeline.choose(problem, current_cpu())
        self._propose(chosen)
        configs = {kernel: choice.config for kernel, choice in chosen.items()}
        rendered = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
        self._compile(rendered)
        checks = self._verify(problem, configs)
        records = self._tune(chosen, seconds)
        configs |= {kernel: record.config for kernel, record in records.items()}
        times = self._measure(problem)
        self.say("")
        took = seconds_text(time.perf_counter() - started)
        self.say(f"{len(checks)} outputs right; {took} in all")
        self.say(f'to read a kernel, type: tilegen show "{problem}" --kernel fwd')
        self.say(f'for other lengths: tilegen compare "{problem}" --backward')
        return {
            "problem": problem.key,
            "processor": processor(),
            "target": target.name,
            "threads": threads,
            "configs": {kernel: config.key for kernel, config in configs.items()},
            "records": {k: str(current().cache_dir / x.path) for k, x in records.items()},
            "times": times,
        }

    def _propose(self, chosen: Mapping[Kernel, Choice]) -> None:
        self.say("")
        self.say("-- propose: tiles that the model predicts to be fastest on one thread, and why")
        for kernel, choice in chosen.items():
            task = choice.ranked.task
            if choice.ranked.origin != "model":
                self.say(f"{kernel:15}{choice.config.key:20}from record {choice.source}")
                continue
            if not may_tune(task):
                self.say(f"{kernel:15}{choice.config.key:20}the only one")
                continue
            first, *others = candidates(task)[:SHOWN]
            for i, candidate in enumerate((first, *others)):
                name, predicted = kernel if i == 0 else "", candidate.estimate.seconds
                self.say(f"{name:15}{candidate.config.key:20}{seconds_text(predicted)} predicted")
            self.say(f"{'':15}{first.config.key}: {first.reason}")

    def _tune(self, chosen: Mapping[Kernel, Choice], seconds: float) -> dict[Kernel, TuningRecord]:
        """Tune the kernels without a record, and return their records."""
        self.say("")
        tasks = {k: choice.ranked.task for k, choice in chosen.items() if _is_tuned(choice)}
        if reason := cpu.why_not():
            self.say(f"-- tune: nothing, since {reason}")
            return {}
        if not tasks:
            self.say("-- tune: nothing, since calls use the records of an earlier run")
            return {}
        budget = seconds_text(seconds)
        self.say(f"-- tune: for {budget}, in turns with the tiles above, on one thread")
        records = {k: tune(task, seconds=seconds / len(tasks)) for k, task in tasks.items()}
        for kernel, record in records.items():
            before, now = chosen[kernel].config, record.config
            verdict = f"{now.key} is faster than {before.key}"
            if before == now:
                verdict = f"{now.key} stays, nothing beats it beyond noise"
            elif " times" in record.measurement.message:
                ratio = record.measurement.message.split()[2]
                verdict += f": {ratio} times its time"
            self.say(f"{kernel:15}{verdict}; {record.trials} tiles tried")
            self.say(f"{'':15}recorded in {current().cache_dir / record.path}")
        return records

    def _compile(self, rendered: Mapping[Kernel, RenderedKernel]) -> None:
        self.say("")
        self.say("-- compile: emitted Triton kernels to machine code, kept on disk")
        for kernel, emitted in rendered.items():
            started = time.perf_counter()
            built = cpu.load(emitted).made
            seconds = time.perf_counter() - started
            self.say(
                f"{kernel:15}{emitted.config.key:17} {memory_text(len(built.binary)):>8}  "
                f"{seconds_text(seconds):>8}"
            )

    def _verify(
        self, problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]
    ) -> tuple[Check, ...]:
        smaller = checkable(problem)
        self.say("")
        self.say(f"-- verify: against fp64, at most twice PyTorch's own error, on {smaller}")
        checks = verify(smaller, configs, device="cpu")
        for check in checks:
            self.say(str(check))
        require(checks)
        return checks

    def _measure(self, problem: AttentionProblem) -> dict[str, Any]:
        self.say("")
        self.say("-- measure: tilegen.attention and SDPA in turns, median times")
        times: dict[str, Any] = {}
        functions_of = passes_to_time(problem)
        for name in passes_of(problem):
            functions = functions_of[name]
            timings = timed_in_turns(functions, seconds=SECONDS)
            ours = timings["tilegen"]
            times[name] = {who: timing.median for who, timing in timings.items()}
            line = f"{name:10}tilegen {seconds_text(ours.median):>8}"
            for who, timing in timings.items():
                if timing is not ours:
                    line += f"  {who} {seconds_text(timing.median):>8}: "
                    line += _compared(timing.ratio, who)
            self.say(line)
        return times


def _is_tuned(choice: Choice) -> bool:
    return choice.ranked.origin == "model" and may_tune(choice.ranked.task)


def _compared(ratio: float, who: str) -> str:
    """Say in words how a speed compares with that of another."""
    if ratio >= 1:
        return f"tilegen is {ratio:.2f} times as fast as {who}"
    return f"tilegen is slower, {ratio:.2f} times the speed of {who}"


def demonstrate_on_cpu(
    problem: str, say: Callable[[str], None], seconds: float | None = None
) -> dict[str, Any]:
    """Run the demonstration on a problem's notation and return its results as plain values. The
    default problem suits this machine."""
    parsed = AttentionProblem.parse(problem or usual_problem())
    return CpuDemo(say).run(parsed, TUNE_SECONDS if seconds is None else seconds)
