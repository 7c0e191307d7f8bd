"""The problem notation round-trips, defaults as documented, and refuses nonsense in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.problems import PROBLEMS
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.masks import Mask, causal, full, intersect, parse_mask, sliding_window
from tilegen.problem import MAX_LENGTH, AttentionProblem

alignments = st.sampled_from(["top_left", "bottom_right"])
sides = st.none() | st.integers(0, 5000)
masks = st.lists(
    st.builds(causal, alignments) | st.builds(sliding_window, sides, sides, alignments), max_size=3
).map(lambda parts: intersect(*parts))


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    heads_kv = draw(st.integers(1, 8))
    return AttentionProblem(
        batch=draw(st.integers(1, 4)),
        num_heads_q=heads_kv * draw(st.integers(1, 4)),
        num_heads_kv=heads_kv,
        seqlen_q=draw(st.integers(1, MAX_LENGTH)),
        seqlen_kv=draw(st.integers(1, MAX_LENGTH)),
        head_dim_qk=draw(st.integers(8, 256)),
        head_dim_v=draw(st.integers(8, 256)),
        dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        mask=draw(masks),
    )


@given(problems())
def test_key_round_trips(problem: AttentionProblem) -> None:
    assert AttentionProblem.parse(problem.key) == problem
    assert AttentionProblem.parse(problem.key.upper().lower()).key == problem.key


@given(problems())
def test_bucket_is_a_fixed_point_that_covers_the_problem(problem: AttentionProblem) -> None:
    bucket = problem.bucket
    assert bucket.bucket == bucket
    assert problem.seqlen_q <= bucket.seqlen_q < 2 * problem.seqlen_q
    assert problem.seqlen_kv <= bucket.seqlen_kv < 2 * problem.seqlen_kv
    assert (bucket.mask, bucket.group_size) == (problem.mask, problem.group_size)


@given(st.text(alphabet="bhqkvd0123456789 fp16causal()&,-/window", max_size=60))
def test_any_text_parses_or_gets_one_line(text: str) -> None:
    message, problem = "", None
    try:
        problem = AttentionProblem.parse(text)
    except TilegenError as error:
        message = str(error)
    assert "\n" not in message
    assert problem is None or AttentionProblem.parse(problem.key) == problem


def test_defaults() -> None:
    assert AttentionProblem.parse("hq8 q128 d64 bf16") == AttentionProblem(
        batch=1,
        num_heads_q=8,
        num_heads_kv=8,
        seqlen_q=128,
        seqlen_kv=128,
        head_dim_qk=64,
        head_dim_v=64,
        dtype="bf16",
        mask=full(),
    )


@pytest.mark.parametrize(
    "text",
    [
        "causal bf16 d64 q128 hq8",
        "  hq8   q128 d64 bf16   causal ",
        "hq8 q128 kv128 hkv8 b1 d64/64 bf16 causal",
    ],
)
def test_order_and_space_do_not_matter(text: str) -> None:
    assert AttentionProblem.parse(text).key == "b1 hq8 hkv8 q128 kv128 d64 bf16 causal"


def test_spaces_inside_a_mask() -> None:
    problem = AttentionProblem.parse(
        "hq8 q128 d192/128 fp32 causal & window( 63 , 9 , bottom_right ) hkv2"
    )
    assert problem.key == "b1 hq8 hkv2 q128 kv128 d192/128 fp32 causal&window(63,9,bottom_right)"
    spaced, dense = (
        AttentionProblem.parse(f"hq8 q128 d64 bf16 causal & keep({mask}) score({score})")
        for mask, score in (("k <= 2 * (q + 1)", "s * 2"), ("k<=2*(q+1)", "s*2"))
    )
    assert spaced.key == dense.key


MALFORMED = {
    "": "no hqN",
    "hq8 d64 bf16": "no qN",
    "hq8 q8 bf16": "no dN",
    "hq8 q8 d64": "no dtype",
    "hq8 q8 d64 bf16 fp16": "two dtypes",
    "hq8 hq4 q8 d64 bf16": "two in",
    "hq8 q8 d64 bf16 causal full": "two masks",
    "hq8 q8 d64 bf16 causl": "no part of one; did you mean causal",
    "hq8 q8 d64 bf16 score(s*2": ") is missing",
    "hq8 q8 d64 bf16 score(s*(2": ") is missing",
    "hq8 q8 d64 bf16 window(1,2": "expected a mask",
    "hq8 q0 d64 bf16": "seqlen_q must be an int in 1..",
    "hq0 q8 d64 bf16": "num_heads_q must be an int in 1..",
    "hq8 q999999999999 d64 bf16": "seqlen_q must be",
    "hq8 hkv3 q8 d64 bf16": "multiple of num_heads_kv, got 8 and 3",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_notation(text: str) -> None:
    with pytest.raises(InvalidProblem) as caught:
        AttentionProblem.parse(text)
    assert MALFORMED[text] in str(caught.value)


@pytest.mark.parametrize("dims", ["7", "1025", "64/4", "2048"])
def test_head_dims_out_of_reach(dims: str) -> None:
    with pytest.raises(
        Unsupported, match=r"head_dim_\w+ must be 8\.\.1024 in bf16, got \d+; use torch"
    ):
        AttentionProblem.parse(f"hq8 q8 d{dims} bf16")


def test_fp32_reaches_half_as_far() -> None:
    assert AttentionProblem.parse("hq8 q8 d512 fp32").head_dim_v == 512
    with pytest.raises(Unsupported, match=r"must be 8\.\.512 in fp32, got 1024"):
        AttentionProblem.parse("hq8 q8 d1024 fp32")


def test_fields_are_checked() -> None:
    good = {"num_heads_q": 2, "num_heads_kv": 2, "seqlen_q": 4, "seqlen_kv": 4}
    dims = {"head_dim_qk": 64, "head_dim_v": 64}
    with pytest.raises(InvalidProblem, match="dtype must be one of"):
        AttentionProblem(**good, **dims, dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match="mask must be a tilegen mask"):
        AttentionProblem(**good, **dims, dtype="fp16", mask="causal")  # type: ignore[arg-type]
    with pytest.raises(InvalidProblem, match="batch must be an int"):
        AttentionProblem(**good, **dims, dtype="fp16", batch=True)
    with pytest.raises(InvalidProblem, match="seqlen_q must be an int"):
        AttentionProblem(**{**good, "seqlen_q": 4.0}, **dims, dtype="fp16")  # type: ignore[arg-type]


def test_the_table_of_problems_has_awkward_sizes() -> None:
    assert {1, 63, 200, 1023} <= {problem.seqlen_q for problem in PROBLEMS}
    assert {1, 4} <= {problem.group_size for problem in PROBLEMS}
    assert {60, 72, 80, 96, 100, 160} <= {problem.head_dim_qk for problem in PROBLEMS}
    assert {problem.dtype for problem in PROBLEMS} == {"fp16", "bf16", "fp32"}
    assert any(isinstance(p.mask, Mask) and p.seqlen_q != p.seqlen_kv for p in PROBLEMS)


@pytest.mark.parametrize(
    "spaced, mask",
    [
        ("dilated( 2 ) | window(1, 1)", "dilated(2)|window(1,1)"),
        ("dilated(2) & ~ window(9, 9)", "dilated(2)&~window(9,9)"),
        ("~ causal", "~causal"),
        ("( global(2) | window(3, 3) ) & window(9, -1)", "(global(2)|window(3,3))&window(9,-1)"),
    ],
)
def test_spaces_in_masks_do_not_split_them(spaced: str, mask: str) -> None:
    problem = AttentionProblem.parse(f"hq8 q64 {spaced} d64 bf16")
    assert problem.mask.notation == mask
    assert AttentionProblem.parse(f"hq8 q64 d64 bf16 {spaced}") == problem


def test_masks_that_look_alike_are_not_merged() -> None:
    both = parse_mask("documents(@q:64)") & parse_mask("documents(@q:64)")
    assert len(both.tables) == 8
    assert parse_mask(both.notation) == both
