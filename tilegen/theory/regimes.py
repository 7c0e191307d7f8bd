"""Regimes: the theorems of the papers, and the points at which schedules cross.

Words are elements. Dao et al., arXiv 2205.14135 (FlashAttention). Li: Li et al., arXiv 2410.09397.
Saha and Ye: arXiv 2402.07443.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import sympy as sp

from tilegen.gpus.spec import GpuSpec, catalogue
from tilegen.kernels.spec import Direction
from tilegen.model.symbols import Z_A, Z_AX, Z_S, Z_X, M, N, Z, alpha, d, kappa, s
from tilegen.model.traffic import ACCUMULATOR_BYTES
from tilegen.theory.optimum import crossover


def large_cache_complexity(direction: Direction) -> sp.Expr:
    """Return the optimum of one head for M >= d^2, up to a constant.

    Forward: Saha and Ye, Theorem 3.1 with Lemmas 3.3 and 3.4 (lower) and FlashAttention, Theorem 2
    (upper). Backward: Li et al., Theorems 4.1 and 4.2. `N d^3` is for the gradient of W_Q W_K^T,
    which a kernel that returns dQ, dK and dV does not compute.
    """
    return N**2 * d**2 / M if direction == "forward" else (N**2 * d**2 + N * d**3) / M


def small_cache_complexity(direction: Direction) -> sp.Expr:
    """Return the optimum of one head for M < d^2, up to a constant.

    Forward: Saha and Ye, Theorems 3.5 (upper, Algorithm 1) and 3.7 (lower). Backward: Li et al.,
    Theorems 4.3 (upper, Algorithm 6) and 4.4 (lower).
    """
    words = N**2 * d if direction == "forward" else N**2 * d + N * d**2
    return words / sp.sqrt(M)


def complexity(direction: Direction) -> sp.Expr:
    """Return N d + min(large cache, small cache), up to a constant.

    Saha and Ye, Theorem 3.1; Li et al., Theorem 1.1. The papers omit the term N d, for reading
    every input and writing every output once.
    """
    return N * d + sp.Min(large_cache_complexity(direction), small_cache_complexity(direction))


def worst_case_over_instances(direction: Direction) -> sp.Expr:
    """Return Li, Theorem 4.5, without its constant. For reports only: NOT a bound for one mask.

    The formula is a worst case over all instances with these counts of nonzeros. It counts nonzeros
    of the factors, which are dense for a mask. Windows and blocks of fixed size move
    Theta(N d) words, for which the formula gives N^1.5. The backward's subscripts are quoted from
    memory. Use `patterns.pattern_bound` for a mask.
    """
    if direction == "forward":
        return sp.Min(Z**2 / M, Z * sp.sqrt(Z_S / M))
    return sp.Min(
        (Z_A**2 + Z_A * Z_X) / M,
        (Z_A * sp.sqrt(Z_S) + sp.sqrt(Z_A * Z_X * Z_AX)) / sp.sqrt(M),
    )


LARGE_CACHE: dict[Direction, str] = {"forward": "fwd_q_stationary", "backward": "bwd_two_pass"}
SMALL_CACHE: dict[Direction, str] = {"forward": "fwd_small_cache", "backward": "bwd_small_cache"}


@cache
def dividing_memory(large_cache: str, small_cache: str) -> sp.Expr:
    """Return the M in words below which the small-cache schedule moves less: d^2 / x^2.

    x is the crossing of leading terms (`optimum.crossover`), in alpha, and in kappa if the
    schedules have it. It gives 0.686 d^2 for the forward with equal words, and 0.686 d^2 / s for a
    mask without structure (`fwd_sparse_small_cache`).
    """
    return d**2 / crossover(large_cache, small_cache) ** 2


def dividing_bytes(
    large_cache: str,
    small_cache: str,
    *,
    head_dim: int,
    element_bytes: int,
    density: float = 1.0,
    kappa_cost: float = 1.0,
) -> float:
    """Return the bytes of fast memory below which the small-cache schedule moves fewer bytes."""
    values = {
        d: head_dim,
        s: density,
        kappa: kappa_cost,
        alpha: sp.Rational(ACCUMULATOR_BYTES, element_bytes),
    }
    return element_bytes * float(dividing_memory(large_cache, small_cache).subs(values))


@dataclass(frozen=True, kw_only=True)
class DeviceRegime:
    """A GPU and a size of inputs: fast memory in words, and head dims at which regimes change.

    The numbers are optimistic: a whole SM for one program, and no second buffer, which would make M
    smaller.
    """

    gpu: str
    element_bytes: int
    smem_words: float
    """Shared memory of one program, in words of the inputs."""
    on_chip_words: float
    """Shared memory, all registers and tensor memory, in words of the inputs: the M of the
    bounds."""
    head_dim_smem: float
    """sqrt(M) with shared memory alone."""
    head_dim_on_chip: float
    """sqrt(M) with registers and tensor memory too, which hold one 32-bit word each."""
    dividing_head_dims: Mapping[Direction, float]
    """Head dims above which the small-cache schedules move fewer bytes than FlashAttention's, whose
    backward has two passes."""


@cache
def device_regimes(
    element_bytes: tuple[int, ...] = (2, 4), gpus: tuple[GpuSpec, ...] | None = None
) -> tuple[DeviceRegime, ...]:
    """Return a row for each GPU (the catalogue's, or `gpus`) and each size of inputs."""
    return tuple(
        _device_regime(spec, size)
        for spec in (catalogue() if gpus is None else gpus)
        for size in element_bytes
    )


def _device_regime(spec: GpuSpec, element_bytes: int) -> DeviceRegime:
    smem = spec.smem_per_block / element_bytes
    words_32 = spec.registers_per_sm + spec.tensor_memory_per_sm / 4
    on_chip = spec.on_chip_bytes / element_bytes
    directions: tuple[Direction, ...] = ("forward", "backward")
    return DeviceRegime(
        gpu=spec.name,
        element_bytes=element_bytes,
        smem_words=smem,
        on_chip_words=on_chip,
        head_dim_smem=smem**0.5,
        head_dim_on_chip=(smem + words_32) ** 0.5,
        dividing_head_dims=MappingProxyType(
            {way: critical_head_dim(spec, way, element_bytes=element_bytes) for way in directions}
        ),
    )


def critical_head_dim(gpu: GpuSpec, direction: Direction, *, element_bytes: int = 2) -> float:
    """Return the head dim above which the small-cache schedule moves fewer bytes on this GPU.

    It is optimistic: a whole SM for one program, and no second buffer. It is compared with
    FlashAttention's schedules, whose backward has two passes.
    """
    return _dividing_x(direction, element_bytes) * (gpu.on_chip_bytes / element_bytes) ** 0.5


@cache
def _dividing_x(direction: Direction, element_bytes: int) -> float:
    at = crossover(LARGE_CACHE[direction], SMALL_CACHE[direction])
    return float(at.subs(alpha, sp.Rational(ACCUMULATOR_BYTES, element_bytes)))
