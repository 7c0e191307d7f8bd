"""flash-attn's functions against its documentation, pair by pair in plain PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from tilegen.calls.attention import attention
from tilegen.calls.varlen import attention_varlen
from tilegen.errors import InvalidProblem
from tilegen.integrations import flash_attn, flash_changes
from tilegen.masks.language.texts import from_text, to_text
from tilegen.runtime import plans

Q, KV = (2, 5, 4, 16), (2, 9, 2, 16)


def inputs(*sizes: Sequence[int]) -> list[torch.Tensor]:
    torch.manual_seed(sum(map(sum, sizes)))
    return [torch.randn(*size, requires_grad=True) for size in sizes]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) as flash-attn's docstrings say it: (batch, seqlen, heads, dim)."""
    rows, columns = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[3] ** -0.5)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    i, j = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(q.shape[0], -1)[..., None, None]
        scores = scores - slopes * (i - j).abs()
    left, right = window_size
    keep = torch.ones(rows, columns, dtype=torch.bool)
    if causal:
        right = 0
    if left >= 0:
        keep &= j >= i - left
    if right >= 0:
        keep &= j <= i + right
    some = keep.any(-1)
    weights = scores.masked_fill(~keep, -1e30).softmax(-1) * some[:, None]
    lse = scores.masked_fill(~keep, -torch.inf)[..., some, :].logsumexp(-1)
    whole = torch.full((*scores.shape[:2], rows), -torch.inf).index_copy(
        2, some.nonzero()[:, 0], lse
    )
    return torch.einsum("bhij,bjhd->bihd", weights, v), whole


def compare(results: tuple[Any, ...], expected: tuple[Any, ...], given: list[torch.Tensor]) -> None:
    """Out, lse and gradients through both."""
    assert results[2] is None
    out, lse = expected
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    here = lse.isfinite()
    gradients = [
        torch.autograd.grad((left * weights).sum() + each[here].square().sum(), given)
        for left, each in ((results[0], results[1]), (out, lse))
    ]
    for left, other in zip((*results[:2], *gradients[0]), (out, lse, *gradients[1]), strict=True):
        torch.testing.assert_close(left, other, atol=3e-5, rtol=3e-5)


CHANGES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (3, -1)},
    "right": {"window_size": [-1, 0]},
    "causal window": {"window_size": (2, 2), "causal": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8])},
    "alibi of each": {
        "alibi_slopes": torch.rand(2, 4, generator=torch.Generator().manual_seed(0)),
        "softcap": 1.5,
        "window_size": (4, 2),
    },
}


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (1, 6)], ids=str)
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_dense(options: dict[str, Any], lengths: tuple[int, int]) -> None:
    rows, columns = lengths
    given = inputs((2, rows, 4, 16), (2, columns, 2, 16), (2, columns, 2, 16))
    actual = flash_attn.flash_attn_func(*given, return_attn_probs=True, **options)
    compare(actual, dense(*given, **options), given)


DOCUMENTS = {
    "equal": ([0, 3, 3, 8], [0, 3, 3, 8]),
    "different": ([0, 4, 4, 9, 10], [0, 2, 5, 11, 11]),
}


def of_documents(
    given: list[torch.Tensor], cu_q: list[int], cu_k: list[int], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of each document by itself, one after the other."""
    q, k, v = given
    outs, lses = [], []
    for at in range(len(cu_q) - 1):
        rows, columns = slice(*cu_q[at : at + 2]), slice(*cu_k[at : at + 2])
        own = dict(options)
        if "alibi_slopes" in own and own["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = own["alibi_slopes"][at : at + 1]
        out, lse = dense(q[None, rows], k[None, columns], v[None, columns], **own)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("options", CHANGES.values(), ids=CHANGES)
def test_packed(options: dict[str, Any], documents: tuple[list[int], list[int]]) -> None:
    """Documents of no tokens among them, and some that are longer in rows than in columns."""
    cu_q, cu_k = documents
    if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
        slopes = torch.rand(len(cu_q) - 1, 4, generator=torch.Generator().manual_seed(1))
        options = {**options, "alibi_slopes": slopes}
    given = inputs((cu_q[-1], 4, 16), (cu_k[-1], 2, 16), (cu_k[-1], 2, 16))
    first = torch.tensor(cu_q, dtype=torch.int32)
    second = first if cu_q == cu_k else torch.tensor(cu_k, dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(
        *(*given, first, second, 5, 6), return_attn_probs=True, **options
    )
    compare(out, of_documents(given, cu_q, cu_k, options), given)


@pytest.mark.parametrize("options", [CHANGES["causal window"], CHANGES["alibi"]], ids=str)
def test_packed_tensors(options: dict[str, Any]) -> None:
    """Several tensors in one, whose gradient is one tensor too."""
    (qkv,) = inputs((2, 5, 3, 4, 16))
    out = flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    compare(out, dense(*qkv.unbind(2), **options), [qkv])
    q, kv = inputs(Q, (2, 9, 2, 2, 16))
    out = flash_attn.flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options)
    compare(out, dense(q, *kv.unbind(2), **options), [q, kv])
    cu_q, cu_k = DOCUMENTS["equal"][0], DOCUMENTS["different"][1][1:]
    (qkv,) = inputs((8, 3, 4, 16))
    cu = torch.tensor(cu_q)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, 5, return_attn_probs=True, **options)
    expected = of_documents(list(qkv.unbind(1)), cu_q, cu_q, options)
    compare(out, expected, [qkv])
    cu_k = [0, 2, 5, 11]
    q, kv = inputs((8, 4, 16), (11, 2, 2, 16))
    out = flash_attn.flash_attn_varlen_kvpacked_func(
        *(q, kv, cu, torch.tensor(cu_k), 5, 6), return_attn_probs=True, **options
    )
    compare(out, of_documents([q, *kv.unbind(1)], cu_q, cu_k, options), [q, kv])


def test_out_alone_by_default() -> None:
    given = inputs(Q, KV, KV)
    out = flash_attn.flash_attn_func(*given, 0.0, None, True)
    torch.testing.assert_close(out, dense(*given, causal=True)[0], atol=2e-5, rtol=2e-5)
    assert out.shape == Q


def test_dropout_is_that_of_attention() -> None:
    """Drawn anew at each call, and reproducible; lse is that of all weights."""
    q, k, v = inputs(Q, KV, KV)
    cu = torch.tensor([0, 5])
    for item, seed in product(
        (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func), (1, 2)
    ):
        is_packed = item is flash_attn.flash_attn_varlen_func
        given = (q[0], k[0], v[0], cu, torch.tensor([0, 9]), 5, 9) if is_packed else (q, k, v)
        torch.manual_seed(seed)
        out, lse, _ = item(*given, 0.5, return_attn_probs=True)
        torch.manual_seed(seed)
        of_attention = attention_varlen if is_packed else attention
        plain = given[:5] if is_packed else [x.transpose(1, 2) for x in given]
        expected, expected_lse = of_attention(*plain, dropout_p=0.5, return_lse=True)
        torch.testing.assert_close(out, expected if is_packed else expected.transpose(1, 2))
        torch.testing.assert_close(lse, expected_lse)
        assert not torch.equal(out, item(*given, 0.5))


def test_slopes_are_trained_where_they_ask_for_it() -> None:
    given = inputs(Q, KV, KV)
    slopes = torch.rand(4, requires_grad=True)
    actual = flash_attn.flash_attn_func(*given, alibi_slopes=slopes, return_attn_probs=True)
    compare(actual, dense(*given, alibi_slopes=slopes), [*given, slopes])


SIGNATURES = {
    "flash_attn_func": ["q", "k", "v"],
    "flash_attn_qkvpacked_func": ["qkv"],
    "flash_attn_kvpacked_func": ["q", "kv"],
    "flash_attn_varlen_func": [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    "flash_attn_varlen_kvpacked_func": [
        *("q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
    ],
}
DEFAULTS = {
    **{"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1)},
    **{"softcap": 0.0, "alibi_slopes": None, "deterministic": False, "return_attn_probs": False},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn(name: str) -> None:
    """In this order: callers pass them by position."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    expected = dict.fromkeys(SIGNATURES[name], inspect.Parameter.empty) | DEFAULTS
    if name == "flash_attn_varlen_func":
        expected["block_table"] = None
    assert [(one.name, one.default) for one in parameters.values()] == list(expected.items())


@pytest.mark.parametrize(
    "options, expected",
    [
        ({"window_size": (1,)}, r"^window_size must be two distances \(left, right\), got \(1,\)$"),
        ({"window_size": 4}, r"^window_size must be two distances \(left, right\), got 4$"),
        ({"alibi_slopes": torch.ones(1, 1, 4)}, r"^alibi_slopes must be .*, got \(1, 1, 4\) torch"),
        ({"alibi_slopes": torch.ones(3)}, "size 4 along query heads, got 3"),
        ({"alibi_slopes": torch.ones(3, 4)}, "size 2 along batch, got 3"),
    ],
)
def test_bad_arguments_get_one_line(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidProblem, match=expected):
        flash_attn.flash_attn_func(*inputs(Q, KV, KV), **options)


def test_bad_packed_tensors_get_one_line() -> None:
    with pytest.raises(InvalidProblem, match=r"^qkv must have shape \(batch, seqlen, 3, heads"):
        flash_attn.flash_attn_qkvpacked_func(torch.randn(2, 5, 2, 4, 16))
    with pytest.raises(InvalidProblem, match=r"^kv must be a tensor \(tokens, 2, heads_kv, dim\)"):
        flash_attn.flash_attn_varlen_kvpacked_func(*[torch.randn(2, 5)] * 4, 1, 1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kinds of calls that something is chosen for."""
    made: list[Any] = []
    actual = plans.by_call.get

    def get(key: Any, make: Any) -> Any:
        made.append(key)
        return actual(key, make)

    monkeypatch.setattr(plans.by_call, "get", get)
    return made


def test_a_second_call_chooses_nothing_and_traces_nothing(
    counted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in CHANGES.values():
        given = inputs(Q, KV, KV)
        flash_attn.flash_attn_func(*given, **options)
        before = len(counted)
        with monkeypatch.context() as patch:
            patch.setattr("tilegen.masks.language.texts.to_text", None)
            first, second = (
                flash_changes.mask_of(options.get("window_size", (-1, -1)), True, "top_left")
                for _ in range(2)
            )
            assert first is second
            slopes = options.get("alibi_slopes")
            again = {**options, "alibi_slopes": None if slopes is None else slopes.clone()}
            flash_attn.flash_attn_func(*given, **again)
        assert len(counted) == before


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 30.0, 1e9])
def test_texts_are_canonical(softcap: float, alignment: Any) -> None:
    text = flash_changes._text(softcap, "h", alignment)
    assert text == to_text(from_text(text, ("float",)))
