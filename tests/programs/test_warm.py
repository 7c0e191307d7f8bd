"""Programs forked from a process that has PyTorch: alike to those of a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support import warm

SAYS = """
import os, sys
print(sys.argv[1:], os.environ.get("TILEGEN_TUNE"), "torch" in sys.modules)
print(sorted({"sympy", "triton", "jinja2", "tilegen"} & set(sys.modules)), hash("a") % 1000)
print(__name__, file=sys.stderr)
import atexit
atexit.register(print, "at exit")
"""


def test_a_program_has_arguments_environment_and_output_of_its_own() -> None:
    programs = [
        warm.start(SAYS, str(n), env={**os.environ, "TILEGEN_TUNE": f"t{n}"}, seed=seed)
        for n, seed in enumerate((1, 1, 2))
    ]
    said = [program.communicate() for program in programs]
    assert [program.returncode for program in programs] == [0] * 3
    first, second, other = (out.splitlines() for out, _ in said)
    assert [lines[0] for lines in (first, second, other)] == [
        f"['{n}'] t{n} True" for n in range(3)
    ]
    assert first[1] == second[1] != other[1], "hashes are those of the seed"
    assert first[1].startswith("[] "), "nothing but PyTorch is imported"
    assert first[2] == "at exit"
    assert {err for _, err in said} == {"__main__\n"}


def test_how_a_program_ends_is_told() -> None:
    ends = {
        "import sys; sys.exit(3)": 3,
        "1 / 0": 1,
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    }
    for code, expected in ends.items():
        program = warm.start(code)
        _, err = program.communicate()
        assert program.returncode == expected
        assert ("ZeroDivisionError" in err) == (expected == 1)
    with pytest.raises(subprocess.CalledProcessError):
        warm.output("import sys; sys.exit(3)")
    assert warm.output("print(__import__('sys').executable)").strip() == sys.executable
    program = warm.start("import time; time.sleep(0.3)")
    assert program.poll() is None
