"""Describe the machine code of a kernel: resources, and for each loop with matrix products its
instructions, the time of each unit, and the work that the products hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tilegen.choose.ranker import estimate, time_as_compiled
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.machine_code.counts import LoopCode
from tilegen.emit.render import render
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import TileConfig
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import residents
from tilegen.model.resources import StepCode
from tilegen.pipeline import choose_kernel
from tilegen.task import KernelTask
from tilegen.units import seconds_text

SHOWN = 128 * 128
"""Number of scores for which clocks are shown, so that tiles can be compared."""


def static(task: KernelTask, config: TileConfig | None = None) -> dict[str, Any]:
    """Describe the machine code of a kernel as plain values; compiles it, without a GPU.

    `config` defaults to the choice of a call. Raises Unsupported and BuildFailed.
    """
    gpu, kernel = task.gpu, task.kernel
    chosen = config or choose_kernel(task, may_compile=True).config
    tiled = task.tiled(chosen)
    built = compile_for(render(task.problem, chosen, kernel), gpu.arch)
    used = built.resources
    needs = footprint(tiled)
    facts: dict[str, Any] = {
        "kernel": kernel,
        "config": chosen.key,
        "gpu": gpu.name,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
        "programs_per_sm": residents(needs.as_compiled(used), gpu, chosen),
        "loops": [
            _loop(loop, chosen.num_warps) | {"looped": loop is not built.code.body}
            for loop in _with_products(built)
        ],
        "predicted_seconds": estimate(tiled).seconds,
    }
    if (code := used.step_code) is not None:
        facts["step"] = _step(code, gpu, chosen)
        facts["seconds"] = time_as_compiled(tiled, used).seconds
    return facts


def _with_products(built: CompiledKernel) -> list[LoopCode]:
    loops = [loop for loop in built.code.loops if loop.products]
    return loops or [built.code.body]


def _loop(loop: LoopCode, warps: int) -> dict[str, Any]:
    return {
        "depth": loop.depth,
        "instructions": loop.instructions,
        "units": {unit: number for unit, number in loop.units.most_common() if number},
        "products": {str(product): number for product, number in loop.products.items()},
        "multiply_adds": loop.multiply_adds(warps),
        "waits": list(loop.waits),
        "serialized": loop.serialized,
        "local_share": loop.local_share,
        "exposed": dict(loop.exposed) if loop.asynchronous else None,
        "timeline": loop.timeline,
    }


def _step(code: StepCode, gpu: GpuSpec, config: TileConfig) -> dict[str, Any]:
    """Return the clocks of a step on a full tile, and the scale to 128 x 128 scores."""
    clocks = clocks_as_compiled(code, gpu)
    scale = SHOWN / (config.rows * config.block_n)
    return asdict(clocks) | {"bound": clocks.bound, "scale": scale, "code": asdict(code)}


def static_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Format the result of `static` as lines."""
    yield (
        f"{facts['kernel']} {facts['config']} on {facts['gpu']}, from its machine code: "
        f"{facts['registers']} registers, {facts['spill_bytes']} bytes spilled, "
        f"{facts['shared_bytes'] / 1024:.4g} KiB of shared memory, "
        f"{facts['programs_per_sm']} program{'s' * (facts['programs_per_sm'] > 1)} per SM"
    )
    if step := facts.get("step"):
        scale = step["scale"]
        parts = ", ".join(
            f"{name} {scale * step[key]:.0f}"
            for name, key in (
                ("matrix products", "tensor"),
                ("exponentials", "exp"),
                ("issue", "issue"),
                ("shared memory", "smem"),
                ("local memory", "local"),
                ("at least", "bound"),
            )
        )
        yield f"  clocks for 128 x 128 scores: {parts}"
        yield (
            f"  {step['exposed']:.0%} of the softmax is under no matrix product; a partial tile "
            f"takes {scale * step['masking']:.0f} clocks more"
        )
        if step["local_once"]:
            yield (
                f"  local memory outside of loops takes {step['local_once']:.0f} clocks of each "
                "program"
            )
        yield (
            f"  predicted {seconds_text(facts['predicted_seconds'])}, "
            f"{seconds_text(facts['seconds'])} with these clocks"
        )
    else:
        yield "  no loop whose matrix products are a step's: the model's own clocks count"
    for loop in facts["loops"]:
        yield from _loop_lines(loop)


def _loop_lines(loop: dict[str, Any]) -> Iterator[str]:
    units = ", ".join(f"{unit} {number}" for unit, number in loop["units"].items())
    what = "loop" if loop["looped"] else "no loop with matrix products: the kernel"
    yield f"  {what} of {loop['instructions']} instructions a warp: {units}"
    if loop["products"]:
        shapes = ", ".join(f"{number} x {shape}" for shape, number in loop["products"].items())
        yield f"    products {shapes} (S shared memory, R registers, T tensor memory)"
    if loop["waits"]:
        left = ", ".join(map(str, loop["waits"]))
        each = "; each product is waited for" if loop["serialized"] else ""
        yield f"    waits that leave {left} groups of products in flight{each}"
    if loop["local_share"]:
        yield f"    {loop['local_share']:.1%} of the instructions load or store spilled registers"
    if loop["exposed"] is not None:
        exposed, units = loop["exposed"], loop["units"]
        exposures = ", ".join(
            f"{exposed.get(unit, 0)} of {units[unit]} {unit}"
            for unit in ("exp", "fp32", "alu", "shared")
            if unit in units
        )
        yield f"    outside of products' time: {exposures}"
    yield f"    {loop['timeline']}"
