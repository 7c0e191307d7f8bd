"""Explain the kernels of a problem on a device, with the choice of their passes and their measured
times. summary.py and text.py format the records, plot.py draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilegen.choose.choice import Choice
from tilegen.choose.families import families_used
from tilegen.choose.records import Records
from tilegen.device import Device
from tilegen.explaining import on_cpu, on_gpu
from tilegen.explaining.alternatives import Explained, with_alternatives
from tilegen.explaining.common import measured_by
from tilegen.explaining.cpu_records import CpuPassExplanation
from tilegen.explaining.gpu_records import PassExplanation
from tilegen.explaining.pass_choice import explain_pass
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.pipeline import choose_kernel, joined_to
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask


def explain_all(
    problem: AttentionProblem,
    device: Device,
    kernels: Sequence[Kernel],
    config: TileConfig | None = None,
    *,
    by_model: bool = False,
    alternatives: bool = True,
) -> tuple[Explained, ...]:
    """Explain kernels on a GPU or a processor, each with the explanation of its pass.

    A problem is explained in its normal form; `rewriting` describes the change in a line. The
    config explained is the choice of a call, for which several are compiled on a GPU. With
    `by_model` it is the model's first, no record is read, and `config` replaces both. With
    `alternatives` choices for other memories, processors and masks are added. Raises Unsupported.
    """
    rewriting, problem = problem.rewriting, problem.normal()
    tasks = [KernelTask.of(kernel, problem, device) for kernel in kernels]
    ways: set[Direction] = {task.direction for task in tasks}
    records = None if by_model else Records(problem, device)
    used: dict[Direction, FamilySpec] = {}
    if config is None and records is not None:
        used = {way: families_used(records, way)[0] for way in ways}
    passes: dict[Direction, PassExplanation] = {}
    on_processor: dict[Direction, CpuPassExplanation] = {}
    if isinstance(device, GpuSpec):
        passes = {way: explain_pass(problem, device, way, used.get(way)) for way in ways}
    else:
        on_processor = {way: on_cpu.explain_pass(problem, way) for way in ways}
    chosen: dict[Kernel, Choice] = {}
    explained: list[Explained] = []
    for task in tasks:
        task = joined_to(task, chosen)
        if config is None and not by_model:
            of_call = choose_kernel(task, may_compile=True)
            chosen[task.kernel] = replace(of_call, library=used[task.direction].library)
            task = chosen[task.kernel].ranked.task
        choice, way = chosen.get(task.kernel), task.direction
        if isinstance(device, GpuSpec):
            facts = replace(on_gpu.explain(task, config, choice), pass_=passes[way])
        else:
            facts = replace(on_cpu.explain(task, config, choice), pass_=on_processor[way])
        measured = None if records is None else measured_by(records, task.kernel)
        explained.append(replace(facts, rewriting=rewriting, measured=measured))
    return with_alternatives(explained, problem, device) if alternatives else tuple(explained)
