"""`tilegen demo`: the whole pipeline on one attention layer, telling what it does as it does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tilegen import pipeline
from tilegen.build.compiler import CompiledKernel
from tilegen.choose.families import kernels_of
from tilegen.emit.kernel_files import write
from tilegen.gpus.spec import detect, gpu
from tilegen.kernels.config import Kernel
from tilegen.problem import AttentionProblem
from tilegen.settings import settings

if TYPE_CHECKING:
    from tilegen.gpus.spec import GpuSpec

LLAMA = "b1 hq32 hkv8 q8192 kv8192 d128 bf16 causal"
WITHOUT_GPU = "h200"
SHOWN = 3  # candidates per kernel


@dataclass
class Demo:
    """State of one demonstration: where lines go."""

    say: Callable[[str], None]

    def run(self, problem: AttentionProblem, seconds: float) -> dict[str, Any]:
        """Run the pipeline and return its results as plain values; `seconds` are spent on
        tuning."""
        here = detect()
        spec = here or gpu(WITHOUT_GPU)
        self.say(f"problem  {problem}")
        if problem.rewriting:
            self.say(f"         {problem.rewriting}")
        problem = problem.normal()
        self.say(f"GPU      {spec.title}" + ("" if here else " (none here: nothing will be timed)"))
        told = {
            "propose": self._propose,
            "render": self._render,
            "build": self._build,
            "verify": self._verify,
        }

        def on_stage(name: str, value: Any) -> None:
            if name in told:
                told[name](value)

        results = pipeline.run(
            problem,
            spec,
            tune_seconds=seconds / len(kernels_of(problem, spec)) if here else None,
            on_stage=on_stage,
        )
        summary: dict[str, Any] = {
            "problem": problem.key,
            "gpu": spec.name,
            "measured": here is not None,
            "records": {
                kernel: str(settings().cache_dir / outcome.record.path)
                for kernel, outcome in results.items()
                if outcome.record is not None
            },
            "configs": {
                kernel: (outcome.record or outcome.chosen).config.key
                for kernel, outcome in results.items()
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

    def _propose(self, candidates: dict[Kernel, list[Any]]) -> None:
        self._heading("propose: tiles that the cost model ranks first, and why")
        for kernel, ranked in candidates.items():
            for i, candidate in enumerate(ranked[:SHOWN]):
                cost = candidate.estimate
                self.say(
                    f"{kernel if i == 0 else '':15}{candidate.config.key:14}"
                    f"{1e6 * cost.seconds:8.0f} us predicted, limited by {cost.limit}"
                )
            self.say(f"{'':15}{ranked[0].config.key}: {ranked[0].reason}")

    def _render(self, rendered: dict[Kernel, list[Any]]) -> None:
        self._heading("render: readable Triton files, the first of each kernel")
        for kernel, ranked in rendered.items():
            self.say(f"{kernel:15}{write(ranked[0])}")

    def _build(self, built: dict[Kernel, pipeline.Built]) -> None:
        self._heading("build: compiled to binaries, no GPU needed")
        for kernel, results in built.items():
            for i, (candidate, result) in enumerate(results[:SHOWN]):
                name = kernel if i == 0 else ""
                if isinstance(result, CompiledKernel):
                    spills = f", {result.spill_bytes} bytes spilled" if result.spill_bytes else ""
                    self.say(
                        f"{name:15}{candidate.config.key:14}{result.arch}  "
                        f"{result.registers:3} registers  "
                        f"{result.shared_bytes / 1024:6.1f} KiB shared"
                        f" (predicted {candidate.estimate.smem_bytes / 1024:.1f}){spills}"
                    )
                else:
                    self.say(f"{name:15}{candidate.config.key:14}{result}")

    def _verify(self, checks: Any) -> None:
        self._heading("verify: against an fp64 reference, at most twice PyTorch's own error")
        for check in checks:
            self.say(str(check))

    def compare(self, problem: AttentionProblem, device: str = "cuda") -> dict[str, float | None]:
        """Return the median of each of tilegen, SDPA and FlexAttention in us; None where it was not
        run."""
        self._heading("compare: forward, median of runs from a cold L2")
        import tilegen
        from tilegen.check.peers import flex, sdpa
        from tilegen.check.reference import make_inputs
        from tilegen.masks.tensors import realized
        from tilegen.masks.typical import typical_score
        from tilegen.measure import measure, one_line

        x = make_inputs(problem, device=device)
        problem = replace(problem, mask=realized(problem.mask, problem.shape, device))
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


def used_gpu() -> GpuSpec:
    """Return the GPU at hand, or the one that commands assume where there is none."""
    return detect() or gpu(WITHOUT_GPU)
