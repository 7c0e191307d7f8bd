"""`tilegen demo` on a GPU: the whole pipeline on one attention layer, step by step."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilegen import pipeline
from tilegen.check.sizes import reduced
from tilegen.check.verification import Check, require, verify
from tilegen.emit.kernel_files import write
from tilegen.emit.render import render
from tilegen.environment import current
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import current_gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.tuning.tuner import tune
from tilegen.units import bytes_text, memory_text, seconds_text, us_text

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec
    from tilegen.model.estimate import CostEstimate

LLAMA = "b1 hq32 hkv8 q8192 kv8192 d128 bf16 causal"
SHOWN = 3  # candidates per kernel


@dataclass
class Demo:
    """A demonstration, printed line by line."""

    say: Callable[[str], None]
    width: int = 0
    """Width of a line [characters]; 0: unlimited."""

    def run(self, problem: AttentionProblem, seconds: float) -> dict[str, Any]:
        """Run the pipeline, with `seconds` for tuning, and return the results as plain values."""
        started = time.perf_counter()
        spec = current_gpu()
        self._line("problem", str(problem), lead=9)
        if problem.rewriting:
            self._line("", problem.rewriting, lead=9)
        problem = problem.normal()
        self._line("GPU", spec.title, lead=9)
        chosen = pipeline.choose(problem, spec, may_compile=True)
        self._propose(chosen)
        self._render(problem, chosen)
        self._build(chosen, spec)
        configs: dict[Kernel, TileConfig] = {name: choice.config for name, choice in chosen.items()}
        checks = self._verify(reduced(problem), configs)
        budget = seconds / len(chosen)
        records = {k: tune(x.ranked.task, seconds=budget) for k, x in chosen.items()}
        summary: dict[str, Any] = {
            "problem": problem.key,
            "gpu": spec.name,
            "measured": True,
            "records": {k: str(current().cache_dir / x.path) for k, x in records.items()},
            "configs": {kernel: record.config.key for kernel, record in records.items()},
            "forward_us": self.compare(problem),
        }
        self._totals(chosen, checks, time.perf_counter() - started)
        self._heading("next")
        self._line("", "To see why these tiles, type:", lead=0)
        self.say(f'tilegen explain "{problem}" --gpu {spec.name}')
        return summary

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

    def _propose(self, chosen: Mapping[Kernel, pipeline.Choice]) -> None:
        self._heading("propose: tiles that are fastest if none of their registers spills, and why")
        for kernel, choice in chosen.items():
            if not choice.ranked.candidates:
                self._line(kernel, f"{choice.config.key:14}from {choice.source}")
                continue
            for i, candidate in enumerate(choice.ranked.candidates[:SHOWN]):
                cost = candidate.estimate
                self._line(
                    kernel if i == 0 else "",
                    f"{candidate.config.key:14}"
                    f"{seconds_text(cost.seconds):>8} predicted, limited by {cost.limit}",
                )
            first = choice.ranked.candidates[0]
            self._line("", f"{first.config.key}: {first.reason}")

    def _render(self, problem: AttentionProblem, chosen: Mapping[Kernel, pipeline.Choice]) -> None:
        self._heading("render: readable Triton files, one for each kernel")
        for kernel, choice in chosen.items():
            self._line(kernel, str(write(render(problem, choice.config, kernel))))

    def _build(self, chosen: Mapping[Kernel, pipeline.Choice], spec: GpuSpec) -> None:
        self._heading("build: compiled until none can be faster, no GPU needed")
        for kernel, choice in chosen.items():
            predicted = {c.config: c.estimate.smem_bytes for c in choice.ranked.candidates}
            for i, (config, used) in enumerate(choice.tried.items()):
                name = kernel if i == 0 else ""
                if isinstance(used, BuildFailed):
                    self._line(name, f"{config.key:14}{used}")
                    continue
                spills = f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
                if config in choice.seconds:
                    spills += f", {seconds_text(choice.seconds[config])}"
                elif choice.ranked.candidates:
                    spills += ": too many"
                self._line(
                    name,
                    f"{config.key:14}{spec.arch}  {used.registers:3} registers  "
                    f"{memory_text(used.shared_bytes):>8} shared"
                    f" (predicted {memory_text(predicted[config])}){spills}",
                )

    def _verify(
        self, problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]
    ) -> tuple[Check, ...]:
        self._heading("verify: the same kernels on a reduced problem")
        self._line("problem", str(problem))
        self._line("allowed", "twice PyTorch's own error, both judged by an fp64 reference")
        checks = verify(problem, configs)
        for check in checks:
            tensor, verdict = str(check).split(" ", 1)
            self._line(tensor, verdict.strip(), lead=6)
        require(checks)
        return checks

    def _totals(
        self, chosen: Mapping[Kernel, pipeline.Choice], checks: Sequence[Check], seconds: float
    ) -> None:
        self._heading("in all")
        directions: dict[str, list[CostEstimate]] = {}
        for choice in chosen.values():
            directions.setdefault(choice.ranked.task.direction, []).extend(
                replace(c.estimate, seconds=choice.seconds.get(c.config, c.estimate.seconds))
                for c in choice.ranked.candidates
                if c.config == choice.config
            )
        for direction, costs in directions.items():
            if costs:
                moved = sum(cost.read_bytes + cost.write_bytes for cost in costs)
                seconds_in_all = sum(cost.seconds for cost in costs)
                plural = "" if len(costs) == 1 else "s"
                self._line(
                    direction,
                    f"{len(costs)} kernel{plural}, {seconds_text(seconds_in_all)} predicted, "
                    f"{bytes_text(moved)} between SMs and L2",
                )
        compiled = sum(len(choice.tried) for choice in chosen.values())
        self._line("compiled", f"{compiled} configs")
        self._line("verified", f"{len(checks)} outputs, all within what is allowed")
        self._line("took", seconds_text(seconds))

    def compare(self, problem: AttentionProblem, device: str = "cuda") -> dict[str, float | None]:
        """Measure tilegen, SDPA and FlexAttention; return medians in us, None for an attention that
        did not run."""
        self._heading("compare: forward, median of runs from a cold L2")
        import tilegen
        from tilegen.check.peers import flex, sdpa
        from tilegen.check.reference import make_inputs
        from tilegen.masks.dropout import TYPICAL
        from tilegen.masks.tensors import typical_score
        from tilegen.tuning.measure import measure, one_line

        x = make_inputs(problem, device=device)
        problem = replace(problem, mask=problem.mask.realized(problem.shape, device))
        score = typical_score(problem.score, problem.shape, device)
        prepare: dict[str, Callable[[], Callable[..., Any]]] = {
            "tilegen": lambda: partial(
                tilegen.attention,
                mask=problem.mask,
                score=score,
                dropout_p=TYPICAL if problem.dropout else 0.0,
            ),
            "sdpa": lambda: sdpa(problem, device),
            "flex_attention": lambda: flex(problem, device),
        }
        times: dict[str, float | None] = {}
        for name, make in prepare.items():
            try:
                result = measure(partial(make(), x.q, x.k, x.v))
            except Exception as error:  # an error of PyTorch must not end the demonstration
                self._line(name, f"not run: {one_line(error)}")
                times[name] = None
                continue
            times[name] = result.median_us
            self._line(
                name,
                f"{us_text(result.median_us):>10}"
                if result.median_us
                else f"{result.status}: {result.message}",
            )
        return times


def demonstrate(
    problem: str, seconds: float, say: Callable[[str], None], width: int = 0
) -> dict[str, Any]:
    """Run the demonstration on a problem's notation and return its results as plain values."""
    return Demo(say, width).run(AttentionProblem.parse(problem), seconds)
