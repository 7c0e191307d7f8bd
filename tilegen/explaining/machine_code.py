"""Describe the machine code of a kernel: resources, and for each loop with matrix products its
instructions, the time of each unit, and the work that the products hide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tilegen.choose.ranker import estimate, time_as_compiled
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.machine_code.counts import LoopCode
from tilegen.emit.render import render
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import residents
from tilegen.model.resources import StepCode
from tilegen.model.time import StepClocks
from tilegen.pipeline import choose_kernel
from tilegen.task import KernelTask
from tilegen.units import memory_text, percent_text, seconds_text

SHOWN = 128 * 128
"""Number of scores for which clocks are shown, so that tiles can be compared."""


@dataclass(frozen=True, kw_only=True)
class LoopFacts:
    """A loop with matrix products, or a kernel without loops."""

    looped: bool
    """False: the kernel has no loop with matrix products, and all of it is described."""
    depth: int
    instructions: int
    units: Mapping[str, int]
    """Instructions by unit, the most frequent first."""
    products: Mapping[str, int]
    multiply_adds: int
    waits: tuple[int, ...]
    """For each wait, the number of groups of products that it leaves in flight."""
    serialized: bool
    local_share: float
    exposed: Mapping[str, int] | None
    """Instructions issued outside of products' time; None where products are synchronous."""
    timeline: str


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The clocks of a step on a full tile."""

    clocks: StepClocks
    scale: float
    """Factor from clocks of this tile to clocks of SHOWN scores."""
    code: StepCode


@dataclass(frozen=True, kw_only=True)
class MachineCodeFacts:
    """The machine code of a kernel."""

    kernel: Kernel
    config: str
    gpu: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    programs_per_sm: int
    loops: tuple[LoopFacts, ...]
    predicted_seconds: float
    """Time by the model alone [s]."""
    step: StepFacts | None
    """None where no loop's products are those of a step."""
    seconds: float | None
    """Time by the clocks of the step [s]."""

    @property
    def values(self) -> dict[str, Any]:
        """The same as values that JSON can hold. The clocks are keys of `step`."""
        values = asdict(self)
        if self.step is not None:
            clocks = values["step"].pop("clocks")
            values["step"] |= clocks | {"bound": self.step.clocks.bound}
        return values


def static(task: KernelTask, config: TileConfig | None = None) -> MachineCodeFacts:
    """Describe the machine code of a kernel; compiles it, without a GPU.

    `config` defaults to the choice of a call. Raises Unsupported and BuildFailed.
    """
    gpu, kernel = task.gpu, task.kernel
    chosen = config or choose_kernel(task, may_compile=True).config
    tiled = task.tiled(chosen)
    built = compile_for(render(task.problem, chosen, kernel), gpu.arch)
    used, code = built.resources, built.resources.step_code
    return MachineCodeFacts(
        kernel=kernel,
        config=chosen.key,
        gpu=gpu.name,
        registers=used.registers,
        spill_bytes=used.spill_bytes,
        shared_bytes=used.shared_bytes,
        programs_per_sm=residents(footprint(tiled).as_compiled(used), gpu, chosen),
        loops=tuple(
            _loop(loop, chosen.num_warps, looped=loop is not built.code.body)
            for loop in _with_products(built)
        ),
        predicted_seconds=estimate(tiled).seconds,
        step=None if code is None else _step(code, gpu, chosen),
        seconds=None if code is None else time_as_compiled(tiled, used).seconds,
    )


def _with_products(built: CompiledKernel) -> list[LoopCode]:
    loops = [loop for loop in built.code.loops if loop.products]
    return loops or [built.code.body]


def _loop(loop: LoopCode, warps: int, *, looped: bool) -> LoopFacts:
    return LoopFacts(
        looped=looped,
        depth=loop.depth,
        instructions=loop.instructions,
        units={unit: number for unit, number in loop.units.most_common() if number},
        products={str(product): number for product, number in loop.products.items()},
        multiply_adds=loop.multiply_adds(warps),
        waits=tuple(loop.waits),
        serialized=loop.serialized,
        local_share=loop.local_share,
        exposed={**loop.exposed} if loop.asynchronous else None,
        timeline=loop.timeline,
    )


def _step(code: StepCode, gpu: GpuSpec, config: TileConfig) -> StepFacts:
    """Return the clocks of a step on a full tile, and the scale to SHOWN scores."""
    scale = SHOWN / (config.rows * config.block_n)
    return StepFacts(clocks=clocks_as_compiled(code, gpu), scale=scale, code=code)


def static_lines(facts: MachineCodeFacts) -> Iterator[str]:
    """Format the machine code of a kernel as lines."""
    yield (
        f"{facts.kernel} {facts.config} on {facts.gpu}, from its machine code: "
        f"{facts.registers} registers, {memory_text(facts.spill_bytes)} spilled, "
        f"{memory_text(facts.shared_bytes)} of shared memory, "
        f"{facts.programs_per_sm} program{'s' * (facts.programs_per_sm > 1)} per SM"
    )
    if (step := facts.step) is not None and facts.seconds is not None:
        scale, clocks = step.scale, step.clocks
        parts = {
            "matrix products": clocks.tensor,
            "exponentials": clocks.exp,
            "issue": clocks.issue,
            "shared memory": clocks.smem,
            "local memory": clocks.local,
            "at least": clocks.bound,
        }
        shown = ", ".join(f"{name} {scale * number:.0f}" for name, number in parts.items())
        yield f"  clocks for 128 x 128 scores: {shown}"
        yield (
            f"  {percent_text(clocks.exposed)} of the softmax is under no matrix product; a "
            f"partial tile takes {scale * clocks.masking:.0f} clocks more"
        )
        if clocks.local_once:
            yield (
                f"  local memory outside of loops takes {clocks.local_once:.0f} clocks of each "
                "program"
            )
        yield (
            f"  predicted {seconds_text(facts.predicted_seconds)}, "
            f"{seconds_text(facts.seconds)} with these clocks"
        )
    else:
        yield "  no loop whose matrix products are a step's: the model's own clocks count"
    for loop in facts.loops:
        yield from _loop_lines(loop)


def _loop_lines(loop: LoopFacts) -> Iterator[str]:
    units = ", ".join(f"{unit} {number}" for unit, number in loop.units.items())
    what = "loop" if loop.looped else "no loop with matrix products: the kernel"
    yield f"  {what} of {loop.instructions} instructions a warp: {units}"
    if loop.products:
        shapes = ", ".join(f"{number} x {shape}" for shape, number in loop.products.items())
        yield f"    products {shapes} (S shared memory, R registers, T tensor memory)"
    if loop.waits:
        left = ", ".join(map(str, loop.waits))
        each = "; each product is waited for" if loop.serialized else ""
        yield f"    waits that leave {left} groups of products in flight{each}"
    if loop.local_share:
        share = percent_text(loop.local_share)
        yield f"    {share} of the instructions load or store spilled registers"
    if loop.exposed is not None:
        exposures = ", ".join(
            f"{loop.exposed.get(unit, 0)} of {loop.units[unit]} {unit}"
            for unit in ("exp", "fp32", "alu", "shared")
            if unit in loop.units
        )
        yield f"    outside of products' time: {exposures}"
    yield f"    {loop.timeline}"
