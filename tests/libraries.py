"""A problem, its kernels, and records of libraries for tests of PyTorch's own kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.records import timed
from tilegen.choose.libraries import library_used
from tilegen.choose.records import Records
from tilegen.gpus.spec import ASSUMED, gpu
from tilegen.kernels.spec import Direction
from tilegen.problem import AttentionProblem
from tilegen.store import current_versions
from tilegen.store.library_record import LibraryRecord

SPEC = gpu(ASSUMED)
PROBLEM = AttentionProblem.parse("b1 hq2 hkv2 q64 kv64 d16 bf16 causal")
FORWARD, BACKWARD = ("fwd",), ("bwd_preprocess", "bwd_dkdv", "bwd_dq")
KERNELS_OF: dict[Direction, tuple[str, ...]] = {"forward": FORWARD, "backward": BACKWARD}


def of_library(us: float = 50.0, **changes: Any) -> LibraryRecord:
    """Return a record of a library's time [us], with fields changed."""
    one = LibraryRecord(
        gpu=SPEC.name,
        arch=SPEC.arch,
        direction="forward",
        problem=PROBLEM,
        library="flash",
        measurement=timed(us),
        versions=current_versions(),
        date="2026-11-21T09:30:00Z",
    )
    return replace(one, **changes)


def used(direction: Direction = "forward", **options: Any) -> LibraryRecord | None:
    """Return the record of the library that computes a pass, if one does."""
    return library_used(Records(PROBLEM, SPEC, **options), direction, KERNELS_OF[direction])
