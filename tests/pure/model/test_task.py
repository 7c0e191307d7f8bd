"""Tasks: the model and the choice take them instead of loose kernels, problems and devices."""

from __future__ import annotations

from dataclasses import replace

from tests.support.records import H200, PROBLEM
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.model.footprint import footprint
from tilegen.model.traffic import traffic
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask, Tiled

CONFIG = TileConfig.parse("m64n64w4s3")


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
