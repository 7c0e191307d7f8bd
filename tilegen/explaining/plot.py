"""Draw two plots of each pass: traffic against fast memory, and the roofline. Only `tilegen explain
--plot` needs matplotlib (the extra `plot`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import sympy as sp

from tilegen.choose.ranker import propose
from tilegen.errors import Unsupported
from tilegen.explaining.explained import ExplainedKernel, ExplainedPass, moved
from tilegen.gpus.nearest import on_tensor_cores
from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import direction_of
from tilegen.kernels.spec import Direction
from tilegen.model.bounds import bound_values, bounds_of
from tilegen.model.symbols import (
    UNMASKED,
    B_c,
    B_e,
    B_p,
    B_r,
    H_kv,
    M,
    N_kv,
    N_q,
    alpha,
    c,
    n,
    nnz,
)
from tilegen.model.traffic import ACCUMULATOR_BYTES
from tilegen.model.visits import visits_of
from tilegen.plots import check_file, save
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, PassTask
from tilegen.theory import regimes
from tilegen.theory.optimum import exact_tiles, leading_tiles
from tilegen.theory.regimes import SMALL_CACHE
from tilegen.theory.schedules import SCHEDULES, smooth
from tilegen.units import memory_text, rate_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = np.ndarray[Any, np.dtype[np.float64]]
FORMATS = (".png", ".svg", ".pdf")
POINTS = 120
CANDIDATES = 8
"""Number of configs of each kernel on the roofline."""
LARGE_CACHE: dict[Direction, tuple[str, ...]] = {
    "forward": ("fwd_q_stationary",),
    "backward": ("bwd_preprocess", "bwd_dkdv", "bwd_dq"),
}
"""The schedules of FlashAttention's passes."""


def draw(
    problem: AttentionProblem, gpu: GpuSpec, explained: Sequence[ExplainedKernel], file: Path
) -> None:
    """Draw the passes of explanations (`explain_all`) to a file. Raises Unsupported."""
    check_file(file, FORMATS)
    from matplotlib.figure import Figure

    passes = {of.way.direction: of.way for of in explained}
    columns = 2 if problem.mask.is_full else 3
    figure = Figure(figsize=(7 * columns, 0.6 + 6.2 * len(passes)), layout="constrained")
    figure.suptitle(f"{problem.key} on {gpu.title}")
    rows = figure.subplots(len(passes), columns, squeeze=False)
    for (traffic, roofline, *rest), way in zip(rows, passes.values(), strict=True):
        shown = [of for of in explained if of.way is way]
        for axes in rest:
            _draw_mask(axes, problem, shown)
        _draw_traffic(traffic, problem, gpu, way)
        _draw_roofline(roofline, problem, gpu, shown)
    save(figure, file)


# --------------------------------------------------------------------------------------------------
# The mask


MASK_SIDE, PAIRS_SIDE = 4096, 512
"""Most rows and columns of a mask that are drawn, from the first, and that are drawn pair by pair:
larger pictures have one shade for each tile."""


def _draw_mask(axes: Axes, problem: AttentionProblem, shown: Sequence[ExplainedKernel]) -> None:
    """Draw the tiles of a mask by class, for the first kernel that visits any, and the kept pairs
    of partial tiles."""
    visiting = [of for of in shown if of.tiled.spec.masked]
    if not visiting:
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"{shown[0].kernel} visits no tile of the mask", ha="center", wrap=True)
        return
    config = visiting[0].config
    rows, columns = (min(n, MASK_SIDE) for n in (problem.seqlen_q, problem.seqlen_kv))
    try:
        picture = mask_picture(problem, config, rows, columns)
    except Unsupported as error:
        axes.set_axis_off()
        axes.text(0.5, 0.5, str(error), ha="center", wrap=True)
        return
    extent = (0, columns, rows, 0)
    axes.imshow(picture, cmap="Blues", vmin=0, vmax=3, interpolation="nearest", extent=extent)
    if max(rows, columns) <= PAIRS_SIDE:
        axes.set_xticks(range(0, columns + 1, config.block_n), minor=False)
        axes.set_yticks(range(0, rows + 1, config.block_m), minor=False)
        axes.grid(visible=True, linewidth=0.3)
    axes.tick_params(labelsize=7, axis="x", rotation=90)
    axes.set(xlabel="keys", ylabel="queries")
    axes.set_title(
        f"first {rows} x {columns} of {problem.mask}, "
        f"tiles {config.block_m} x {config.block_n} of {visiting[0].kernel}\n"
        "dark: full tiles, middle: kept pairs of partial tiles, or these tiles,\n"
        "light: computed and dropped, white: skipped",
        fontsize=9,
    )


def mask_picture(problem: AttentionProblem, config: TileConfig, rows: int, columns: int) -> Array:
    """Return the shade of each pair: 3 in full tiles, 2 and 1 for kept and dropped pairs in partial
    tiles, 0 in tiles that are not visited. Beyond PAIRS_SIDE a pixel is a tile, with the shade of
    kept pairs."""
    keep = problem.mask.pairs(rows, columns)
    if max(rows, columns) > PAIRS_SIDE:
        at_q = np.arange(0, rows, config.block_m)
        at_k = np.arange(0, columns, config.block_n)
        kept = np.add.reduceat(np.add.reduceat(keep.astype(np.int64), at_q, 0), at_k, 1)
        sizes = np.outer(np.diff(at_q, append=rows), np.diff(at_k, append=columns))
        return np.where(kept == sizes, 3.0, 2.0 * (kept > 0))
    picture = np.zeros(keep.shape)
    for q in range(0, rows, config.block_m):
        for k in range(0, columns, config.block_n):
            tile = keep[q : q + config.block_m, k : k + config.block_n]
            if tile.any():
                shade = 3 if tile.all() else 1 + tile
                picture[q : q + config.block_m, k : k + config.block_n] = shade
    return picture


# --------------------------------------------------------------------------------------------------
# Traffic against fast memory


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Traffic of a pass [bytes] against fast memory [bytes]."""

    memory: Array
    large_cache: Array
    """FlashAttention's schedule at its best tiles; NaN where none fits."""
    small_cache: Array
    """The small-cache schedule at its best tiles."""
    bounds: Mapping[str, Array]
    """The bounds LB1, LB1G, LB2 and floor, by name."""


def curves(problem: AttentionProblem, gpu: GpuSpec, direction: Direction) -> Curves:
    """Compute the traffic of both schedules at their best tiles, and the bounds, over a range of M.

    The small-cache backward is the schedule with five products. The emitted kernels compute P and
    dS at once, which saves reading P if lengths are short.
    """
    size, head_dim = problem.element_bytes, max(problem.head_dim_qk, problem.head_dim_v)
    device = gpu.on_chip_bytes / size
    words = np.geomspace(min(head_dim**2, device) / 32, 32 * max(head_dim**2, device), POINTS)
    values = bound_values(PassTask(direction, problem, gpu))
    del values[M]
    bounds = {
        name: np.broadcast_to(_evaluated(bound, values, {M: words}), words.shape)
        for name, bound in bounds_of(direction, values_in_keys=problem.latent).items()
    }
    task = KernelTask.of("fwd", problem, gpu)
    large = sum(_large_cache(name, task, values, words) for name in LARGE_CACHE[direction])
    small = _small_cache(SMALL_CACHE[direction], task, values, words)
    if direction == "backward":  # both schedules need delta
        small = small + _large_cache("bwd_preprocess", task, values, words)
    floor = bounds["floor"]
    return Curves(
        memory=words * size,
        large_cache=np.maximum(large, floor),
        small_cache=np.maximum(small, floor),
        bounds=bounds,
    )


def _large_cache(
    name: str, task: KernelTask, values: dict[sp.Symbol, float], words: Array
) -> Array:
    moved = _moved(name)
    if name == "bwd_preprocess":
        return np.full_like(words, _evaluated(moved, values, {}))
    memory = {alpha: ACCUMULATOR_BYTES / task.problem.element_bytes, c: 1.0, n: 1.0}
    tiles = {
        side: np.broadcast_to(_evaluated(tile, values | memory, {M: words}), words.shape)
        for side, tile in exact_tiles(name).items()
    }
    fits = np.all([tile >= 1 for tile in tiles.values()], axis=0)
    return np.where(fits, _evaluated(moved, values, _cut(tiles, task)), np.nan)


def _small_cache(
    name: str, task: KernelTask, values: dict[sp.Symbol, float], words: Array
) -> Array:
    problem = task.problem
    weight = ACCUMULATOR_BYTES / problem.element_bytes
    tiles = {
        side: _evaluated(tile, {alpha: weight}, {}) * np.sqrt(words)
        for side, tile in leading_tiles(name).items()
    }
    # An output tile is no wider than the head dim: the room that this leaves goes to rows.
    tiles[B_e] = np.minimum(tiles[B_e], min(problem.head_dim_qk, problem.head_dim_v))
    tiles[B_p] = words / (weight * tiles[B_e])
    return _evaluated(_moved(name), values, _cut(tiles, task))


def _cut(tiles: Mapping[sp.Symbol, Array], task: KernelTask) -> dict[sp.Symbol, Array]:
    """Limit tiles to at least one row and at most the sequence. `nnz` becomes the number of scores
    that a head visits with them, which is more than the mask keeps."""
    problem = task.problem
    longest = {B_r: problem.seqlen_q, B_c: problem.seqlen_kv, B_p: problem.seqlen_q}
    cut = {side: np.clip(tile, 1.0, longest.get(side, np.inf)) for side, tile in tiles.items()}
    cut[nnz] = np.array(
        [
            visits_of(task, int(rows), int(columns), aligned=False).cells
            for rows, columns in zip(cut[B_r], cut[B_c], strict=True)
        ]
    )
    return cut


def _moved(name: str) -> sp.Expr:
    """Return the bytes of a launch for tiles that divide all lengths; nnz replaces N_q N_kv, the
    scores without a mask."""
    whole = sp.expand(smooth(SCHEDULES[name].bytes().subs(UNMASKED)))
    per_score = whole.coeff(N_q, 1).coeff(N_kv, 1)
    return H_kv * (sp.expand(whole - per_score * N_q * N_kv) + per_score * nnz)


def _evaluated(
    expression: sp.Expr, values: Mapping[sp.Symbol, float], arrays: Mapping[sp.Symbol, Array]
) -> Any:
    known = {**values, **arrays}
    symbols = sorted(expression.free_symbols, key=str)
    known_values = (known[symbol] for symbol in symbols)
    return sp.lambdify(symbols, expression, modules="numpy")(*known_values)


def _draw_traffic(axes: Axes, problem: AttentionProblem, gpu: GpuSpec, way: ExplainedPass) -> None:
    drawn, chip, size = (
        curves(problem, gpu, way.direction),
        gpu.on_chip_bytes,
        problem.element_bytes,
    )
    schedules = regimes.LARGE_CACHE[way.direction], SMALL_CACHE[way.direction]
    dividing = regimes.dividing_bytes(*schedules, head_dim=way.head_dim, element_bytes=size)
    axes.set_title(f"{way.direction}: traffic between SMs and L2")
    large = "FlashAttention-2" + (", two passes" if way.direction == "backward" else "")
    axes.loglog(drawn.memory, drawn.large_cache, color="C0", label=f"{large}, best tiles")
    axes.loglog(
        drawn.memory, drawn.small_cache, color="C1", label="small-cache schedule, best tiles"
    )
    styles = {
        "LB1": (":", "0.3"),
        "LB1G": ("-.", "0.3"),
        "LB2": ("--", "0.3"),
        "floor": ("-", "0.6"),
    }
    for name, bound in drawn.bounds.items():
        if not (bound > drawn.bounds["floor"][0] / 4).any():  # below the panel
            continue
        style, color = styles[name]
        shown = np.where(bound > 0, bound, np.nan)
        label = "floor: inputs and outputs once" if name == "floor" else f"lower bound {name}"
        axes.loglog(drawn.memory, shown, style, color=color, lw=1.2, label=label)
    marks = {
        f"M of {gpu.name}, {memory_text(chip)}": ("C2", chip),
        f"schedules cross if unmasked, {memory_text(dividing)}": ("C3", dividing),
    }
    for label, (color, at) in marks.items():
        axes.axvline(at, color=color, lw=1, ls="-.", label=label)
    for (name, best), marker in zip(way.families.items(), "osD^", strict=False):
        label = f"tiles of {name}" + (", chosen" if name == way.chosen else "")
        total = sum(moved(candidate.estimate) for candidate in best)
        filled = "C2" if name == way.chosen else "none"
        axes.plot([chip], [total], marker, mfc=filled, color="C2", label=label)
    bottom = drawn.bounds["floor"][0] / 4
    top = np.nanmax([drawn.large_cache[0], drawn.small_cache[0], *drawn.small_cache]) * 2
    axes.set_ylim(bottom, top)
    axes.set_xlabel("fast memory M, bytes per SM")
    axes.set_ylabel("bytes")
    axes.grid(alpha=0.3)
    axes.set_xlim(drawn.memory[0], drawn.memory[-1])
    _legend(axes)


# --------------------------------------------------------------------------------------------------
# Roofline


def _draw_roofline(
    axes: Axes,
    problem: AttentionProblem,
    gpu: GpuSpec,
    explained: Sequence[ExplainedKernel],
) -> None:
    from matplotlib.ticker import NullFormatter

    fast = on_tensor_cores(problem.dtype, gpu.arch)
    peak = gpu.tensor_flops_16 if fast else gpu.vector_flops_32
    direction = direction_of(explained[0].kernel)
    axes.set_title(f"{direction}: roofline, the model's best {CANDIDATES} of each kernel")
    intensities: list[float] = []
    speeds: list[float] = []
    for i, of in enumerate(explained):
        kernel, own = of.kernel, of.cost
        ranked = propose(KernelTask.of(kernel, problem, gpu), top=CANDIDATES)
        best = [candidate.estimate for candidate in ranked]
        if not best[0].flops:
            continue  # the preprocess has no matrix products
        speed = [1e-12 * cost.flops / cost.seconds for cost in best]
        levels = {
            "L2": [cost.flops / moved(cost) for cost in best],
            "DRAM": [cost.flops / cost.dram_bytes for cost in best],
        }
        for (level, at), filled in zip(levels.items(), (f"C{i}", "none"), strict=True):
            axes.loglog(at, speed, "o", color=f"C{i}", mfc=filled, label=f"{kernel}, {level}")
            intensities += at
        at, reached = [own.flops / moved(own)], 1e-12 * own.flops / own.seconds
        label = f"{kernel} {of.config.key}"
        axes.loglog(at, [reached], "*", ms=12, color=f"C{i}", mec="0.2", label=label)
        intensities += at
        speeds += [*speed, reached]
    if not intensities:
        axes.text(0.5, 0.5, "no matrix products", ha="center", transform=axes.transAxes)
        return
    span = np.geomspace(min(intensities) / 4, max(*intensities, peak / gpu.dram_bandwidth) * 2, 50)
    roofs = {"L2": (gpu.l2_bandwidth, "-"), "DRAM": (gpu.dram_bandwidth, "--")}
    for level, (bandwidth, style) in roofs.items():
        label = f"{level} {rate_text(bandwidth, 'B/s')}, peak {rate_text(peak, 'flop/s')}"
        roof = 1e-12 * np.minimum(peak, bandwidth * span)
        axes.loglog(span, roof, style, color="0.4", lw=1.2, label=label)
    axes.set_ylim(min(*speeds, 1e-12 * peak) / 4, 2e-12 * peak)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())  # labels would overlap
    axes.set_xlabel("flop per byte at L2 (filled) or DRAM (hollow)")
    axes.set_ylabel("Tflop/s, predicted")
    axes.grid(alpha=0.3)
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
