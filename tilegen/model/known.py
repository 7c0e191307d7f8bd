"""Configs known to spill although the register fit says otherwise: spills.toml.

A fit cannot foresee the last few registers that a compiler needs. What it got wrong for the
benchmark catalogue stands in a table that `python -m benchmarks.proposals --learn` makes from
compiled kernels.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files

from tilegen.config import Kernel, TileConfig
from tilegen.model.architecture import nearest
from tilegen.problem import AttentionProblem


def compile_class(problem: AttentionProblem, kernel: Kernel) -> str:
    """Return what registers depend on besides the config: kernel, widths, mask structure,
    groups."""
    mask = re.sub(r"\d+", "N", problem.mask.notation)
    heads = "grouped" if problem.group_size > 1 else "single"
    bits = 8 * problem.element_bytes
    return f"{kernel} d{problem.head_dim_qk}/{problem.head_dim_v} {bits}-bit {mask} {heads}"


def is_known_to_spill(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, arch: str
) -> bool:
    """Whether this config has been seen to spill, or not to compile, on this architecture."""
    known = [name for name in table() if name[:3] == arch[:3]]  # of the same vendor
    if not known:
        return False
    return config.key in table()[nearest(arch, known)].get(compile_class(problem, kernel), ())


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """Return {architecture: {compile class: [config keys]}}."""
    text = (files("tilegen.model") / "spills.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)
