"""Random masks and scores, as SymPy expressions, and the small problem they are evaluated on."""

from random import Random
from typing import Any

import sympy
import torch

from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.nodes import Sigmoid, Where
from tilegen.masks.language.symbols import SEQLEN_KV, B, H, K, Lookup, Q, S, captured_name

BATCH, HEADS, SEQLEN = 2, 3, 5
B_IDX, H_IDX, Q_IDX, K_IDX = (
    torch.arange(size).reshape([-1 if axis == i else 1 for axis in range(4)])
    for i, size in enumerate((BATCH, HEADS, SEQLEN, SEQLEN))
)
SHAPE = (BATCH, HEADS, SEQLEN, SEQLEN)


def value_of(expr: Any, captured: tuple[torch.Tensor, ...], s: torch.Tensor) -> torch.Tensor:
    """Return a mask or a score at all pairs of the small problem."""
    return evaluate(
        expr,
        captured,
        b=B_IDX,
        h=H_IDX,
        q=Q_IDX,
        k=K_IDX,
        s=s,
        seqlen_q=SEQLEN,
        seqlen_kv=SEQLEN,
    )


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers in fp64 that require a gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


KINDS = ("float", "int", "bool")
"""What the captured tensors t0 (heads, 10), t1 (7,) and t2 (5,) hold."""
T0, T1, T2 = (captured_name(slot, kind) for slot, kind in enumerate(KINDS))

NUMBERS = [-3, 2, 7, sympy.Rational(1, 3), sympy.Rational(-5, 2), 0.5, -1.75, 0.1]


def integer(random: Random, depth: int) -> Any:
    """Return an integer expression of indices and look-ups."""
    if depth == 0:
        return random.choice(
            [B, H, Q, K, SEQLEN_KV, sympy.Integer(3), Lookup(T1, Q), Lookup(T2, K)]
        )
    one, other = integer(random, depth - 1), integer(random, depth - 1)
    positive = random.randint(2, 9)
    return random.choice(
        [
            lambda: one + other,
            lambda: one - other,
            lambda: one * positive,
            lambda: sympy.floor(one / sympy.Integer(random.choice([-positive, positive]))),
            lambda: sympy.Mod(one, random.choice([-positive, positive])),
            lambda: sympy.Max(one, other),
            lambda: sympy.Abs(one),
            lambda: Where(condition(random, depth - 1), one, other),
            lambda: Lookup(T1, sympy.Mod(one, 7)),
        ]
    )()


def condition(random: Random, depth: int) -> Any:
    """Return a predicate of indices and look-ups."""
    compare = random.choice([sympy.Le, sympy.Lt, sympy.Eq, sympy.Ne, sympy.Ge])
    found = compare(integer(random, depth), integer(random, depth) / random.choice([1, 2]))
    if depth == 0:
        return found
    other = condition(random, depth - 1)
    return random.choice([found, found & other, found | ~other, ~(found & other)])


def score(random: Random, depth: int) -> Any:
    """Return a score whose values stay moderate."""
    if depth == 0:
        # Column 5 is one that q - k never meets: equal elements would tie in minima.
        return random.choice(
            [S, S, S * 1.5, Lookup(T0, H, Q - K), Lookup(T0, H, 5), Q, sympy.sympify(0.5), K]
        )
    one, other = score(random, depth - 1), score(random, random.randrange(depth))
    number = sympy.sympify(random.choice(NUMBERS))
    return random.choice(
        [
            lambda: one + other,
            lambda: one - number * other,
            lambda: sympy.tanh(one) * other,
            lambda: one + number * integer(random, 1),
            lambda: one / (1 + other**2),
            lambda: sympy.exp(sympy.tanh(one)),
            lambda: sympy.log(1 + one**2),
            lambda: sympy.sqrt(1 + sympy.Abs(one)),
            lambda: sympy.Max(one, other),
            lambda: sympy.Min(one, number),
            lambda: sympy.Abs(one),
            lambda: Sigmoid(one),
            lambda: sympy.sin(one) + sympy.cos(other),
            lambda: Where(condition(random, 1), one, other),
            lambda: Where(sympy.Lt(S, one), one, other),
            lambda: number * sympy.floor(one) + sympy.sign(other) * one,
            lambda: one**3 / 50 + 2 ** sympy.tanh(one),
        ]
    )()
