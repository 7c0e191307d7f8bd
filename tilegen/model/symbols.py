"""The symbols of the model, all positive, with their names in the papers and in the code."""

# | symbol | in the papers          | in the code                                                  |
# | ------ | ---------------------- | ------------------------------------------------------------ |
# | N_q    | N, n                   | seqlen_q                                                     |
# | N_kv   | N, n                   | seqlen_kv                                                    |
# | N      | N, n                   | seqlen_q = seqlen_kv                                         |
# | d_qk   | d                      | head_dim_qk                                                  |
# | d_v    | d                      | head_dim_v                                                   |
# | d      | d                      | head_dim_qk = head_dim_v                                     |
# | B_r    | B_r (FlashAttention)   | block_m, query rows per tile                                 |
# | B_c    | B_c (FlashAttention)   | block_n, key-value rows per tile                             |
# | g      |                        | group_size, query heads per key-value head                   |
# | H_kv   |                        | batch * num_heads_kv                                         |
# | M      | M, in words            | GpuSpec.on_chip_bytes / element_bytes                        |
# | P      | 1                      | num_sms, each with its own M words                           |
# | x      |                        | d / sqrt(M): below 1 large cache, above 1 small cache        |
# | nnz    | nnz                    | score entries that a query head keeps; N_q N_kv if unmasked  |
# | w      |                        | most entries of the mask in one row or one column            |
# | n_q    |                        | query rows that keep any entry                               |
# | n_kv   |                        | key-value rows that any query row keeps                      |
# | V_kv   | T_r N_kv if unmasked   | visited_rows of side "rows": KV rows a query head streams    |
# | V_q    | T_c N_q if unmasked    | visited_rows of side "columns": query rows streamed, a head |
# | W_q    |                        | query rows of all visited tiles, for a query head            |
# | W_s    |                        | stationary rows of a head, once per split that a tile visits |
# | g_t    |                        | tiles that hold a group's heads: g, or 1 that holds all      |
# | A_w    |                        | entries of all visited tiles, in rows padded to 16 bytes     |
# | T_s    | T_c                    | score tiles of a row, in the small-cache forward             |
# | n_p    |                        | panels into which a group of query heads is divided          |
# | alpha  |                        | bytes of an accumulator / element_bytes                      |
# | kappa  |                        | cost of an add in slow memory: 2 load and store, 1 reduction |
# | e      |                        | element_bytes                                                |
# | n      |                        | buffers of streamed tiles                                    |
# | c      |                        | fewest rows or columns of a tile                             |
# | B      | B (Saha and Ye)        | side of a square block                                       |
# | B_d    |                        | head_dim_qk (or both) columns read at a time                 |
# | B_e    |                        | output columns per tile                                      |
# | B_k    |                        | rows read at a time by a product that sums over rows         |
# | B_p    |                        | query rows per tile of the second phase of a small cache     |
# | n_s    |                        | num_splits, of the streamed rows                             |
# | s      | s                      | density: kept entries / all entries                          |
# | k      |                        | query and key-value rows together, of a part of the scores   |
# | b      |                        | side of the blocks of a block-diagonal mask                  |
# | u      |                        | most entries per row and column of a sub-grid                |
# | w_b    |                        | differences of query and key-value row that a mask keeps     |
# | p      |                        | columns of a prefix, which all query rows keep               |
# | T_h    |                        | programs that stream the same rows, of one KV head           |
# | n_w    |                        | programs in flight, a wave                                   |
# | h_t    |                        | key-value heads whose programs start together                |
# | C      |                        | heads whose streamed rows L2 holds together                  |
# | F      |                        | part of a head's rows that one wave streams; 1 if unmasked   |
# | Z      | Z_input                | nonzeros of Q and K together; 2 N d if dense                 |
# | Z_A    | Z_A                    | nonzeros of an N x d input                                   |
# | Z_X    | Z_X                    | nonzeros of X = W_Q W_K^T                                    |
# | Z_AX   | Z_AX                   | nonzeros of A_1 X                                            |
# | Z_S    | Z_QK, Z_AXA            | nonzeros of S                                                |

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import sympy as sp

N_q, N_kv, N = sp.symbols("N_q N_kv N", positive=True, integer=True)
d_qk, d_v, d = sp.symbols("d_qk d_v d", positive=True, integer=True)
B_r, B_c, g, H_kv = sp.symbols("B_r B_c g H_kv", positive=True, integer=True)
M, x = sp.symbols("M x", positive=True)
P, nnz, w, n_q, n_kv = sp.symbols("P nnz w n_q n_kv", positive=True, integer=True)
V_kv, V_q = sp.symbols("V_kv V_q", positive=True, integer=True)
W_q, A_w, T_s, n_p = sp.symbols("W_q A_w T_s n_p", positive=True, integer=True)
W_s, g_t = sp.symbols("W_s g_t", positive=True, integer=True)
alpha, kappa, e = sp.symbols("alpha kappa e", positive=True)
B, B_d, B_e, B_k, B_p = sp.symbols("B B_d B_e B_k B_p", positive=True, integer=True)
n, n_s, c = sp.symbols("n n_s c", positive=True, integer=True)
s = sp.Symbol("s", positive=True)
k, b, w_b = sp.symbols("k b w_b", positive=True, integer=True)
p = sp.Symbol("p", nonnegative=True, integer=True)
u = sp.Symbol("u", positive=True)
T_h, n_w, h_t = sp.symbols("T_h n_w h_t", positive=True, integer=True)
C = sp.Symbol("C", nonnegative=True)
F = sp.Symbol("F", positive=True)
Z, Z_A, Z_X, Z_AX, Z_S = sp.symbols("Z Z_A Z_X Z_AX Z_S", positive=True)

UNMASKED = {V_kv: sp.ceiling(N_q / B_r) * N_kv, V_q: sp.ceiling(N_kv / B_c) * N_q}
"""The visited rows if nothing is masked."""


class Gcd(sp.Function):
    """Greatest common divisor of integers; unevaluated for symbols (`sp.gcd` returns 1 for
    them)."""

    @classmethod
    def eval(cls, *numbers: Any) -> Any:
        """Return the divisor if all arguments are numbers."""
        if all(number.is_Integer for number in numbers):
            return sp.Integer(math.gcd(*map(int, numbers)))
        return None


FUNCTIONS: dict[str, Any] = {
    "Gcd": Gcd,
    "where": lambda condition, then, other: sp.Piecewise((then, condition), (other, True)),  # type: ignore
}
"""The functions of `formulas.FUNCTIONS` that SymPy does not know by the same name."""
_SYMBOLS = {name: value for name, value in vars().items() if isinstance(value, sp.Symbol)}
_read: Any = sp.sympify


def read(formula: str, names: Mapping[str, Any]) -> sp.Expr:
    """Parse a formula in these symbols and functions, and in `names`."""
    return _read(formula, locals=_SYMBOLS | FUNCTIONS | dict(names))


def by_symbol(values: Mapping[str, Any]) -> dict[sp.Symbol, Any]:
    """Return values by symbol, in place of its name."""
    return {_SYMBOLS[name]: value for name, value in values.items()}
