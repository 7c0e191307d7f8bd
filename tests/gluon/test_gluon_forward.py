"""The Gluon forward in the memory model: right under many schedules and under all there are, and
each deliberate break of it noticed whatever the schedule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.tasks import task
from tilegen.model.visits import visits_of

pytest.importorskip("greenlet", reason="greenlet, which runs partitions in the memory model")

from tests.conftest import CheckGolden
from tests.gluon.breaks import BREAKS, EQUIVALENT, HARMLESS, Break
from tests.gluon.forward import HopperForward
from tests.gluon.memory_model import Fault
from tests.gluon.memory_model.schedules import EverySchedule, Schedule
from tests.gluon.runs import TRITON, Case, is_right, results, verdict
from tilegen.errors import Unsupported
from tilegen.problem import AttentionProblem

SMALL = HopperForward(head_dim=64, block_n=64)
RAGGED = Case(SMALL, rows=300, keys=230)
"""Four tiles of keys: the ring goes round twice."""
CASES = [
    RAGGED,
    Case(HopperForward(head_dim=64, block_n=64, causal=False, stages=3), rows=70, keys=400),
    Case(HopperForward(head_dim=64, dtype="fp16", group_size=2), batch=2, heads=4, rows=200),
    Case(HopperForward(group_size=4, block_n=64), heads=4, rows=129, keys=65),
    Case(HopperForward(causal=False), heads=2, rows=1, keys=300),
    Case(HopperForward(dtype="fp16"), rows=256, keys=256),
    Case(HopperForward(stages=3, block_n=64), rows=128, keys=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_and_bytes(case: Case) -> None:
    for seed in range(8):
        checks, report = results(case, seed=seed)
        assert is_right(case, checks)
    assert sum(report.written_bytes.values()) == written(case)
    assert sum(report.read_bytes.values()) == read(case)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rows, keys", [(70, 0), (0, 70), (0, 0)])
def test_without_keys_or_queries_nothing_is_launched(rows: int, keys: int, causal: bool) -> None:
    case = Case(HopperForward(head_dim=64, causal=causal), rows=rows, keys=keys)
    checks, report = results(case)
    assert is_right(case, checks)
    assert report.steps == 0


def problem(case: Case) -> AttentionProblem:
    kernel = case.kernel
    mask = "causal" if kernel.causal else "full"
    heads = f"b{case.batch} hq{case.heads} hkv{case.heads // kernel.group_size}"
    lengths = f"q{case.rows} kv{case.keys}"
    return AttentionProblem.parse(f"{heads} {lengths} d{kernel.head_dim} {kernel.dtype} {mask}")


def read(case: Case) -> int:
    """Return the bytes that a program for each 128 query rows reads: its queries, and the keys and
    values that any of them sees, in whole tiles inside of the sequence."""

    kernel, whole = case.kernel, problem(case)
    streamed = visits_of(task("fwd", whole), 128, kernel.block_n).rows
    heads = case.batch * case.heads
    return heads * kernel.head_dim * 2 * int(case.rows + 2 * streamed)


def written(case: Case) -> int:
    """Return the bytes of out and lse."""
    return case.batch * case.heads * case.rows * (2 * case.kernel.head_dim + 4)


def test_many_schedules_of_two_tiles() -> None:
    case = Case(SMALL)
    for seed in range(200):
        checks, _ = results(case, seed=seed)
        assert is_right(case, checks)


@pytest.mark.slow
def test_every_schedule_of_two_tiles() -> None:
    case = Case(SMALL)

    def run(schedule: Schedule) -> None:
        checks, _ = results(case, schedule=lambda program: schedule)
        assert is_right(case, checks)

    assert EverySchedule().each(run) > 500


def test_every_schedule_finds_possible_deadlocks() -> None:
    """Consumers that let each other go in turn hang where one of them comes first."""
    broken = next(one for one in BREAKS if one.name == "values not let go")
    source = broken.of(SMALL.source(TRITON))
    case = Case(SMALL, rows=256, keys=256)
    with pytest.raises(Fault, match="nothing can go on"):
        EverySchedule().each(lambda order: results(case, source, schedule=lambda program: order))


@pytest.mark.sampled
@pytest.mark.parametrize("broken", BREAKS, ids=str)
def test_breaks_are_noticed_in_every_schedule(broken: Break) -> None:
    source = broken.of(RAGGED.kernel.source(TRITON))
    for seed in range(8):
        verdicts = verdict(RAGGED, source, seed)
        assert re.search(broken.says, verdicts), verdicts


@pytest.mark.sampled
@pytest.mark.parametrize("change", HARMLESS, ids=str)
def test_harmless_changes_are_not(change: Break) -> None:
    source = change.of(RAGGED.kernel.source(TRITON))
    assert {verdict(RAGGED, source, seed) for seed in range(8)} == {"right"}


def test_there_are_breaks_enough() -> None:
    assert len(BREAKS) >= 50
    assert len({one.name for one in BREAKS}) == len(BREAKS)


def test_a_seed_is_enough() -> None:
    """The same seed gives the same fault, word for word; the message names it."""
    broken = next(one for one in BREAKS if one.name == "one consumer lets go")
    source = broken.of(RAGGED.kernel.source(TRITON))
    faults = [verdict(RAGGED, source, seed) for seed in (3, 3, 4)]
    assert faults[0] == faults[1]
    assert "seed 3" in faults[0]
    assert "seed 4" in faults[2]


# --------------------------------------------------------------------------------------------------
# All statements of the device code


_ACTS = re.compile(
    r"(?:mbarrier\.(?:init|expect|arrive|wait)|tma|fence_async_shared|warpgroup_mma_wait|"
    r"warpgroup_mma|gl\.store|_softmax|_stay)(?=[(.])|(?<=^)q\.store"
)


def statements(source: str) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    """Yield each statement of the device functions with the one after it."""
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.decorator_list:
            for node in ast.walk(function):
                for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
                    if isinstance(body, list) and body:
                        yield from zip(body, [*body[1:], None], strict=True)


def text_of(lines: list[str], statement: ast.stmt) -> list[str]:
    return lines[statement.lineno - 1 : statement.end_lineno]


def act(text: list[str]) -> str:
    """Return the effect of a statement, by its name in EQUIVALENT; empty for arithmetic."""
    actual = _ACTS.search(text[0].strip())
    return actual[0].removesuffix("(") if actual else ""


def test_no_statement_can_be_left_out() -> None:
    source = RAGGED.kernel.source(TRITON)
    lines = source.splitlines()
    left_out = 0
    for item, _ in statements(source):
        text = text_of(lines, item)
        if not act(text) or isinstance(item, ast.For | ast.If | ast.Return) or "_stay" in text[0]:
            continue
        indent = text[0][: len(text[0]) - len(text[0].lstrip())]
        changed = [*lines[: item.lineno - 1], f"{indent}pass", *lines[item.end_lineno :]]
        left_out += 1
        for seed in range(2):
            with suppress(NameError):  # the result is used later: Triton would not compile it
                assert verdict(RAGGED, "\n".join(changed), seed) != "right", text
    assert left_out > 30


def test_neighbours_that_may_change_places_are_known() -> None:
    source = RAGGED.kernel.source(TRITON)
    lines = source.splitlines()
    used: set[str] = set()
    for left, other in statements(source):
        if other is None:
            continue
        first, second = text_of(lines, left), text_of(lines, other)
        if not (act(first) and act(second)):
            continue  # arithmetic and names: the compiler moves those itself
        between = lines[left.end_lineno : other.lineno - 1]
        changed = [*lines[: left.lineno - 1], *second, *between, *first, *lines[other.end_lineno :]]
        try:
            verdicts = {verdict(RAGGED, "\n".join(changed), seed) for seed in range(3)}
        except NameError:
            continue
        if "right" in verdicts:
            assert verdicts == {"right"}, (first, second, verdicts)
            used.add(f"{act(first)} | {act(second)}")
    assert used == set(EQUIVALENT)


# --------------------------------------------------------------------------------------------------
# Text


@pytest.mark.parametrize("triton", ["3.7.1", "3.9.0"])
def test_emitted_file(triton: str, golden: CheckGolden) -> None:
    golden(HopperForward(group_size=4).source(triton))


@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1", "3.9.0"])
def test_names_of_each_triton_are_modelled(triton: str) -> None:
    checks, _ = results(Case(SMALL), SMALL.source(triton))
    assert is_right(Case(SMALL), checks)


def test_other_sizes_are_refused() -> None:
    for changes in ({"head_dim": 96}, {"dtype": "fp32"}, {"block_n": 32}, {"stages": 1}):
        with pytest.raises(Unsupported, match=f"{next(iter(changes))} must be one of"):
            HopperForward(**changes)  # type: ignore[arg-type]
