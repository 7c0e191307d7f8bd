"""The forward for Hopper in the memory model: right under many schedules and under all there are,
for each form of mask and score, and each deliberate break of it noticed whatever the schedule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tests.support.problems import task
from tilegen.model.visits import visits_of

pytest.importorskip("greenlet", reason="greenlet, which runs partitions in the memory model")

from tests.gluon.breaks import BREAKS, EQUIVALENT, HARMLESS, Break
from tests.gluon.memory_model import Fault, run
from tests.gluon.memory_model.schedules import EverySchedule, Schedule
from tests.gluon.runs import KERNEL, TWINS, Case, case_of, is_right, left_out, results, verdict
from tilegen.kernels.config import TileConfig

SMALL = case_of("b1 hq1 hkv1 q128 kv128 d64 bf16 causal")
RAGGED = case_of("b1 hq2 hkv1 q300 kv230 d64 bf16 causal", "m128n64w8s2tp132", programs=2)
"""Row tiles of six, and tiles of keys of up to four: both rings go round twice."""
CASES = [
    RAGGED,
    case_of("b1 hq1 hkv1 q70 kv400 d64 bf16 full", "m128n64w8s3t"),
    case_of("b2 hq4 hkv2 q200 kv130 d64 fp16 causal", "m128n128w8s2t"),
    case_of("b1 hq4 hkv1 q129 kv65 d128 bf16 causal"),
    case_of("b1 hq2 hkv2 q1 kv300 d128 bf16 full", "m128n128w8s2t"),
    case_of("b1 hq1 hkv1 q256 kv256 d128 fp16 causal", "m128n128w8s2tu"),
    case_of("b1 hq1 hkv1 q128 kv1 d128 bf16 full", "m128n64w8s3t"),
    case_of("b1 hq1 hkv1 q400 kv300 d192/128 bf16 causal", "m192n64w12s2tp132", programs=2),
]
MASKS = (
    *("full", "causal", "causal(bottom_right)", "window(60,0)", "window(30,20)", "prefix_lm(100)"),
    *("global(4)", "dilated(3)", "causal&dilated(2)", "keep(less(k+3*h,q))", "tree(@:200)"),
    *("block_sparse(@:50,64)", "window(20,20,bottom_right)", "neighborhood(10x20,5x5)"),
    *("kv_prefix(150)", "kv_prefix(@b:64)&causal"),
)
SCORES = ("5*tanh(s/5)", "s+t0[h]*(k-q),float32", "s,sinks", "where(less(k-q,30),s,-inf)")
TILES = {"m128n64w8s2t": 0, "m128n128w8s2tp132u": 2}
FORMS = [
    *(f"b1 hq2 hkv1 q200 kv200 d64 bf16 {mask}" for mask in MASKS),
    *(f"b2 hq1 hkv1 q150 kv200 d64 fp16 causal score({score})" for score in SCORES),
    *(
        f"b1 hq1 hkv1 q{q} kv{kv} d64 bf16 causal(bottom_right)"
        for q, kv in [(400, 130), (65, 400)]
    ),
    *(f"b1 hq1 hkv1 q130 kv200 d{dims} bf16 window(60,0)" for dims in ("128", "192/128", "256")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_bytes(case: Case) -> None:
    for seed in range(8):
        checks, report = results(case, seed=seed)
        assert is_right(case, checks)
    assert sum(report.written_bytes.values()) == written(case)
    assert sum(report.read_bytes.values()) == read(case)


@pytest.mark.sampled
@pytest.mark.parametrize("config", TILES)
@pytest.mark.parametrize("text", FORMS)
def test_each_form_of_mask_and_score(text: str, config: str) -> None:
    case = case_of(text, config.replace("n128", "n64") if "d256" in text else config, TILES[config])
    for seed in range(8):
        assert verdict(case, case.source, seed) == "right"


@pytest.mark.parametrize("layout", ["heads inside of rows", "every other row"])
def test_strides_that_a_descriptor_holds(layout: str) -> None:
    case = case_of("b2 hq4 hkv2 q130 kv100 d64 bf16 causal")
    inputs, source = case.inputs, case.source

    def laid(x: torch.Tensor) -> torch.Tensor:
        if layout == "every other row":
            return x.repeat_interleave(2, 2)[:, :, ::2]
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    q, k, v = map(laid, (inputs.q, inputs.k, inputs.v))
    checks, _ = run(source, q, k, v, 64**-0.5, twins=TWINS, seed=1)
    assert is_right(case, checks)
    assert checks[0].is_contiguous() == (layout == "every other row")


@pytest.mark.parametrize("config", TILES)
def test_keys_beyond_a_length_reach_no_row(config: str) -> None:
    """Even if they are NaN, whose product with 0 is NaN."""
    case = case_of("b1 hq2 hkv1 q200 kv230 d64 bf16 kv_prefix(100)", config, TILES[config])
    q, k, v = case.inputs.q, case.inputs.k.clone(), case.inputs.v.clone()
    k[:, :, 100:], v[:, :, 100:] = float("nan"), float("inf")
    for seed in range(4):
        checks, _ = run(case.source, q, k, v, 64**-0.5, twins=TWINS, bind=case.bind, seed=seed)
        assert is_right(case, checks)


def read(case: Case) -> int:
    """Return the bytes that a program for each row tile reads: its queries, and the keys and values
    that any of them sees, in whole tiles inside of the sequence."""
    problem, config = case.problem, TileConfig.parse(case.config)
    streamed = visits_of(task(KERNEL, problem), config.block_m, config.block_n).rows
    width = problem.head_dim_qk + problem.head_dim_v
    heads = problem.batch * problem.num_heads_q
    return heads * 2 * int(problem.seqlen_q * problem.head_dim_qk + width * streamed)


def written(case: Case) -> int:
    """Return the bytes of out and lse."""
    problem = case.problem
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    return rows * (2 * problem.head_dim_v + 4)


@pytest.mark.slow
def test_many_schedules_of_two_tiles() -> None:
    for seed in range(200):
        checks, _ = results(SMALL, seed=seed)
        assert is_right(SMALL, checks)


@pytest.mark.slow
def test_every_schedule_of_two_tiles() -> None:
    def run(schedule: Schedule) -> None:
        checks, _ = results(SMALL, schedule=lambda program: schedule)
        assert is_right(SMALL, checks)

    assert EverySchedule().each(run) > 500


def test_every_schedule_finds_possible_deadlocks() -> None:
    """Consumers that let each other go in turn hang where one of them comes first."""
    case = case_of("b1 hq1 hkv1 q256 kv256 d64 bf16 causal")
    broken = case.source.replace("    mbarrier.arrive(v_empty.index(last), count=1)\n", "", 1)
    with pytest.raises(Fault, match="nothing can go on"):
        EverySchedule().each(lambda order: results(case, broken, schedule=lambda program: order))


@pytest.mark.sampled
@pytest.mark.parametrize("broken", BREAKS, ids=str)
def test_breaks_are_noticed_in_every_schedule(broken: Break) -> None:
    source = broken.of(RAGGED.source)
    for seed in range(8):
        verdicts = verdict(RAGGED, source, seed)
        assert re.search(broken.says, verdicts), verdicts


@pytest.mark.sampled
@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_harmless_changes_are_not(change: Break) -> None:
    source = change.of(RAGGED.source)
    assert {verdict(RAGGED, source, seed) for seed in range(8)} == {"right"}


def test_there_are_breaks_enough() -> None:
    assert len(BREAKS) >= 45
    assert len({one.name for one in BREAKS}) == len(BREAKS)


def test_a_seed_is_enough() -> None:
    """The same seed gives the same fault, word for word; the message names it."""
    broken = next(one for one in BREAKS if one.name == "one consumer lets go")
    source = broken.of(RAGGED.source)
    faults = [verdict(RAGGED, source, seed) for seed in (3, 3, 4)]
    assert faults[0] == faults[1]
    assert "seed 3" in faults[0]
    assert "seed 4" in faults[2]


# --------------------------------------------------------------------------------------------------
# All statements of the device code

NO_KEYS = case_of("b1 hq1 hkv1 q600 kv330 d64 bf16 causal(bottom_right)", "m128n64w8s2tp132", 2)
"""The first row tile keeps no keys: its output still takes the place of its queries."""
TURNS = case_of("b1 hq1 hkv1 q600 kv600 d64 bf16 causal", "m128n64w8s2tp132u", 2)
CUT = case_of("b1 hq1 hkv1 q500 kv230 d64 bf16 kv_prefix(200)", "m128n64w8s2tp132", 2)
"""The last tile of values is cleared from the 200th key on."""
ORDERS_TIME_ALONE = {"_turn(PART)": 2}
"""Statements that may be left out: a turn that is not waited for changes when products run."""


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("case", [RAGGED, NO_KEYS, TURNS, CUT], ids=str)
def test_no_statement_can_be_left_out(case: Case) -> None:
    tried, spared = left_out(case)
    assert tried >= 28
    assert spared == (ORDERS_TIME_ALONE if case is TURNS else {})


def test_a_row_without_kept_keys_in_a_tile_is_no_nan() -> None:
    case = case_of("b1 hq1 hkv1 q128 kv128 d64 bf16 window(10,0)")
    broken = case.source.replace("m_new) if MASKED else m_new", "m_new) if False else m_new")
    assert broken != case.source
    assert {verdict(case, broken, seed) for seed in range(4)} == {"wrong"}


def steps_of(source: str) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """Yield each statement of the device functions with the one after it."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            for node in ast.walk(function):
                for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
                    if isinstance(body, list):
                        yield from pairwise(body)


_ACTS = re.compile(
    r"(?:mbarrier\.(?:init|expect|arrive|wait)|tma|_tma|fence_async_shared|warpgroup_mma_wait|"
    r"warpgroup_mma|tl\.store|_softmax|_stay)(?=[(._])|(?<=^)q\.store"
)


def act(text: list[str]) -> str:
    """Return the effect of a statement, by its name in EQUIVALENT; empty for arithmetic."""
    actual = _ACTS.search(text[0].strip())
    return actual[0].removesuffix("(") if actual else ""


@pytest.mark.slow
def test_neighbours_that_may_change_places_are_known() -> None:
    source = RAGGED.source
    lines = source.splitlines()
    used: set[str] = set()
    for left, right in steps_of(source):
        first = lines[left.lineno - 1 : left.end_lineno]
        second = lines[right.lineno - 1 : right.end_lineno]
        if not (act(first) and act(second)):
            continue  # arithmetic and names: the compiler moves those itself
        between = lines[left.end_lineno : right.lineno - 1]
        changed = [*lines[: left.lineno - 1], *second, *between, *first, *lines[right.end_lineno :]]
        try:
            verdicts = {verdict(RAGGED, "\n".join(changed), seed) for seed in range(3)}
        except NameError:
            continue
        if "right" in verdicts:
            assert verdicts == {"right"}, (first, second, verdicts)
            used.add(f"{act(first)} | {act(second)}")
    assert used == set(EQUIVALENT)
