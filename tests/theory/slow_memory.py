"""A slow memory that counts, for schedules written as loops over tiles.

Numbers are fp64 whatever size class a tensor has: the classes matter for the count alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Key = tuple[str, str, str]
"""Tensor, `read` or `write`, size class."""


WORK: Counter[str] = Counter()
"""Flops of matrix products and exponentials of scores, since it was last cleared."""


class Loaded(np.ndarray):
    """An array that came from slow memory, or was computed from one: its products are counted."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = [x.view(np.ndarray) if isinstance(x, Loaded) else x for x in inputs]
        if "out" in options:
            options["out"] = tuple(x.view(np.ndarray) for x in options["out"])
        result = getattr(ufunc, method)(*plain, **options)
        if ufunc is np.matmul:
            WORK["flops"] += 2 * result.size * plain[0].shape[1]
        return result.view(Loaded) if isinstance(result, np.ndarray) else result


def exponentials(s: Array) -> Array:
    """Return exp of a tile of scores."""
    WORK["exps"] += s.size
    return np.exp(s)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One key-value head, and the sides of the tiles."""

    g: int = 1
    rows: int
    columns: int
    qk: int
    v: int
    B_r: int
    B_c: int
    B_d: int = 2
    B_e: int = 3
    B_k: int = 2
    B_p: int = 3
    B: int = 4
    splits: int = 2
    kappa: int = 2


@dataclass
class SlowMemory:
    """Arrays with a count of the words that cross its border."""

    shape: Shape
    keep: NDArray[np.bool_]
    arrays: dict[str, Array] = field(default_factory=dict)
    sizes: dict[str, str] = field(default_factory=dict)
    moved: Counter[Key] = field(default_factory=Counter)
    on_chip: Counter[int] = field(default_factory=Counter)
    """Most words at a time, for each phase."""

    def new(self, name: str, shape: tuple[int, ...], size: str = "element") -> None:
        """Make an array of garbage; costs nothing."""
        self.arrays[name], self.sizes[name] = np.full(shape, np.nan), size

    def load(self, name: str, *at: int | slice) -> Array:
        part = self.arrays[name][at].copy()
        self.moved[name, "read", self.sizes[name]] += part.size
        return part.view(Loaded)

    def store(self, name: str, value: Array, *at: int | slice) -> None:
        self.arrays[name][at] = value
        self.moved[name, "write", self.sizes[name]] += self.arrays[name][at].size

    def add(self, name: str, value: Array, *at: int | slice) -> None:
        self.arrays[name][at] += value
        self.moved[name, "write", self.sizes[name]] += value.size
        self.moved[name, "read", self.sizes[name]] += (self.shape.kappa - 1) * value.size

    def hold(self, phase: int, *arrays: Array) -> None:
        """State the tensors that are on chip now."""
        self.on_chip[phase] = max(self.on_chip[phase], sum(array.size for array in arrays))


def spans(length: int, block: int) -> Iterator[slice]:
    return (slice(at, min(at + block, length)) for at in range(0, length, block))


def size_of(span: slice) -> int:
    return span.stop - span.start


@dataclass
class Softmax:
    """Running maximum, sum and weighted sum of a tile of rows."""

    m_i: Array
    l_i: Array
    acc: Array

    @staticmethod
    def start(rows: int, width: int) -> Softmax:
        return Softmax(np.full(rows, -np.inf), np.zeros(rows), np.zeros((rows, width)))

    def probabilities(self, s: Array) -> tuple[Array, Array]:
        """Add a tile of scores; return exp(s - max), and the factor of earlier sums."""
        top = np.maximum(self.m_i, s.max(axis=1))
        base = np.where(top == -np.inf, 0.0, top)  # rows that keep nothing so far
        shrink, p = np.exp(self.m_i - base), exponentials(s - base[:, None])
        self.m_i, self.l_i = top, shrink * self.l_i + p.sum(axis=1)
        return p, shrink[:, None]

    def step(self, s: Array, v: Array) -> None:
        p, shrink = self.probabilities(s)
        self.acc = shrink * self.acc + p @ v

    @property
    def out(self) -> Array:
        return self.acc / np.where(self.l_i == 0, 1.0, self.l_i)[:, None]

    @property
    def lse(self) -> Array:
        with np.errstate(divide="ignore"):
            return self.m_i + np.log(self.l_i)


def scores(q: Array, k: Array, keep: NDArray[np.bool_]) -> Array:
    return np.where(keep, q @ k.T, -np.inf).view(Loaded)


def chunked_scores(
    m: SlowMemory, phase: int, left: tuple[str, int], r: slice, right: str, c: slice, *also: Array
) -> Array:
    """Return left[r] right[c]^T, with B_d columns of both on chip at a time."""
    s = np.zeros((size_of(r), size_of(c)))
    for e in spans(m.arrays[right].shape[1], m.shape.B_d):
        a, b = m.load(*left, r, e), m.load(right, c, e)
        s += a @ b.T
        m.hold(phase, s, a, b, *also)
    return s


def reference(m: SlowMemory, shared_kv: bool = False) -> dict[str, Array]:
    """Return outputs and gradients by dense formulas; `dout` is in memory."""
    q, k, dout = m.arrays["q"], m.arrays["k"], m.arrays["dout"]
    v = k[:, : m.shape.v] if shared_kv else m.arrays["v"]
    s = np.where(m.keep, q @ k.T, -np.inf)
    top = s.max(axis=-1)
    base = np.where(top == -np.inf, 0.0, top)[..., None]
    total = np.exp(s - base).sum(axis=-1)
    p = np.exp(s - base) / np.where(total == 0, 1.0, total)[..., None]
    out = p @ v
    delta = (out * dout).sum(axis=-1)
    ds = p * (dout @ v.T - delta[..., None])
    return {
        "out": out,
        "lse": np.array([[math.log(x) if x else -math.inf for x in row] for row in total]) + top,
        "delta": delta,
        "dq": ds @ k,
        "dk": np.einsum("hrc,hrd->cd", ds, q),
        "dv": np.einsum("hrc,hrd->cd", p, dout),
        "m_i, l_i": np.stack([top, total], axis=-1),
    }
