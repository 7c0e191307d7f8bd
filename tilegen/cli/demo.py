"""`tilegen demo`: the whole pipeline on one attention layer, step by step, on this machine's GPU or
else on its processor."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilegen import cpu, pipeline
from tilegen.check.peers import flex, sdpa
from tilegen.check.sizes import checkable
from tilegen.check.verification import Check, require, verify
from tilegen.choose.families import passes_of
from tilegen.choose.on_cpu import candidates, may_tune
from tilegen.cpu.passes import passes_to_time
from tilegen.cpu.timing import timed_in_turns
from tilegen.device import Device
from tilegen.devices import device_of
from tilegen.emit.kernel_files import write
from tilegen.emit.render import render
from tilegen.environment import current
from tilegen.errors import BuildFailed, TilegenError, Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.problem import AttentionProblem
from tilegen.tuning.measure import measure, one_line
from tilegen.tuning.tuner import tune
from tilegen.units import memory_text, ratio_text, seconds_text

if TYPE_CHECKING:
    from tilegen.check.peers import AttentionFunction
    from tilegen.choose.choice import Choice
    from tilegen.kernels.config import Kernel, TileConfig
    from tilegen.store import TuningRecord

ON_GPU = "b1 hq32 hkv8 q8192 kv8192 d128 bf16 causal"
ON_CPU = "b1 hq8 hkv2 q2048 kv2048 d128 fp32 causal"
ON_CPU_NARROW = "b1 hq8 hkv2 q2048 kv2048 d128 bf16 causal"
"""The same problem for processors that multiply bf16: about a second for everything."""
TUNE_SECONDS, TUNE_SECONDS_ON_CPU = 40.0, 16.0
"""Time to tune all kernels together [s]."""
SECONDS = 1.0
"""Time to measure each function on a processor [s]."""
SHOWN = 3
"""Candidates per kernel."""


@dataclass
class Demo:
    """A demonstration, printed line by line."""

    say: Callable[[str], None]
    device: Device
    width: int = 0
    """Width of a line [characters]; 0: unlimited."""

    @property
    def on_gpu(self) -> bool:
        """True on a GPU, False on a processor."""
        return isinstance(self.device, GpuSpec)

    def run(self, problem: AttentionProblem, seconds: float) -> dict[str, Any]:
        """Choose, compile, verify, tune and measure the kernels of a problem; return results as
        plain values. Raises Unsupported if kernels cannot be compiled."""
        started = time.perf_counter()
        if not self.on_gpu and (reason := cpu.why_not_compiled()):
            raise Unsupported(reason)
        self._line("problem", str(problem), lead=10)
        if problem.rewriting:
            self._line("", problem.rewriting, lead=10)
        self._line("device", _title(self.device), lead=10)
        problem = problem.normal()
        if problem.page:
            raise Unsupported(
                f"expected whole keys, got pages of {problem.page}: the demonstration times calls "
                "of tilegen.attention; leave the page out"
            )
        chosen = pipeline.choose(problem, self.device, may_compile=self.on_gpu)
        self._propose(chosen)
        self._compile(problem, chosen)
        configs = {kernel: choice.config for kernel, choice in chosen.items()}
        checks = self._verify(problem, configs)
        records = self._tune(chosen, seconds)
        configs |= {kernel: record.config for kernel, record in records.items()}
        times = self._measure(problem)
        took = seconds_text(time.perf_counter() - started)
        self._heading(f"{len(checks)} outputs right; {took} in all")
        self._heading("next: why these tiles, and other lengths")
        self.say(f'tilegen explain "{problem}"')
        self.say(f'tilegen compare "{problem}" --backward')
        return {
            "problem": problem.key,
            "device": self.device.name,
            "configs": {kernel: config.key for kernel, config in configs.items()},
            "records": {k: str(current().cache_dir / x.path) for k, x in records.items()},
            "times": times,
        }

    def _heading(self, text: str) -> None:
        self.say("")
        self._line("--", text, lead=3)

    def _line(self, first: str, text: str, *, lead: int = 15) -> None:
        """Print a line whose text starts in column `lead`; continuation lines start there too."""
        line = f"{first:{lead}}{text}"
        if self.width and len(line) > self.width:
            line = textwrap.fill(
                line,
                max(self.width, 2 * lead),
                subsequent_indent=" " * lead,
                break_long_words=False,
                break_on_hyphens=False,
            )
        self.say(line)

    def _propose(self, chosen: Mapping[Kernel, Choice]) -> None:
        kind = "if none of their registers spills" if self.on_gpu else "on one thread"
        self._heading(f"propose: tiles that the model predicts to be fastest {kind}, and why")
        for kernel, choice in chosen.items():
            if choice.ranked.origin != "model":
                self._line(kernel, f"{choice.config.key:20}from {choice.source}")
                continue
            if not (self.on_gpu or may_tune(choice.ranked.task)):
                self._line(kernel, f"{choice.config.key:20}the only one")
                continue
            proposed = choice.ranked.candidates or candidates(choice.ranked.task)
            for i, candidate in enumerate(proposed[:SHOWN]):
                name, predicted = kernel if i == 0 else "", candidate.estimate.seconds
                text = f"{candidate.config.key:20}{seconds_text(predicted):>8} predicted"
                self._line(name, f"{text}, limited by {candidate.estimate.limit}")
            self._line("", f"{proposed[0].config.key}: {proposed[0].reason}")

    def _compile(self, problem: AttentionProblem, chosen: Mapping[Kernel, Choice]) -> None:
        self._heading("compile: emitted Triton files, one for each kernel, to machine code")
        for kernel, choice in chosen.items():
            rendered = render(problem, choice.config, kernel)
            self._line(kernel, str(write(rendered)))
            if not self.on_gpu:
                started = time.perf_counter()
                size = memory_text(len(cpu.load(rendered).made.binary))
                took = seconds_text(time.perf_counter() - started)
                self._line("", f"{choice.config.key:20}{size:>8}, {took}")
            for config, built in choice.tried.items():
                if isinstance(built, BuildFailed):
                    self._line("", f"{config.key:20}{built}")
                    continue
                text = f"{config.key:20}{built.registers:3} registers"
                text += f", {memory_text(built.shared_bytes)} of shared memory"
                text += f", {built.spill_bytes} bytes spilled" if built.spill_bytes else ""
                if predicted := choice.seconds.get(config):
                    text += f", {seconds_text(predicted)} predicted"
                self._line("", text)

    def _verify(
        self, problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]
    ) -> tuple[Check, ...]:
        smaller = checkable(problem)
        self._heading(f"verify: against fp64, at most twice PyTorch's own error, on {smaller}")
        checks = verify(smaller, configs, device="cuda" if self.on_gpu else "cpu")
        for check in checks:
            tensor, verdict = str(check).split(" ", 1)
            self._line(tensor, verdict.strip(), lead=6)
        require(checks)
        return checks

    def _tune(self, chosen: Mapping[Kernel, Choice], seconds: float) -> dict[Kernel, TuningRecord]:
        """Tune the kernels without a record, and return their records."""
        tasks = {k: one.ranked.task for k, one in chosen.items() if one.ranked.origin == "model"}
        if not self.on_gpu:
            tasks = {kernel: task for kernel, task in tasks.items() if may_tune(task)}
            if reason := cpu.why_not():
                self._heading(f"tune: nothing, since {reason}")
                return {}
        if not tasks:
            self._heading("tune: nothing, since calls use records of earlier runs")
            return {}
        self._heading(f"tune: for {seconds_text(seconds)}, beginning with the tiles above")
        records = {k: tune(task, seconds=seconds / len(tasks)) for k, task in tasks.items()}
        for kernel, record in records.items():
            before, now = chosen[kernel].config, record.config
            verdict = f"{now.key} is faster than {before.key}"
            if before == now:
                verdict = f"{now.key} stays, nothing beats it beyond noise"
            elif " times" in record.measurement.message:
                verdict += f": {record.measurement.message.split()[2]} times its time"
            self._line(kernel, f"{verdict}; {record.trials} tiles tried")
            self._line("", f"recorded in {current().cache_dir / record.path}")
        return records

    def _measure(self, problem: AttentionProblem) -> dict[str, dict[str, float | None]]:
        """Measure tilegen and PyTorch; return the median times of each pass [s]."""
        how = "from a cold L2" if self.on_gpu else "in turns"
        self._heading(f"measure: tilegen.attention and PyTorch {how}, median times")
        place = "cuda" if self.on_gpu else "cpu"
        functions_of = passes_to_time(problem, self._peers(problem, place), place)
        times: dict[str, dict[str, float | None]] = {}
        for name in passes_of(problem):
            times[name] = timed = self._timed(functions_of[name])
            ours = timed["tilegen"]
            for who, seconds in timed.items():
                text = f"{who:16}{seconds_text(seconds):>8}" if seconds else f"{who:16}not run"
                if who != "tilegen" and seconds and ours:
                    text += f": tilegen has {ratio_text(seconds / ours)} times its speed"
                self._line(name, text)
        return times

    def _peers(self, problem: AttentionProblem, place: str) -> dict[str, AttentionFunction]:

        # The first call of FlexAttention on a processor takes half a minute.
        made: dict[str, AttentionFunction] = {}
        for name, make in {"SDPA": sdpa, "FlexAttention": flex}.items():
            if name == "SDPA" or self.on_gpu:
                try:
                    made[name] = make(problem, place)
                except TilegenError as error:  # for example a score
                    self._line(name, f"not run: {one_line(error)}")
        return made

    def _timed(self, functions: Mapping[str, Callable[[], object]]) -> dict[str, float | None]:
        if not self.on_gpu:
            timings = timed_in_turns(functions, seconds=SECONDS)
            return {name: timing.median for name, timing in timings.items()}
        times: dict[str, float | None] = {}
        for name, function in functions.items():
            try:
                median = measure(function).median_us
            except Exception as error:  # an error of PyTorch must not end the demonstration
                self._line(name, f"not run: {one_line(error)}")
                median = None
            times[name] = median and 1e-6 * median
        return times


def _title(device: Device) -> str:
    if isinstance(device, GpuSpec):
        return device.title

    from tilegen.cpu.target import host, processor

    return f"{processor()}, {host().name}, {torch.get_num_threads()} threads; no GPU found"


def demonstrate(
    problem: str, say: Callable[[str], None], seconds: float | None = None, width: int = 0
) -> dict[str, Any]:
    """Run the demonstration on a problem's notation and return its results as plain values. The
    default problem suits this machine."""
    demo = Demo(say, device_of(None), width)
    if not problem:
        from tilegen.cpu.target import host

        problem = ON_GPU if demo.on_gpu else ON_CPU_NARROW if host().pairs else ON_CPU
    usual = TUNE_SECONDS if demo.on_gpu else TUNE_SECONDS_ON_CPU
    return demo.run(AttentionProblem.parse(problem), usual if seconds is None else seconds)
