"""Masks and scores as users write them for FlexAttention, which kernels once computed wrongly or
not at all. PyTorch itself, called with indices of all pairs, says what each means."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

BATCH, HEADS, SEQLEN_Q, SEQLEN_KV = 2, 2, 75, 90
LONGEST = max(SEQLEN_Q, SEQLEN_KV)
_random = torch.Generator().manual_seed(0)
WEIGHTS = torch.randn(LONGEST, generator=_random)
DOUBLES = 1.7e9 + torch.randint(0, 40, (LONGEST,), generator=_random).double() / 1000
STAMPS = 1_700_000_000_000 + torch.randint(0, 40, (LONGEST,), generator=_random)
IDS = torch.randint(0, 5, (LONGEST,), generator=_random)
ROWS = torch.randn(BATCH, HEADS, LONGEST, 6, generator=_random)
PICKED = torch.randint(0, 9, (LONGEST, 3), generator=_random)
DOCUMENTS = torch.tensor([0] * 21 + [1] * 40 + [2] * 29)
STARTS = torch.tensor([0, 21, 61, 90])
PADDED = torch.where(torch.arange(LONGEST) < 70, DOCUMENTS, -1)
OTHERS = torch.tensor([0] * 35 + [1] * 5 + [2] * 50)
DOUBLES_RISING = DOUBLES.sort().values
SMALL = torch.rand(LONGEST, generator=_random, dtype=torch.float64)
NUMBER = torch.tensor(7)
FEW = torch.tensor([0, 2, 21, 40])
STEPS = torch.arange(LONGEST) // 15 / 10
TIMES = STAMPS.sort().values
WEIGHTS_RISING = WEIGHTS.sort().values
IS_TOKEN = torch.arange(LONGEST) < torch.tensor([50, 90])[:, None]
TRAINED = torch.randn(LONGEST, generator=_random).requires_grad_()
HOLED = torch.where(torch.arange(LONGEST) % 7 == 3, torch.nan, torch.arange(LONGEST) / 9)
TENTHS = torch.where(torch.arange(LONGEST) % 2 == 0, torch.tensor(0.1).double(), 0.1)
"""0.1 as fp32 has it, and as fp64 does."""
BYTES = torch.randint(0, 256, (LONGEST,), generator=_random, dtype=torch.uint8)


def _morton(x: Any) -> Any:
    """Return every second bit, moved together."""
    x = x & 0x5555
    x = (x | (x >> 1)) & 0x3333
    return (x | (x >> 2)) & 0x0F0F


def _grid(at: Any) -> tuple[Any, Any]:
    return at // 10, at % 10


def _disc(b: Any, h: Any, q: Any, k: Any) -> Any:
    (qy, qx), (ky, kx) = _grid(q), _grid(k)
    return (qx - kx) ** 2 + (qy - ky) ** 2 <= 9


MASKS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    # Brackets of floor division and remainder.
    "quotient times": lambda b, h, q, k: 3 * (k // 48) <= q,
    "quotients multiplied": lambda b, h, q, k: (k // 5) * (q // 3) < 100,
    "quotient by a sum": lambda b, h, q, k: q // (h + 2) >= k // 3,
    "remainder by a sum": lambda b, h, q, k: (q - k) % (h + 3) == 1,
    "negative quotients": lambda b, h, q, k: -(q // 4) + k // -3 > -30,
    "remainders subtracted": lambda b, h, q, k: 20 - (k % 7) * 2 - q % 5 > (q - k) % -6 + 10,
    "divisor zero is never chosen": lambda b, h, q, k: (
        torch.where(q > 0, k % (q + (q == 0)), 1) < 9
    ),
    "even by twice an odd number": lambda b, h, q, k: (4 * k - 4 * q).abs() // 18 == b,
    "even by an odd number": lambda b, h, q, k: torch.maximum(4 * k, 4 * q) / 3 == 8 * h,
    # Rationals.
    "rationals": lambda b, h, q, k: q / 3 >= k / 7,
    "quotient of a head": lambda b, h, q, k: (h / (h + 1) < 0.05) | (k < q / (h + 1)),
    "rational steps": lambda b, h, q, k: torch.floor(q / 3.0) >= torch.ceil(k * 0.25),
    "fraction of a head": lambda b, h, q, k: h <= 0.3,
    "fractions between positions": lambda b, h, q, k: (k < q + 0.5 - h) & (q - k <= 30.5),
    "bits of both signs": lambda b, h, q, k: 3 + ((k - q) ^ q) >= 2,
    "remainder of a float": lambda b, h, q, k: ((q - k) * 0.1) % 0.3 < 0.15,
    "quotient of floats": lambda b, h, q, k: (q // 0.1) % 2 == (k // -0.3) % 2,
    "remainder by a float of a column": lambda b, h, q, k: WEIGHTS[q] % WEIGHTS[k] < 0.2,
    "remainder of both signs": lambda b, h, q, k: torch.fmod(q - k, 0.7) < 0.1,
    "remainder by infinity": lambda b, h, q, k: (q - k).float() % torch.inf < 7,
    "doubles beside a number": lambda b, h, q, k: (TENTHS[k] + (q - q) != 0.1) | (k > q),
    # More than 32 bits.
    "hash": lambda b, h, q, k: ((q * 73856093 + k * 19349663) % 1000003) % 10 < 5,
    "wide product": lambda b, h, q, k: q * 1000000 * k <= 5e9,
    "wide table": lambda b, h, q, k: STAMPS[q] >= STAMPS[k],
    "wide shift": lambda b, h, q, k: ((q << 33) ^ (k << 32)) % 7 < 4,
    # Fewer than 32 bits, or as many.
    "int8 sums": lambda b, h, q, k: BYTES.to(torch.int8)[q] + BYTES.to(torch.int8)[k] > 0,
    "uint8 distances": lambda b, h, q, k: BYTES[q] - BYTES[k] <= 100,
    "int16 products": lambda b, h, q, k: (q * k * 1000).short() > 0,
    "int32 products": lambda b, h, q, k: (BYTES[q].int() << 20) * BYTES[k] % 9 < 4,
    "complements": lambda b, h, q, k: ~BYTES[q] // 3 >= ~BYTES[k] % 50,
    "sums of bools": lambda b, h, q, k: ((q > 3) + (k > 5)) == (IS_TOKEN[b, k] * (k > q)),
    "shifts beyond": lambda b, h, q, k: (1 << (q - k)) > (q >> (k - 7)),
    "powers of two": lambda b, h, q, k: (2 ** (q - k)).int() > k,
    # NaN.
    "not below a root": lambda b, h, q, k: ~(torch.sqrt(40.0 - q) < k / 8),
    "chosen by a logarithm": lambda b, h, q, k: torch.where(torch.log(50.0 - k) > 0, k <= q, k > q),
    "not by a quotient": lambda b, h, q, k: ~((q - 30) / (k - 30) < 1.3) & (q != h),
    "tables with NaN": lambda b, h, q, k: ~(HOLED[k] <= HOLED[q]) | (k == q),
    # Powers and functions.
    "square": lambda b, h, q, k: (q - k) ** 2 <= 25,
    "product of distances": lambda b, h, q, k: (q - k) * (q - k) < 200,
    "disc": _disc,
    "root": lambda b, h, q, k: torch.sqrt((q - k) ** 2 + 1.0) <= 9.5,
    "exponential": lambda b, h, q, k: torch.exp(-0.1 * torch.abs(q - k)) > 0.25,
    "sigmoid": lambda b, h, q, k: torch.sigmoid(0.3 * (q - k)) > 0.4,
    "sign": lambda b, h, q, k: torch.sign(q - k) * (k - 30) > -5,
    "floor of a float": lambda b, h, q, k: torch.floor(0.3 * q) >= k // 4,
    "bound that is the floor of a float": lambda b, h, q, k: k >= torch.floor(5.5 * h),
    "bounds by batch and head": lambda b, h, q, k: (k <= h) | ((k >= q) & (k < q + b + 9)),
    "logarithm": lambda b, h, q, k: torch.log1p(q) >= torch.log(k + 0.5),
    # Tables.
    "floats": lambda b, h, q, k: WEIGHTS[k] <= WEIGHTS[q],
    "halves": lambda b, h, q, k: WEIGHTS.half()[k] * 2 <= WEIGHTS.half()[q] + 1,
    "doubles": lambda b, h, q, k: DOUBLES[k] <= DOUBLES[q],
    "doubles computed with": lambda b, h, q, k: DOUBLES[k] + 0.0105 <= DOUBLES[q],
    "trained": lambda b, h, q, k: TRAINED[k] < 0.5,
    "nested": lambda b, h, q, k: WEIGHTS[IDS[q]] < WEIGHTS[IDS[k] + 3],
    # Comparisons that have a closed form.
    "packed": lambda b, h, q, k: (k >= STARTS[DOCUMENTS[q]]) & (k <= q),
    "padding": lambda b, h, q, k: (PADDED[q] == PADDED[k]) & (PADDED[q] >= 0),
    "two tables of ids": lambda b, h, q, k: DOCUMENTS[q] == OTHERS[k],
    "times": lambda b, h, q, k: TIMES[k] <= TIMES[q],
    "window of time": lambda b, h, q, k: (TIMES[q] - TIMES[k] <= 9) & (TIMES[q] > TIMES[k]),
    "rising floats": lambda b, h, q, k: 2 * WEIGHTS_RISING[q] > WEIGHTS_RISING[k],
    "a number": lambda b, h, q, k: k <= q + NUMBER,
    "rising doubles": lambda b, h, q, k: DOUBLES_RISING[k] + 0.0105 <= DOUBLES_RISING[q],
    "double and single": lambda b, h, q, k: (
        (DOUBLES_RISING[k] < 1.7e9 + 0.0105) | (STEPS[k] <= 0.3)
    ),
    "tokens": lambda b, h, q, k: IS_TOKEN[b, k] & IS_TOKEN[b, q],
    "not the tokens": lambda b, h, q, k: ~IS_TOKEN[b, k] | ~IS_TOKEN[b, k],
    # Bits.
    "odd": lambda b, h, q, k: ((q & 1) == 0) | (k <= q),
    "bits of a product": lambda b, h, q, k: k <= (k * (q // 2) ^ 5),
    "exclusive or": lambda b, h, q, k: (q ^ k) < 32,
    "shift": lambda b, h, q, k: (q >> 3) == (k >> 3),
    "shift by a head": lambda b, h, q, k: (q >> (h + 1)) >= (k >> 2),
    "all bits": lambda b, h, q, k: (~q & k) < (q | k) // 2,
    "morton": lambda b, h, q, k: (
        (_morton(q) - _morton(k)).abs() + (_morton(q >> 1) - _morton(k >> 1)).abs() <= 4
    ),
    # Rows.
    "picked": lambda b, h, q, k: (PICKED[q] == (k // 10).unsqueeze(-1)).any(-1),
    "all of a row": lambda b, h, q, k: (PICKED[q] <= PICKED[k]).all(dim=-1),
    "sum of a row": lambda b, h, q, k: PICKED[q].sum(-1) >= PICKED[k].sum(-1),
    # Small tables.
    "among a few": lambda b, h, q, k: torch.isin((k - q).abs(), FEW) | (k < h),
    "close": lambda b, h, q, k: torch.isclose(WEIGHTS[q], WEIGHTS[k], rtol=0.3, atol=0.1),
    "between edges": lambda b, h, q, k: (
        torch.bucketize(k, FEW) == torch.searchsorted(FEW, q, right=True)
    ),
    "any of a few": lambda b, h, q, k: (q - k == FEW).any() | ((k >= FEW).sum() == 2),
    # What tiles are solved from, in users' words.
    "ids": lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[q] >= 1),
    "documents": lambda b, h, q, k: (
        (DOCUMENTS[q] == DOCUMENTS[k]) & (q - STARTS[DOCUMENTS[q]] >= k - STARTS[DOCUMENTS[k]])
    ),
    "documents by their starts": lambda b, h, q, k: (k >= STARTS[DOCUMENTS[q]]) & (k <= q),
    "chunks": lambda b, h, q, k: q // 16 == k // 16,
    "chunks before": lambda b, h, q, k: (k // 16 <= q // 16) & (q // 16 - k // 16 <= 2),
    "dilated": lambda b, h, q, k: (torch.abs(q - k) % 3 == 0) & (q >= k) & (q - k < 40),
}


SCORES: dict[str, Callable[[Any, Any, Any, Any, Any], Any]] = {
    "gelu": lambda s, b, h, q, k: functional.gelu(s),
    "gelu by tanh": lambda s, b, h, q, k: functional.gelu(s, approximate="tanh"),
    "log sigmoid": lambda s, b, h, q, k: functional.logsigmoid(s),
    "leaky": lambda s, b, h, q, k: functional.leaky_relu(s, 0.2),
    "elu": lambda s, b, h, q, k: functional.elu(s, 0.7),
    "softplus": lambda s, b, h, q, k: functional.softplus(s),
    "log1p": lambda s, b, h, q, k: torch.log1p(s * s),
    "erf": lambda s, b, h, q, k: torch.erf(s),
    "dot": lambda s, b, h, q, k: s + torch.dot(ROWS[b, h, q], ROWS[b, 0, k]),
    "row sum": lambda s, b, h, q, k: s + (ROWS[b, h, q] * PICKED[k].sum(-1)).sum(-1) / 20,
    "row any": lambda s, b, h, q, k: torch.where((PICKED[q] == PICKED[k]).any(-1), s, s - 1),
    "buckets": lambda s, b, h, q, k: s + WEIGHTS[torch.bucketize(q - k, FEW, right=True)],
    "nothing": lambda s, b, h, q, k: 0 * s,
    "constant": lambda s, b, h, q, k: 1.5,
    "head": lambda s, b, h, q, k: -1.0 * h,
    "row": lambda s, b, h, q, k: 0.1 * q,
    "column": lambda s, b, h, q, k: -0.1 * k,
    "squares": lambda s, b, h, q, k: s - ((q - k) * 50000) ** 2 / 1e13,
    "bits": lambda s, b, h, q, k: s + 0.25 * ((q ^ k) & 7),
    "quotient": lambda s, b, h, q, k: s + (q - k) / (h + 1),
    "remainder": lambda s, b, h, q, k: s + ((q - k) * 0.1) % 0.3 + torch.fmod(s, 0.7),
    "doubles": lambda s, b, h, q, k: s + torch.where(DOUBLES[q] < DOUBLES[k], 1.0, 0.0),
    "a function of doubles": lambda s, b, h, q, k: s - torch.log1p((SMALL[q] - SMALL[k]).abs()),
    "stamps": lambda s, b, h, q, k: s - torch.where(STAMPS[q] < STAMPS[k], 1, 0),
}


def pairs(mask: Callable[[Any, Any, Any, Any], Any]) -> torch.Tensor:
    """Evaluate a mask in PyTorch: (BATCH, HEADS, SEQLEN_Q, SEQLEN_KV), pair by pair."""
    every = torch.func.vmap(
        torch.func.vmap(
            torch.func.vmap(torch.func.vmap(mask, (None, None, None, 0)), (None, None, 0, None)),
            (None, 0, None, None),
        ),
        (0, None, None, None),
    )
    sizes = (BATCH, HEADS, SEQLEN_Q, SEQLEN_KV)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")  # of torch.isin by vmap
        return every(*map(torch.arange, sizes)).expand(sizes).detach()
