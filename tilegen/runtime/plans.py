"""Plans and kernels that a process caches for later calls."""

from __future__ import annotations

from typing import Any

from tilegen.bounded_cache import BoundedCache

MAX_PLANS = 4096
MAX_LOADED = 1024

by_call: BoundedCache[Any, Any] = BoundedCache(MAX_PLANS)  # a server keeps seeing new lengths
"""Plans of calls, by plan-cache key."""
by_problem: BoundedCache[Any, Any] = BoundedCache(MAX_LOADED)
"""Loaded kernels, by problem bucket, device, dtypes of integers and settings."""


def forget() -> None:
    """Drop all plans, so that calls choose their kernels again."""
    by_call.clear()
    by_problem.clear()
