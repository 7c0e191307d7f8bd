"""`tilegen demo`: the whole pipeline on one attention layer, telling what it does as it does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilegen import pipeline
from tilegen.check.verification import Check, reduced, require, verify_anywhere
from tilegen.emit.kernel_files import write
from tilegen.emit.render import render
from tilegen.errors import BuildFailed
from tilegen.gpus.spec import current_gpu, detect
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.problem import AttentionProblem
from tilegen.settings import settings
from tilegen.store import TuningRecord
from tilegen.tuning.tuner import tune

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

LLAMA = "b1 hq32 hkv8 q8192 kv8192 d128 bf16 causal"
SHOWN = 3  # candidates per kernel


@dataclass
class Demo:
    """State of one demonstration: where lines go."""

    say: Callable[[str], None]

    def run(self, problem: AttentionProblem, seconds: float) -> dict[str, Any]:
        """Go through the pipeline and return its results as plain values; `seconds` are spent on
        tuning."""
        here = detect()
        spec = current_gpu()
        self.say(f"problem  {problem}")
        if problem.rewriting:
            self.say(f"         {problem.rewriting}")
        problem = problem.normal()
        self.say(f"GPU      {spec.title}" + ("" if here else " (none here: nothing will be timed)"))
        chosen = pipeline.choose(problem, spec, may_compile=True)
        self._propose(chosen)
        self._render(problem, chosen)
        self._build(chosen, spec)
        configs: dict[Kernel, TileConfig] = {kernel: one.config for kernel, one in chosen.items()}
        self._verify(verify_anywhere(reduced(problem), configs))
        records: dict[Kernel, TuningRecord] = {}
        if here:
            budget = seconds / len(chosen)
            records = {k: tune(problem, spec, kernel=k, seconds=budget) for k in chosen}
        summary: dict[str, Any] = {
            "problem": problem.key,
            "gpu": spec.name,
            "measured": here is not None,
            "records": {k: str(settings().cache_dir / one.path) for k, one in records.items()},
            "configs": {
                kernel: (records[kernel].config if kernel in records else config).key
                for kernel, config in configs.items()
            },
        }
        if here:
            summary["forward_us"] = self.compare(problem)
        else:
            self._heading("next")
            self.say("no record was made, since nothing was measured; on a machine with a GPU the")
            self.say(
                "same command tunes these kernels, then compares them with PyTorch's; see more"
            )
            self.say("of the choice: tilegen explain")
        return summary

    def _heading(self, text: str) -> None:
        self.say("")
        self.say(f"-- {text}")

    def _propose(self, chosen: Mapping[Kernel, pipeline.Chosen]) -> None:
        self._heading("propose: tiles that the cost model ranks first, and why")
        for kernel, one in chosen.items():
            if not one.ranked.candidates:
                self.say(f"{kernel:15}{one.config.key:14}from {one.source}")
                continue
            for i, candidate in enumerate(one.ranked.candidates[:SHOWN]):
                cost = candidate.estimate
                self.say(
                    f"{kernel if i == 0 else '':15}{candidate.config.key:14}"
                    f"{1e6 * cost.seconds:8.0f} us predicted, limited by {cost.limit}"
                )
            first = one.ranked.candidates[0]
            self.say(f"{'':15}{first.config.key}: {first.reason}")

    def _render(self, problem: AttentionProblem, chosen: Mapping[Kernel, pipeline.Chosen]) -> None:
        self._heading("render: readable Triton files, one for each kernel")
        for kernel, one in chosen.items():
            self.say(f"{kernel:15}{write(render(problem, one.config, kernel))}")

    def _build(self, chosen: Mapping[Kernel, pipeline.Chosen], spec: GpuSpec) -> None:
        self._heading("build: the first that compiles to what may be used, no GPU needed")
        for kernel, one in chosen.items():
            predicted = {c.config: c.estimate.smem_bytes for c in one.ranked.candidates}
            for i, (config, used) in enumerate(one.tried.items()):
                name = kernel if i == 0 else ""
                if isinstance(used, BuildFailed):
                    self.say(f"{name:15}{config.key:14}{used}")
                    continue
                spills = f", {used.spill_bytes} bytes spilled" if used.spill_bytes else ""
                self.say(
                    f"{name:15}{config.key:14}{spec.arch}  {used.registers:3} registers  "
                    f"{used.shared_bytes / 1024:6.1f} KiB shared"
                    f" (predicted {predicted[config] / 1024:.1f}){spills}"
                )

    def _verify(self, checks: tuple[Check, ...]) -> None:
        self._heading("verify: against an fp64 reference, at most twice PyTorch's own error")
        for check in checks:
            self.say(str(check))
        require(checks)

    def compare(self, problem: AttentionProblem, device: str = "cuda") -> dict[str, float | None]:
        """Return the median of each of tilegen, SDPA and FlexAttention in us; None where it was not
        run."""
        self._heading("compare: forward, median of runs from a cold L2")
        import tilegen
        from tilegen.check.peers import flex, sdpa
        from tilegen.check.reference import make_inputs
        from tilegen.masks.typical import typical_score
        from tilegen.measure import measure, one_line

        x = make_inputs(problem, device=device)
        problem = replace(problem, mask=problem.mask.realized(problem.shape, device))
        score = typical_score(problem.score, problem.shape, device)
        prepare: dict[str, Callable[[], Callable[..., Any]]] = {
            "tilegen": lambda: partial(tilegen.attention, mask=problem.mask, score=score),
            "sdpa": lambda: sdpa(problem, device),
            "flex_attention": lambda: flex(problem, device),
        }
        times: dict[str, float | None] = {}
        for name, make in prepare.items():
            try:
                result = measure(partial(make(), x.q, x.k, x.v))
            except Exception as error:  # what PyTorch cannot do must not end the demonstration
                self.say(f"{name:15}not run: {one_line(error)}")
                times[name] = None
                continue
            times[name] = result.median_us
            self.say(
                f"{name:15}{result.median_us:10.1f} us"
                if result.median_us
                else f"{name:15}{result.status}: {result.message}"
            )
        return times


def demonstrate(problem: str, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the demonstration on a problem's notation and return its results as plain values."""
    return Demo(say).run(AttentionProblem.parse(problem), seconds)
