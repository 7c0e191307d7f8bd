"""Clocks of a step from its machine code, which `compiling.machine_code` reads.

The instructions of a step are counted instead of predicted. If matrix products are asynchronous, so
is the part of the softmax that the products of the same warps do not hide.
"""

from __future__ import annotations

from tilegen.gpus.spec import GpuSpec
from tilegen.model.rates import peak_flops_per_clk, rates_of
from tilegen.model.resources import StepCode
from tilegen.model.time import SCHEDULERS, SMEM_BYTES_PER_CLK, StepClocks

LANES = 32
ALU_LANES = 64
"""Threads whose integer operations, comparisons or conversions an SM issues per clock."""


def issue_clocks(code: StepCode, gpu: GpuSpec) -> float:
    """Compute the clocks in which an SM issues a step, on its busiest pipe."""
    fp32_lanes = gpu.vector_flops_32 / (2 * gpu.num_sms * gpu.clock_hz)
    return max(
        code.instructions / SCHEDULERS,
        code.fp32 * LANES / fp32_lanes,
        code.integer * LANES / ALU_LANES,
    )


def clocks_as_compiled(code: StepCode, gpu: GpuSpec) -> StepClocks:
    """Compute the clocks for which a step keeps each unit busy."""
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
    additional = max(0, code.partial_instructions - code.instructions)
    return StepClocks(
        tensor=2 * code.multiply_adds / peak,
        exp=exp,
        issue=issue,
        masking=additional / SCHEDULERS,
        smem=code.shared_bytes / SMEM_BYTES_PER_CLK,
        exposed=exposed,
        asynchronous=code.asynchronous,
        local=_local_clocks(code.local),
        local_once=_local_clocks(code.local_once),
    )


def _local_clocks(words: int) -> float:
    """Compute the clocks in which words of all warps move to or from local memory.

    Local memory is cached in L1, behind the port of shared memory. The next instruction needs the
    spilled word, so nothing hides the clocks.
    """
    return words * LANES * 4 / SMEM_BYTES_PER_CLK
