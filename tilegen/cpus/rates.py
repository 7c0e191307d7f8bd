"""Rates of this machine's processor, measured by compiled kernels and kept on disk.

Choices do not use them: see `host.current_cpu`. They say how fast this machine is, and `tilegen
doctor` prints them. Where times of tuned kernels contradict them, they are measured again: see
tuning/judged_rates.py.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tilegen.cpus.host import current_cpu, with_own_sizes
from tilegen.cpus.spec import CpuSpec
from tilegen.disk import log, write_whole
from tilegen.environment import current
from tilegen.errors import Unsupported
from tilegen.store.versions import installed, this_machine

ROUNDS = 7
"""Times that each kernel runs; the shortest counts."""
PRODUCT, SQUARE, ROW = 64, 64, 1024
"""Sides of the tiles that are multiplied and exponentiated, and columns of those that are read."""
LEAST_READ = 2**25
"""Bytes to read from a cache in one run."""
MOST_MEMORY = 2**27
"""Bytes to read from memory."""
RATES = (
    "product_flops_32",
    "product_flops_16",
    "exp2_rate",
    "l2_bandwidth",
    "l3_bandwidth",
    "dram_bandwidth",
)


@dataclass(frozen=True)
class Kept:
    """The content of a file of rates."""

    rates: dict[str, float]
    """Values of RATES."""
    ratios: tuple[float, ...] = ()
    """Measured times of the last tuned kernels over those that the rates predict, oldest first."""


@cache
def measured_cpu() -> CpuSpec:
    """Return this machine's processor with its own sizes and rates, measured now or earlier."""
    spec = with_own_sizes(current_cpu())
    kept = read_kept()
    if kept is None:
        kept = Kept(measure(spec))
        keep(kept)
    return with_rates(kept.rates)


def with_rates(rates: dict[str, float]) -> CpuSpec:
    """Return this machine's processor with its own sizes and the given rates."""
    spec = with_own_sizes(current_cpu())
    return replace(spec, **rates, measured=True, source="measured on this machine")


def measure(spec: CpuSpec) -> dict[str, float]:
    """Measure the rates of one core in about half a second, by the clock of this thread."""
    import torch

    from tilegen.cpu.direct import DirectFunction
    from tilegen.cpus import rate_kernels as kernels

    product, exp2, read = (
        DirectFunction(function)
        for function in (kernels.multiply, kernels.exponentiate, kernels.read)
    )
    program = (1,)  # a single program runs on this thread
    rates: dict[str, float] = {}
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16)):
        x, out = torch.zeros(PRODUCT, PRODUCT, dtype=dtype), torch.zeros(PRODUCT, PRODUCT)
        steps = 2000 if bits == 32 or spec.pairs else 500
        seconds = _least(lambda x=x, out=out, n=steps: product[program](x, out, n, PRODUCT))
        rates[f"product_flops_{bits}"] = 2.0 * PRODUCT**3 * steps / seconds
    x = torch.zeros(SQUARE, SQUARE)
    seconds = _least(lambda: exp2[program](x, torch.empty_like(x), 1000, SQUARE))
    rates["exp2_rate"] = SQUARE**2 * 1000 / seconds
    sizes = {
        "l2": spec.l2_bytes // 2,
        "l3": min(spec.l3_bytes // 2, MOST_MEMORY // 4),
        "dram": max(MOST_MEMORY, 2 * min(spec.l3_bytes, MOST_MEMORY)),
    }
    out = torch.zeros(16)
    for level, size in sizes.items():
        steps = max(1, size // (4 * 16 * ROW))
        read_bytes = 4 * 16 * ROW * steps
        rounds = -(-LEAST_READ // read_bytes)
        x = torch.zeros(read_bytes // 4)
        seconds = _least(lambda x=x, n=rounds, s=steps: read[program](x, out, n, s, ROW))
        rates[f"{level}_bandwidth"] = rounds * read_bytes / seconds
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def _least(run: Callable[[], None]) -> float:
    """Return the shortest time of a run by this thread's clock [s], after a run that warms up."""
    run()
    times: list[float] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    return max(min(times), 1e-9)


def read_kept() -> Kept | None:
    """Read this machine's rates; None if there are none that can be used."""
    try:
        values: Any = json.loads(_path().read_bytes())
        rates = {name: float(values[name]) for name in RATES}
        ratios = tuple(float(ratio) for ratio in values.get("ratios", ()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    usable = all(0 < value < math.inf for value in (*rates.values(), *ratios))
    return Kept(rates, ratios) if usable else None


def keep(kept: Kept) -> None:
    """Write this machine's rates. A folder that cannot be written is no error."""
    values = {**kept.rates, "ratios": kept.ratios}
    try:
        write_whole(_path(), json.dumps(values, indent=2).encode() + b"\n")
    except Unsupported as error:  # measured again by the next process
        log.debug("%s", error)


def _path() -> Path:
    """Return the file of this machine's rates: by processor, host and compiler."""
    name, compiler = current_cpu().name, installed("llvmlite") or "none"
    return current().cache_dir / "cpus" / f"{name}-{this_machine()}-{compiler}.json"
