"""Timing of launches with a cold L2. A failure is a value, and is recorded like a timing."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tilegen.compiling.digests import noting_launches
from tilegen.device import COLD_L2
from tilegen.errors import BuildFailed, TilegenError, Unsupported
from tilegen.tuning.surroundings import UNKNOWN, OnGpu, Surroundings

Status = Literal[
    "ok", "build_failed", "out_of_resources", "declined", "launch_failed", "wrong", "unmeasured"
]
"""ok: timed. unmeasured: chosen by the model, never run. Others: the reason for a missing time.
declined: the machine code is slow, so that the kernel is timed only if no other config runs."""

Timer = Callable[[Callable[[], object], int], list[float]]
"""`timer(launch, repeats)` runs `launch` `repeats` times, each from a cold L2, and returns the
times [us]."""

POLICY = COLD_L2
"""Name of the timing method of records and trials that name none."""
TIE_LIMIT = 0.02
"""Largest relative difference of medians that count as a tie, however noisy the measurement."""
MIN_REPEATS = 10
MAX_REPEATS = 1000
MAX_BATCH = 50
"""Most launches between two looks at the clock; the driver's queue has room for all of them."""
MIN_FLUSH_BYTES = 256 * 2**20
"""Minimum size of the buffer whose writing clears L2 [bytes]. Writing it takes long enough to queue
the next launch meanwhile."""
MAX_MESSAGE = 200


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time of a launch [us], or the reason for a missing time."""

    status: Status
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    repeats: int = 0
    message: str = ""
    digest: str = ""
    """Digests of the timed binaries (tilegen/compiling/digests.py), in the order of their first
    launches, separated by spaces. Empty if unknown, as for libraries."""
    surroundings: Surroundings = UNKNOWN
    """The clock of the GPU, and what other processes did meanwhile."""

    @property
    def failure(self) -> str:
        """Reason for a missing time: `launch failed: MESSAGE`."""
        return f"{self.status.replace('_', ' ')}: {self.message}"


class DeviceLost(TilegenError):
    """A launch that broke the CUDA context: nothing more can be measured in this process."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(
            f"the GPU takes no more work from this process ({measurement.message}); start another"
        )
        self.measurement = measurement


def measure(
    launch: Callable[[], object],
    *,
    min_repeats: int = MIN_REPEATS,
    seconds: float = 0.3,
    timer: Timer | None = None,
) -> Measurement:
    """Measure median, p20 and p80 over the launches that fit into `seconds`.

    At least `min_repeats` launches are timed. If these take over four times `seconds`, there are
    fewer, but at least one. Raises Unsupported without a GPU, and DeviceLost if a launch breaks the
    CUDA context. Any other failure becomes a status with a one-line message.
    """
    around = OnGpu() if timer is None else None
    timer = timer or _cuda_timer(around)
    times: list[float] = []
    try:
        with noting_launches() as launched:
            timer(launch, 1)  # warm-up: builds the kernel, fills the allocator
        if around:
            around.begin()
        start = time.perf_counter()
        times += timer(launch, 1)
        run_seconds = max(time.perf_counter() - start, 1e-6)
        while len(times) < MAX_REPEATS:
            elapsed = time.perf_counter() - start
            enough = len(times) >= min_repeats
            left = (seconds if enough else 4 * seconds) - elapsed
            if left <= 0:
                break
            wanted = MAX_REPEATS if enough else min_repeats
            fits = max(1, int(left / run_seconds))
            times += timer(launch, min(fits, wanted - len(times), MAX_BATCH))
    except Exception as error:  # any error of a launch is a result of this config
        return survived(error)
    result = summarise(times)
    if result.status != "ok":
        return result
    surroundings = around.seen() if around else UNKNOWN
    return replace(result, digest=launched.digest, surroundings=surroundings)


def summarise(times: list[float]) -> Measurement:
    """Compute the statistics of `times` [us]; launch_failed if a value cannot be a time."""
    if not times or not all(1e-3 <= us < math.inf for us in times):
        return Measurement(
            status="launch_failed", message=f"expected times above 0 us, timer gave {times[:3]}"
        )
    at_least_two = times if len(times) > 1 else times * 2  # quantiles needs two values
    p20, _, _, p80 = statistics.quantiles(at_least_two, n=5, method="inclusive")
    return Measurement(
        status="ok",
        median_us=round(statistics.median(times), 3),
        p20_us=round(p20, 3),
        p80_us=round(p80, 3),
        repeats=len(times),
    )


def tie_limit(fastest: Measurement) -> float:
    """Return the longest median that ties with the fastest [us]: at most the fastest's p80, and at
    most TIE_LIMIT above its median."""
    median = fastest.median_us or math.inf
    return max(median, min(fastest.p80_us or 0.0, median * (1 + TIE_LIMIT)))


def failed(error: Exception) -> Measurement:
    """Convert the error of a launch to a measurement."""
    # Compare Triton's classes by name: their module differs between versions.
    names = {c.__name__ for c in type(error).__mro__ if c.__module__.startswith("triton.")}
    status: Status = "launch_failed"
    if "OutOfResources" in names:
        status = "out_of_resources"
    elif isinstance(error, BuildFailed) or names & {"CompilationError", "PTXASError"}:
        status = "build_failed"
    return Measurement(status=status, message=one_line(error))


def survived(error: Exception) -> Measurement:
    """Return `failed(error)` if the GPU still works. Raises DeviceLost if it does not."""
    failure = failed(error)
    if not _device_answers():
        raise DeviceLost(failure) from error
    return failure


def one_line(error: Exception | str) -> str:
    """Format an error as one printable line of at most MAX_MESSAGE characters."""
    text = error if isinstance(error, str) else str(error) or type(error).__name__
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def _cuda_timer(around: OnGpu | None = None) -> Timer:
    import torch

    if not torch.cuda.is_available():
        raise Unsupported(
            "measuring needs a GPU that PyTorch can use (torch.cuda.is_available() is False); "
            "without one, take the model's choice: tilegen propose"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    flush_bytes = max(MIN_FLUSH_BYTES, 4 * properties.L2_cache_size)

    def timer(launch: Callable[[], object], repeats: int) -> list[float]:
        flush = torch.empty(flush_bytes, dtype=torch.int8, device="cuda")
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(repeats)
        ]
        for before, after in events:
            flush.zero_()
            before.record()
            launch()
            after.record()
        if around:  # the GPU is at work on the queue
            around.read()
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in events]

    return timer


def _device_answers() -> bool:
    """Return True while the GPU works: after an illegal access, every later call fails."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:  # torch raises AcceleratorError or RuntimeError, depending on its version
        return False
    return True
