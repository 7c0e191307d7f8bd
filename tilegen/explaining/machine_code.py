"""Describe the machine code of a kernel: resources, and for each loop with matrix products its
instructions, the time of each unit, and the work that the products hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tilegen.choose.ranker import estimate, time_as_compiled
from tilegen.compiling.compiler import compile_for
from tilegen.compiling.machine_code.counts import LoopCode
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.model.as_compiled import clocks_as_compiled
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import residents
from tilegen.pipeline import choose_kernel
from tilegen.task import KernelTask
from tilegen.units import memory_text, percent_text, seconds_text

SHOWN = 128 * 128
"""Number of scores for which clocks are shown, so that tiles can be compared."""
CLOCKS = {
    "tensor": "matrix products",
    "exp": "exponentials",
    "issue": "issue",
    "smem": "shared memory",
    "local": "local memory",
    "bound": "at least",
}
"""The clocks of a step, in words."""


def read(task: KernelTask, config: TileConfig | None = None) -> dict[str, Any]:
    """Describe the machine code of a kernel, as values that JSON can hold; compiles the kernel,
    without a GPU.

    `config` defaults to the choice of a call. `step` has the clocks of a step on a full tile, and
    `scale` to clocks of SHOWN scores; it and `seconds`, the time by these clocks, are None if no
    loop's products are those of a step. Raises Unsupported and BuildFailed.
    """
    gpu, kernel = task.gpu, task.kernel
    chosen = config or choose_kernel(task, may_compile=True).config
    tiled = task.tiled(chosen)
    built = compile_for(render(task.problem, chosen, kernel), gpu.arch)
    used, code, body = built.resources, built.resources.step_code, built.code.body
    loops = [loop for loop in built.code.loops if loop.products] or [body]
    step = None
    if code is not None:
        clocks = clocks_as_compiled(code, gpu)
        scale = SHOWN / (chosen.rows * chosen.block_n)
        step = {"scale": scale, "code": asdict(code), **asdict(clocks), "bound": clocks.bound}
    return {
        "kernel": kernel,
        "config": chosen.key,
        "gpu": gpu.name,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
        "programs_per_sm": residents(footprint(tiled).as_compiled(used), gpu, chosen),
        "loops": [_loop(loop, chosen.num_warps, looped=loop is not body) for loop in loops],
        "predicted_seconds": estimate(tiled).seconds,
        "step": step,
        "seconds": None if code is None else time_as_compiled(tiled, used).seconds,
    }


def _loop(loop: LoopCode, warps: int, *, looped: bool) -> dict[str, Any]:
    """Describe a loop with matrix products, or a kernel that has none: then `looped` is False."""
    return {
        "looped": looped,
        "depth": loop.depth,
        "instructions": loop.instructions,
        "units": {unit: number for unit, number in loop.units.most_common() if number},
        "products": {str(product): number for product, number in loop.products.items()},
        "multiply_adds": loop.multiply_adds(warps),
        "waits": list(loop.waits),
        "serialized": loop.serialized,
        "local_share": loop.local_share,
        # Instructions issued outside of products' time, where products are asynchronous.
        "exposed": {**loop.exposed} if loop.asynchronous else None,
        "timeline": loop.timeline,
    }


def lines_of_code(code: dict[str, Any]) -> Iterator[str]:
    """Format what `read` returns as lines."""
    yield (
        f"{code['kernel']} {code['config']} on {code['gpu']}, from its machine code: "
        f"{code['registers']} registers, {memory_text(code['spill_bytes'])} spilled, "
        f"{memory_text(code['shared_bytes'])} of shared memory, "
        f"{code['programs_per_sm']} program{'s' * (code['programs_per_sm'] > 1)} per SM"
    )
    if (step := code["step"]) is None:
        yield "  no loop whose matrix products are a step's: the model's own clocks count"
    else:
        clocks = (f"{words} {step['scale'] * step[name]:.0f}" for name, words in CLOCKS.items())
        yield f"  clocks for 128 x 128 scores: {', '.join(clocks)}"
        yield (
            f"  {percent_text(step['exposed'])} of the softmax is under no matrix product; a "
            f"partial tile takes {step['scale'] * step['masking']:.0f} clocks more"
        )
        if step["local_once"]:
            yield (
                f"  local memory outside of loops takes {step['local_once']:.0f} clocks of each "
                "program"
            )
        yield (
            f"  predicted {seconds_text(code['predicted_seconds'])}, "
            f"{seconds_text(code['seconds'])} with these clocks"
        )
    for loop in code["loops"]:
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
        share = percent_text(loop["local_share"])
        yield f"    {share} of the instructions load or store spilled registers"
    if (exposed := loop["exposed"]) is not None:
        exposures = ", ".join(
            f"{exposed.get(unit, 0)} of {loop['units'][unit]} {unit}"
            for unit in ("exp", "fp32", "alu", "shared")
            if unit in loop["units"]
        )
        yield f"    outside of products' time: {exposures}"
    yield f"    {loop['timeline']}"
