"""A family is its module, its templates and one line of the registry: without them the rest of
tilegen works, and no other module names its kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tilegen.kernels import split_backward
from tilegen.kernels.registry import FAMILIES, MODULES

ROOT = Path(__file__).parents[2]
NAME = "split_backward"
ITS_OWN = {one.name for one in split_backward.FAMILIES}
SHARED = {
    name
    for families in FAMILIES.values()
    for one in families.values()
    if one.name not in ITS_OWN
    for name in one.names
}
KERNELS = {name for one in split_backward.FAMILIES for name in one.names} - SHARED

SCRIPT = """
import sys
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.emit.render import render
from tilegen.explaining.explanation import explain_all
from tilegen.explaining.text import lines_of_all
from tilegen.gpus.spec import gpu
from tilegen.kernels.registry import BACKWARD, KERNELS
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

assert "tilegen.kernels.split_backward" not in sys.modules
assert tuple(BACKWARD) == ("two_pass", "small_cache"), BACKWARD
h200 = gpu("h200")
for text in ("hq16 hkv16 q4096 kv77 d64 bf16", "hq8 hkv2 q1 kv8192 d64 bf16"):
    problem = AttentionProblem.parse(text)
    kernels = kernels_of(problem, h200)
    assert set(kernels) <= set(KERNELS)
    for kernel in kernels:
        (best,) = propose(KernelTask.of(kernel, problem, h200), top=1)
        assert render(problem, best.config, kernel).source
    print(*kernels)
told = explain_all(problem, h200, ("fwd_split", "bwd_dkdv"), by_model=True)
assert [one["pass"]["direction"] for one in told] == ["forward", "backward"]
assert lines_of_all(told, with_passes=True)
"""


def test_no_other_module_names_its_kernels() -> None:
    """Nor its families: what others have to know of them stands in their records."""
    assert {"bwd_dkdv_split", "bwd_dkdv_sum", "bwd_dq_split", "bwd_dq_sum"} == KERNELS
    named: dict[str, set[str]] = {}
    for path in (ROOT / "tilegen").rglob("*.py"):
        words = {word.lower() for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
        if found := words & {NAME, *ITS_OWN, *KERNELS}:
            named[path.relative_to(ROOT / "tilegen").as_posix()] = found
    del named[f"kernels/{NAME}.py"]
    assert named == {"kernels/registry.py": {NAME}}


def test_every_module_with_families_is_listed() -> None:
    files = (ROOT / "tilegen" / "kernels").glob("*.py")
    modules = {file.stem for file in files if re.search("^FAMILIES = ", file.read_text(), re.M)}
    assert modules == set(MODULES)


def test_tilegen_works_without_its_files_and_its_line_in_the_registry(tmp_path: Path) -> None:
    for folder in ("tilegen", "templates", "cache"):
        ignored = shutil.ignore_patterns(NAME, f"{NAME}.*")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    registry = tmp_path / "tilegen" / "kernels" / "registry.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if NAME not in line]
    assert len(lines) - len(kept) == 1
    registry.write_text("".join(kept), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TILEGEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "fwd bwd_preprocess bwd_dkdv bwd_dq",
        "fwd_split fwd_combine bwd_preprocess bwd_dkdv bwd_dq",
    ]
