"""The child process of in_child.py: runs one check, and prints its results as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch

from tilegen.check.verification import verify
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem


def main() -> None:
    """Run the job on standard input; an empty one multiplies two matrices on the GPU."""
    job = json.load(sys.stdin)
    results = checks_of(job) if job else [float(_product().sum())]
    sys.stdout.write(json.dumps(results))


def checks_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the fields of each check of a job, and its text."""
    configs = {kernel: TileConfig.parse(key) for kernel, key in job["configs"].items()}
    problem = AttentionProblem.parse(job["problem"])
    checks = verify(problem, configs, seed=job["seed"], here=True)
    return [{**asdict(check), "text": str(check)} for check in checks]


def _product() -> torch.Tensor:
    x = torch.ones(512, 512, device="cuda")
    return x @ x
