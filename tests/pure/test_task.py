"""Tasks: the model and the choice take them instead of loose kernels, problems and devices."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tilegen as package
from tests.records import H200, PROBLEM
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.model.footprint import footprint
from tilegen.model.traffic import traffic
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask, Tiled

ROOT = Path(package.__file__).parent
CONFIG = TileConfig.parse("m64n64w4s3")
AT_THE_EDGE = ("api.py", "cli", "task.py")
"""Where names of users become tasks."""


def sources(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text(encoding="utf-8"))


def test_no_function_takes_kernel_problem_and_device_loose() -> None:
    loose: list[str] = []
    for name, tree in sources("."):
        if name.split("/")[0] in AT_THE_EDGE:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                types = {
                    ast.unparse(one.annotation).split(" |")[0] for one in given if one.annotation
                }
                if types >= {"Kernel", "AttentionProblem", "GpuSpec"}:
                    loose.append(f"{name} {node.name}")
    assert loose == []


@pytest.mark.parametrize("folder", ["model", "choose"])
def test_model_and_choice_look_no_kernel_up(folder: str) -> None:
    allowed = {
        "model/traffic.py",  # formulas of a kernel, whatever the problem
        "model/bounds.py",  # the same
        "choose/records.py",  # the task of a kernel by its name
    }
    for name, tree in sources(folder):
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "KERNELS" not in names or name in allowed, name
        calls = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert calls.count("normal") <= (name == "choose/records.py"), name


def test_no_stage_names_a_kernel() -> None:
    """Stages read facts from the record of a kernel, and do not ask for its name."""
    allowed = {
        ("model/rates.py", "fwd"),  # whose counts kernels take that nobody counted
        ("explaining/plot.py", "fwd"),  # theory: any task with the problem's values
        ("explaining/plot.py", "bwd_preprocess"),  # schedules of theory
        ("explaining/plot.py", "bwd_dkdv"),
        ("explaining/plot.py", "bwd_dq"),
        ("emit/render.py", "fwd"),  # the default of a function
    }
    stages = ("model", "choose", "compiling", "emit", "explaining", "store", "tuning")
    named: set[tuple[str, str]] = set()
    for name, tree in sources(*stages, "check"):
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str() as word) | ast.Name(id=word):
                    if word.lower() in KERNELS:
                        named.add((name, word.lower()))
                case _:
                    pass
    assert named == allowed


def test_a_task_is_of_the_normal_form() -> None:
    dilated = AttentionProblem.parse("b1 hq2 q4096 d64 fp16 dilated(4)")
    assert KernelTask.of("fwd", dilated, H200).problem == dilated.normal() != dilated
    assert PassTask.of("forward", dilated, H200).problem == dilated.normal()


def test_footprints_do_not_depend_on_lengths() -> None:
    longer = replace(PROBLEM, batch=7, seqlen_q=777, seqlen_kv=999)
    first, second = (Tiled.of("fwd", one, H200, CONFIG) for one in (PROBLEM, longer))
    assert footprint(first) == footprint(second)
    assert traffic(first) != traffic(second)


def test_facts_of_one_device_are_not_those_of_another() -> None:
    """Nor with the same name, as where another fast memory is asked for."""
    small = replace(H200, num_sms=16, smem_per_block=48 * 1024)
    problem = AttentionProblem.parse("b1 hq4 hkv4 q8192 d512 bf16 causal")
    config = TileConfig.parse("m64n128d128w8s3")
    tasks = [Tiled.of("bwd_columns", problem, one, config) for one in (H200, small, H200)]
    assert traffic(tasks[0]) == traffic(tasks[2]) != traffic(tasks[1]), "smaller panels"
    a100 = Tiled.of("fwd", PROBLEM, gpu("a100"), CONFIG)
    assert footprint(a100) != footprint(Tiled.of("fwd", PROBLEM, H200, CONFIG))


def test_a_kernel_that_joins_splits_follows_the_kernel_that_makes_them() -> None:
    task = KernelTask.of("fwd_combine", PROBLEM, H200)
    assert task.before is not None
    assert task.before.kernel == "fwd_split"
    assert task.before.before is None
    paged = KernelTask.of("fwd_combine", replace(PROBLEM, page=16), H200)
    assert paged.before is not None
    assert paged.before.kernel == "fwd_paged"
