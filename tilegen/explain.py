"""Why these tiles: the formulas, the numbers, the bound, the runner-up, and what would change the
choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import sympy

from tilegen.config import Kernel, TileConfig
from tilegen.device import GpuSpec
from tilegen.errors import Unsupported
from tilegen.masks.compiler import FIRST, LAST, Side, stream_bounds
from tilegen.masks.mask import causal, full
from tilegen.model.bounds import complexity, critical_head_dim, lower_bound
from tilegen.model.estimate import Candidate
from tilegen.model.traffic import TERMS, visits
from tilegen.problem import AttentionProblem
from tilegen.propose import estimate, propose

OTHER_FAST_MEMORY = tuple(kib * 1024 for kib in (48, 64, 99, 163, 227))
"""Bytes of shared memory per program of GPUs from the GTX 1060 to the H200."""


def explain(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, config: TileConfig | None = None
) -> dict[str, Any]:
    """Return the explanation as plain values; `explain_lines` makes text of it. Raises Unsupported.

    `config` defaults to the model's choice.
    """
    ranked = propose(problem, gpu, kernel=kernel, top=4)
    chosen = ranked[0] if config is None else _candidate(problem, gpu, kernel, config, ranked)
    others = [c for c in ranked if c.config != chosen.config][:3]
    cost = chosen.estimate
    counts = visits(problem, chosen.config.block_m, chosen.config.block_n, kernel)
    direction = "forward" if kernel == "fwd" else "backward"
    return {
        "problem": problem.key,
        "gpu": gpu.name,
        "kernel": kernel,
        "config": asdict(chosen.config),
        "reason": chosen.reason,
        "mask": _mask(problem, kernel),
        "tiles": asdict(counts),
        "traffic": {
            "formula": [
                {
                    "tensor": t.tensor,
                    "direction": t.direction,
                    "words": str(t.words),
                    "size": t.size,
                }
                for t in TERMS[kernel]
            ],
            "read_bytes": cost.read_bytes,
            "write_bytes": cost.write_bytes,
            "dram_bytes": cost.dram_bytes,
        },
        "bound": {
            "complexity": str(complexity(direction)),
            "formula": str(lower_bound(kernel)),
            "on_chip_bytes": gpu.on_chip_bytes,
            "bytes": cost.lower_bound_bytes,
            "ratio": (cost.read_bytes + cost.write_bytes) / cost.lower_bound_bytes,
            "critical_head_dim": critical_head_dim(
                gpu, direction, element_bytes=problem.element_bytes
            ),
        },
        "footprint": {"smem_bytes": cost.smem_bytes, "registers": cost.registers},
        "time": {
            "seconds": cost.seconds,
            "limit": cost.limit,
            "waves": cost.waves,
            "terms": dict(cost.terms),
        },
        "next_best": [_short(candidate) for candidate in others],
        "other_fast_memory": [_other_memory(problem, gpu, kernel, m) for m in OTHER_FAST_MEMORY],
        "other_masks": [
            _other(replace(problem, mask=mask), gpu, kernel) | {"mask": mask.notation}
            for mask in (full(), causal())
            if mask != problem.mask
        ],
    }


def explain_lines(told: dict[str, Any]) -> list[str]:
    """Return an explanation as lines of text."""
    traffic, bound, time, mask = told["traffic"], told["bound"], told["time"], told["mask"]
    tiles, moved = told["tiles"], (traffic["read_bytes"], traffic["write_bytes"])
    lines = [
        f"{told['kernel']} for '{told['problem']}' on {told['gpu']}",
        f"  tile       {_config(told['config'])}",
        f"  because    {told['reason']}",
        "",
        f"  mask       {mask['keep']}; the tile [first, last] of {mask['stays']}",
        f"             needs {mask['streams']} in {_range(mask['live'])}, "
        f"all of them in {_range(mask['full'])}",
        f"  tiles      {tiles['tiles']} visited per head by {tiles['programs']} programs, "
        f"{tiles['partial_tiles']} of them with mask code",
        "",
        "  traffic between SMs and L2, words per key-value head:",
        *(
            f"    {term['direction']:5} {term['tensor']:6} {term['words']}"
            + (" (fp32)" if term["size"] == "fp32" else "")
            for term in traffic["formula"]
        ),
        f"    in all {_bytes(moved[0])} read, {_bytes(moved[1])} written; "
        f"DRAM {_bytes(traffic['dram_bytes'])}",
        "",
        f"  optimum    Theta({bound['complexity']})",
        f"  bound      {_bytes(bound['bytes'])} with {_bytes(bound['on_chip_bytes'])} on chip: "
        f"these tiles move {bound['ratio']:.1f} times that",
        f"  crossover  head dim {bound['critical_head_dim']:.0f}: "
        "beyond it the small-cache algorithms move less",
        "",
        f"  time       {1e6 * time['seconds']:.1f} us predicted, limited by {time['limit']}; "
        f"{time['waves']:.1f} waves",
        *(f"    {name:8} {1e6 * seconds:10.1f} us" for name, seconds in time["terms"].items()),
        "",
        "  next best",
        *(
            f"    {other['config']:14} {1e6 * other['seconds']:8.1f} us  {other['reason']}"
            for other in told["next_best"]
        ),
        "",
        "  with other fast memory, or another mask",
        *(
            f"    {other['fast_memory'] // 1024:3} KiB        {other['config'] or 'nothing fits'}"
            for other in told["other_fast_memory"]
        ),
        *(f"    {other['mask']:14} {other['config']}" for other in told["other_masks"]),
    ]
    return lines


def _candidate(
    problem: AttentionProblem,
    gpu: GpuSpec,
    kernel: Kernel,
    config: TileConfig,
    ranked: Sequence[Candidate],
) -> Candidate:
    for candidate in ranked:
        if candidate.config == config:
            return candidate
    cost = estimate(problem, gpu, config, kernel)
    ratio = cost.seconds / ranked[0].estimate.seconds
    reason = f"asked for; predicted to take {ratio:.2f} times as long as the model's choice"
    return Candidate(kernel=kernel, config=config, estimate=cost, reason=reason)


def _mask(problem: AttentionProblem, kernel: Kernel) -> dict[str, Any]:
    side: Side = "columns" if kernel == "bwd_dkdv" else "rows"
    bounds = stream_bounds(problem.mask, side)
    shown = {FIRST: sympy.Symbol("first"), LAST: sympy.Symbol("last")}
    return {
        "keep": problem.mask.notation,
        "stays": "queries" if side == "rows" else "keys",
        "streams": "keys" if side == "rows" else "queries",
        "live": [str(e.subs(shown)) for e in (bounds.live.lo, bounds.live.hi)],
        "full": [str(e.subs(shown)) for e in (bounds.full.lo, bounds.full.hi)],
    }


def _short(candidate: Candidate) -> dict[str, Any]:
    cost = candidate.estimate
    return {
        "config": candidate.config.key,
        "seconds": cost.seconds,
        "limit": cost.limit,
        "reason": candidate.reason,
    }


def _other(problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel) -> dict[str, Any]:
    try:
        return _short(propose(problem, gpu, kernel=kernel, top=1)[0])
    except Unsupported as error:
        return {"config": None, "seconds": None, "limit": None, "reason": str(error)}


def _other_memory(
    problem: AttentionProblem, gpu: GpuSpec, kernel: Kernel, size: int
) -> dict[str, Any]:
    limited = replace(gpu, smem_per_block=size, smem_per_sm=max(size + 1024, gpu.smem_per_sm))
    return _other(problem, limited, kernel) | {"fast_memory": size}


def _range(ends: Sequence[str]) -> str:
    lo, hi = (end.replace("-oo", "0") for end in ends)
    return f"[{lo}, {hi})"


def _config(fields: dict[str, int]) -> str:
    return repr(TileConfig(**fields))


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
