"""The forward schedules as loops over tiles; see slow_memory.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.theory.slow_memory import (
    SlowMemory,
    Softmax,
    chunked_scores,
    exponentials,
    scores,
    size_of,
    spans,
)


def q_stationary(m: SlowMemory, shared_kv: bool = False) -> None:
    t = m.shape
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            q, state = m.load("q", h, r), Softmax.start(size_of(r), t.v)
            for c in spans(t.columns, t.B_c):
                if not m.keep[r, c].any():
                    continue
                k = m.load("k", c)
                streamed = [k] if shared_kv else [k, m.load("v", c)]
                s = scores(q, k, m.keep[r, c])
                state.step(s, streamed[-1][:, : t.v])
                m.hold(0, q, state.acc, state.m_i, state.l_i, s, *streamed)
            m.store("out", state.out, h, r)
            m.store("lse", state.lse, h, r)


def q_stationary_mla(m: SlowMemory) -> None:
    q_stationary(m, shared_kv=True)


def kv_stationary(m: SlowMemory, literal: bool = False) -> None:
    t = m.shape
    m.new("acc", (t.g, t.rows, t.v), "fp32")
    m.new("m_i, l_i", (t.g, t.rows, 2), "fp32")
    if literal:
        for h in range(t.g):
            for r in spans(t.rows, t.B_r):
                m.store("acc", np.zeros((size_of(r), t.v)), h, r)
                m.store("m_i, l_i", np.array([-np.inf, 0.0]), h, r)
    for c in spans(t.columns, t.B_c):
        k, v = m.load("k", c), m.load("v", c)
        first, last = c.start == 0, c.stop == t.columns
        for h in range(t.g):
            for r in spans(t.rows, t.B_r):
                if not m.keep[r, c].any():
                    continue
                q, state = m.load("q", h, r), Softmax.start(size_of(r), t.v)
                if literal or not first:
                    statistics = m.load("m_i, l_i", h, r)
                    state = Softmax(statistics[:, 0], statistics[:, 1], m.load("acc", h, r))
                if literal:  # FA1 keeps the output normalised
                    state.acc *= state.l_i[:, None]
                s = scores(q, k, m.keep[r, c])
                state.step(s, v)
                m.hold(0, k, v, s, q, state.acc, state.m_i, state.l_i)
                if last and not literal:
                    m.store("out", state.out, h, r)
                    m.store("lse", state.lse, h, r)
                else:
                    m.store("acc", state.out if literal else state.acc, h, r)
                    m.store("m_i, l_i", np.stack([state.m_i, state.l_i], axis=1), h, r)
    if literal:
        m.arrays["out"] = m.arrays["acc"]


def kv_stationary_fa1(m: SlowMemory) -> None:
    kv_stationary(m, literal=True)


def split_kv(m: SlowMemory) -> None:
    t = m.shape
    tiles = list(spans(t.columns, t.B_c))
    each = -(-len(tiles) // t.splits)
    parts = [tiles[at : at + each] for at in range(0, len(tiles), each)]
    m.new("partial_out", (len(parts), t.g, t.rows, t.v), "fp32")
    m.new("partial_lse", (len(parts), t.g, t.rows), "fp32")
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            for i, part in enumerate(parts):
                q, state = m.load("q", h, r), Softmax.start(size_of(r), t.v)
                for c in part:
                    if not m.keep[r, c].any():
                        continue
                    k, v = m.load("k", c), m.load("v", c)
                    s = scores(q, k, m.keep[r, c])
                    state.step(s, v)
                    m.hold(0, q, state.acc, state.m_i, state.l_i, s, k, v)
                m.store("partial_out", state.out, i, h, r)
                m.store("partial_lse", state.lse, i, h, r)
            outs = np.stack([m.load("partial_out", i, h, r) for i in range(len(parts))])
            lses = np.stack([m.load("partial_lse", i, h, r) for i in range(len(parts))])
            top = lses.max(axis=0)
            weights = np.exp(lses - np.where(top == -np.inf, 0.0, top))
            total = weights.sum(axis=0)
            weights /= np.where(total == 0, 1.0, total)
            m.store("out", (weights[:, :, None] * outs).sum(axis=0), h, r)
            with np.errstate(divide="ignore"):
                m.store("lse", top + np.log(total), h, r)


def saha_ye(m: SlowMemory) -> None:
    t = m.shape
    m.new("p", (t.g, t.rows, t.columns), "fp32")
    m.new("row_sum", (t.g, t.rows), "fp32")
    for h in range(t.g):
        for r in spans(t.rows, t.B):
            row_sum = np.zeros(size_of(r))
            for c in spans(t.columns, t.B):
                a = np.zeros((size_of(r), size_of(c)))
                for e in spans(t.qk, t.B):
                    q, k = m.load("q", h, r, e), m.load("k", c, e)
                    a += q @ k.T
                    m.hold(0, a, q, k, row_sum)
                p = exponentials(a)
                m.store("p", p, h, r, c)
                row_sum += p.sum(axis=1)
            m.store("row_sum", row_sum, h, r)
        for r in spans(t.rows, t.B):
            row_sum = m.load("row_sum", h, r)
            for e in spans(t.v, t.B):
                acc = np.zeros((size_of(r), size_of(e)))
                for c in spans(t.columns, t.B):
                    p, v = m.load("p", h, r, c), m.load("v", c, e)
                    acc += p @ v / row_sum[:, None]
                    m.hold(0, acc, p, v, row_sum)
                m.store("out", acc, h, r, e)


def small_cache(m: SlowMemory, size: str = "element") -> None:
    """Only the kept entries of S are held and stored: all, or those of a sparse mask."""
    t = m.shape
    m.new("s", (t.g, t.rows, t.columns), size)
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            state = Softmax.start(size_of(r), 0)
            for c in spans(t.columns, t.B_c):
                keep = m.keep[r, c]
                s = np.zeros((size_of(r), size_of(c)))
                for e in spans(t.qk, t.B_d):
                    q, k = m.load("q", h, r, e), m.load("k", c, e)
                    s += q @ k.T
                    m.hold(0, s[keep], q, k, state.m_i, state.l_i)
                state.step(np.where(keep, s, -np.inf), np.zeros((size_of(c), 0)))
                m.arrays["s"][h, r, c] = np.where(keep, s, -np.inf)
                m.moved["s", "write", size] += keep.sum()
            m.store("lse", state.lse, h, r)
        for r in spans(t.rows, t.B_p):
            lse = m.load("lse", h, r)
            base = np.where(lse == -np.inf, 0.0, lse)
            for e in spans(t.v, t.B_e):
                acc = np.zeros((size_of(r), size_of(e)))
                for c in spans(t.columns, t.B_k):
                    s, v = m.arrays["s"][h, r, c], m.load("v", c, e)
                    m.moved["s", "read", size] += m.keep[r, c].sum()
                    acc += exponentials(s - base[:, None]) @ v
                    m.hold(1, acc, s[m.keep[r, c]], v, lse)
                m.store("out", acc, h, r, e)


def small_cache_fp32(m: SlowMemory) -> None:
    small_cache(m, "fp32")


def s_stationary(m: SlowMemory) -> None:
    t = m.shape
    m.new("acc", (t.g, t.rows, t.v), "fp32")
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            state = Softmax.start(size_of(r), 0)
            for c in spans(t.columns, t.B_c):
                s = chunked_scores(m, 0, ("q", h), r, "k", c, state.m_i, state.l_i)
                p, shrink = state.probabilities(s)
                for e in spans(t.v, t.B_e):
                    v = m.load("v", c, e)
                    before = m.load("acc", h, r, e) if c.start else 0.0
                    acc = shrink * before + p @ v
                    m.hold(1, p, state.m_i, state.l_i, acc, v)
                    if c.stop == t.columns:
                        m.store("out", acc / state.l_i[:, None], h, r, e)
                    else:
                        m.store("acc", acc, h, r, e)
            m.store("lse", state.lse, h, r)


def o_stationary(m: SlowMemory) -> None:
    t = m.shape
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            state = Softmax.start(size_of(r), t.v)
            for c in spans(t.columns, t.B_c):
                own = state.acc, state.m_i, state.l_i
                s = chunked_scores(m, 0, ("q", h), r, "k", c, *own)
                p, shrink = state.probabilities(s)
                state.acc *= shrink
                for e in spans(t.v, t.B_e):
                    v = m.load("v", c, e)
                    state.acc[:, e] += p @ v
                    m.hold(1, *own, p, v)
            m.store("out", state.out, h, r)
            m.store("lse", state.lse, h, r)


def v_split(m: SlowMemory) -> None:
    t = m.shape
    for h in range(t.g):
        for e in spans(t.v, t.B_e):
            for r in spans(t.rows, t.B_r):
                q, state = m.load("q", h, r), Softmax.start(size_of(r), size_of(e))
                for c in spans(t.columns, t.B_c):
                    if not m.keep[r, c].any():
                        continue
                    k, v = m.load("k", c), m.load("v", c, e)
                    s = scores(q, k, m.keep[r, c])
                    state.step(s, v)
                    m.hold(0, q, state.acc, state.m_i, state.l_i, s, k, v)
                m.store("out", state.out, h, r, e)
                if e.start == 0:
                    m.store("lse", state.lse, h, r)


FORWARD: dict[str, Callable[[SlowMemory], None]] = {
    "fwd_q_stationary": q_stationary,
    "fwd_q_stationary_mla": q_stationary_mla,
    "fwd_kv_stationary_fa1": kv_stationary_fa1,
    "fwd_kv_stationary": kv_stationary,
    "fwd_split_kv": split_kv,
    "fwd_saha_ye": saha_ye,
    "fwd_small_cache": small_cache,
    "fwd_small_cache_fp32": small_cache_fp32,
    "fwd_sparse_small_cache": small_cache,
    "fwd_s_stationary": s_stationary,
    "fwd_o_stationary": o_stationary,
    "fwd_v_split": v_split,
}
