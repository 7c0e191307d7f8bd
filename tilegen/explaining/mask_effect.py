"""Explain the effect of a mask: work left, tiles visited, and the gain of choosing tiles for it."""

from __future__ import annotations

import re
from dataclasses import replace

from tilegen.choose.ranker import best_of, estimate
from tilegen.explaining.records import DenseChoice, MaskEffect
from tilegen.masks.mask import Side, full
from tilegen.masks.tiles.spans import Interval, visit
from tilegen.model.estimate import Candidate
from tilegen.model.mask_size import size_of
from tilegen.model.visits import visits
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled
from tilegen.units import ratio_text


def explain_mask(task: KernelTask, chosen: Candidate) -> MaskEffect:
    """Describe the tiles that a kernel visits under the mask, on a GPU or a processor."""
    problem, (stays, streams) = task.problem, task.spec.loop.sides("queries", "keys")
    visits_tiles = task.spec.masked
    form, (live, whole, dropped) = _form(problem, task.spec.stationary)
    return MaskEffect(
        keep=problem.mask.notation,
        stays=stays,
        streams=streams,
        form=form,
        live=live,
        full=whole,
        dropped=dropped,
        waste=_waste(task.tiled(chosen.config)) if visits_tiles else None,
        dense_choice=_dense_choice(task, chosen) if visits_tiles else None,
    )


def mask_lines(mask: MaskEffect) -> list[str]:
    """Format the effect of a mask as lines."""
    lines = [f"  mask       {mask.keep}; the tile [first, last] of {mask.stays}"]
    if not mask.live and mask.form != "lists":
        lines.append(f"             needs no {mask.streams}")
    elif mask.form == "interval":
        live, whole = _range(mask.live[0]), _range(mask.full[0])
        lines.append(f"             needs {mask.streams} in {live}, all of them in {whole}")
    elif mask.form == "several":
        live, dropped = (" or ".join(map(_range, part)) for part in (mask.live, mask.dropped))
        lines += [
            f"             needs {mask.streams} in {live},",
            f"             and not all of those in {dropped}; merged when the kernel runs",
        ]
    else:
        lines.append(f"             finds its tiles of {mask.streams} in lists, built once")
    if mask.waste is not None:
        waste = ratio_text(mask.waste)
        lines.append(f"  waste      {waste} scores computed for each that is kept")
    if dense := mask.dense_choice:
        lines.append(
            f"             {dense.config}, best without a mask, would take "
            f"{ratio_text(dense.slowdown)} times as long: {ratio_text(dense.traffic_ratio)} times "
            f"the bytes, {ratio_text(dense.scores_ratio)} times the scores"
        )
    return lines


EdgeWords = tuple[str, str]
"""The ends of a half-open interval, in terms of the tile [first, last]."""


def _form(problem: AttentionProblem, side: Side) -> tuple[str, tuple[tuple[EdgeWords, ...], ...]]:
    """Return the form of a mask's tiles, with the live, full and dropped intervals."""
    sets = visit(problem.mask, side).sets
    if sets is None:
        return "lists", ((), (), ())
    live, dropped = (tuple(map(_edges, intervals)) for intervals in (sets.live, sets.dropped))
    whole = () if sets.full is None else (_edges(sets.full),)
    return "interval" if whole else "several", (live, whole, dropped)


def _edges(interval: Interval) -> EdgeWords:
    edges = ("0" if interval.lo is None else str(interval.lo), str(interval.hi))
    lo, hi = (re.sub(r"(?<=[\w)])([-+])", r" \1 ", edge).replace(",", ", ") for edge in edges)
    return lo, hi


def _range(edges: EdgeWords) -> str:
    lo, hi = edges
    return f"[{lo}, {hi})"


def _scores(tiled: Tiled) -> float:
    return float(visits(tiled).tiles) * tiled.config.block_m * tiled.config.block_n


def _waste(tiled: Tiled) -> float | None:
    kept = size_of(tiled.task).entries
    return _scores(tiled) / kept if kept else None


def _dense_choice(task: KernelTask, chosen: Candidate) -> DenseChoice | None:
    """Compare the config that is best without a mask, under the mask of the problem."""
    if task.problem.mask.is_full:
        return None
    dense = best_of(replace(task, problem=replace(task.problem, mask=full()))).config
    if dense == chosen.config:
        return None
    other, own = estimate(task.tiled(dense)), chosen.estimate
    moved = own.read_bytes + own.write_bytes
    if not (moved and _scores(task.tiled(chosen.config))):  # no pair is kept
        return None
    return DenseChoice(
        config=dense.key,
        slowdown=other.seconds / own.seconds,
        traffic_ratio=(other.read_bytes + other.write_bytes) / moved,
        scores_ratio=_scores(task.tiled(dense)) / _scores(task.tiled(chosen.config)),
    )
