"""The backward schedules as loops over tiles; see slow_memory.py."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.theory.slow_memory import (
    Array,
    SlowMemory,
    chunked_scores,
    exponentials,
    scores,
    size_of,
    spans,
)


def gradients(s: Array, lse: Array, delta: Array, v: Array, dout: Array) -> tuple[Array, Array]:
    """Return P and dS of a tile."""
    p = exponentials(s - np.where(lse == -np.inf, 0.0, lse)[:, None])
    return p, p * (dout @ v.T - delta[:, None])


def preprocess(m: SlowMemory) -> None:
    t = m.shape
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            out, dout = m.load("out", h, r), m.load("dout", h, r)
            delta = (out * dout).sum(axis=1)
            m.hold(0, out, dout, delta)
            m.store("delta", delta, h, r)


def dkdv(m: SlowMemory, per_head: bool = False) -> None:
    t = m.shape
    m.new("partial_dk", (t.g, t.columns, t.qk), "fp32")
    m.new("partial_dv", (t.g, t.columns, t.v), "fp32")
    groups = [[h] for h in range(t.g)] if per_head else [list(range(t.g))]
    for heads in groups:
        for c in spans(t.columns, t.B_c):
            k, v = m.load("k", c), m.load("v", c)
            dk, dv = np.zeros_like(k), np.zeros_like(v)
            for h in heads:
                for r in spans(t.rows, t.B_r):
                    if not m.keep[r, c].any():
                        continue
                    q, dout = m.load("q", h, r), m.load("dout", h, r)
                    lse, delta = m.load("lse", h, r), m.load("delta", h, r)
                    p, ds = gradients(scores(q, k, m.keep[r, c]), lse, delta, v, dout)
                    dv += p.T @ dout
                    dk += ds.T @ q
                    m.hold(0, k, v, dk, dv, p, ds, q, dout, lse, delta)
            if per_head:
                m.store("partial_dk", dk, heads[0], c)
                m.store("partial_dv", dv, heads[0], c)
            else:
                m.store("dk", dk, c)
                m.store("dv", dv, c)
    if per_head:
        for c in spans(t.columns, t.B_c):
            m.store("dk", sum(m.load("partial_dk", h, c) for h in range(t.g)), c)
            m.store("dv", sum(m.load("partial_dv", h, c) for h in range(t.g)), c)


def dkdv_per_head(m: SlowMemory) -> None:
    dkdv(m, per_head=True)


def dq(m: SlowMemory, fused: bool = False) -> None:
    t = m.shape
    if fused:
        m.new("dk_accum", (t.columns, t.qk), "fp32")
        m.new("dv_accum", (t.columns, t.v), "fp32")
        for c in spans(t.columns, t.B_c):
            m.store("dk_accum", np.zeros((size_of(c), t.qk)), c)
            m.store("dv_accum", np.zeros((size_of(c), t.v)), c)
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            q, dout = m.load("q", h, r), m.load("dout", h, r)
            lse, delta = m.load("lse", h, r), m.load("delta", h, r)
            acc = np.zeros_like(q)
            for c in spans(t.columns, t.B_c):
                if not m.keep[r, c].any():
                    continue
                k, v = m.load("k", c), m.load("v", c)
                p, ds = gradients(scores(q, k, m.keep[r, c]), lse, delta, v, dout)
                acc += ds @ k
                held = [q, dout, acc, lse, delta, p, ds, k, v]
                if fused:
                    dk, dv = ds.T @ q, p.T @ dout
                    m.add("dk_accum", dk, c)
                    m.add("dv_accum", dv, c)
                    held += [dk, dv]
                m.hold(0, *held)
            m.store("dq", acc, h, r)
    if fused:
        m.arrays |= {"dk": m.arrays["dk_accum"], "dv": m.arrays["dv_accum"]}


def fused_q_stationary(m: SlowMemory) -> None:
    dq(m, fused=True)


def fused(m: SlowMemory, literal: bool = False) -> None:
    t = m.shape
    m.new("dq_accum", (t.g, t.rows, t.qk), "fp32")
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            m.store("dq_accum", np.zeros((size_of(r), t.qk)), h, r)
    for c in spans(t.columns, t.B_c):
        k, v = m.load("k", c), m.load("v", c)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for h in range(t.g):
            for r in spans(t.rows, t.B_r):
                if not m.keep[r, c].any():
                    continue
                q, dout = m.load("q", h, r), m.load("dout", h, r)
                lse, delta = m.load("lse", h, r), m.load("delta", h, r)
                unused = [m.load("out", h, r)] if literal else []
                p, ds = gradients(scores(q, k, m.keep[r, c]), lse, delta, v, dout)
                dv += p.T @ dout
                dk += ds.T @ q
                part = ds @ k
                m.add("dq_accum", part, h, r)
                m.hold(0, k, v, dk, dv, p, ds, q, dout, lse, delta, part, *unused)
        m.store("dk", dk, c)
        m.store("dv", dv, c)
    m.arrays["dq"] = m.arrays["dq_accum"]


def fused_fa2(m: SlowMemory) -> None:
    fused(m, literal=True)


def convert(m: SlowMemory) -> None:
    t = m.shape
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            rows = m.load("dq_accum", h, r)
            m.hold(0, rows)
            m.store("dq", rows, h, r)


def fa1(m: SlowMemory) -> None:
    t = m.shape
    m.sizes["dq"] = "fp32"
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            m.store("dq", np.zeros((size_of(r), t.qk)), h, r)
    for c in spans(t.columns, t.B_c):
        m.store("dk", np.zeros((size_of(c), t.qk)), c)
        m.store("dv", np.zeros((size_of(c), t.v)), c)
    for c in spans(t.columns, t.B_c):
        k, v = m.load("k", c), m.load("v", c)
        dk, dv = np.zeros_like(k), np.zeros_like(v)
        for h in range(t.g):
            for r in spans(t.rows, t.B_r):
                if not m.keep[r, c].any():
                    continue
                q, out, dout = (m.load(name, h, r) for name in ("q", "out", "dout"))
                acc, statistics = m.load("dq", h, r), m.load("m_i, l_i", h, r)
                delta = (out * dout).sum(axis=1)
                with np.errstate(divide="ignore"):
                    lse = statistics[:, 0] + np.log(statistics[:, 1])
                p, ds = gradients(scores(q, k, m.keep[r, c]), lse, delta, v, dout)
                dv += p.T @ dout
                dk += ds.T @ q
                m.hold(0, k, v, dk, dv, p, ds, q, out, dout, acc, statistics, delta)
                m.store("dq", acc + ds @ k, h, r)
        m.store("dk", dk, c)
        m.store("dv", dv, c)


def small_cache(m: SlowMemory) -> None:
    t = m.shape
    m.new("p", (t.g, t.rows, t.columns))
    m.new("ds", (t.g, t.rows, t.columns))
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            lse = m.load("lse", h, r)
            for c in spans(t.columns, t.B_c):
                s = chunked_scores(m, 0, ("q", h), r, "k", c, lse)
                m.store("p", exponentials(s - lse[:, None]), h, r, c)
    _sum_over_rows(m, "p", "dout", "dv")
    for h in range(t.g):
        for r in spans(t.rows, t.B_r):
            delta = m.load("delta", h, r)
            for c in spans(t.columns, t.B_c):
                ds = chunked_scores(m, 0, ("dout", h), r, "v", c, delta) - delta[:, None]
                for e in spans(size_of(c), t.B_d):
                    piece = m.load("p", h, r, slice(c.start + e.start, c.start + e.stop))
                    ds[:, e] *= piece
                    m.hold(0, ds, piece, delta)
                m.store("ds", ds, h, r, c)
    for h in range(t.g):
        for r in spans(t.rows, t.B_p):
            for e in spans(t.qk, t.B_e):
                acc = np.zeros((size_of(r), size_of(e)))
                for c in spans(t.columns, t.B_k):
                    ds, k = m.load("ds", h, r, c), m.load("k", c, e)
                    acc += ds @ k
                    m.hold(1, acc, ds, k)
                m.store("dq", acc, h, r, e)
    _sum_over_rows(m, "ds", "q", "dk")


def _sum_over_rows(m: SlowMemory, square: str, rows: str, result: str) -> None:
    """Store square^T rows, summed over the rows of all heads."""
    t = m.shape
    for c in spans(t.columns, t.B_p):
        for e in spans(m.arrays[rows].shape[2], t.B_e):
            acc = np.zeros((size_of(c), size_of(e)))
            for h in range(t.g):
                for r in spans(t.rows, t.B_k):
                    left, right = m.load(square, h, r, c), m.load(rows, h, r, e)
                    acc += left.T @ right
                    m.hold(1, acc, left, right)
            m.store(result, acc, c, e)


BACKWARD: dict[str, Callable[[SlowMemory], None]] = {
    "bwd_preprocess": preprocess,
    "bwd_dkdv": dkdv,
    "bwd_dkdv_per_head": dkdv_per_head,
    "bwd_dq": dq,
    "bwd_fused": fused,
    "bwd_fused_fa2": fused_fa2,
    "bwd_convert": convert,
    "bwd_fused_q_stationary": fused_q_stationary,
    "bwd_fa1": fa1,
    "bwd_small_cache": small_cache,
}
