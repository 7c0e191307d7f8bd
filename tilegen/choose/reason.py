"""The reason for a tile, in one sentence beside the numbers of `propose`."""

from __future__ import annotations

from tilegen.gpus.nearest import on_tensor_cores
from tilegen.model.estimate import CostEstimate
from tilegen.model.on_chip import Footprint, residents
from tilegen.task import Tiled
from tilegen.units import bytes_text, memory_text, ratio_text

_WAITS_FOR = {
    "tensor": "the tensor cores",
    "exp": "exponentials",
    "issue": "instruction issue",
    "smem": "shared memory",
    "l2": "L2 bandwidth",
    "dram": "DRAM bandwidth",
    "latency": "memory latency",
}


def reason_of(tiled: Tiled, cost: CostEstimate, needs: Footprint) -> str:
    """Describe a tile in one sentence: its sides, its traffic, and its limit."""
    config, gpu = tiled.config, tiled.gpu
    moved = cost.read_bytes + cost.write_bytes
    together = residents(needs, gpu, config)
    waits_for = limit_in_words(tiled, cost)
    spills = f"; may spill {needs.spill_bytes} bytes a thread" if needs.spill_bytes else ""
    # The bound is 0 where a kernel only hands intermediates on and the mask keeps no pair.
    least = cost.lower_bound_bytes
    bound = f", {ratio_text(moved / least)} times the lower bound" if least else ""
    tile = tiled.spec.loop.tile(config)
    return (
        f"{tile}: {bytes_text(moved)} to and from L2{bound}; waits for {waits_for}, "
        f"{together} program{'s' * (together > 1)} per SM with "
        f"{memory_text(cost.smem_bytes)} and {cost.registers} registers{spills}"
    )


def limit_in_words(tiled: Tiled, cost: CostEstimate) -> str:
    """Return the unit that a tile waits for, in words."""
    if cost.limit == "tensor" and not on_tensor_cores(tiled.problem.dtype, tiled.gpu.arch):
        return "fp32 multiply-adds"
    return _WAITS_FOR[cost.limit]
