"""Schedules: each one executed against a memory that counts, and compared word by word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import sympy as sp
from numpy.typing import NDArray

from tests.theory.backward_simulations import BACKWARD
from tests.theory.forward_simulations import FORWARD
from tests.theory.slow_memory import WORK, Key, Shape, SlowMemory, reference, spans
from tilegen.kernels.config import Kernel
from tilegen.model import symbols
from tilegen.model.bounds import bounds_of, partition_bound, product_bound
from tilegen.model.symbols import UNMASKED, V_kv, V_q
from tilegen.model.traffic import terms_of
from tilegen.theory.schedules import PACKED_UNMASKED, SCHEDULES, Schedule, packed

SIMULATED = FORWARD | BACKWARD

SHAPES = {
    "aligned": Shape(rows=24, columns=16, qk=6, v=6, B_r=4, B_c=8, B_e=3, B=2),
    "wide_v": Shape(rows=8, columns=24, qk=4, v=12, B_r=8, B_c=4, B_p=2, B_k=4, B=4),
    "ragged": Shape(rows=13, columns=17, qk=7, v=5, B_r=4, B_c=5, B_d=3, kappa=1, splits=3),
    "longer_q": Shape(rows=29, columns=6, qk=5, v=8, B_r=7, B_c=4, B_k=5, B_p=6, splits=1),
    "one_row": Shape(rows=1, columns=23, qk=5, v=5, B_r=4, B_c=3, splits=4, B=3),
    "one_tile": Shape(rows=5, columns=6, qk=4, v=3, B_r=8, B_c=8, B_e=4, B_d=8, splits=9),
    "group": Shape(g=3, rows=10, columns=14, qk=6, v=4, B_r=4, B_c=4, kappa=1),
    "group_of_rows": Shape(g=5, rows=1, columns=11, qk=3, v=2, B_r=2, B_c=4, B_p=2),
}


def masks(rows: int, columns: int) -> dict[str, NDArray[np.bool_]]:
    i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
    random = np.random.default_rng(3).random((rows, columns)) < 0.2
    return {
        "full": np.ones((rows, columns), dtype=bool),
        "causal": j <= i,
        "window": (j <= i) & (i - j < 3),  # some rows keep nothing where columns are few
        "blocks": i // 4 == j // 4,
        "random": random,
    }


def run(name: str, shape: Shape, keep: NDArray[np.bool_]) -> SlowMemory:
    """Execute a schedule and check its results."""
    random = np.random.default_rng(7).standard_normal
    memory = SlowMemory(shape, keep)
    inputs = {
        "q": random((shape.g, shape.rows, shape.qk)),
        "k": random((shape.columns, max(shape.qk, shape.v) if name.endswith("mla") else shape.qk)),
        "v": random((shape.columns, shape.v)),
        "dout": random((shape.g, shape.rows, shape.v)),
    }
    if name.endswith("mla"):
        inputs["q"] = random((shape.g, shape.rows, inputs["k"].shape[1]))
    memory.arrays = inputs
    expected = reference(memory, shared_kv=name.endswith("mla"))
    memory.arrays |= {key: value.copy() for key, value in expected.items()}
    memory.arrays["dq_accum"] = expected["dq"].copy()
    fp32 = ("lse", "delta", "m_i, l_i", "dq_accum")
    memory.sizes = {key: "fp32" if key in fp32 else "element" for key in memory.arrays}
    results = {
        "bwd_preprocess": ("delta",),
        "bwd_dkdv": ("dk", "dv"),
        "bwd_dkdv_per_head": ("dk", "dv"),
        "bwd_dq": ("dq",),
        "bwd_convert": ("dq",),
        "fwd_saha_ye": ("out",),
        "fwd_kv_stationary_fa1": ("out",),
    }.get(name, ("out", "lse") if name in FORWARD else ("dq", "dk", "dv"))
    for result in results:
        memory.arrays[result] = np.full_like(memory.arrays[result], np.nan)
    WORK.clear()
    SIMULATED[name](memory)
    for result in results:
        np.testing.assert_allclose(memory.arrays[result], expected[result], atol=1e-9)
    return memory


def values(shape: Shape, keep: NDArray[np.bool_], qk: int) -> dict[sp.Symbol, int]:
    """Values of the formulas' symbols."""
    rows, columns = list(spans(shape.rows, shape.B_r)), list(spans(shape.columns, shape.B_c))
    visited = [(r, c) for r in rows for c in columns if keep[r, c].any()]
    sides = {name: getattr(shape, name) for name in ("B_r", "B_c", "B_d", "B_e", "B_k", "B_p", "B")}
    numbers = sides | {
        "g": shape.g,
        "N_q": shape.rows,
        "N_kv": shape.columns,
        "d_qk": qk,
        "d_v": shape.v,
        "V_kv": sum(c.stop - c.start for _, c in visited),
        "V_q": sum(r.stop - r.start for r, _ in visited),
        "nnz": int(keep.sum()),
        "n": 1,
        "n_s": shape.splits,
        "kappa": shape.kappa,
    }
    return {getattr(symbols, name): value for name, value in numbers.items()}


def counted(schedule: Schedule, numbers: dict[sp.Symbol, int]) -> Counter[Key]:
    """The formulas' words, without tensors that do not move."""
    given = {symbol.name: number for symbol, number in numbers.items()}
    count: Counter[Key] = Counter()
    for term in schedule.terms:
        names, words = evaluator(term.words)
        value = words(*(given[name] for name in names))
        assert value == int(value)
        count[term.tensor, term.direction, term.size] += int(value)
    return +count


@cache
def evaluator(words: sp.Expr) -> tuple[list[str], Callable[..., Any]]:
    """Return the names of a formula's symbols, and the formula as a function of their numbers."""
    symbols = sorted(words.free_symbols, key=str)
    return [symbol.name for symbol in symbols], sp.lambdify(symbols, words, "math")


CASES = [
    (name, shape, mask)
    for name, schedule in SCHEDULES.items()
    for shape in SHAPES
    for mask in ("full", "causal", "window", "blocks", "random")
    if mask == "full"
    or (schedule.masks and shape in ("aligned", "ragged", "longer_q", "group"))
    or ("sparse" in name and mask == "random")
]


@pytest.mark.sampled
@pytest.mark.parametrize("name, shape, mask", CASES)
def test_words_equal_those_of_the_execution(name: str, shape: str, mask: str) -> None:
    """Reads and writes of every tensor and size class, as integers."""
    keep = masks(SHAPES[shape].rows, SHAPES[shape].columns)[mask]
    memory = run(name, SHAPES[shape], keep)
    numbers = values(SHAPES[shape], keep, memory.arrays["q"].shape[2])
    assert counted(SCHEDULES[name], numbers) == +memory.moved


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", ["aligned", "wide_v"])
def test_footprint_is_the_most_that_is_held(name: str, shape: str) -> None:
    """Tiles that divide everything: equal in each phase. Cut-off tiles hold less."""
    keep = masks(SHAPES[shape].rows, SHAPES[shape].columns)["full"]
    for chunk in (2, 4):
        of_chunk = replace(SHAPES[shape], B_d=2, B_k=chunk, B_p=4)
        memory = run(name, of_chunk, keep)
        numbers = values(of_chunk, keep, memory.arrays["q"].shape[2])
        phases = [
            int(sp.Add(*(held.words for held in phase)).subs(symbols.s, 1).subs(numbers))
            for phase in SCHEDULES[name].phases
        ]
        assert phases == [memory.on_chip[phase] for phase in range(len(phases))]
        assert SCHEDULES[name].footprint.subs(symbols.s, 1).subs(numbers) == max(phases)


@pytest.mark.parametrize("name", SCHEDULES)
def test_cut_off_tiles_hold_no_more(name: str) -> None:
    for shape in ("ragged", "longer_q", "group"):
        keep = masks(SHAPES[shape].rows, SHAPES[shape].columns)["full"]
        memory = run(name, SHAPES[shape], keep)
        numbers = values(SHAPES[shape], keep, memory.arrays["q"].shape[2])
        limit = SCHEDULES[name].footprint.subs(symbols.s, 1).subs(numbers)
        assert max(memory.on_chip.values()) <= limit


@pytest.mark.sampled
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shape", ["aligned", "ragged", "group"])
def test_flops_and_exponentials_equal_those_of_the_execution(name: str, shape: str) -> None:
    keep = masks(SHAPES[shape].rows, SHAPES[shape].columns)["full"]
    memory = run(name, SHAPES[shape], keep)
    numbers = values(SHAPES[shape], keep, memory.arrays["q"].shape[2])
    assert SCHEDULES[name].flops.subs(numbers) == WORK["flops"]
    assert SCHEDULES[name].exps.subs(numbers) == WORK["exps"]


def test_the_small_cache_backward_adds_no_flops() -> None:
    """Five products and one exponential, as fused; two passes take seven and two."""
    five, small, passes = (
        SCHEDULES["bwd_fused"],
        SCHEDULES["bwd_small_cache"],
        [SCHEDULES["bwd_dkdv"], SCHEDULES["bwd_dq"]],
    )
    assert (five.flops, five.exps) == (small.flops, small.exps)
    equal = {symbols.d_qk: symbols.d_v}
    seven = sum(one.flops for one in passes).subs(equal)
    assert sp.simplify(seven / small.flops.subs(equal)) == sp.Rational(7, 5)
    assert sp.simplify(sum(one.exps for one in passes) / small.exps) == 2


def test_every_formula_is_held_to_the_word() -> None:
    """Each term of each schedule, one word more: the comparison sees it."""
    shape = replace(SHAPES["ragged"], g=2, kappa=2)
    keep = masks(shape.rows, shape.columns)["full"]
    for name, schedule in SCHEDULES.items():
        memory = run(name, shape, keep)
        numbers = values(shape, keep, memory.arrays["q"].shape[2])
        assert counted(schedule, numbers) == +memory.moved
        for i, term in enumerate(schedule.terms):
            for changed in (
                replace(term, words=term.words + 1),
                replace(term, direction="write" if term.direction == "read" else "read"),
                replace(term, size="fp32" if term.size == "element" else "element"),
            ):
                terms = (*schedule.terms[:i], changed, *schedule.terms[i + 1 :])
                assert counted(replace(schedule, terms=terms), numbers) != +memory.moved


@pytest.mark.parametrize(
    "name", [name for name, one in SCHEDULES.items() if "per_head" not in name]
)
@pytest.mark.parametrize("shape", ["group", "group_of_rows"])
def test_packed_groups(name: str, shape: str) -> None:
    """The g heads of a group as one head of g N_q rows: the formula with R = g N_q."""
    group = SHAPES[shape]
    changed = replace(group, g=1, rows=group.g * group.rows)
    memory = run(name, changed, np.ones((changed.rows, changed.columns), dtype=bool))
    keep = np.ones((group.rows, group.columns), dtype=bool)
    numbers = values(group, keep, memory.arrays["q"].shape[2])
    del numbers[V_kv], numbers[V_q]
    visited = {symbol: value.subs(numbers) for symbol, value in PACKED_UNMASKED.items()}
    if "sparse" in name:
        numbers[symbols.nnz] *= group.g  # of the packed rows
    assert counted(packed(SCHEDULES[name]), numbers | visited) == +memory.moved


def test_packing_divides_decoding_traffic_by_the_group() -> None:
    """N_q = 1: K and V once for min(g, B_r) heads instead of once per head."""
    schedule = SCHEDULES["fwd_q_stationary"]
    numbers = {symbols.g: 8, symbols.N_q: 1, symbols.N_kv: 999, symbols.B_r: 16, symbols.d_qk: 64}
    both = [
        one.terms[1].words.subs(visited).subs(numbers)
        for one, visited in ((schedule, UNMASKED), (packed(schedule), PACKED_UNMASKED))
    ]
    assert both[0] == 8 * both[1] == 8 * 999 * 64


@pytest.mark.parametrize("kernel", ["fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"])
def test_emitted_kernels_are_among_the_schedules(kernel: Kernel) -> None:
    name = {"fwd": "fwd_q_stationary"}.get(kernel, kernel)
    assert SCHEDULES[name].terms == terms_of(kernel)


def test_bytes_count_each_tensor_in_its_own_size() -> None:
    """Reads and writes apart, and the sum; fused adds the kernel that rounds dQ."""
    e = symbols.e
    split = SCHEDULES["fwd_split_kv"]
    assert sp.expand(split.bytes() - split.bytes("read") - split.bytes("write")) == 0
    assert sp.expand(split.words() - split.words("read") - split.words("write")) == 0
    rows = symbols.g * symbols.N_q * symbols.d_qk
    assert sp.expand(SCHEDULES["bwd_convert"].bytes() - rows * (4 + e)) == 0
    forward = SCHEDULES["fwd_q_stationary"]
    assert (
        sp.expand(forward.bytes().subs(e, 1) - forward.words()).subs({symbols.g: 1, symbols.N_q: 5})
        == 15
    )  # the lse of five rows takes three bytes more than a word of one byte
    assert sp.expand(forward.weighted_words().subs(symbols.alpha, 1) - forward.words()) == 0
    assert forward.footprint_bytes.subs(e, 4) == 4 * forward.footprint


def test_a_schedule_says_where_it_comes_from() -> None:
    assert all(schedule.citation and schedule.name == name for name, schedule in SCHEDULES.items())
    assert set(SIMULATED) == set(SCHEDULES)


def long_sequences(head_dim: int) -> dict[sp.Symbol, int]:
    """Values of the symbols of bounds and schedules for 2**16 queries and keys."""
    length = 2**16
    ones = dict.fromkeys(("g", "n", "n_s", "kappa", "H_kv", "P", "s", "B_d", "B_k"), 1)
    same = dict.fromkeys(("N_q", "N_kv", "w", "n_q", "n_kv"), length) | {"nnz": length**2}
    same |= {"u": length // 2, "w_b": 2 * length - 1}
    numbers = {getattr(symbols, key): value for key, value in (ones | same).items()}
    return numbers | {symbols.d_qk: head_dim, symbols.d_v: head_dim}


@cache
def least_words(is_forward: bool, head_dim: int) -> Callable[[int], float]:
    """Return the lower bound as a function of M."""
    bound = partition_bound()
    if is_forward:  # in words of four bytes, as all are in fp32
        bound = sp.Max(*(one.subs(symbols.e, 4) / 4 for one in bounds_of("fwd").values()))
    largest = sp.Max(bound, product_bound()).subs(long_sequences(head_dim))
    return sp.lambdify(symbols.M, largest, "math")


FORMS_SCORES = [name for name, one in SCHEDULES.items() if one.flops != 0 and "mla" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS_SCORES)
@pytest.mark.parametrize("head_dim", [8, 64, 512])
def test_no_schedule_beats_the_bounds(name: str, head_dim: int) -> None:
    """With as much fast memory as its tiles take, at any tiles; all words equal."""
    schedule, numbers = SCHEDULES[name], long_sequences(head_dim)
    rows, columns = sp.symbols("rows columns")
    tiles = dict.fromkeys((symbols.B_r, symbols.B_p, symbols.B), rows)
    tiles |= dict.fromkeys((symbols.B_c, symbols.B_e), columns)
    words, held = (
        sp.lambdify((rows, columns), expression.subs(UNMASKED).subs(numbers).subs(tiles), "math")
        for expression in (schedule.words(), schedule.footprint)
    )
    least = least_words(name.startswith("fwd"), head_dim)
    for side in (2, 16, 128, 1024):
        for other in (2, 64, 1024):
            assert words(side, other) >= least(held(side, other))
