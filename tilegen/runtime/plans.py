"""Plans and kernels that a process keeps of its calls, until what they choose changes."""

from __future__ import annotations

from typing import Any

from tilegen.bounded_cache import BoundedCache

MAX_PLANS = 4096
MAX_LOADED = 1024

by_call: BoundedCache[Any, Any] = BoundedCache(MAX_PLANS)  # a server sees ever new lengths
"""Plans of calls of one kind, by the key of a call."""
by_problem: BoundedCache[Any, Any] = BoundedCache(MAX_LOADED)
"""The kernels of one problem bucket on one device."""


def forget() -> None:
    """Have every kind of call choose its kernels again."""
    by_call.clear()
    by_problem.clear()
