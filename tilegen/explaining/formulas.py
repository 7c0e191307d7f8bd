"""The formulas of explanations in SymPy, and the values of their symbols."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import sympy as sp

from tilegen.gpus.spec import GpuSpec
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.model.bounds import bound_values, inputs_once
from tilegen.model.dram import Levels, order_of, sweeps
from tilegen.model.formulas import expression
from tilegen.model.symbols import (
    C,
    F,
    H_kv,
    T_h,
    V_kv,
    V_q,
    by_symbol,
    g,
    h_t,
    n_kv,
    n_q,
    n_w,
)
from tilegen.model.traffic import terms_of, total_bytes, values_of
from tilegen.model.visits import visits
from tilegen.task import KernelTask, Tiled

rho = sp.Symbol("rho", positive=True)
"""Number of times that DRAM delivers the streamed rows: `dram.sweeps`."""
L2 = sp.Symbol("L2", positive=True)
"""Size of L2 [bytes]."""

SymbolValues = dict[sp.Symbol, Any]


@cache
def read(formula: str) -> sp.Expr:
    """Return a formula of `model.terms`; SymPy has functions of the same names as some symbols."""
    names = set(re.findall(r"\b[a-zA-Z]\w*\b(?!\()", formula))
    return expression(formula, **{name: sp.Symbol(name) for name in names})


def dram_formulas(task: KernelTask) -> dict[str, sp.Expr]:
    """Return the formulas of the bytes between L2 and DRAM, and of rho; none for sliced kernels,
    which have no closed form."""
    if task.spec.sliced:
        return {}
    crossing = _dram_bytes(task.kernel, task.values_in_keys, task.problem.pair_lse)
    formulas = {"DRAM": crossing}
    if rho in crossing.free_symbols:
        formulas["rho"] = _sweeps(order_of(task))
    return formulas


_sweeps = cache(sweeps)


@cache
def _dram_bytes(kernel: Kernel, values_in_keys: bool, pairs: bool) -> sp.Expr:
    """Return the bytes between L2 and DRAM of a whole launch; with `pairs` lse is two numbers.

    Stationary tiles move once. Streamed tiles move rho times, or as often as they move from L2 to
    the SMs if that is less.
    """
    moved = terms_of(kernel, values_in_keys=values_in_keys, pairs=pairs)
    written = H_kv * total_bytes(term for term in moved if term.direction == "write")
    reads = H_kv * total_bytes(term for term in moved if term.direction == "read")
    spec, made = KERNELS[kernel], {term.tensor for term in moved if term.direction == "write"}
    if spec.joins:  # the kernel before has just written the splits to L2
        return sp.factor(written) + sp.Max(0, sp.factor(reads) - L2)
    if spec.splits:  # inputs move once, or less if less moves to the SMs
        once = inputs_once(kernel, values_in_keys=values_in_keys)
        return sp.factor(written) + sp.Min(sp.factor(reads), once)
    streamed = [term for term in moved if term.words.has(V_kv, V_q) and term.tensor not in made]
    crossing = H_kv * total_bytes(streamed)
    kept = written + reads - crossing
    if not streamed:
        return sp.factor(kept)
    once = crossing.subs({V_kv: n_kv / g, V_q: n_q})
    return sp.factor(kept) + sp.Min(sp.factor(crossing), rho * sp.factor(once))


def kernel_values(tiled: Tiled) -> SymbolValues:
    """Return the values of the symbols in the formulas of a kernel's traffic and bounds."""
    counted = values_of(tiled, panel_rows=tiled.task.panel_rows)
    known = bound_values(tiled.task) | by_symbol(counted)
    return known | ({L2: tiled.gpu.l2_bytes} if isinstance(tiled.device, GpuSpec) else {})


def level_values(tiled: Tiled, levels: Levels) -> SymbolValues:
    """Return the values of the symbols that only `dram_formulas` use."""
    return {
        T_h: tiled.task.heads_of_group * visits(tiled).programs,
        n_w: levels.in_flight,
        h_t: levels.started,
        C: levels.heads_in_l2,
        F: levels.part_of_head,
        rho: levels.sweeps,
    }


def value_of(expression: sp.Expr, values: SymbolValues) -> float:
    """Return the value of an expression."""
    return _plain(expression.subs({one: values[one] for one in expression.free_symbols}))


def named(values: SymbolValues, used: Iterable[sp.Expr]) -> dict[str, float]:
    """Return the values of the symbols in expressions, by name, without infinite values."""
    symbols = {
        symbol for expression in used for symbol in expression.free_symbols if symbol in values
    }
    return {
        symbol.name: _plain(values[symbol])
        for symbol in sorted(symbols, key=lambda symbol: symbol.name)
        if math.isfinite(values[symbol])
    }


def _plain(number: Any) -> float:
    """Return a number as an integer, or as a float if it is none."""
    return int(number) if number == int(number) else float(number)
