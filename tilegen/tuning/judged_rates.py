"""The rates kept for this processor, judged by the times of kernels that are tuned on it."""

from __future__ import annotations

from dataclasses import replace

from tilegen.cpus import rates
from tilegen.cpus.host import current_cpu, with_own_sizes
from tilegen.cpus.rates import Kept
from tilegen.disk import log
from tilegen.kernels.config import TileConfig
from tilegen.model.cpu_time import LAUNCH_SECONDS, TERMS, terms_of, weights_of
from tilegen.sympy_lock import one_at_a_time
from tilegen.task import KernelTask
from tilegen.tuning.in_turns import alone_on_this_machine

IMPOSSIBLE = 0.9
"""Part of the time of matrix products alone, at the rate kept for them, that no kernel can beat.
Kernels take at least 1.05 times as long by the fitted weights (model/cpu_weights.toml)."""
FACTOR = 1.25
"""Largest ratio of a measured and a predicted time, in either direction, that agrees with the
rates. The fitted times are off by 4 to 6 % in the mean."""
RUNS = 5
"""Kernels in a row that contradict the rates together."""


def judge(task: KernelTask, config: TileConfig, seconds: float) -> None:
    """Compare a kernel's measured time on one thread [s] with the rates kept for this processor,
    and measure the rates again where times contradict them.

    Two things contradict rates. A kernel took less than IMPOSSIBLE of the time of its matrix
    products alone. Or each of the last RUNS kernels took over FACTOR times as long as the model
    predicts by the rates, or each of them less than 1 / FACTOR of it.

    Other programs slow a measurement down, and never speed it up. So after kernels that are too
    fast, each rate becomes the larger of the old and the new. After kernels that are too slow, the
    new rates replace the old. Earlier times no longer count then.

    Nothing happens where no rates are kept, or where the model does not predict the kernel.
    """
    kept = rates.read_kept()
    if kept is None or task.spec.packs or not task.spec.masked:
        return
    predicted, least = _predicted(task, config, kept)
    ratios = (*kept.ratios, seconds / predicted)[-RUNS:]
    is_full = len(ratios) == RUNS
    too_fast = seconds < IMPOSSIBLE * least or (is_full and max(ratios) < 1 / FACTOR)
    if not too_fast and not (is_full and min(ratios) > FACTOR):
        rates.keep(replace(kept, ratios=ratios))
        return
    with alone_on_this_machine():
        new = rates.measure(with_own_sizes(current_cpu()))
    if too_fast:
        new = {name: max(rate, kept.rates[name]) for name, rate in new.items()}
    rates.keep(Kept(new))
    rates.measured_cpu.cache_clear()
    log.info(
        "rates of this processor measured again, since %s took %.2f times the predicted time: "
        "%.3g GFLOP/s of fp32 products, earlier %.3g",
        *(f"{task.kernel} for '{task.problem}'", seconds / predicted),
        *(one["product_flops_32"] / 1e9 for one in (new, kept.rates)),
    )


@one_at_a_time
def _predicted(task: KernelTask, config: TileConfig, kept: Kept) -> tuple[float, float]:
    """Return the predicted time of a kernel and the time of its matrix products alone [s]."""
    tiled = replace(task, device=rates.with_rates(kept.rates)).tiled(config)
    terms, weights = terms_of(tiled), weights_of(tiled)
    return LAUNCH_SECONDS + sum(weights[name] * terms[name] for name in TERMS), terms["products"]
