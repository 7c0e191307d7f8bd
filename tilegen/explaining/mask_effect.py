"""The effect of a mask: work that is left, tiles that are visited, gain of choosing by it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sympy

from tilegen.choose.ranking import best_of, estimate
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.masks.language.symbols import FIRST, LAST
from tilegen.masks.mask import Full, Side, full
from tilegen.masks.tiles.closed_form import Interval, stream_sets
from tilegen.model.estimate import Candidate
from tilegen.model.mask_size import mask_size
from tilegen.model.traffic import visits
from tilegen.problem import AttentionProblem


def explain_mask(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, chosen: Candidate
) -> dict[str, Any]:
    """Return what a kernel visits under the mask, as plain values.

    `form` is "interval", "several" (intervals) or "lists" (of tiles); `waste` the scores computed
    for each that is kept; `dense_choice` how the config that suits no mask would do, None where it
    is the chosen one.
    """
    side: Side = KERNELS[kernel].stays
    return {
        "keep": problem.mask.notation,
        "stays": "queries" if side == "rows" else "keys",
        "streams": "keys" if side == "rows" else "queries",
        **_form(problem, side),
        "waste": _waste(problem, chosen),
        "dense_choice": _dense_choice(problem, gpu, chosen),
    }


def mask_lines(mask: dict[str, Any]) -> list[str]:
    """Return what is told of a mask, for people."""
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
    live = [_edges(one) for one in sets.live]
    dropped = [_edges(one) for one in sets.dropped]
    whole = [] if sets.full is None else [_edges(sets.full)]
    form = "interval" if whole else "several"
    return {"form": form, "live": live, "full": whole, "dropped": dropped}


def _edges(interval: Interval) -> list[str]:
    shown = {FIRST: sympy.Symbol("first"), LAST: sympy.Symbol("last")}
    lo = sympy.S.Zero if interval.lo.is_infinite else interval.lo
    return [str(edge.subs(shown)) for edge in (lo, interval.hi)]


def _range(edges: list[str]) -> str:
    lo, hi = edges
    return f"[{lo}, {hi})"


def _scores(problem: AttentionProblem, candidate: Candidate) -> float:
    config = candidate.config
    tiles = visits(problem, config.block_m, config.block_n, candidate.kernel).tiles
    return float(tiles) * config.block_m * config.block_n


def _waste(problem: AttentionProblem, chosen: Candidate) -> float | None:
    if not KERNELS[chosen.kernel].masked:
        return None
    kept = mask_size(problem.mask, problem.seqlen_q, problem.seqlen_kv).entries
    return _scores(problem, chosen) / kept if kept else None


def _dense_choice(
    problem: AttentionProblem, gpu: GpuSpec, chosen: Candidate
) -> dict[str, Any] | None:
    """Return how the config that is best without a mask does under the mask of the problem."""
    if isinstance(problem.mask, Full) or not KERNELS[chosen.kernel].masked:
        return None
    kernel = chosen.kernel
    dense = best_of(replace(problem, mask=full()), gpu, kernel).config
    if dense == chosen.config:
        return None
    its, mine = estimate(problem, gpu, dense, kernel), chosen.estimate
    as_candidate = replace(chosen, config=dense, estimate=its)
    moved = mine.read_bytes + mine.write_bytes
    if not moved:  # nothing is kept, and all results are intermediates
        return None
    return {
        "config": dense.key,
        "slowdown": its.seconds / mine.seconds,
        "traffic_ratio": (its.read_bytes + its.write_bytes) / moved,
        "scores_ratio": _scores(problem, as_candidate) / max(1.0, _scores(problem, chosen)),
    }
