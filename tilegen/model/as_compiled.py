"""Clocks of a step as its machine code has them, where it was read (`compiling.machine_code`).

The instructions of a step are then counted, not predicted; so is the part of the softmax that no
matrix product of the same warps hides, where those are asynchronous.
"""

from __future__ import annotations

from tilegen.gpus.spec import GpuSpec
from tilegen.model.rates import peak_flops_per_clk, rates_of
from tilegen.model.resources import StepCode
from tilegen.model.time import SCHEDULERS, SMEM_BYTES_PER_CLK, StepClocks

LANES = 32
ALU_LANES = 64
"""Threads whose integer operations, comparisons or conversions an SM starts each clock."""


def issue_clocks(code: StepCode, gpu: GpuSpec) -> float:
    """Return the clocks in which an SM issues a step, on its busiest pipe."""
    fp32_lanes = gpu.vector_flops_32 / (2 * gpu.num_sms * gpu.clock_hz)
    return max(
        code.instructions / SCHEDULERS,
        code.fp32 * LANES / fp32_lanes,
        code.integer * LANES / ALU_LANES,
    )


def clocks_as_compiled(code: StepCode, gpu: GpuSpec) -> StepClocks:
    """Return the clocks that a step keeps each unit busy."""
    rates = rates_of(gpu.arch)
    peak = peak_flops_per_clk(gpu, vector=False)
    if code.rows < rates.full_rate_rows:
        peak *= rates.narrow_rate
    issue, exp = issue_clocks(code, gpu), code.exponentials * LANES / gpu.exp_per_clk_per_sm
    exposed = rates.exposed_of(code.kernel)
    if code.serialized:
        exposed = 1.0
    elif code.asynchronous and (softmax := max(issue, exp)):
        bare = max(
            code.exposed / SCHEDULERS, code.exposed_exponentials * LANES / gpu.exp_per_clk_per_sm
        )
        exposed = min(1.0, bare / softmax)
    more = max(0, code.partial_instructions - code.instructions)
    return StepClocks(
        tensor=2 * code.multiply_adds / peak,
        exp=exp,
        issue=issue,
        masking=more / SCHEDULERS,
        smem=code.shared_bytes / SMEM_BYTES_PER_CLK,
        exposed=exposed,
        asynchronous=code.asynchronous,
        local=_local_clocks(code.local),
        local_once=_local_clocks(code.local_once),
    )


def _local_clocks(words: int) -> float:
    """Return the clocks that words of all warps take to or from local memory: it is cached in L1,
    behind the port of shared memory, and what was spilled is wanted by the next instruction."""
    return words * LANES * 4 / SMEM_BYTES_PER_CLK
