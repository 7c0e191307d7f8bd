"""A family is its module, its templates and one line of the registry: without them the rest of
tilegen works, and no other module names its kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tilegen.kernels import one_pass, split_backward
from tilegen.kernels.registry import FAMILIES, MODULES
from tilegen.kernels.spec import FamilySpec

ROOT = Path(__file__).parents[2]
ITS_OWN: dict[str, tuple[FamilySpec, ...]] = {
    "split_backward": split_backward.FAMILIES,
    "one_pass": one_pass.FAMILIES,
}
"""The families of each module."""
KERNELS = {
    "split_backward": {"bwd_dkdv_split", "bwd_dkdv_sum", "bwd_dq_split"},
    "one_pass": {"bwd_one_pass"},
}
"""The kernels that no other module's families have."""
HOPPER = "hopper_two_pass", "hopper_dkdv", "hopper_dq"
LEFT = {
    "split_backward": ("two_pass", *HOPPER, "small_cache", "one_pass"),
    "one_pass": ("two_pass", *HOPPER, "split_dkdv", "split_dq", "split_backward", "small_cache"),
}

SCRIPT = """
import sys
from tilegen.choose.families import kernels_of
from tilegen.choose.ranker import propose
from tilegen.emit.render import render
from tilegen.explaining.explained import explain_all
from tilegen.explaining.explanation import Explanation
from tilegen.gpus.spec import gpu
from tilegen.kernels.registry import BACKWARD, KERNELS
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask

assert "tilegen.kernels.NAME" not in sys.modules
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
assert [one.way.direction for one in told] == ["forward", "backward"]
assert Explanation(problem=problem, gpu=h200, explained=told, with_passes=True).text("all")
print(*BACKWARD)
"""
CHOSEN = {
    "split_backward": [
        "fwd bwd_preprocess bwd_dkdv bwd_dq",
        "fwd_split fwd_combine bwd_preprocess bwd_dkdv bwd_dq",
    ],
    "one_pass": [
        "fwd bwd_preprocess bwd_dkdv_split bwd_dkdv_sum bwd_dq",
        "fwd_split fwd_combine bwd_preprocess bwd_dkdv bwd_dq_split bwd_dq_sum",
    ],
}


@pytest.mark.parametrize("name", ITS_OWN)
def test_no_other_module_names_its_kernels(name: str) -> None:
    """Nor its families: what others have to know of them stands in their records."""
    mine = {one.name for one in ITS_OWN[name]}
    every = (one for families in FAMILIES.values() for one in families.values())
    shared = {kernel for one in every if one.name not in mine for kernel in one.names}
    kernels = {kernel for one in ITS_OWN[name] for kernel in one.names} - shared
    assert kernels == KERNELS[name]
    named: dict[str, set[str]] = {}
    for path in (ROOT / "tilegen").rglob("*.py"):
        words = {word.lower() for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
        if actual := words & {name, *mine, *kernels}:
            named[path.relative_to(ROOT / "tilegen").as_posix()] = actual
    del named[f"kernels/{name}.py"]
    assert named == {"kernels/registry.py": {name}}


def test_every_module_with_families_is_listed() -> None:
    files = (ROOT / "tilegen" / "kernels").glob("*.py")
    modules = {file.stem for file in files if re.search("^FAMILIES = ", file.read_text(), re.M)}
    assert modules == set(MODULES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ITS_OWN)
def test_tilegen_works_without_its_files_and_its_line_in_the_registry(
    name: str, tmp_path: Path
) -> None:
    for folder in ("tilegen", "templates", "cache"):
        ignored = shutil.ignore_patterns(name, f"{name}.*")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    registry = tmp_path / "tilegen" / "kernels" / "registry.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if name not in line]
    assert len(lines) - len(kept) == 1
    registry.write_text("".join(kept), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TILEGEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("NAME", name)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*CHOSEN[name], " ".join(LEFT[name])]
