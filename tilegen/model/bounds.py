"""Lower bounds on the words attention must move, and the regimes of the known schedules.

Words are elements. Sources: Saha and Ye, arXiv 2402.07443 (forward); Li et al., arXiv 2410.09397
(backward); Dao et al., arXiv 2205.14135 (FlashAttention); Smith et al., arXiv 1702.02017 (matrix
product). The theorems are about one head and one processor. Here H_kv heads run on P processors
with M words each, which multiplies the additive term by P and changes nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import sympy as sp

from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import FLOORS, KERNELS
from tilegen.kernels.spec import Direction
from tilegen.model.mask_size import size_of
from tilegen.model.subgrids import spanned_by_all_heads, subgrids
from tilegen.model.symbols import (
    H_kv,
    M,
    N,
    N_kv,
    N_q,
    P,
    d,
    d_qk,
    d_v,
    e,
    g,
    k,
    n_kv,
    n_q,
    nnz,
    u,
    w,
    w_b,
)
from tilegen.model.traffic import Term, terms, total_bytes, total_words
from tilegen.task import KernelTask, PassTask

# --------------------------------------------------------------------------------------------------
# Theorems of the papers: complexities of one head, without constants


def large_cache_complexity(direction: Direction) -> sp.Expr:
    """Return the optimum for M >= d^2, up to a constant.

    Forward: Saha and Ye, Theorem 3.1 with Lemmas 3.3 and 3.4 (lower) and FlashAttention, Theorem 2
    (upper). Backward: Li et al., Theorems 4.1 and 4.2. `N d^3` is for the gradient of W_Q W_K^T,
    which a kernel that returns dQ, dK and dV does not compute.
    """
    return N**2 * d**2 / M if direction == "forward" else (N**2 * d**2 + N * d**3) / M


def small_cache_complexity(direction: Direction) -> sp.Expr:
    """Return the optimum for M < d^2, up to a constant.

    Forward: Saha and Ye, Theorems 3.5 (upper, Algorithm 1) and 3.7 (lower). Backward: Li et al.,
    Theorems 4.3 (upper, Algorithm 6) and 4.4 (lower).
    """
    return N**2 * d / sp.sqrt(M) if direction == "forward" else (N**2 * d + N * d**2) / sp.sqrt(M)


def complexity(direction: Direction) -> sp.Expr:
    """Return N d + min(large cache, small cache), up to a constant.

    Saha and Ye, Theorem 3.1; Li et al., Theorem 1.1. The papers omit the term N d, for reading
    every input and writing every output once.
    """
    return N * d + sp.Min(large_cache_complexity(direction), small_cache_complexity(direction))


# --------------------------------------------------------------------------------------------------
# Lower bounds with constants, for a whole launch


def largest_subgrid() -> sp.Expr:
    """Return an upper bound on the score entries that 2M/d rows of Q and K together span.

    I query rows and J key rows, I + J = 2M/d, span at most I J entries. If a mask keeps at most w
    in a row or column, and g query heads share each key row, they span at most min(I w, J g w).
    """
    return sp.Min(M**2 / d_qk**2, 2 * M * w * g / (d_qk * (g + 1)))


def partition_bound() -> sp.Expr:
    """Return LB1 in words, for every M: Saha and Ye, Lemma 3.3, applied to a 2M-partition.

    A part of the computation that touches 2M words completes at most `largest_subgrid()` entries
    and reaches 4M more. One dense head on one processor: N_q N_kv d^2 / (M + 4 d^2) - M.
    """
    return partitioned(largest_subgrid())


def pattern_bound() -> sp.Expr:
    """Return LB1G in words: LB1 with `e_G(2M/d)`, the entries of the densest sub-grids of the mask,
    instead of an estimate by degrees. LB1G is never below LB1."""
    return partitioned(spanned_by_all_heads().subs(k, 2 * M / d_qk))


def partitioned(entries: sp.Expr) -> sp.Expr:
    """Return the bound in words if parts of the computation that touch 2M words complete at most
    `entries` entries each."""
    return M * (H_kv * g * nnz / (entries + 4 * M) - P)


def product_bound() -> sp.Expr:
    """Return LB2 in words, useful for M < 4 d^2: computing S is a product of Q and K^T.

    Saha and Ye, Theorem 3.7: if each entry of S is written when it first appears, the kernel is a
    matrix product. A product moves 2 N_q N_kv d / sqrt(M) - 2 M words (Smith et al.). The kernel
    saves the first read of each entry. The argument counts products, so it holds under a mask too.
    """
    entries = H_kv * g * nnz
    return 2 * entries * d_qk / sp.sqrt(M) - entries - 2 * M * P


def floor_terms(what: Kernel | Direction, *, values_in_keys: bool = False) -> tuple[Term, ...]:
    """Return the words that any schedule moves, per key-value head: inputs that affect the result,
    and all outputs. Values that are columns of the keys move with the keys."""
    moved = FLOORS[what] if what in FLOORS else KERNELS[what].floor
    return terms(moved, values_in_keys=values_in_keys)


def inputs_once(kernel: Kernel, *, values_in_keys: bool = False) -> sp.Expr:
    """Return the bytes of the inputs that affect a kernel's result, each read once."""
    moved = floor_terms(kernel, values_in_keys=values_in_keys)
    return H_kv * total_bytes(term for term in moved if term.direction == "read")


def bytes_of_inputs(task: KernelTask) -> int:
    """Compute `inputs_once` for a task."""
    size, problem = size_of(task), task.problem
    dims = problem.head_dim_qk, problem.head_dim_v, problem.element_bytes
    inputs = _inputs(task.kernel, task.values_in_keys)
    return int(inputs(task.heads_kv, problem.group_size, size.rows, size.columns, *dims))


@cache
def _inputs(kernel: Kernel, values_in_keys: bool) -> Callable[..., Any]:
    symbols = [H_kv, g, n_q, n_kv, d_qk, d_v, e]
    once = inputs_once(kernel, values_in_keys=values_in_keys)
    return sp.lambdify(symbols, once, modules="math")


@cache
def lower_bound(what: Kernel | Direction, *, values_in_keys: bool = False) -> sp.Expr:
    """Return max(LB1, LB1G, LB2, floor) in words. For a kernel that computes no scores, or reads or
    writes them, return the floor alone."""
    floor = H_kv * total_words(floor_terms(what, values_in_keys=values_in_keys))
    if _floor_alone(what):
        return floor
    return sp.Max(partition_bound(), pattern_bound(), product_bound(), floor)


def _floor_alone(what: Kernel | Direction) -> bool:
    spec = KERNELS.get(what)
    return spec is not None and not spec.is_fused


def lower_bound_bytes(task: KernelTask | PassTask) -> int:
    """Compute the bytes that every algorithm for a kernel or pass must move on the device, in a
    whole launch."""
    key = "lower bound", what_of(task), task.device
    return task.memo.once(key, lambda: max(0, math.floor(max(each_bound(task).values()))))


def what_of(task: KernelTask | PassTask) -> Kernel | Direction:
    """Return the name of a task's kernel or pass."""
    return task.direction if isinstance(task, PassTask) else task.kernel


def lower_bound_with(task: KernelTask, fast_bytes: int) -> int:
    """Compute the bytes that every algorithm must move with another size of fast memory [bytes]."""
    return max(0, math.floor(max(each_bound(task, fast_bytes).values())))


def each_bound(task: KernelTask | PassTask, fast_bytes: int | None = None) -> dict[str, float]:
    """Compute the values of `bounds_of` for a whole launch [bytes]. `fast_bytes` replaces the
    device's fast memory."""
    what, latent, values = what_of(task), task.problem.latent, bound_values(task)
    if fast_bytes is not None:
        values[M] = fast_bytes / task.problem.element_bytes
    bounds = _evaluator(what, latent)(*(values[symbol] for symbol in _ARGUMENTS))
    return dict(zip(bounds_of(what, values_in_keys=latent), map(float, bounds), strict=True))


def bound_values(task: KernelTask | PassTask) -> dict[sp.Symbol, float]:
    """Return the values of the symbols in the bounds.

    Slow memory is L2, fast memory everything on an SM: M = on_chip_bytes / element_bytes words.
    """
    problem, device, size = task.problem, task.device, size_of(task)
    given = problem.mask, problem.seqlen_q, problem.seqlen_kv, problem.group_size
    densest = task.memo.once("subgrids", lambda: subgrids(*given))
    return {
        H_kv: problem.batch * problem.num_heads_kv,
        g: problem.group_size,
        N_q: problem.seqlen_q,
        N_kv: problem.seqlen_kv,
        d_qk: problem.head_dim_qk,
        d_v: problem.head_dim_v,
        nnz: size.entries,
        w: size.degree,
        u: densest.per_row,
        w_b: densest.width,
        n_q: size.rows,
        n_kv: size.columns,
        M: device.on_chip_bytes / problem.element_bytes,
        P: device.memories,
        e: problem.element_bytes,
    }


@cache
def bounds_of(what: Kernel | Direction, *, values_in_keys: bool = False) -> dict[str, sp.Expr]:
    """Return LB1, LB1G, LB2 and the floor in bytes of a whole launch; the largest applies."""
    moved = floor_terms(what, values_in_keys=values_in_keys)
    floor = {"floor": H_kv * total_bytes(moved)}
    if _floor_alone(what):
        return floor
    bounds = {"LB1": partition_bound(), "LB1G": pattern_bound(), "LB2": product_bound()}
    return {name: e * bound for name, bound in bounds.items()} | floor


_ARGUMENTS = (H_kv, g, N_q, N_kv, d_qk, d_v, nnz, w, u, w_b, n_q, n_kv, M, P, e)


@cache
def _evaluator(what: Kernel | Direction, values_in_keys: bool) -> Callable[..., list[float]]:
    # A list, not `sp.Max`: SymPy would compare the bounds by their symbols, which takes 0.1 s.
    evaluate: Any = sp.lambdify(
        _ARGUMENTS, [*bounds_of(what, values_in_keys=values_in_keys).values()], modules="math"
    )
    return evaluate
