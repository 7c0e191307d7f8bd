"""Count the bytes that a kernel moves between the levels of a processor's memory."""

from __future__ import annotations

from tilegen.cpus.spec import CpuSpec
from tilegen.model.bounds import each_bound
from tilegen.model.cpu_time import bytes_of, source_of, step_bytes
from tilegen.model.launches import launches
from tilegen.model.traffic import traffic
from tilegen.task import Tiled


def bytes_from(tiled: Tiled, spec: CpuSpec) -> tuple[int, int, int]:
    """Return the bytes of a launch between each of `cpu_time.levels_of` and the faster levels.

    All bytes of the tiles cross the borders up to the level that streams come from, with the bytes
    of each step that the faster level does not hold. Behind that level inputs and results move
    once.
    """
    moved, source = bytes_of(traffic(tiled)), source_of(tiled, spec)
    once = min(moved, round(each_bound(tiled.task)["floor"]))
    state, steps = step_bytes(tiled), float(launches(tiled).steps)
    too_many = (max(0.0, state - size) * steps for size in (spec.l1_bytes, spec.l2_bytes))
    of_steps = (*map(round, too_many), 0)
    first, second, third = (
        (moved if place <= source else once) + extra for place, extra in enumerate(of_steps)
    )
    return first, second, third
