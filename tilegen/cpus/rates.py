"""Rates of this machine's processor, measured once by compiled kernels and kept on disk.

Choices do not use them: see `host.current_cpu`. They say how fast this machine is: `tilegen doctor`
prints them, and predictions of times are scaled to them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tilegen.cpus.host import current_cpu, with_own_sizes
from tilegen.cpus.spec import CpuSpec
from tilegen.disk import log, write_whole
from tilegen.errors import Unsupported
from tilegen.settings import settings
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


@cache
def measured_cpu() -> CpuSpec:
    """Return this machine's processor with its own sizes and rates, measured now or earlier."""
    spec = with_own_sizes(current_cpu())
    path = _path(spec)
    rates = _kept(path)
    if rates is None:
        rates = measure(spec)
        try:
            write_whole(path, json.dumps(rates, indent=2).encode() + b"\n")
        except Unsupported as error:  # measured again by the next process
            log.debug("%s", error)
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
    one = (1,)  # a single program runs on this thread
    rates: dict[str, float] = {}
    for bits, dtype in ((32, torch.float32), (16, torch.bfloat16)):
        x, out = torch.zeros(PRODUCT, PRODUCT, dtype=dtype), torch.zeros(PRODUCT, PRODUCT)
        steps = 2000 if bits == 32 or spec.pairs else 500
        seconds = _least(lambda x=x, out=out, n=steps: product[one](x, out, n, PRODUCT))
        rates[f"product_flops_{bits}"] = 2.0 * PRODUCT**3 * steps / seconds
    x = torch.zeros(SQUARE, SQUARE)
    seconds = _least(lambda: exp2[one](x, torch.empty_like(x), 1000, SQUARE))
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
        seconds = _least(lambda x=x, n=rounds, s=steps: read[one](x, out, n, s, ROW))
        rates[f"{level}_bandwidth"] = rounds * read_bytes / seconds
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


def _least(run: Callable[[], None]) -> float:
    """Return the shortest time of a run by this thread's clock [s], after one that warms up."""
    run()
    times: list[float] = []
    for _ in range(ROUNDS):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    return max(min(times), 1e-9)


def _path(spec: CpuSpec) -> Path:
    """Return the file of this machine's rates: by processor, host and compiler."""
    compiler = installed("llvmlite") or "none"
    return settings().cache_dir / "cpus" / f"{spec.name}-{this_machine()}-{compiler}.json"


def _kept(path: Path) -> dict[str, float] | None:
    """Return the rates of a file; None if there is none that can be used."""
    try:
        values: Any = json.loads(path.read_bytes())
        rates = {name: float(values[name]) for name in RATES}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return rates if all(0 < rate < math.inf for rate in rates.values()) else None
