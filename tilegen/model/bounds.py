"""Lower bounds on the words attention must move, with constants, for a whole launch.

Words are elements. Sources: Saha and Ye, arXiv 2402.07443 (forward); Li et al., arXiv 2410.09397
(backward); Dao et al., arXiv 2205.14135 (FlashAttention); Smith et al., arXiv 1702.02017 (matrix
product). The theorems are about one head and one processor. Here H_kv heads run on P processors
with M words each, which multiplies the additive term by P and changes nothing else.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Literal

from tilegen.kernels.config import Kernel
from tilegen.kernels.moved import Moved
from tilegen.kernels.registry import FLOORS, KERNELS
from tilegen.kernels.spec import Direction
from tilegen.model.formulas import computed, expression
from tilegen.model.mask_size import size_of
from tilegen.model.subgrids import SPANNED, subgrids
from tilegen.model.traffic import Term, bytes_moved, terms, total_bytes
from tilegen.task import KernelTask, PassTask

if TYPE_CHECKING:
    import sympy as sp

LARGEST = "Min(M**2/d_qk**2, 2*M*w*g/(d_qk*(g + 1)))"
PARTITIONED = "M*(H_kv*g*nnz/({entries} + 4*M) - P)"
PRODUCT = "2*H_kv*g*nnz*d_qk/sqrt(M) - H_kv*g*nnz - 2*M*P"


def largest_subgrid() -> sp.Expr:
    """Return an upper bound on the score entries that 2M/d rows of Q and K together span.

    I query rows and J key rows, I + J = 2M/d, span at most I J entries. If a mask keeps at most w
    in a row or column, and g query heads share each key row, they span at most min(I w, J g w).
    """
    return expression(LARGEST)


def partition_bound() -> sp.Expr:
    """Return LB1 in words, for every M: Saha and Ye, Lemma 3.3, applied to a 2M-partition.

    A part of the computation that touches 2M words completes at most `largest_subgrid()` entries
    and reaches 4M more. One dense head on one processor: N_q N_kv d^2 / (M + 4 d^2) - M.
    """
    return partitioned(largest_subgrid())


def pattern_bound() -> sp.Expr:
    """Return LB1G in words: LB1 with `e_G(2M/d)`, the entries of the densest sub-grids of the mask,
    instead of an estimate by degrees. LB1G is never below LB1."""
    return partitioned(expression(SPANNED, {"k": "2*M/d_qk"}))


def partitioned(entries: sp.Expr) -> sp.Expr:
    """Return the bound in words if parts of the computation that touch 2M words complete at most
    `entries` entries each."""
    return expression(PARTITIONED.format(entries="entries"), entries=entries)


def product_bound() -> sp.Expr:
    """Return LB2 in words, useful for M < 4 d^2: computing S is a product of Q and K^T.

    Saha and Ye, Theorem 3.7: if each entry of S is written when it first appears, the kernel is a
    matrix product. A product moves 2 N_q N_kv d / sqrt(M) - 2 M words (Smith et al.). The kernel
    saves the first read of each entry. The argument counts products, so it holds under a mask too.
    """
    return expression(PRODUCT)


def floor_terms(what: Kernel | Direction, *, values_in_keys: bool = False) -> tuple[Term, ...]:
    """Return the words that any schedule moves, per key-value head: inputs that affect the result,
    and all outputs. Values that are columns of the keys move with the keys."""
    return terms(_floor(what), values_in_keys=values_in_keys)


def _floor(what: Kernel | Direction) -> tuple[Moved, ...]:
    return FLOORS[what] if what in FLOORS else KERNELS[what].floor


def inputs_once(kernel: Kernel, *, values_in_keys: bool = False) -> sp.Expr:
    """Return the bytes of the inputs that affect a kernel's result, each read once."""
    moved = floor_terms(kernel, values_in_keys=values_in_keys)
    return expression("H_kv") * total_bytes(term for term in moved if term.direction == "read")


def bytes_of_inputs(task: KernelTask) -> int:
    """Compute `inputs_once` for a task."""
    formulas = _formulas(task.kernel, task.values_in_keys)
    return int(computed({"read": formulas["read"]}, values_of(task))["read"])


def _floor_alone(what: Kernel | Direction) -> bool:
    spec = KERNELS.get(what)
    return spec is not None and not spec.is_fused


def lower_bound_bytes(task: KernelTask | PassTask) -> int:
    """Compute the bytes that every algorithm for a kernel or pass must move on the device, in a
    whole launch."""
    return max(0, math.floor(max(each_bound(task).values())))


def what_of(task: KernelTask | PassTask) -> Kernel | Direction:
    """Return the name of a task's kernel or pass."""
    return task.direction if isinstance(task, PassTask) else task.kernel


def lower_bound_with(task: KernelTask, fast_bytes: int) -> int:
    """Compute the bytes that every algorithm must move with another size of fast memory [bytes]."""
    return max(0, math.floor(max(each_bound(task, fast_bytes).values())))


def each_bound(task: KernelTask | PassTask, fast_bytes: int | None = None) -> dict[str, float]:
    """Compute the values of `bounds_of` for a whole launch [bytes]. `fast_bytes` replaces the
    device's fast memory."""
    values = values_of(task)
    if fast_bytes is not None:
        values["M"] = fast_bytes / task.problem.element_bytes
    formulas = _formulas(what_of(task), task.problem.latent)
    bounds = computed(formulas, values)
    return {name: float(bounds[name]) for name in formulas if name[0] == "L" or name == "floor"}


@cache
def _formulas(what: Kernel | Direction, values_in_keys: bool) -> dict[str, str]:
    moved = _floor(what)
    once = {way: bytes_moved(moved, way, in_keys=values_in_keys, pairs=False) for way in _WAYS}
    bounds = {} if _floor_alone(what) else BOUNDS
    return bounds | once | {"floor": "read + write"}


_WAYS: tuple[Literal["read", "write"], ...] = ("read", "write")
BOUNDS = {
    "k": "2*M/d_qk",
    "LB1": "e*" + PARTITIONED.format(entries=LARGEST),
    "LB1G": "e*" + PARTITIONED.format(entries=SPANNED),
    "LB2": f"e*({PRODUCT})",
}
"""The bounds in bytes, of kernels in which no scores leave the chip."""


def values_of(task: KernelTask | PassTask) -> dict[str, float]:
    """Return the values of the symbols in the bounds, by name.

    Slow memory is L2, fast memory everything on an SM: M = on_chip_bytes / element_bytes words.
    """
    problem, device, size = task.problem, task.device, size_of(task)
    densest = subgrids(problem.mask, problem.seqlen_q, problem.seqlen_kv, problem.group_size)
    return {
        "H_kv": problem.batch * problem.num_heads_kv,
        "g": problem.group_size,
        "N_q": problem.seqlen_q,
        "N_kv": problem.seqlen_kv,
        "d_qk": problem.head_dim_qk,
        "d_v": problem.head_dim_v,
        "nnz": size.entries,
        "w": size.degree,
        "u": densest.per_row,
        "w_b": densest.width,
        "n_q": size.rows,
        "n_kv": size.columns,
        "M": device.on_chip_bytes / problem.element_bytes,
        "P": device.memories,
        "e": problem.element_bytes,
    }


def bound_values(task: KernelTask | PassTask) -> dict[sp.Symbol, float]:
    """Return the values of the symbols in the bounds."""
    from tilegen.model.symbols import by_symbol  # loads SymPy

    return by_symbol(values_of(task))


@cache
def bounds_of(what: Kernel | Direction, *, values_in_keys: bool = False) -> dict[str, sp.Expr]:
    """Return LB1, LB1G, LB2 and the floor in bytes of a whole launch; the largest applies."""
    moved = floor_terms(what, values_in_keys=values_in_keys)
    floor = {"floor": expression("H_kv") * total_bytes(moved)}
    if _floor_alone(what):
        return floor
    bounds = {"LB1": partition_bound(), "LB1G": pattern_bound(), "LB2": product_bound()}
    return {name: expression("e") * bound for name, bound in bounds.items()} | floor
