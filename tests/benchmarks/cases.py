"""Workloads, providers, rows and parts of a check for the tests of the benchmarks."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from benchmarks import rows, run
from benchmarks.parts import Part
from benchmarks.providers import AttentionFunction, Provider
from benchmarks.workloads import Workload
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem

PROBLEM = AttentionProblem.parse("b2 hq4 hkv2 q70 kv70 d16 fp32 causal")


def a_workload(name: str) -> Workload:
    return Workload(name=name, problem=PROBLEM, source="test", directions=("forward",))


def a_provider(name: str, *, slow: bool = False) -> Provider:
    def prepare(problem: AttentionProblem, device: str) -> AttentionFunction:
        raise Unsupported(f"{name} computes nothing")

    return Provider(name=name, prepare=prepare, slow_to_start=slow)


def a_row(**changes: Any) -> rows.Row:
    (case,) = run.cases([a_workload("w")], [a_provider("p")])
    return replace(run.make_row(case, status="ok", median_us=1.0), **changes)


def a_part(name: str, code: str, *, share: float = 1.0) -> Part:
    """Return a part of a check that runs this Python code."""
    return Part(name=name, command=lambda _: [sys.executable, "-c", code], share=share)
