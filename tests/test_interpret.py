"""Runs tests/interpret in a process where TRITON_INTERPRET is set before triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIME_LIMIT = 2400  # seconds; other tests may run on the same cores


def test_interpret_tier() -> None:
    # Interpreted kernels run on one core each, so the tests spread over all of them.
    spread = ["-n", str(os.cpu_count() or 1)] if find_spec("xdist") else []
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/interpret", "-q", "--durations=10", *spread],
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
    assert exit_code == 0, f"pytest tests/interpret exited with {exit_code}; its output is above"
