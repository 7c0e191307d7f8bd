"""Runs tests/interpret, and tests/gpu as far as that can be rehearsed, in processes where
TRITON_INTERPRET is set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import has_gpu_device

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 2400  # seconds; other tests may run on the same cores


@pytest.mark.slow
def test_interpret_tier() -> None:
    run("tests/interpret", "--durations=10")


@pytest.mark.slow
def test_gpu_tier_is_rehearsed() -> None:
    if has_gpu_device():
        pytest.skip("tests/gpu itself runs on a machine with a GPU")
    run("tests/gpu", "-p", "tests.rehearsal")


def run(*arguments: str) -> None:
    # Interpreted kernels run on one core each, so the tests spread over all of them.
    spread = ["-n", str(os.cpu_count() or 1)] if find_spec("xdist") else []
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments, *spread],
        cwd=ROOT,
        env={"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    print(result.stdout)
    exit_code = result.returncode
    shown = " ".join(arguments)
    assert exit_code == 0, f"pytest {shown} exited with {exit_code}; its output is above"
