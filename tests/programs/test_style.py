"""The rules of `.ci/style.py`: each finds its fault, and the exempt forms pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VAIN = " ".join(("in", "vain"))  # apart, since the rules hold for this file too
FILES = {
    "tilegen/first.py": "from tilegen import second\n",
    "tilegen/second.py": "def f():\n    import tilegen.first\n",
    "tilegen/loose.py": "def f(k: Kernel, p: AttentionProblem | None, d: GpuSpec): ...\n",
    "tilegen/model/names.py": 'kernel = "bwd_dq"\nspec = KERNELS[kernel]\nx = task.normal()\n',
    "tilegen/choose/records.py": "x = task.normal()\ny = task.normal()\n",
    "tilegen/reads.py": 'from triton.runtime import driver\ngetattr(torch._C, "_x")\nf.warmup\n',
    "tilegen/hidden.py": '"""Return what is loaded."""\n',
    "tilegen/whether.py": 'def f() -> int:\n    """Whether what is there fits."""\n',
    "tilegen/parameter.py": "def f(one: int) -> int:\n    return one\n",
    "tilegen/variable.py": "for found in ():\n    pass\n",
    "tilegen/phrase.py": "# The sum of weights in\n# vain is dropped.\n",
    "tilegen/exempt.py": '"""Return the size."""\n'
    "sizes = [one.size for one in ()]\nkey = lambda one: one.size\n"
    "class Check:\n    found: float = 0.0\n",
    "tilegen/long.md": "x " * 60 + "\n| " + "x " * 60 + "\n```\n" + "x " * 60 + "\n```\n",
}
EXPECTED = {
    "modules need each other: tilegen.first -> tilegen.second -> tilegen.first",
    "tilegen/loose.py:1: f takes no task",
    "tilegen/model/names.py:1: names the kernel bwd_dq",
    "tilegen/model/names.py:2: looks a kernel up",
    "tilegen/model/names.py:3: a task is of the normal form already",
    "tilegen/choose/records.py:2: a task is of the normal form already",
    "tilegen/reads.py: triton.runtime.driver is undocumented, and stands in private_*.py",
    "tilegen/reads.py: torch._C is undocumented, and stands in private_*.py",
    "tilegen/reads.py: torch._C._x is undocumented, and stands in private_*.py",
    "tilegen/reads.py: warmup is undocumented, and stands in private_*.py",
    "tilegen/hidden.py:1: 'Return what is loaded' hides its result; name the noun",
    "tilegen/whether.py:2: 'Whether what is there fits' hides its result; name the noun",
    "tilegen/parameter.py:1: a variable called 'one'; call it by its noun",
    "tilegen/variable.py:1: a variable called 'found'; call it by its noun",
    f"tilegen/phrase.py: {VAIN!r}; say it with a noun and a verb",
    "tilegen/long.md:1: 120 columns",
}
MISSING = {
    "tilegen/emit/render.py: no longer names the kernel fwd; take it out of NAMED_KERNELS",
    "tilegen/private_torch.py: torch._dynamo is undocumented, and stands in private_*.py",
}
"""Exceptions of modules that this tree lacks, two of several."""


def test_each_rule_finds_its_fault(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "style.py", tmp_path / ".ci")
    result = subprocess.run(
        [sys.executable, ".ci/style.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    faults = set(result.stdout.splitlines())
    assert result.returncode == 1, result.stderr
    assert faults >= MISSING
    of_this_tree = {x for x in faults if "NAMED_KERNELS" not in x and "/private_t" not in x}
    assert of_this_tree == EXPECTED
