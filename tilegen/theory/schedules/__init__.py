"""All schedules, emitted or for comparison: words and bytes moved, and words held, exactly."""

from __future__ import annotations

from tilegen.theory.schedules import backward, forward
from tilegen.theory.schedules.record import PACKED_UNMASKED, Held, Schedule, packed, smooth

__all__ = ["PACKED_UNMASKED", "SCHEDULES", "Held", "Schedule", "packed", "smooth"]

SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for module in (forward, backward)
    for schedule in vars(module).values()
    if isinstance(schedule, Schedule)
}
"""Schedules by name."""
