"""Explain the effect of a mask: work left, tiles visited, and the gain of choosing tiles for it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tilegen.choose.ranker import best_of, estimate
from tilegen.errors import Unsupported
from tilegen.masks.mask import Side, full
from tilegen.masks.tiles.closed_form import Interval, stream_sets
from tilegen.model.estimate import Candidate
from tilegen.model.mask_size import size_of
from tilegen.model.visits import visits
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled


def explain_mask(task: KernelTask, chosen: Candidate) -> dict[str, Any]:
    """Describe the tiles that a kernel visits under the mask, as plain values.

    `form` is "interval", "several" (intervals) or "lists" (of tiles). `waste` is the number of
    scores computed for each kept score. `dense_choice` compares the config that is best without a
    mask; None if it is the chosen config.
    """
    problem, (stays, streams) = task.problem, task.spec.loop.sides("queries", "keys")
    visits_tiles = task.spec.masked
    return {
        "keep": problem.mask.notation,
        "stays": stays,
        "streams": streams,
        **_form(problem, task.spec.stays),
        "waste": _waste(task.tiled(chosen.config)) if visits_tiles else None,
        "dense_choice": _dense_choice(task, chosen) if visits_tiles else None,
    }


def mask_lines(mask: dict[str, Any]) -> list[str]:
    """Format the explanation of a mask as lines."""
    lines = [f"  mask       {mask['keep']}; the tile [first, last] of {mask['stays']}"]
    if mask["form"] == "interval":
        live, whole = (_range(mask[part][0]) for part in ("live", "full"))
        lines.append(f"             needs {mask['streams']} in {live}, all of them in {whole}")
    elif mask["form"] == "several":
        live, dropped = (" or ".join(map(_range, mask[part])) for part in ("live", "dropped"))
        lines += [
            f"             needs {mask['streams']} in {live},",
            f"             and not all of those in {dropped}; merged when the kernel runs",
        ]
    else:
        lines.append(f"             finds its tiles of {mask['streams']} in lists, built once")
    if mask["waste"] is not None:
        lines.append(f"  waste      {mask['waste']:.2f} scores computed for each that is kept")
    if dense := mask["dense_choice"]:
        lines.append(
            f"             {dense['config']}, best without a mask, would take "
            f"{dense['slowdown']:.2f} times as long: {dense['traffic_ratio']:.2f} times the bytes, "
            f"{dense['scores_ratio']:.2f} times the scores"
        )
    return lines


def _form(problem: AttentionProblem, side: Side) -> dict[str, Any]:
    try:
        sets = stream_sets(problem.mask, side)
    except Unsupported:
        return {"form": "lists", "live": [], "full": [], "dropped": []}
    live = [_edges(interval) for interval in sets.live]
    dropped = [_edges(interval) for interval in sets.dropped]
    whole = [] if sets.full is None else [_edges(sets.full)]
    form = "interval" if whole else "several"
    return {"form": form, "live": live, "full": whole, "dropped": dropped}


def _edges(interval: Interval) -> list[str]:
    edges = ("0" if interval.lo is None else str(interval.lo), str(interval.hi))
    return [re.sub(r"(?<=[\w)])([-+])", r" \1 ", edge).replace(",", ", ") for edge in edges]


def _range(edges: list[str]) -> str:
    lo, hi = edges
    return f"[{lo}, {hi})"


def _scores(tiled: Tiled) -> float:
    return float(visits(tiled).tiles) * tiled.config.block_m * tiled.config.block_n


def _waste(tiled: Tiled) -> float | None:
    kept = size_of(tiled.task).entries
    return _scores(tiled) / kept if kept else None


def _dense_choice(task: KernelTask, chosen: Candidate) -> dict[str, Any] | None:
    """Compare the config that is best without a mask, under the mask of the problem."""
    if task.problem.mask.is_full:
        return None
    dense = best_of(replace(task, problem=replace(task.problem, mask=full()))).config
    if dense == chosen.config:
        return None
    other, own = estimate(task.tiled(dense)), chosen.estimate
    moved = own.read_bytes + own.write_bytes
    if not moved:  # no pair is kept, and all results are intermediates
        return None
    return {
        "config": dense.key,
        "slowdown": other.seconds / own.seconds,
        "traffic_ratio": (other.read_bytes + other.write_bytes) / moved,
        "scores_ratio": _scores(task.tiled(dense)) / max(1.0, _scores(task.tiled(chosen.config))),
    }
