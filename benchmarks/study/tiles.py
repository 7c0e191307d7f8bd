"""Emitted tiles that a memory of M words allows, and the words that they move.

Words are words of the inputs: 4 bytes in fp32, where all elements weigh the same, as in the papers;
2 bytes in fp16, where an fp32 accumulator weighs two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import sympy as sp

from tilegen.gpus.spec import gpu
from tilegen.kernels import registry
from tilegen.kernels.config import BLOCK_SIZES, Family, Kernel, TileConfig
from tilegen.kernels.panels import SCORE_WIDTH
from tilegen.kernels.registry import KERNELS
from tilegen.kernels.spec import Direction, FamilySpec
from tilegen.model.symbols import B_c, B_d, B_e, B_k, B_p, B_r, alpha, d_qk, d_v, n
from tilegen.model.traffic import ACCUMULATOR_BYTES, traffic_of
from tilegen.problem import AttentionProblem
from tilegen.task import Tiled
from tilegen.theory.schedules import SCHEDULES, Held
from tilegen.theory.schedules.record import weight

FAMILIES: dict[Direction, dict[Family, FamilySpec]] = {
    direction: {
        name: one
        for name, one in its.items()
        if not any(k.parts or k.specialised for k in one.kernels)
    }
    for direction, its in registry.FAMILIES.items()
}
"""The families that a schedule of theory/ describes and a processor runs: none that splits rows
over programs, or gives warpgroups roles."""
LARGE_CACHE: dict[Direction, Family] = {"forward": "q_stationary", "backward": "two_pass"}
DTYPES = {4: "fp32", 2: "fp16"}
"""Dtypes that kernels are counted in, by the bytes of an element."""


def problem_of(seqlen: int, head_dim: int, element_bytes: int, mask: str = "full") -> Any:
    """Return one head of N = `seqlen` rows and columns."""
    return AttentionProblem.parse(
        f"b1 hq1 hkv1 q{seqlen} kv{seqlen} d{head_dim} {DTYPES[element_bytes]} {mask}"
    )


# --------------------------------------------------------------------------------------------------
# What one program holds


@cache
def held(kernel: Kernel) -> tuple[tuple[Held, ...], ...]:
    """Return the words that each phase of a kernel holds on chip, with one buffer of streamed rows.

    Phases are those of the schedules, except for two emitted kernels: the streamed forward takes V
    whole, and `bwd_scores` makes P and dS together, in two tiles.
    """
    rows_and_slices = SCHEDULES["bwd_small_cache"].phases[1]
    match kernel:
        case "fwd":
            return SCHEDULES["fwd_q_stationary"].phases
        case "fwd_scores":
            return SCHEDULES["fwd_small_cache"].phases[:1]
        case "fwd_values":
            return SCHEDULES["fwd_small_cache"].phases[1:]
        case "bwd_scores":
            return (
                (
                    Held("p, ds", 2 * B_r * B_c, "fp32"),
                    Held("q, k; dout, v", n * B_d * (B_r + B_c)),
                    Held("lse, delta", 2 * B_r, "fp32"),
                ),
            )
        case "bwd_columns" | "bwd_rows":
            return (rows_and_slices,)
        case "fwd_streamed":
            return tuple(
                tuple(Held(h.tensor, sp.sympify(h.words).subs(B_e, d_v), h.size) for h in phase)
                for phase in SCHEDULES["fwd_o_stationary"].phases
            )
        case _:
            return SCHEDULES[kernel].phases


def held_words(kernel: Kernel, config: TileConfig, head_dim: int, element_bytes: int) -> int:
    """Return the words that one program of a kernel needs at once."""
    rows, columns, slice_ = config.block_m, config.block_n, config.block_d
    stays = columns if kernel == "bwd_columns" else rows
    passes_by = rows if kernel == "bwd_columns" else columns
    size = ACCUMULATOR_BYTES // element_bytes
    return int(_held(kernel)(rows, columns, slice_, slice_, stays, passes_by, head_dim, size))


@cache
def _held(kernel: Kernel) -> Callable[..., float]:
    phases = [
        sp.Add(*(one.words * weight(one.size) for one in phase)).subs({d_v: d_qk, n: 1})
        for phase in held(kernel)
    ]
    symbols = (B_r, B_c, B_d, B_e, B_p, B_k, d_qk, alpha)
    evaluate: Any = sp.lambdify(symbols, sp.Max(*phases), modules="math")
    return evaluate


# --------------------------------------------------------------------------------------------------
# The best tiles of a family, for every M


WORTH_A_STEP = 0.02
"""Part of the words that more memory must save to be a step of the staircase."""


@dataclass(frozen=True, kw_only=True)
class TileSet:
    """One config for each kernel of a family: the best for all M from `memory` words on."""

    family: Family
    memory: int
    """Words that the largest of the programs needs."""
    configs: Mapping[Kernel, TileConfig]
    words: int
    """Words that all kernels of the family move, at the length that the tiles were chosen for."""

    @property
    def key(self) -> str:
        """The tiles in short: `fwd_scores 128x256x32, fwd_values 64x32x256`."""
        return ", ".join(f"{kernel} {_sides(config)}" for kernel, config in self.configs.items())


def moved_bytes(
    problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]
) -> dict[Kernel, int]:
    """Return the bytes that each kernel loads and stores, by the model."""
    width = configs["fwd_scores"].block_n if "fwd_scores" in configs else SCORE_WIDTH
    moved: dict[Kernel, int] = {}
    for kernel, config in configs.items():
        traffic = traffic_of(Tiled.of(kernel, problem, gpu("h200"), config), score_width=width)
        moved[kernel] = traffic.read_bytes + traffic.write_bytes
    return moved


def moved_words(problem: AttentionProblem, configs: Mapping[Kernel, TileConfig]) -> int:
    """Return the words that all kernels together load and store, by the model."""
    return sum(moved_bytes(problem, configs).values()) // problem.element_bytes


def configs_of(kernel: Kernel) -> list[TileConfig]:
    """Return the tiles that a kernel can be emitted with."""
    if KERNELS[kernel].sliced:
        knobs = KERNELS[kernel].knobs
        sides = product(knobs.block_m, knobs.block_n, knobs.block_d)
        return [TileConfig(block_m=m, block_n=w, block_d=s) for m, w, s in sides]
    if kernel == "bwd_preprocess":
        return [TileConfig(block_m=64, block_n=16)]  # O(N d) words whatever its tile
    return [TileConfig(block_m=m, block_n=w) for m, w in product(BLOCK_SIZES, BLOCK_SIZES)]


@cache
def frontier(
    family: Family, direction: Direction, head_dim: int, element_bytes: int, seqlen: int
) -> tuple[TileSet, ...]:
    """Return the best tile set of every M, the smallest M first; each moves clearly fewer words.

    Every kernel takes the tiles that move least among those that fit, and of equals the largest.
    """
    problem = problem_of(seqlen, head_dim, element_bytes)
    kernels = FAMILIES[direction][family].names
    needs = {
        kernel: {
            config: held_words(kernel, config, head_dim, element_bytes)
            for config in configs_of(kernel)
        }
        for kernel in kernels
        if kernel != "bwd_preprocess"
    }
    sets: list[TileSet] = []
    for memory in sorted({words for options in needs.values() for words in options.values()}):
        configs: dict[Kernel, TileConfig] = {}
        for kernel in kernels:
            options = needs.get(kernel) or dict.fromkeys(configs_of(kernel), 0)
            fitting = [config for config, words in options.items() if words <= memory]
            if not fitting:
                break
            configs[kernel] = min(
                fitting,
                key=lambda config, kernel=kernel: _merit(problem, configs, kernel, config),
            )
        else:
            words = moved_words(problem, configs)
            if not sets or words < (1 - WORTH_A_STEP) * sets[-1].words:
                sets.append(TileSet(family=family, memory=memory, configs=configs, words=words))
    return tuple(sets)


def best_at(sets: Sequence[TileSet], memory: float) -> TileSet | None:
    """Return the last set of a frontier that fits M = `memory` words, None if none does."""
    fitting = [one for one in sets if one.memory <= memory]
    return fitting[-1] if fitting else None


def _merit(
    problem: AttentionProblem,
    chosen: Mapping[Kernel, TileConfig],
    kernel: Kernel,
    config: TileConfig,
) -> tuple[int, int]:
    words = moved_words(problem, {**chosen, kernel: config})
    return words, -config.block_m * config.block_n * max(1, config.block_d)


def _sides(config: TileConfig) -> str:
    sides = (config.block_m, config.block_n, config.block_d)
    return "x".join(str(side) for side in sides if side)
