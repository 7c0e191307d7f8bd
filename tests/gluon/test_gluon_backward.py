"""The backward for Hopper in the memory model: dQ, and dK with dV, right under many schedules for
each form of mask and score, and each statement needed whatever the schedule."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.problems import task
from tilegen.model.visits import visits_of

pytest.importorskip("greenlet", reason="greenlet, which runs partitions in the memory model")

from tests.gluon.breaks import BACKWARD, Break
from tests.gluon.memory_model.schedules import EverySchedule, Schedule
from tests.gluon.runs import DKDV, DQ, Case, case_of, is_right, left_out, results, verdict
from tests.gluon.test_gluon_forward import MASKS, SCORES
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

TILES = {DQ: ("m128n64w8s2t", "m192n64w12s3t"), DKDV: ("m64n128w8s2t", "m64n128w8s3t")}
KERNELS = tuple(TILES)


def backward(kernel: str, text: str, config: str = "") -> Case:
    return case_of(text, config or TILES[kernel][0], kernel=kernel)


RAGGED = {name: backward(name, "b1 hq2 hkv1 q300 kv230 d64 bf16 causal") for name in KERNELS}
"""Both rings go round twice."""
NO_KEYS = {
    DQ: backward(DQ, "b1 hq1 hkv1 q200 kv130 d64 bf16 causal(bottom_right)"),
    DKDV: backward(DKDV, "b1 hq1 hkv1 q300 kv600 d64 bf16 causal"),
}
"""A program that visits nothing: its zeros still take the place of what stays."""
CUT = backward(DQ, "b1 hq1 hkv1 q300 kv330 d64 bf16 kv_prefix(200)")
"""The last tile of keys is cleared from the 200th on."""
HEADS = backward(DKDV, "b1 hq2 hkv1 q300 kv230 d64 bf16 keep(less(k+3*h,q))")
"""Query heads visit different tiles, one after the other."""
PAIRS = backward(DKDV, "b1 hq2 hkv1 q300 kv230 d64 bf16 causal score(5*tanh(s/5))")
CASES = [
    *RAGGED.values(),
    *(
        backward(kernel, text, config)
        for kernel in KERNELS
        for text, config in [
            ("b1 hq1 hkv1 q70 kv400 d64 bf16 full", TILES[kernel][1]),
            ("b2 hq4 hkv2 q200 kv130 d64 fp16 causal", ""),
            ("b1 hq4 hkv1 q129 kv65 d128 bf16 causal", ""),
            ("b1 hq2 hkv2 q1 kv300 d128 bf16 full", ""),
        ]
    ),
    backward(DQ, "b1 hq1 hkv1 q256 kv256 d128 fp16 causal", "m128n128w8s2t"),
]
FORMS = [
    *(f"b1 hq2 hkv1 q200 kv200 d64 bf16 {mask}" for mask in MASKS),
    *(f"b2 hq1 hkv1 q150 kv200 d64 fp16 causal score({score})" for score in SCORES),
    *(
        f"b1 hq1 hkv1 q{q} kv{kv} d64 bf16 causal(bottom_right)"
        for q, kv in [(400, 130), (65, 400)]
    ),
    "b1 hq1 hkv1 q130 kv200 d128 bf16 window(60,0)",
    "b1 hq1 hkv1 q70 kv300 d64 bf16 window(60,0)",
    "b2 hq4 hkv2 q70 kv65 d128 fp16 causal",
]


def named(case: Case) -> str:
    return f"{case.kernel} {case}"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=named)
def test_results_and_bytes(case: Case) -> None:
    for seed in range(8):
        checks, report = results(case, seed=seed)
        assert is_right(case, checks)
    problem, config = case.problem, TileConfig.parse(case.config)
    streamed = visits_of(task(case.kernel, problem), config.block_m, config.block_n).rows
    width = 2 * (problem.head_dim_qk + problem.head_dim_v)
    rows = problem.batch * problem.num_heads_q * problem.seqlen_q
    keys = problem.batch * problem.num_heads_kv * problem.seqlen_kv
    read = report.read_bytes
    numbers = sum(size for name, size in read.items() if name.startswith(("lse", "delta")))
    if case.kernel == DQ:
        assert numbers == 8 * rows
        assert sum(read.values()) == (width + 8) * rows + width * _heads(problem) * streamed
        assert sum(report.written_bytes.values()) == 2 * problem.head_dim_qk * rows
    else:
        assert sum(read.values()) - numbers == width * (keys + _heads(problem) * streamed)
        # The last tile of a head reads numbers of the next head, too.
        more = numbers - 8 * _heads(problem) * streamed
        assert 0 <= more <= 8 * 63 * _heads(problem) * -(-problem.seqlen_kv // 128)
        assert sum(report.written_bytes.values()) == width * keys


def _heads(problem: AttentionProblem) -> int:
    return problem.batch * problem.num_heads_q


@pytest.mark.sampled
@pytest.mark.parametrize("at", range(2))
@pytest.mark.parametrize("text", FORMS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_each_form_of_mask_and_score(kernel: str, text: str, at: int) -> None:
    case = backward(kernel, text, TILES[kernel][at])
    for seed in range(8):
        assert verdict(case, case.source, seed) == "right"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["heads inside of rows", "every other row"])
def test_strides_that_a_descriptor_holds(kernel: str, layout: str) -> None:
    case = backward(kernel, "b2 hq4 hkv2 q130 kv100 d64 bf16 causal")

    def laid(x: torch.Tensor) -> torch.Tensor:
        if layout == "every other row":
            return x.repeat_interleave(2, 2)[:, :, ::2]
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    given = (*map(laid, case.given[:4]), *case.given[4:])
    checks, _ = results(case, given=given, seed=1)
    assert is_right(case, checks)
    first = checks[0] if kernel == DKDV else checks
    assert first.is_contiguous() == (layout == "every other row")


@pytest.mark.parametrize("kernel", KERNELS)
def test_keys_beyond_a_length_reach_no_row(kernel: str) -> None:
    """Even if they are NaN, whose product with 0 is NaN; their own gradients are 0."""
    case = backward(kernel, "b1 hq2 hkv1 q200 kv230 d64 bf16 kv_prefix(100)")
    q, k, v, *others = case.given
    k, v = k.clone(), v.clone()
    k[:, :, 100:], v[:, :, 100:] = float("nan"), float("inf")
    for seed in range(4):
        checks, _ = results(case, given=(q, k, v, *others), seed=seed)
        assert is_right(case, checks)


def test_rows_of_the_next_head_reach_no_key() -> None:
    """The last tile of queries of a head reads numbers of rows of the next, which may be NaN."""
    case = backward(DKDV, "b1 hq2 hkv2 q100 kv130 d64 bf16 full")
    *others, lse, delta, scale = case.given
    lse, delta = lse.clone(), delta.clone()
    lse[:, 1], delta[:, 1] = float("-inf"), float("nan")
    (dk, dv), _ = results(case, given=(*others, lse, delta, scale))
    wanted = case.expected
    assert torch.allclose(dk[:, 0].double(), wanted[0][:, 0], rtol=0.02, atol=0.02)
    assert torch.allclose(dv[:, 0].double(), wanted[1][:, 0], rtol=0.02, atol=0.02)
    assert dk[:, 1].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_schedule_of_two_tiles(kernel: str) -> None:
    case = backward(kernel, "b1 hq1 hkv1 q128 kv128 d64 bf16 causal")

    def run(schedule: Schedule) -> None:
        checks, _ = results(case, schedule=lambda program: schedule)
        assert is_right(case, checks)

    assert EverySchedule().each(run) > 200


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("broken", BACKWARD, ids=str)
def test_breaks_are_noticed_in_every_schedule(broken: Break) -> None:
    case = RAGGED[broken.kernel]
    source = broken.of(case.source)
    for seed in range(8):
        verdicts = verdict(case, source, seed)
        assert re.search(broken.says, verdicts), verdicts


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", [*RAGGED.values(), *NO_KEYS.values(), CUT, HEADS, PAIRS], ids=named
)
def test_no_statement_can_be_left_out(case: Case) -> None:
    tried, spared = left_out(case)
    assert tried >= 19
    assert spared == {}
