"""The formulas of an explanation as text and as LaTeX, and the values of their symbols for a
problem and a config."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import sympy as sp

from tilegen.explaining.records import Formula
from tilegen.kernels.config import Kernel
from tilegen.kernels.registry import KERNELS
from tilegen.model.bounds import bound_values, inputs_once
from tilegen.model.dram import Levels, Order, sweeps
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
    nnz,
)
from tilegen.model.traffic import terms_of, total_bytes, values_of
from tilegen.model.visits import visits
from tilegen.task import Tiled

rho = sp.Symbol("rho", positive=True)
"""Number of times that DRAM delivers the streamed rows: `dram.sweeps`."""

SymbolValues = dict[sp.Symbol, Any]


def formula(name: str, expression: sp.Expr) -> Formula:
    """Return an equation as text and as LaTeX."""
    text, in_latex = _written(expression)
    return Formula(name=name, text=text, latex=in_latex)


@lru_cache(maxsize=1024)  # kernels, bounds and regimes have a hundred expressions
def _written(expression: sp.Expr) -> tuple[str, str]:
    return str(expression), latex(expression)


def latex(expression: sp.Expr) -> str:
    """Return an expression as LaTeX."""
    symbols = (symbol for symbol in expression.free_symbols if symbol.name == nnz.name)
    words = {symbol: rf"\mathrm{{{symbol}}}" for symbol in symbols}
    return sp.latex(expression, symbol_names=words)


def dram_formulas(
    kernel: Kernel, order: Order, values_in_keys: bool, pairs: bool
) -> tuple[Formula, ...]:
    """Return the formulas of the bytes between L2 and DRAM, and of rho; none for sliced kernels,
    which have no closed form."""
    if KERNELS[kernel].sliced:
        return ()
    moved = dram_bytes(kernel, values_in_keys, pairs)
    formulas = (formula("DRAM bytes", moved),)
    if rho in moved.free_symbols:
        formulas += (formula("rho", sweeps_of_heads(order)),)
    return formulas


@cache
def sweeps_of_heads(order: Order) -> sp.Expr:
    """Return rho of kernels whose programs start in the given order."""
    return sweeps(order)


@cache
def dram_bytes(kernel: Kernel, values_in_keys: bool, pairs: bool) -> sp.Expr:
    """Return the bytes between L2 and DRAM of a whole launch; with `pairs` lse is two numbers.

    Stationary tiles move once. Streamed tiles move rho times, or as often as they move from L2 to
    the SMs if that is less.
    """
    moved = terms_of(kernel, values_in_keys=values_in_keys, pairs=pairs)
    if KERNELS[kernel].splits:  # inputs move once, or less if less moves to the SMs
        written = H_kv * total_bytes(term for term in moved if term.direction == "write")
        reads = H_kv * total_bytes(term for term in moved if term.direction == "read")
        once = inputs_once(kernel, values_in_keys=values_in_keys)
        return sp.factor(written) + sp.Min(sp.factor(reads), once)
    kept = H_kv * total_bytes(term for term in moved if not term.words.has(V_kv, V_q))
    crossing = H_kv * total_bytes(term for term in moved if term.words.has(V_kv, V_q))
    if not crossing:
        return sp.factor(kept)
    once = crossing.subs({V_kv: n_kv / g, V_q: n_q})
    return sp.factor(kept) + sp.Min(sp.factor(crossing), rho * sp.factor(once))


def kernel_values(tiled: Tiled) -> SymbolValues:
    """Return the values of the symbols in the formulas of a kernel's traffic and bounds."""
    counted = values_of(tiled, panel_rows=tiled.task.panel_rows)
    return bound_values(tiled.task) | by_symbol(counted)


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


def named(values: SymbolValues, used: Iterable[sp.Expr]) -> dict[str, float]:
    """Return the values of the symbols in expressions, by name, without infinite values."""
    symbols = {
        symbol for expression in used for symbol in expression.free_symbols if symbol in values
    }
    return {
        symbol.name: values[symbol]
        for symbol in sorted(symbols, key=lambda symbol: symbol.name)
        if math.isfinite(values[symbol])
    }
