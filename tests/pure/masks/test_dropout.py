"""Dropout: random words of pairs, and calls on a CPU."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilegen
from tests import two_sweeps
from tilegen.check.reference import attention_reference
from tilegen.choose.families import ranked_families
from tilegen.errors import InvalidProblem
from tilegen.kernels.registry import BACKWARD, FORWARD
from tilegen.masks.dropout import Dropout, drawn_words, philox
from tilegen.problem import AttentionProblem
from tilegen.runtime.dilation import group, ungroup

STATE = torch.tensor([0x0123456789ABCDEF, 42])


def words(*hex_: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in hex_]


@pytest.mark.parametrize(
    "rounds, counter, key, expected",
    [
        (7, "0 0 0 0", "0 0", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (10, "0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            *(7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
            "5207ddc2 45165e59 4d8ee751 8c52f662",
        ),
    ],
)
def test_philox_gives_its_authors_test_vectors(
    rounds: int, counter: str, key: str, expected: str
) -> None:
    value = philox(tuple(words(*counter.split())), tuple(words(*key.split())), rounds)  # type: ignore
    assert [f"{int(word):08x}" for word in value] == expected.split()


def test_dropout_of_a_pair_depends_on_its_place_alone() -> None:
    whole = drawn_words(STATE, 2, 3, 40, 50)
    assert whole.unique().numel() >= whole.numel() - 1  # of 2**32: few meet by chance
    assert torch.equal(drawn_words(STATE, 1, 3, 17, 33), whole[:1, :, :17, :33])
    assert torch.equal(drawn_words(STATE, 1, 6, 40, 50).flatten(0, 1), whole.flatten(0, 1))
    for other in (STATE + torch.tensor([1, 0]), STATE + torch.tensor([0, 1])):
        assert (drawn_words(other, 2, 3, 40, 50) != whole).all()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_pairs_are_dropped_as_p_says(p: float) -> None:
    """Fixed seeds: what is drawn is always the same, so this passes always or never."""
    dropped = Dropout(p, STATE).factors(4, 8, 96, 128) == 0.0

    def deviations(tensor: torch.Tensor, chance: float) -> float:
        """How many standard deviations of a binomial a share is off."""
        return abs(float(tensor.double().mean()) - chance) / math.sqrt(
            chance * (1 - chance) / tensor.numel()
        )

    assert deviations(dropped, p) < 3
    both = {
        "neighbouring columns": dropped[..., 1:] & dropped[..., :-1],
        "neighbouring rows": dropped[..., 1:, :] & dropped[..., :-1, :],
        "columns of one Philox": dropped[..., 8:] & dropped[..., :-8],
        "rows of one Philox": dropped[..., 8:, :] & dropped[..., :-8, :],
        "heads": dropped[:, 1:] & dropped[:, :-1],
        "batch entries": dropped[1:] & dropped[:-1],
        "seeds": dropped & (Dropout(p, STATE + 1).factors(4, 8, 96, 128) == 0.0),
    }
    results = {name: deviations(tensor, p * p) for name, tensor in both.items()}
    assert all(results[name] < 4 for name in results), results
    for axis in (-1, -2):  # no row or column of a head is much worse off
        share = dropped.double().mean(axis)
        assert (share - p).abs().max() < 6 * math.sqrt(p * (1 - p) / dropped.shape[axis])


@pytest.mark.parametrize("p", [0.0, 0.1, 1.0])
def test_kept_weights_make_up_for_dropped_ones(p: float) -> None:
    factors = Dropout(p, STATE).factors(1, 2, 64, 64)
    kept = 1 / (1 - p) if p < 1 else 0.0
    torch.testing.assert_close(factors, factors.sign() * kept)
    assert float(factors.mean()) == (0.0 if p == 1 else pytest.approx(1.0, abs=0.02))


def made(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 20, 16), (2, 2, 24, 16), (2, 2, 24, 16)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def state_of_a_call() -> torch.Tensor:
    """The state that a call after torch.manual_seed(5) draws."""
    torch.manual_seed(5)
    return Dropout.drawn(0.3, torch.device("cpu")).state


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": tilegen.causal() & tilegen.sliding_window(9, 0)},
        {"score": tilegen.softcap(3.0)},
        {"score": tilegen.sinks(torch.linspace(-1, 1, 4))},
        {"kv_lengths": torch.tensor([24, 7])},
        {"scale": -0.4},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_a_call_and_its_gradients_drop_by_the_seed(options: dict[str, Any]) -> None:
    q, k, v = made()
    factors = Dropout(0.3, state_of_a_call()).factors(2, 4, 20, 24).float()
    torch.manual_seed(5)
    out, lse = tilegen.attention(q, k, v, **options, dropout_p=0.3, return_lse=True)
    gradients = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))

    identity = torch.eye(24).expand(2, 2, 24, 24)  # the weights themselves
    weights, expected_lse = tilegen.attention(q, k, identity, **options, return_lse=True)
    expected = weights * factors @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    wanted = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), (q, k, v))
    for left, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(left, other)


def test_calls_draw_anew_and_a_seed_makes_them_draw_the_same() -> None:
    q, k, v = made(torch.bfloat16)
    torch.manual_seed(1)
    first, second = (tilegen.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(tilegen.attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_nothing_is_drawn_where_nothing_is_dropped() -> None:
    q, k, v = made()
    before = torch.get_rng_state()
    plain = tilegen.attention(q, k, v)
    for nothing in (0, 0.0):
        assert torch.equal(tilegen.attention(q, k, v, dropout_p=nothing), plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_all_is_dropped_where_p_is_1_as_pytorch_does() -> None:
    q, k, v = made()
    out, lse = tilegen.attention(q, k, v, dropout_p=1, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, tilegen.attention(q, k, v, return_lse=True)[1])
    assert all((one == 0).all() for one in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan"), "0.1", None, True, torch.ones(1)])
def test_invalid_probabilities_are_refused_in_one_line(p: Any) -> None:
    q, k, v = made()
    for call in (tilegen.attention, tilegen.attention_varlen):
        given = (q, k, v) if call is tilegen.attention else (q[0], k[0], v[0], torch.tensor([0, 4]))
        with pytest.raises(InvalidProblem, match=r"dropout_p must be a number 0\.\.1") as caught:
            call(*given, dropout_p=p)
        assert "\n" not in str(caught.value)
    with pytest.raises(InvalidProblem, match=r"number 0\.\.1"), FlopCounterMode(display=False):
        tilegen.attention(q, k, v, dropout_p=p)  # a call that PyTorch watches


def test_a_call_that_pytorch_watches_drops_the_same() -> None:
    q, k, v = made()
    results: list[torch.Tensor] = []
    for watching in (FlopCounterMode(display=False), nullcontext()):
        torch.manual_seed(3)
        with watching:
            out = tilegen.attention(q, k, v, dropout_p=0.4)
        results += [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
    for left, other in zip(results[:4], results[4:], strict=True):
        torch.testing.assert_close(left, other)


def test_packed_sequences_drop_by_their_place_among_all_tokens() -> None:
    q, k, v = (one[0, :2].transpose(0, 1).detach() for one in made())
    cu = torch.tensor([0, 6, 20])
    state = state_of_a_call()
    torch.manual_seed(5)
    out = tilegen.attention_varlen(q, k[:20], v[:20], cu, dropout_p=0.3)
    documents = tilegen.documents(torch.tensor([0] * 6 + [1] * 14))
    expected, _ = attention_reference(
        *(x[:20].transpose(0, 1)[None] for x in (q, k, v)),
        mask=documents,
        dropout=Dropout(0.3, state),
    )
    torch.testing.assert_close(out.transpose(0, 1)[None], expected)
    jagged = [torch.nested.nested_tensor_from_jagged(x[:20], cu).transpose(1, 2) for x in (q, k, v)]
    torch.manual_seed(5)
    nested: Any = tilegen.attention(*jagged, dropout_p=0.3)
    torch.testing.assert_close(nested.transpose(1, 2).values(), out)


def test_a_dilated_mask_drops_by_places_in_its_groups() -> None:
    q, k, v = (one[:, :2, :20].detach() for one in made())
    state = state_of_a_call()
    torch.manual_seed(5)
    out = tilegen.attention(
        q, k, v, mask=tilegen.sliding_window(4, 4) & tilegen.dilated(2), dropout_p=0.3
    )
    grouped = [group(x, 2) for x in (q, k, v)]
    window = tilegen.sliding_window(2, 2)
    expected, _ = attention_reference(*grouped, mask=window, dropout=Dropout(0.3, state))
    torch.testing.assert_close(out, ungroup(expected, 2, 20))


# --------------------------------------------------------------------------------------------------
# Problems that drop weights


TEXT = "b2 hq8 hkv2 q4096 kv4096 d128 bf16 causal"


def test_a_problem_that_drops_weights_says_so_last() -> None:
    plain, dropping = (AttentionProblem.parse(TEXT + end) for end in ("", " dropout"))
    assert dropping == replace(plain, dropout=True)
    assert (plain.key, dropping.key) == (TEXT, f"{TEXT} dropout")
    scored = AttentionProblem.parse(f"dropout {TEXT} score(2*s)")
    assert scored.key == f"{TEXT} score(2*s) dropout"
    assert AttentionProblem.parse(scored.key) == scored
    for form in (scored.normal(), scored.bucket, scored.rounded):
        assert form.dropout
    with pytest.raises(InvalidProblem, match="the word dropout twice"):
        AttentionProblem.parse(f"{TEXT} dropout dropout")


def test_kernels_without_dropout_are_not_used_for_it() -> None:
    problem = AttentionProblem.parse(f"{TEXT} dropout")
    with two_sweeps.registered():
        assert "does not drop weights" in FORWARD["two_sweeps"].why_not(problem, "sm_90")
        assert not FORWARD["two_sweeps"].why_not(replace(problem, dropout=False), "sm_90")
        assert "two_sweeps" not in ranked_families(problem, tilegen.gpu("h200"), "forward")
    for families in (FORWARD, BACKWARD):
        left_out = [name for name, one in families.items() if one.why_not(problem, "sm_90")]
        without = ["split_kv", "paged", "hopper_forward"]
        with_roles = ["hopper_two_pass", "hopper_dkdv", "hopper_dq"]
        assert left_out == (without if families is FORWARD else with_roles)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_the_model_knows_that_drawing_takes_time(gpu: str) -> None:
    for kernel in ("fwd", "bwd_dkdv", "bwd_dq", "bwd_scores"):
        plain, dropping = (
            tilegen.propose(TEXT + end, gpu, kernel=kernel, top=1)[0].estimate.seconds
            for end in ("", " dropout")
        )
        assert 1.05 * plain < dropping < 4 * plain, kernel
    plain, dropping = (
        tilegen.propose(TEXT + end, gpu, kernel="bwd_rows", top=1)[0].estimate.seconds
        for end in ("", " dropout")
    )
    assert plain == dropping


def test_an_explanation_of_kernels_that_drop_weights() -> None:
    text = tilegen.explain(f"{TEXT} dropout", "h200", kernel="fwd", by_model=True).text("all")
    assert "dropout" in text.splitlines()[0]
    assert re.search(r"^  read seeds +[\d.]+ [kM]?B for dropout$", text, re.MULTILINE)
    without = tilegen.explain(TEXT, "h200", kernel="fwd", by_model=True)
    assert "dropout" not in without.text("all")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_scale_is_not_rounded_to_the_default_dtype(dtype: torch.dtype) -> None:
    """A model that is made in bf16 often leaves it the default."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(1))

    def dropped() -> torch.Tensor:
        torch.manual_seed(0)
        return tilegen.attention(q, k, v, dropout_p=0.3)

    expected = dropped()
    torch.set_default_dtype(dtype)
    try:
        actual = dropped()
        factors = Dropout(0.3, torch.tensor([1, 2])).factors(1, 1, 8, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual, expected)
    assert factors.dtype == torch.float64
    assert factors.max().item() == 1 / (1 - torch.tensor(0.3).item())
