"""Kernels and passes with the choices made for them, from which the facts are derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tilegen.choose import on_cpu
from tilegen.choose.choice import Choice
from tilegen.choose.families import (
    CLEARLY_FASTER,
    LARGE,
    families_used,
    family,
    ranked_families,
    why_not_ranked,
)
from tilegen.choose.ranker import best_of, candidate_of, joining, propose
from tilegen.choose.records import Records
from tilegen.cpus import spec as cpus
from tilegen.device import Device
from tilegen.errors import BuildFailed, Unsupported
from tilegen.gpus.spec import GpuSpec, with_fast_memory
from tilegen.kernels.config import Family, Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, check_config
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.masks.mask import causal, full
from tilegen.model.estimate import Candidate, CostEstimate
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import TENSOR_MEMORY_COLUMNS
from tilegen.pipeline import choose_kernel, joined_to
from tilegen.problem import AttentionProblem
from tilegen.store import Found
from tilegen.task import KernelTask, PassTask, Tiled
from tilegen.units import memory_text

SHOWN = 3
"""Number of other configs in an explanation."""
OTHER_FAST_MEMORY = tuple(kib * 1024 for kib in (48, 64, 99, 163, 227))
"""Shared memory per program on GPUs from the GTX 1060 to the H200 [bytes]."""
BY_MODEL = "the model's ranking alone; without --model, what a call would launch"


@dataclass(frozen=True)
class ExplainedPass:
    """A pass of a problem in normal form, with its families."""

    direction: Direction
    problem: AttentionProblem
    device: Device
    used: FamilySpec | None = None
    """The family that calls use; by default the model's, or on a processor that of the rules."""

    @cached_property
    def chosen(self) -> Family:
        """The family of the pass. Raises Unsupported."""
        return self.used.name if self.used else self.by_model

    @cached_property
    def by_model(self) -> Family:
        """The family that the model chooses, or on a processor the rules."""
        if isinstance(self.device, GpuSpec):
            return family(self.problem, self.device, self.direction)
        return on_cpu.family_on_cpu(self.problem, self.direction).name

    @property
    def task(self) -> PassTask:
        """The pass on its device, which must be a GPU."""
        assert isinstance(self.device, GpuSpec), self.device
        return PassTask(self.direction, self.problem, self.device)

    @cached_property
    def families(self) -> dict[Family, tuple[Candidate, ...]]:
        """The families that a GPU's model ranks, the fastest first, with the config of each
        kernel. Rules choose the family of a processor."""
        if not isinstance(self.device, GpuSpec):
            return {}
        ranked = ranked_families(self.problem, self.device, self.direction)
        names = dict.fromkeys((*(name for name, _ in ranked), self.chosen))
        specs = FAMILIES[self.direction]
        return {
            name: tuple(best_of(self.task.kernel(spec)) for spec in specs[name].kernels)
            for name in names
        }

    @cached_property
    def left_out(self) -> dict[Family, str]:
        """Families that cannot compute the pass or cannot win, with the reason."""
        arch = self.device.arch if isinstance(self.device, GpuSpec) else "cpu"
        reasons: dict[Family, str] = {}
        for name, spec in FAMILIES[self.direction].items():
            reason = spec.why_not(self.problem, arch)
            if isinstance(self.device, GpuSpec) and name not in self.families:
                reason = reason or why_not_ranked(spec, self.problem, self.device) or "nothing fits"
            if reason and name not in self.families:
                reasons[name] = reason
        return reasons

    @property
    def because(self) -> str:
        """The reason for the family, in a phrase."""
        specs = FAMILIES[self.direction]
        if not isinstance(self.device, GpuSpec):
            return "rules choose it"
        if self.chosen != self.by_model:
            return (
                f"agreed by all ranks, or measured to be faster than {self.by_model}, the model's"
            )
        names, chosen = list(self.families), specs[self.chosen]
        best = specs[names[0]]
        if best.margin > chosen.margin:
            return (
                f"{best.name} is predicted to be faster, which counts from {best.margin:g} times on"
            )
        room = self.words / self.head_dim**2
        if room >= LARGE and not chosen.large_heads_only:
            beyond = (
                f"M is {room:.1f} d^2, and from {LARGE:g} d^2 on FlashAttention's schedules move "
                "least by a margin"
            )
            alike = [name for name in names if not specs[name].large_heads_only]
            if best.large_heads_only:
                return (
                    f"{beyond}; {best.name} is predicted to be faster, which counts from "
                    f"{CLEARLY_FASTER:g} times on"
                )
            return f"{beyond}; the fastest of {', '.join(alike)}" if len(alike) > 1 else beyond
        if best is not chosen:
            bucket = self.problem.bucket.key
            return f"predicted to be the fastest for '{bucket}', which stands for this one"
        if len(names) == 1:
            return "the only one to fit"
        spilling = any(map(self.spills, names))
        last = ", those that spill many registers last" if spilling else ""
        return f"predicted to be the fastest of {len(names)}{last}"

    def spills(self, name: Family) -> bool:
        """Check whether a kernel of a family surely spills."""
        kernels = zip(FAMILIES[self.direction][name].kernels, self.families[name], strict=True)
        return any(
            footprint(self.task.kernel(spec).tiled(best.config)).surely_spills
            for spec, best in kernels
        )

    @property
    def head_dim(self) -> int:
        """The larger head dim, the d of the theorems."""
        return max(self.problem.head_dim_qk, self.problem.head_dim_v)

    @property
    def words(self) -> float:
        """Words of fast memory, the M of the theorems."""
        return self.device.on_chip_bytes / self.problem.element_bytes

    @cached_property
    def elsewhere(self) -> dict[str, tuple[Family, float] | str]:
        """The family and its time on GPUs with other fast memory, and under other masks; or the
        reason why none fits. Empty on a processor."""
        if not isinstance(self.device, GpuSpec):
            return {}
        gpus = {
            memory_text(size): with_fast_memory(self.device, size) for size in OTHER_FAST_MEMORY
        }
        cases = {name: (self.problem, gpu) for name, gpu in gpus.items()}
        cases |= {one.mask.notation: (one, self.device) for one in _other_masks(self.problem)}
        return {name: self._family(*case) for name, case in cases.items()}

    def _family(self, problem: AttentionProblem, gpu: GpuSpec) -> tuple[Family, float] | str:
        try:
            chosen = family(problem, gpu, self.direction)
            return chosen, dict(ranked_families(problem, gpu, self.direction))[chosen]
        except Unsupported as error:
            return str(error)


@dataclass(frozen=True, kw_only=True)
class ExplainedKernel:
    """A kernel with its config, beside other configs."""

    tiled: Tiled
    candidate: Candidate
    """The config, with the model's estimate and reason."""
    ranked: tuple[Candidate, ...]
    """The model's best configs, of which the config need not be one."""
    space: int
    """Number of configs that a processor's model ranks, 1 where rules leave no choice; 0 on a
    GPU."""
    choice: str
    """The source of the config; empty if the user gave it."""
    way: ExplainedPass
    measured: Found | None = None
    """The device's own record with a time."""
    rewriting: str = ""
    """The change of the mask to its normal form; empty if there is none."""

    @property
    def kernel(self) -> Kernel:
        """The name of the kernel."""
        return self.tiled.task.kernel

    @property
    def config(self) -> TileConfig:
        """The config explained."""
        return self.tiled.config

    @property
    def cost(self) -> CostEstimate:
        """The model's estimate."""
        return self.candidate.estimate

    @property
    def others(self) -> list[Candidate]:
        """The best configs besides the config explained."""
        return [other for other in self.ranked if other.config != self.config][:SHOWN]

    @cached_property
    def on_other_devices(self) -> dict[str, Candidate | str]:
        """The model's config with other fast memory on a GPU, or on other processors, at the
        lengths of the problem; or the reason why nothing fits."""
        others: Mapping[str, Device]
        if isinstance(device := self.tiled.device, GpuSpec):
            others = {memory_text(x): with_fast_memory(device, x) for x in OTHER_FAST_MEMORY}
        else:
            others = {one.name: one for one in cpus.catalogue() if one.name != device.name}
        return {name: _first(replace(self._task, device=one)) for name, one in others.items()}

    @cached_property
    def under_other_masks(self) -> dict[str, Candidate | str]:
        """The model's config under other masks; or the reason why nothing fits."""
        others = _other_masks(self.tiled.problem)
        return {one.mask.notation: _first(replace(self._task, problem=one)) for one in others}

    @property
    def _task(self) -> KernelTask:
        """The task for which no splits are settled."""
        return replace(self.tiled.task, joined=None)


def moved(cost: CostEstimate) -> int:
    """Return the bytes between SMs and L2, or to and from the L2 of a core, both ways."""
    return cost.read_bytes + cost.write_bytes


def _other_masks(problem: AttentionProblem) -> list[AttentionProblem]:
    masks = (mask for mask in (full(), causal()) if mask != problem.mask)
    return [replace(problem, mask=mask) for mask in masks]


def _first(task: KernelTask) -> Candidate | str:
    try:
        return _ranked(joining(task), top=1)[0]
    except Unsupported as error:
        return str(error)


def _ranked(task: KernelTask, top: int) -> list[Candidate]:
    """Return the model's best configs, at the lengths of the problem; on a processor that of the
    rules first, if they leave no choice."""
    if isinstance(task.device, GpuSpec):
        return propose(task, top=top) if top > 1 else [best_of(task)]
    first = on_cpu.chosen_config(task)
    configs = dict.fromkeys((first, *(on_cpu.ranked(task) if top > 1 else ())))
    return [candidate_of(task.tiled(config)) for config in list(configs)[:top]]


def explain(
    task: KernelTask,
    config: TileConfig | None = None,
    choice: Choice | None = None,
    way: ExplainedPass | None = None,
) -> ExplainedKernel:
    """Explain a config of a kernel: `config`, the config of a choice, or by default the model's
    first. Raises Unsupported."""
    asked = config is not None
    if config is not None:
        check_config(config, task.kernel)
    elif choice is not None:
        config = choice.config
    task = joining(task)
    ranked = _ranked(task, SHOWN + 1)
    tiled = task.tiled(config or ranked[0].config)
    known = (candidate for candidate in ranked if candidate.config == tiled.config)
    if (candidate := next(known, None)) is None:
        _check_fits(tiled)
        candidate = candidate_of(tiled)
    space = 0 if isinstance(task.device, GpuSpec) else len(on_cpu.space(task))
    return ExplainedKernel(
        tiled=tiled,
        candidate=candidate,
        ranked=tuple(ranked),
        space=space,
        choice="" if asked else _source(task, choice, space),
        way=way or ExplainedPass(task.direction, task.problem, task.device),
    )


def explain_all(
    problem: AttentionProblem,
    device: Device,
    kernels: Sequence[Kernel],
    config: TileConfig | None = None,
    *,
    by_model: bool = False,
) -> tuple[ExplainedKernel, ...]:
    """Explain kernels on a GPU or a processor.

    A problem is explained in its normal form. The config explained is the choice of a call, for
    which several are compiled on a GPU. With `by_model` it is the model's first, no record is read,
    and `config` replaces both. Raises Unsupported.
    """
    rewriting, problem = problem.rewriting, problem.normal()
    tasks = [KernelTask.of(kernel, problem, device) for kernel in kernels]
    records = None if by_model else Records(problem, device)
    ways: dict[Direction, ExplainedPass] = {}
    for task in tasks:
        used = None
        if config is None and records is not None:
            (used,) = families_used(records, task.direction)
        ways.setdefault(task.direction, ExplainedPass(task.direction, problem, device, used))
    chosen: dict[Kernel, Choice] = {}
    explained: list[ExplainedKernel] = []
    for task in tasks:
        task, way = joined_to(task, chosen), ways[task.direction]
        if way.used:
            of_call = choose_kernel(task, may_compile=True)
            chosen[task.kernel] = replace(of_call, library=way.used.library)
            task = of_call.ranked.task
        known = explain(task, config, chosen.get(task.kernel), way)
        own = records.own(task.kernel) if records else None
        timed = own if own and own.record.measurement.median_us is not None else None
        explained.append(replace(known, measured=timed, rewriting=rewriting))
    return tuple(explained)


def _source(task: KernelTask, choice: Choice | None, space: int) -> str:
    """Return the source of a config that the user did not give, in a line."""
    if choice is not None and choice.ranked.origin != "model":
        line = choice.source
    elif task.spec.packs and space > 1:
        return "rules, since the keys are divided over threads, which the model does not count"
    elif space == 1:
        return "rules, which leave one tile"
    elif choice is None:
        return BY_MODEL
    elif space:
        return f"the model, the first of {space} tiles"
    else:
        built = sum(not isinstance(one, BuildFailed) for one in choice.tried.values())
        best = f", the fastest by machine code of {built} compiled"
        line = choice.source + (best if built else "; nothing was compiled")
    if choice.library:
        line += f"; but calls go to library: {choice.library}, measured to be faster for the pass"
    return line


def _check_fits(tiled: Tiled) -> None:
    """Raise Unsupported for a config that does not fit on a GPU, whose time is unknown."""
    if not isinstance(device := tiled.device, GpuSpec):
        return
    needs = footprint(tiled)
    if needs.may_fit(device):
        return
    columns = f" and {needs.columns} columns of tensor memory" if needs.columns else ""
    limits = f" and {TENSOR_MEMORY_COLUMNS}" if needs.columns else ""
    raise Unsupported(
        f"expected a config that fits on {device.name}, got {tiled.config.key}: "
        f"{tiled.spec.name} would need {needs.smem_bytes} bytes of shared memory{columns}, of "
        f"{device.smem_per_block}{limits}; choose smaller tiles or fewer stages"
    )
