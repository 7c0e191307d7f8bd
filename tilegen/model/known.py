"""Configs that have been compiled: whether they spill is known, not predicted.

A fit cannot foresee the last few registers that a compiler needs. compiled.toml holds what
`python -m benchmarks.calibrate_footprint` found out: random configs, and everything the model
proposes for the benchmark catalogue.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, lru_cache
from importlib.resources import files

from tilegen.gpus.nearest import nearest
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

UNUSABLE = 10**6
"""Bytes that stand for a kernel that asks for more tensor memory than there is, and only traps, or
that waits for each matrix product, whatever it spills."""


def compile_class(problem: AttentionProblem, config: TileConfig, kernel: Kernel) -> str:
    """Return what registers depend on besides the config: kernel, widths, mask, grouping."""
    return _classes(problem, kernel, config.block_d)[0]


@lru_cache(maxsize=512)
def _classes(problem: AttentionProblem, kernel: Kernel, block_d: int) -> tuple[str, str]:
    """Return the compile class, and what it has in common with other masks and groupings."""
    widths = f"{kernel} {_widths(problem, kernel, block_d)} {8 * problem.element_bytes}-bit"
    mask = re.sub(r"\d+", "N", problem.mask.notation)
    heads = "grouped" if problem.group_size > 1 else "single"
    return f"{widths} {mask} {heads}", widths


def _widths(problem: AttentionProblem, kernel: Kernel, block_d: int) -> str:
    """Return what a kernel's text says of the head dims; few things, where it takes them in
    slices, so that one kernel speaks for many head dims."""
    width = problem.head_dims
    loop = KERNELS[kernel].sliced
    if loop is None:
        return f"d{width['qk']}/{width['v']}"
    if loop.loops:
        slices = [_steps(width[dim], block_d) for dim in loop.slices]
        return "/".join(slices if loop.panel else [*slices, f"d{width['v']}"])
    one, *others = loop.slices
    if others:  # either head dim is an argument
        return "any"
    return "padded" if width[one] % block_d else "whole"


MOST_STEPS = 16
"""From which the compiler no longer looks at how many there are."""


def _steps(head_dim: int, block_d: int) -> str:
    """Return how long the loop over slices is. Its length is a constant of the kernel, by which the
    compiler decides whether three programs or two share an SM; powers of two divide the cases."""
    steps = min(-(-head_dim // block_d), MOST_STEPS)
    return f"x{1 << steps.bit_length() - 1}{'-padded' if head_dim % block_d else ''}"


def spilled_bytes(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> int | None:
    """Return what a thread of a config spills, 0 where it fits, None if it was never compiled.

    Of a mask or a grouping that has not been compiled, others speak: the one that spills most.
    """
    known = reports_on(arch)
    for name in _classes(problem, kernel, config.block_d):
        if (found := known.get(f"{name} {config.key}")) is not None:
            return found
    return None


def reported_spill(problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str) -> int:
    """Return what a thread of a kernel of this very class spills, 0 if it was never compiled."""
    return reports_on(arch).get(f"{compile_class(problem, config, kernel)} {config.key}", 0)


def is_compiled(problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str) -> bool:
    """Whether a kernel of this very class has been compiled."""
    return f"{compile_class(problem, config, kernel)} {config.key}" in reports_on(arch)


@cache
def reports_on(arch: str) -> dict[str, int]:
    """Return {"<class> <config>": bytes spilled} of an architecture, or of the nearest compiled."""
    known = [name for name in table() if name[:3] == arch[:3]]  # of the same vendor
    return table()[nearest(arch, known)] if known else {}


@cache
def table() -> dict[str, dict[str, int]]:
    """Return {architecture: {"<class> <config>": bytes spilled}}, for both kinds of class."""
    text = (files("tilegen.model") / "compiled.toml").read_text(encoding="utf-8")
    reports: dict[str, dict[str, int]] = {}
    for arch, classes in tomllib.loads(text).items():
        found = reports.setdefault(arch, {})
        for name, row in classes.items():
            kernel, widths, bits, *_ = name.split()
            for said in (*row["fit"].split(), *row["spill"].split()):
                config, _, spilled = said.partition(":")
                wide = f"{kernel} {widths} {bits} {config}"
                found[f"{name} {config}"] = int(spilled or 0)
                found[wide] = max(found.get(wide, 0), int(spilled or 0))
    return reports
