"""Choose the family of kernels for a pass. Queries (or keys) are stationary and whole, or head dims
are streamed, or scores are stored in a panel as in the small-cache algorithms. Measured times
decide, or else the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from tilegen.check import in_child
from tilegen.choose.libraries import faster_library
from tilegen.device import Device
from tilegen.environment import HOPPER, current
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Family, Kernel
from tilegen.kernels.registry import FAMILIES
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.problem import AttentionProblem
from tilegen.sympy_lock import one_at_a_time
from tilegen.task import PassTask

if TYPE_CHECKING:
    from tilegen.choose.records import Records

LARGE = 2.0
"""M / d^2 above which FlashAttention's schedules move the fewest bytes by a clear margin. The
traffic of forward and backward schedules crosses between 0.7 and 1.8 (theory/optimum.py). Above,
another family must be predicted to be faster by CLEARLY_FASTER. Measured times have priority: see
`families_used`."""
CLEARLY_LARGE = 4.0
"""M / d^2 above which the other families are not ranked. On an H200, head dims of 128 in 16 bits
have 15, and 256 have 3.8. At 256, registers for the gradients of 64 keys and values are short, and
few heads leave SMs idle. Ranking takes four to five times as long for a new forward, even if there
is a record."""
CLEARLY_FASTER = 1.25
"""Factor in predicted time that exceeds the model's error between untimed kernels: a guess."""

TALL, FEW_WAVES, FEW_ROWS = 128, 2, 16
"""Rows of a tall tile, and the programs per SM above which families for few programs are not
ranked: no SM is idle for long. Such a family is still ranked if a head has fewer than FEW_ROWS
queries, because heads of a group may then share a tile."""


@one_at_a_time
def kernels_of(
    problem: AttentionProblem, gpu: Device, direction: Direction | None = None
) -> tuple[Kernel, ...]:
    """Return the kernels that compute a problem, or one of its passes, on a device."""
    if direction is not None:
        if not isinstance(gpu, GpuSpec):
            return _family_on_cpu(problem, direction).names
        return FAMILIES[direction][family(problem, gpu, direction)].names
    return tuple(name for way in passes_of(problem) for name in kernels_of(problem, gpu, way))


def passes_of(problem: AttentionProblem) -> tuple[Direction, ...]:
    """Return the passes of a problem. Keys in pages have no gradients. Values in keys have none
    either: their gradients need a problem with separate values."""
    return ("forward",) if problem.page or problem.latent else ("forward", "backward")


def kernels_used(records: Records, direction: Direction | None = None) -> tuple[Kernel, ...]:
    """Return the kernels that a call uses, for one pass or for all."""
    return tuple(name for spec in families_used(records, direction) for name in spec.names)


def families_used(records: Records, direction: Direction | None = None) -> tuple[FamilySpec, ...]:
    """Choose the family that a call uses, for one pass or for both."""
    ways = passes_of(records.problem) if direction is None else (direction,)
    return tuple(_family_used(records, way) for way in ways)


def _family_used(records: Records, direction: Direction) -> FamilySpec:
    """Choose the family that all ranks agreed on, or else the fastest measured family, or else the
    model's.

    Measured times are compared with measured times only. Predictions are optimistic, so an untimed
    family would always win. A library, too, is compared with a measured family only.
    """
    if not isinstance(records.device, GpuSpec):
        return _family_on_cpu(records.problem, direction)
    families = {name: one for name, one in FAMILIES[direction].items() if not one.for_cpus}
    for spec in families.values():
        if all(records.agreed(kernel) for kernel in spec.names):
            return spec
        if spec.by_record and current().hopper and not _why_not_used(records, spec):
            return spec
    best = families[family(records.problem, records.device, direction)]
    if _measured(records, best.names) is None:
        return best
    shortest = math.inf
    for spec in families.values():
        if spec.why_not(records.problem, records.device.arch):
            continue
        seconds = _measured(records, spec.names)
        if seconds is not None and seconds < shortest and not _why_not_used(records, spec):
            best, shortest = spec, seconds
    library = faster_library(records, direction, shortest)
    return replace(best, library=library) if library else best


def _why_not_used(records: Records, spec: FamilySpec) -> str:
    """Return the reason why a call cannot use a family; empty if it can. Kernels whose warpgroups
    have roles must have been right on this GPU model, with the config of the record if any."""
    if reason := spec.why_not(records.problem, records.device.arch):
        return reason
    if not spec.by_record:
        return ""
    if not records.roles:
        return f"{spec.name} loads all tiles through tensor descriptors"
    for kernel in (one.name for one in spec.kernels if one.specialised):
        task, entry = records.task(kernel), records.own(kernel)
        checked = in_child.passed(task)
        if not checked or (entry and entry.record.config not in checked):
            return f"{kernel} has passed no check here: tilegen verify, tune and warm run it"
    return ""


def _family_on_cpu(problem: AttentionProblem, direction: Direction) -> FamilySpec:
    from tilegen.choose.on_cpu import family_on_cpu  # loads the model

    return family_on_cpu(problem, direction)


def _measured(records: Records, kernels: tuple[Kernel, ...]) -> float | None:
    """Return the summed time of a family's kernels; None if a kernel was not measured."""
    total = 0.0
    for kernel in kernels:
        if (seconds := records.seconds(kernel)) is None:
            return None
        total += seconds
    return total


def family(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> Family:
    """Return the family predicted to be fastest. Raises Unsupported if none fits."""
    bucket = problem.bucket
    able = _able(problem, gpu, direction)
    if len(able) == 1:
        return able[0]
    ranked = ranked_families(bucket, gpu, direction)
    families = FAMILIES[direction]
    usual = tuple(pair for pair in ranked if families[pair[0]].margin == 1.0)
    if usual and usual[0][1] <= families[ranked[0][0]].margin * ranked[0][1]:
        ranked = usual
    best, shortest = ranked[0]
    if _room(problem, gpu) >= LARGE:
        any_head = (pair for pair in ranked if not families[pair[0]].large_heads_only)
        name, seconds = next(any_head, ranked[0])
        best = name if seconds <= CLEARLY_FASTER * shortest else best
    return best


def _able(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> list[Family]:
    """Return the families that can compute a problem and may be the fastest."""
    return [
        name
        for name, spec in FAMILIES[direction].items()
        if not spec.why_not(problem, gpu.arch) and not why_not_ranked(spec, problem.bucket, gpu)
    ]


def _room(problem: AttentionProblem, gpu: GpuSpec) -> float:
    """Return M / d^2 of a problem."""
    head_dim = max(problem.head_dim_qk, problem.head_dim_v)
    return gpu.on_chip_bytes / problem.element_bytes / head_dim**2


def why_not_ranked(spec: FamilySpec, problem: AttentionProblem, gpu: GpuSpec) -> str:
    """Return the reason why a family cannot win, by the limits in its record; empty if it may. For
    batch-invariant problems, the family must not depend on sizes."""
    if spec.for_cpus:
        return "nobody has timed it on a GPU"
    if spec.by_record:
        return f"only measured times choose it, or {HOPPER}=1, once its check has passed"
    if problem.invariant and spec.direction == "forward":
        return ""
    if spec.large_heads_only and (room := _room(problem, gpu)) >= CLEARLY_LARGE:
        return (
            f"M is {room:.1f} d^2; from {CLEARLY_LARGE:g} d^2 on, other families move clearly less"
        )
    for kernel in spec.kernels if spec.few_programs_only else ():
        rows, _ = kernel.loop.sides(problem.seqlen_q * problem.group_size, problem.seqlen_kv)
        tiles = problem.batch * problem.num_heads_kv * -(-rows // TALL)
        shares = kernel.packs and problem.group_size > 1 and problem.seqlen_q < FEW_ROWS
        if kernel.splits and tiles >= FEW_WAVES * gpu.num_sms and not shares:
            return f"{tiles} tiles of {TALL} rows keep {gpu.num_sms} SMs busy"
    return ""


def ranked_families(
    problem: AttentionProblem, gpu: GpuSpec, direction: Direction
) -> tuple[tuple[Family, float], ...]:
    """Return (family, predicted seconds), the fastest first.

    Families whose kernels spill too much may come last. Raises Unsupported if no family fits.
    """
    from tilegen.choose.ranker import best_of  # loads the model
    from tilegen.model.footprint import footprint

    task = PassTask(direction, problem, gpu)
    fitting: list[tuple[bool, float, Family]] = []
    reasons: list[str] = []
    for name, spec in FAMILIES[direction].items():
        if why_not_ranked(spec, problem, gpu):
            continue
        if reason := spec.why_not(problem, gpu.arch):
            reasons.append(reason)
            continue
        try:
            best = [best_of(task.kernel(kernel)) for kernel in spec.kernels]
        except Unsupported as error:
            reasons.append(str(error))
            continue
        seconds = sum(candidate.estimate.seconds for candidate in best)
        spills = any(
            footprint(task.kernel(kernel).tiled(candidate.config)).surely_spills
            for kernel, candidate in zip(spec.kernels, best, strict=True)
        )
        fitting.append((spills, seconds, name))
    if not fitting:
        raise Unsupported("; ".join(reasons))
    return tuple((name, seconds) for _, seconds, name in sorted(fitting))
