"""The families of kernels. A new family is a module like `q_stationary`, its templates, and a line
in `MODULES`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING

from tilegen.errors import Unsupported
from tilegen.kernels import q_stationary, two_pass
from tilegen.kernels.config import (
    BLOCK_SIZES,
    OPTIONS,
    ROWS_OF_GROUP,
    WARPS_OF_GROUP,
    Family,
    Kernel,
    TileConfig,
)
from tilegen.kernels.moved import Moved
from tilegen.kernels.spec import Direction, FamilySpec, KernelSpec

if TYPE_CHECKING:
    from tilegen.problem import AttentionProblem

MODULES = (
    "q_stationary",
    "split_kv",
    "q_streamed",
    "hopper_forward",
    "two_pass",
    "hopper_two_pass",
    "split_backward",
    "small_cache",
    "one_pass",
)
"""Modules of this package, each with a tuple FAMILIES, in listing order. They are imported by name,
so that a new family is one line here."""

FORWARD: dict[Family, FamilySpec] = {}
BACKWARD: dict[Family, FamilySpec] = {}
FAMILIES: dict[Direction, dict[Family, FamilySpec]] = {"forward": FORWARD, "backward": BACKWARD}
KERNELS: dict[Kernel, KernelSpec] = {}
"""All kernels by name, forward first."""
_OF_KERNEL: dict[Kernel, dict[tuple[Direction, Family], FamilySpec]] = {}
"""The families that launch a kernel, in order of registration."""

FLOORS: dict[str, tuple[Moved, ...]] = {
    "forward": q_stationary.FWD.floor,
    "backward": two_pass.FLOOR,
}
"""Tensors that a pass must move under any schedule, by direction."""


def register(family: FamilySpec) -> None:
    """Register a family for the whole compiler."""
    FAMILIES[family.direction][family.name] = family
    for kernel in family.kernels:
        KERNELS[kernel.name] = kernel
        _OF_KERNEL.setdefault(kernel.name, {})[family.direction, family.name] = family


def _families() -> list[FamilySpec]:
    """Import the families of all modules, those of the forward first."""
    families: list[FamilySpec] = []
    for name in MODULES:
        families += import_module(f"tilegen.kernels.{name}").FAMILIES
    return sorted(families, key=lambda family: list(FAMILIES).index(family.direction))


for _family in _families():
    register(_family)

LARGE_CACHE: tuple[Kernel, ...] = (*FORWARD["q_stationary"].names, *BACKWARD["two_pass"].names)
SMALL_CACHE: tuple[Kernel, ...] = (*FORWARD["small_cache"].names, *BACKWARD["small_cache"].names)


def family_among(kernels: Collection[Kernel], direction: Direction) -> FamilySpec | None:
    """Return the family of a pass whose kernels are all among `kernels`; None if there is none."""
    families = FAMILIES[direction].values()
    return next((family for family in families if set(family.names) <= set(kernels)), None)


def family_with(
    kernel: Kernel, problem: AttentionProblem | None = None, *, for_cpus: bool = False
) -> FamilySpec:
    """Return the first family that launches a kernel. If families for pages and for whole keys
    share the kernel, the first that reads keys as in `problem`. With `for_cpus` families for
    processors come first."""
    families = tuple(_OF_KERNEL[kernel].values())
    if for_cpus:
        families = tuple(family for family in families if family.for_cpus) or families
    paged = problem is not None and problem.page > 0
    return next(
        (family for family in families if ("pages" in family.supports) == paged), families[0]
    )


def partners(kernel: Kernel, problem: AttentionProblem) -> tuple[Kernel, ...]:
    """Return the kernels that must run to check a kernel's results, itself included. If warpgroups
    have roles, they have none in the others."""
    family = family_with(kernel, problem)
    if KERNELS[kernel].specialised:
        every = _OF_KERNEL[kernel].values()
        family = min(every, key=lambda one: sum(spec.specialised for spec in one.kernels))
    ahead = FORWARD["q_stationary"].names if family.direction == "backward" else ()
    return *ahead, *family.names


def smallest_config(kernel: Kernel) -> TileConfig:
    """Return the smallest config of a kernel: it runs on every GPU and for every problem that the
    kernel serves."""
    spec = KERNELS[kernel]
    return TileConfig(
        block_m=spec.knobs.block_m[0],
        block_n=spec.knobs.block_n[0],
        block_d=spec.knobs.block_d[0],
        split_kv=spec.knobs.split_kv[0],
        num_warps=spec.knobs.num_warps[0],
        num_stages=spec.knobs.num_stages[0],
        descriptors=spec.specialised,
    )


def direction_of(kernel: Kernel) -> Direction:
    """Return the pass that a kernel belongs to."""
    return next(iter(_OF_KERNEL[kernel].values())).direction


def grid_of(kernel: Kernel, config: TileConfig, group_size: int) -> tuple[tuple[str, int], ...]:
    """Return the grid of one launch, as sizes with their divisors."""
    knobs = {"group_size": group_size, "tile_heads": tile_heads(config, group_size)}
    knobs["split_q"] = config.split_kv
    knobs |= asdict(config)
    return tuple((name, knobs.get(by, by)) for name, by in KERNELS[kernel].grid)  # type: ignore


def tile_heads(config: TileConfig, group_size: int) -> int:
    """Return the number of query heads whose rows a tile holds: one head, part of a group, or a
    whole group."""
    return min(config.heads, group_size)


def why_no_roles(spec: KernelSpec, config: TileConfig) -> str:
    """Return the reason why a kernel's warpgroups cannot have roles under a config; empty if they
    can."""
    rows, _ = spec.loop.sides((config.block_m, "query"), (config.block_n, "key"))
    if config.num_warps * ROWS_OF_GROUP != WARPS_OF_GROUP * rows[0]:
        return f"has w{WARPS_OF_GROUP} for each {ROWS_OF_GROUP} {rows[1]} rows"
    if not config.descriptors:
        return "loads all tiles through tensor descriptors: add t"
    if config.turns and config.consumers != 2:
        return f"has turns of two warpgroups: leave u out, or use m{2 * ROWS_OF_GROUP}"
    return ""


def check_config(config: TileConfig, kernel: Kernel) -> None:
    """Check that a kernel can have a config. Raises Unsupported."""
    spec = KERNELS[kernel]
    for name in config.values:
        option = OPTIONS[name]
        for fact, why in option.needs:
            if not getattr(spec, fact):
                raise Unsupported(f"{kernel} {why}; remove {option.letter} from {config.key}")
    if spec.specialised and (reason := why_no_roles(spec, config)):
        raise Unsupported(f"{kernel} {reason}, got {config.key}")
    at = 0 if spec.split_name == "split_q" else 1
    size, rows = ((config.block_m, "queries"), (config.block_n, "keys"))[at]
    if spec.parts and (not config.split_kv or config.split_kv % size):
        raise Unsupported(
            f"{'shares' if spec.shares else 'splits'} of {kernel} hold whole tiles of {size} "
            f"{rows}, expected a k that is a multiple, got {config.key}"
        )
    values = {"block_m": config.rows, "block_n": config.block_n}
    values |= {"block_d": config.block_d}
    for name, value in values.items():
        allowed = getattr(spec.knobs, name)
        least = BLOCK_SIZES[0]
        is_free = not (spec.sliced or spec.parts or max(allowed) < least) and value in BLOCK_SIZES
        is_free &= not spec.specialised
        # Tiles of few rows are for CPUs, which compute only the rows that exist.
        is_free |= name == "block_m" and (spec.packs or kernel == "fwd") and value < least
        if value not in allowed and not is_free:
            raise Unsupported(
                f"{name} of {kernel} must be one of {allowed}, got {value} in {config.key}"
            )
