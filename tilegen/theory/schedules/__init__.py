"""Every schedule that is emitted or compared with: exact words and bytes, and what it holds."""

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
"""Schedules by their names."""
