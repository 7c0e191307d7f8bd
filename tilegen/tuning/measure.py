"""Time a launch with a cold L2. A failure is a value, to be written down as a timing is."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from tilegen.compiling.digests import noting_launches
from tilegen.errors import BuildFailed, TilegenError, Unsupported

Status = Literal["ok", "build_failed", "out_of_resources", "launch_failed", "wrong", "unmeasured"]
"""ok: timed. unmeasured: the model's choice, never run. The others: why there is no time."""

Timer = Callable[[Callable[[], object], int], list[float]]
"""`timer(launch, repeats)` runs `launch` that often, from a cold L2, and returns the us of each."""

POLICY = "cold_l2"
"""Name of the way in which times are taken: the median of single launches, L2 cleared before each,
between two events on the stream. Times of ways with other names are kept apart by records."""
TIE_LIMIT = 0.02
"""Two medians that differ by more are never a tie, however noisy the measurement."""
MIN_REPEATS = 10
MAX_REPEATS = 1000
MAX_BATCH = 50
"""Runs between two looks at the clock; their launches all fit into the driver's queue."""
MIN_FLUSH_BYTES = 256 * 2**20
"""Bytes whose writing takes so long that the next launch is queued before the GPU is done."""
MAX_MESSAGE = 200


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Time of one launch [us], or why there is none."""

    status: Status
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    repeats: int = 0
    message: str = ""
    digest: str = ""
    """Digests of the binaries that were timed (tilegen/compiling/digests.py), in the order of their
    first launch, with spaces between; empty where they are not known, as a library's are not."""

    @property
    def failure(self) -> str:
        """Reason why there is no time, in words: `launch failed: MESSAGE`."""
        return f"{self.status.replace('_', ' ')}: {self.message}"


class DeviceLost(TilegenError):
    """A launch broke the CUDA context: nothing more can be measured in this process."""

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
    """Return median, p20 and p80 over the runs that fit into `seconds`, at least `min_repeats`.

    A launch so slow that `min_repeats` of it would take over four times `seconds` is run less
    often, at least once. Raises Unsupported without a GPU; DeviceLost after a failure that no
    later launch survives; every other failure becomes a status with a message of one line.
    """
    timer = timer or _cuda_timer()
    times: list[float] = []
    try:
        with noting_launches() as launched:
            timer(launch, 1)  # warm-up: builds the kernel, fills the allocator
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
    except Exception as error:  # whatever a launch raises is a result of this config
        return survived(error)
    found = summarise(times)
    return replace(found, digest=launched.digest) if found.status == "ok" else found


def summarise(times: list[float]) -> Measurement:
    """Return the statistics of `times` in us; launch_failed if one of them cannot be a time."""
    if not times or not all(1e-3 <= us < math.inf for us in times):
        return Measurement(
            status="launch_failed", message=f"expected times above 0 us, timer gave {times[:3]}"
        )
    at_least_two = times if len(times) > 1 else times * 2  # quantiles takes no single value
    p20, _, _, p80 = statistics.quantiles(at_least_two, n=5, method="inclusive")
    return Measurement(
        status="ok",
        median_us=round(statistics.median(times), 3),
        p20_us=round(p20, 3),
        p80_us=round(p80, 3),
        repeats=len(times),
    )


def tie_limit(fastest: Measurement) -> float:
    """Return the longest median, in us, that is equal to that of the fastest: within its spread and
    TIE_LIMIT."""
    median = fastest.median_us or math.inf
    return max(median, min(fastest.p80_us or 0.0, median * (1 + TIE_LIMIT)))


def failed(error: Exception) -> Measurement:
    """Return the measurement of a launch that raised `error`."""
    # Triton's classes, by name: their module has moved between versions.
    names = {c.__name__ for c in type(error).__mro__ if c.__module__.startswith("triton.")}
    status: Status = "launch_failed"
    if "OutOfResources" in names:
        status = "out_of_resources"
    elif isinstance(error, BuildFailed) or names & {"CompilationError", "PTXASError"}:
        status = "build_failed"
    return Measurement(status=status, message=one_line(error))


def survived(error: Exception) -> Measurement:
    """Return `failed(error)` if the GPU still takes work. Raises DeviceLost if it does not."""
    failure = failed(error)
    if not _device_answers():
        raise DeviceLost(failure) from error
    return failure


def us(value: float | None) -> str:
    """Return microseconds with three digits or more, `?` for no time."""
    if value is None:
        return "?"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def one_line(error: Exception | str) -> str:
    """Return an error as one printable line of at most MAX_MESSAGE characters."""
    text = error if isinstance(error, str) else str(error) or type(error).__name__
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 3]}..."


def _cuda_timer() -> Timer:
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
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in events]

    return timer


def _device_answers() -> bool:
    """True while work can be launched: an illegal access is reported by every later call."""
    import torch

    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
    except Exception:  # torch raises AcceleratorError or RuntimeError, depending on its version
        return False
    return True
