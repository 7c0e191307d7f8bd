"""Random masks and scores, as expressions, and the small problem they are evaluated on."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from tilegen.masks.language.algebra import (
    add,
    as_expr,
    at_most,
    both,
    divide,
    either,
    equal,
    floor,
    less,
    load,
    maximum,
    minimum,
    multiply,
    opposite,
    where,
)
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import SEQLEN_KV, B, Expr, H, K, Q, S
from tilegen.masks.language.functions import elementary, power, sign
from tilegen.masks.language.remainders import remainder

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
"""Elements of the captured tensors t0 (heads, 10), t1 (7,) and t2 (5,)."""
NUMBERS = [-3, 2, 7, 1 / 3, -2.5, 0.5, -1.75, 0.1]


def t0(*index: Any) -> Expr:
    """Return an element of t0, a float."""
    return load(0, "float", *index)


def t1(*index: Any) -> Expr:
    """Return an element of t1, an integer."""
    return load(1, "int", *index)


def t2(*index: Any) -> Expr:
    """Return an element of t2, a bool, as a number."""
    return load(2, "bool", *index)


def integer(random: Random, depth: int) -> Expr:
    """Return an integer expression of indices and look-ups."""
    if depth == 0:
        return random.choice([B, H, Q, K, SEQLEN_KV, as_expr(3), t1(Q), t2(K)])
    left, other = integer(random, depth - 1), integer(random, depth - 1)
    positive = random.randint(2, 9)
    return random.choice(
        [
            lambda: left + other,
            lambda: left - other,
            lambda: left * positive,
            lambda: left // random.choice([-positive, positive]),
            lambda: remainder(left, random.choice([-positive, positive])),
            lambda: maximum(left, other),
            lambda: abs(left),
            lambda: where(condition(random, depth - 1), left, other),
            lambda: t1(left % 7),
        ]
    )()


def condition(random: Random, depth: int) -> Expr:
    """Return a predicate of indices and look-ups."""
    compare = random.choice(
        [at_most, less, equal, lambda a, b: opposite(equal(a, b)), lambda a, b: at_most(b, a)]
    )
    actual = compare(integer(random, depth), divide(integer(random, depth), random.choice([1, 2])))
    if depth == 0:
        return actual
    other = condition(random, depth - 1)
    return random.choice(
        [actual, both(actual, other), either(actual, ~other), opposite(both(actual, other))]
    )


def score(random: Random, depth: int) -> Expr:
    """Return a score whose values stay moderate."""
    if depth == 0:
        # Column 5 is one that q - k never meets: equal elements would tie in minima.
        return random.choice([S, S, S * 1.5, t0(H, Q - K), t0(H, 5), Q, as_expr(0.5), K])
    left, other = score(random, depth - 1), score(random, random.randrange(depth))
    number = random.choice(NUMBERS)
    return random.choice(
        [
            lambda: left + other,
            lambda: left - multiply(number, other),
            lambda: elementary("tanh", left) * other,
            lambda: left + multiply(number, integer(random, 1)),
            lambda: divide(left, 1.0 + power(other, 2)),
            lambda: elementary("exp", elementary("tanh", left)),
            lambda: elementary("log", add(1.0, power(left, 2))),
            lambda: elementary("sqrt", add(1.0, abs(left))),
            lambda: maximum(left, other),
            lambda: minimum(left, number),
            lambda: abs(left),
            lambda: elementary("sigmoid", left),
            lambda: elementary("sin", left) + elementary("cos", other),
            lambda: where(condition(random, 1), left, other),
            lambda: where(less(S, left), left, other),
            lambda: multiply(number, floor(left)) + sign(other) * left,
            lambda: power(left, 3) / 50.0 + power(2.0, elementary("tanh", left)),
        ]
    )()
