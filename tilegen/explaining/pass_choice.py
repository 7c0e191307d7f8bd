"""Explain the choice of kernels: the families that can compute a pass, its lower bound and its
regime."""

from __future__ import annotations

from collections.abc import Sequence

from tilegen.choose.families import (
    CLEARLY_FASTER,
    LARGE,
    family,
    ranked_families,
    why_not_ranked,
)
from tilegen.choose.ranker import best_of
from tilegen.explaining.formulas import formula, named
from tilegen.explaining.gpu_records import (
    FamilyFacts,
    FamilyKernel,
    PanelFacts,
    PassExplanation,
    Regime,
)
from tilegen.explaining.records import BoundFacts, SubgridFacts
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Family
from tilegen.kernels.panels import panels, panels_at_once, rows_for
from tilegen.kernels.registry import FAMILIES
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.model.bounds import (
    bound_values,
    bounds_of,
    complexity,
    each_bound,
    lower_bound_bytes,
    what_of,
)
from tilegen.model.footprint import footprint
from tilegen.model.subgrids import closed_form, subgrids
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask
from tilegen.theory import regimes


def explain_pass(
    problem: AttentionProblem, gpu: GpuSpec, direction: Direction, used: FamilySpec | None = None
) -> PassExplanation:
    """Explain the choice of a pass's kernels. They are those of the family `used` by calls, by
    default those of the model's. Raises Unsupported."""
    task = PassTask.of(direction, problem, gpu)
    problem = task.problem
    by_model = family(problem, gpu, direction)
    chosen = used.name if used else by_model
    fitting = dict(ranked_families(problem, gpu, direction))
    families = tuple(_family(task, name) for name in dict.fromkeys((*fitting, chosen)))
    mine = next(facts for facts in families if facts.family == chosen)
    bound = bound_of(task, moved=mine.read_bytes + mine.write_bytes)
    regime = _regime(problem, gpu, direction)
    because = f"agreed by all ranks, or measured to be faster than {by_model}, the model's"
    if chosen == by_model:
        because = _because(problem, direction, regime, chosen, families)
    return PassExplanation(
        direction=direction,
        family=chosen,
        because=because,
        kernels=tuple(kernel.kernel for kernel in mine.kernels),
        seconds=mine.seconds,
        read_bytes=mine.read_bytes,
        write_bytes=mine.write_bytes,
        families=families,
        left_out={
            name: spec.why_not(problem, gpu.arch)
            or why_not_ranked(spec, problem, gpu)
            or "nothing fits"
            for name, spec in FAMILIES[direction].items()
            if name not in fitting and name != chosen
        },
        optimum=formula("optimum", complexity(direction)),
        bound=bound,
        regime=regime,
        panel=_panel(problem, gpu, direction) if chosen == "small_cache" else None,
    )


def bound_of(task: KernelTask | PassTask, *, moved: int) -> BoundFacts:
    """Return the lower bounds of a kernel or pass whose tiles move a number of bytes."""
    problem = task.problem
    expressions = bounds_of(what_of(task), values_in_keys=problem.latent)
    values, sizes, least = bound_values(task), each_bound(task), lower_bound_bytes(task)
    return BoundFacts(
        bytes=least,
        applies=max(sizes, key=lambda name: sizes[name]),
        each=sizes,
        formulas=tuple(formula(name, expression) for name, expression in expressions.items()),
        values=named(values, expressions.values()),
        on_chip_bytes=task.device.on_chip_bytes,
        subgrids=_subgrids(problem) if "LB1G" in sizes else None,
        theorems_of="problem" if problem.mask.is_full else "unmasked problem",
        ratio=moved / least if least else None,  # 0: no pair is kept, all results intermediates
    )


def _subgrids(problem: AttentionProblem) -> SubgridFacts:
    """Describe the densest sub-grids of a mask, with their closed form if there is one."""
    lengths = problem.seqlen_q, problem.seqlen_kv
    densest = subgrids(problem.mask, *lengths, problem.group_size)
    return SubgridFacts(
        per_row=densest.per_row,
        width=densest.width,
        formula=formula("u", closed_form(densest.family)) if densest.family else None,
    )


def _family(task: PassTask, name: Family) -> FamilyFacts:
    tasks = [task.kernel(spec) for spec in FAMILIES[task.direction][name].kernels]
    best = [best_of(kernel_task) for kernel_task in tasks]
    costs = [candidate.estimate for candidate in best]
    return FamilyFacts(
        family=name,
        seconds=sum(cost.seconds for cost in costs),
        read_bytes=sum(cost.read_bytes for cost in costs),
        write_bytes=sum(cost.write_bytes for cost in costs),
        dram_bytes=sum(cost.dram_bytes for cost in costs),
        spills=any(
            footprint(kernel_task.tiled(candidate.config)).surely_spills
            for kernel_task, candidate in zip(tasks, best, strict=True)
        ),
        kernels=tuple(
            FamilyKernel(
                kernel=candidate.kernel,
                config=candidate.config,
                key=candidate.config.key,
                seconds=candidate.estimate.seconds,
            )
            for candidate in best
        ),
    )


def _because(
    problem: AttentionProblem,
    direction: Direction,
    regime: Regime,
    chosen: Family,
    ranked: Sequence[FamilyFacts],
) -> str:
    families = FAMILIES[direction]
    names = [facts.family for facts in ranked]
    margin = families[names[0]].margin
    if margin > families[chosen].margin:
        return f"{names[0]} is predicted to be faster, which counts from {margin:g} times on"
    if regime.m_over_d2 >= LARGE and not families[chosen].large_heads_only:
        beyond = f"M is {regime.m_over_d2:.1f} d^2, and from {LARGE:g} d^2 on "
        beyond += "FlashAttention's schedules move least by a margin"
        if families[names[0]].large_heads_only:
            return (
                f"{beyond}; {names[0]} is predicted to be faster, which counts from "
                f"{CLEARLY_FASTER:g} times on"
            )
        alike = [name for name in names if not families[name].large_heads_only]
        return f"{beyond}; the fastest of {', '.join(alike)}" if len(alike) > 1 else beyond
    if ranked[0].family != chosen:
        return f"predicted to be the fastest for '{problem.bucket.key}', which stands for this one"
    why = (
        f"predicted to be the fastest of {len(ranked)}"
        if len(ranked) > 1
        else "the only one to fit"
    )
    return why + (
        ", those that spill many registers last" if any(facts.spills for facts in ranked) else ""
    )


def _regime(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> Regime:
    """Compare M with d^2, in words and in bytes: theorems count words."""
    size, head_dim = problem.element_bytes, max(problem.head_dim_qk, problem.head_dim_v)
    names = regimes.LARGE_CACHE[direction], regimes.SMALL_CACHE[direction]
    dividing = regimes.dividing_bytes(*names, head_dim=head_dim, element_bytes=size)
    return Regime(
        regime="large cache" if gpu.on_chip_bytes >= dividing else "small cache",
        dtype=problem.dtype,
        head_dim=head_dim,
        m_bytes=gpu.on_chip_bytes,
        m_words=gpu.on_chip_bytes / size,
        m_over_d2=gpu.on_chip_bytes / size / head_dim**2,
        theorem_words=head_dim**2,
        theorem_bytes=head_dim**2 * size,
        dividing=formula("M", regimes.dividing_memory(*names)),
        values={"d": head_dim, "alpha": regimes.ACCUMULATOR_BYTES / size},
        dividing_words=dividing / size,
        dividing_bytes=dividing,
        critical_head_dim=regimes.critical_head_dim(gpu, direction, element_bytes=size),
    )


def _panel(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> PanelFacts:
    """Describe the panels that the kernels of a small-cache pass exchange through L2."""
    limit = rows_for(problem, gpu, direction)
    heads = problem.batch * problem.num_heads_q
    parts = list(panels(heads, problem.group_size, problem.seqlen_q, limit))
    rows = max(part.num_heads * part.num_rows for part in parts)
    return PanelFacts(
        panels=len(parts),
        rows=rows,
        bytes=rows * problem.seqlen_kv * problem.element_bytes * panels_at_once(direction),
        l2_bytes=gpu.l2_bytes,
    )
