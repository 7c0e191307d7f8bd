"""Goldens of the first proposals for every workload of the catalogue on four GPUs: a change of the
model shows there."""

from __future__ import annotations

import pytest

from benchmarks.workloads import CATALOGUE
from tests.conftest import CheckGolden
from tilegen import gpu
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.kernels.registry import FAMILIES
from tilegen.task import KernelTask

GPUS = ("a100", "h100", "h200", "b200")


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_first_proposals(name: str, golden: CheckGolden) -> None:
    spec = gpu(name)
    lines: list[str] = []
    for problem in dict.fromkeys(one.problem for one in CATALOGUE):
        lines.append(problem.key)
        for direction in FAMILIES:
            best = [
                propose(KernelTask.of(kernel, problem, spec), top=1)[0]
                for kernel in kernels_of(problem, spec, direction)
            ]
            lines.append("  " + "  ".join(f"{one.kernel} {one.config.key}" for one in best))
    golden("\n".join(lines) + "\n")
