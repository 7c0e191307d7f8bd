"""A problem, its kernels, and records of libraries for tests of PyTorch's own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.records import timed
from tilegen.choose.families import families_used
from tilegen.choose.records import Records
from tilegen.gpus.spec import ASSUMED, gpu
from tilegen.kernels.spec import Backend, Direction
from tilegen.problem import AttentionProblem
from tilegen.store import current_versions
from tilegen.store.library_record import LibraryRecord, save_library

SPEC = gpu(ASSUMED)
PROBLEM = AttentionProblem.parse("b1 hq2 hkv2 q64 kv64 d16 bf16 causal")
FORWARD, BACKWARD = ("fwd",), ("bwd_preprocess", "bwd_dkdv", "bwd_dq")


def save_time(us: float = 50.0, direction: Direction = "forward", **changes: Any) -> Path:
    """Save the record of a library's time [us], with fields changed; return its file."""
    versions = current_versions()
    record = LibraryRecord(library="flash", measurement=timed(us), versions=versions)
    return save_library(replace(record, **changes), PROBLEM, SPEC, direction)


def used(direction: Direction = "forward", **options: Any) -> Backend | None:
    """Return the library that computes a pass, if one does."""
    (family,) = families_used(Records(PROBLEM, SPEC, **options), direction)
    return family.library
