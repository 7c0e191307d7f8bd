"""`tilegen demo` on a machine without a GPU: kernels compiled for the CPU, checked and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilegen import cpu, pipeline
from tilegen.check.sizes import checkable
from tilegen.check.verification import Check, require, verify
from tilegen.choose.families import passes_of
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.timing import timed_in_turns
from tilegen.cpus.host import current_cpu
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem

if TYPE_CHECKING:
    from tilegen.emit.identity import RenderedKernel

PROBLEM = "b1 hq8 hkv2 q2048 kv2048 d128 fp32 causal"
NARROW = "b1 hq8 hkv2 q2048 kv2048 d128 bf16 causal"
"""The same problem in bf16, for processors that multiply bf16."""
SECONDS = 1.0
"""Time to measure each function [s]."""


def usual_problem() -> str:
    """Return a problem for this machine's processor: about a second for everything."""
    from tilegen.cpu.target import host

    return NARROW if host().pairs else PROBLEM


@dataclass
class CpuDemo:
    """A demonstration, printed line by line."""

    say: Callable[[str], None]

    def run(self, problem: AttentionProblem) -> dict[str, Any]:
        """Emit, compile, verify and measure the kernels of a problem; return results as plain
        values. Raises Unsupported if kernels cannot be compiled."""
        import torch

        from tilegen.cpu.target import host, processor

        if reason := cpu.trouble():
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
        configs = {kernel: choice.config for kernel, choice in chosen.items()}
        rendered = {kernel: render(problem, config, kernel) for kernel, config in configs.items()}
        self._compile(rendered)
        checks = self._verify(problem, configs)
        times = self._measure(problem)
        self.say("")
        self.say(f"{len(checks)} outputs right; {time.perf_counter() - started:.1f} s in all")
        self.say(f'to read a kernel, type: tilegen show "{problem}" --kernel fwd')
        return {
            "problem": problem.key,
            "processor": processor(),
            "target": target.name,
            "threads": threads,
            "configs": {kernel: config.key for kernel, config in configs.items()},
            "times": times,
        }

    def _compile(self, rendered: Mapping[Kernel, RenderedKernel]) -> None:
        self.say("")
        self.say("-- compile: emitted Triton kernels to machine code, kept on disk")
        for kernel, emitted in rendered.items():
            started = time.perf_counter()
            built = cpu.function_of(cpu.load(emitted)).made
            seconds = time.perf_counter() - started
            self.say(
                f"{kernel:15}{emitted.config.key:14}{len(built.binary) / 1024:5.0f} KiB  "
                f"{1e3 * seconds:5.0f} ms"
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
            line = f"{name:10}tilegen {1e3 * ours.median:8.2f} ms"
            for who, timing in timings.items():
                if timing is not ours:
                    line += f"  {who} {1e3 * timing.median:8.2f} ms:"
                    line += f" {timing.ratio:.2f} times {who}'s speed"
            self.say(line)
        return times


def demonstrate_on_cpu(problem: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the demonstration on a problem's notation and return its results as plain values. The
    default problem suits this machine."""
    return CpuDemo(say).run(AttentionProblem.parse(problem or usual_problem()))
