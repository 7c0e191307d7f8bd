"""Models of transformers with tilegen's attention against the same models with eager attention.

Both are held to attention written out in fp64: an error may be twice what the eager model in fp32
has, plus a rounding floor, and the eager model's must be small itself. Models are random and tiny,
and PyTorch computes, as on any CPU; tests/compiled/test_transformers.py does so with emitted
kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
transformers = pytest.importorskip("transformers", reason=REASON)

from transformers import masking_utils  # noqa: E402

import tilegen  # noqa: E402
from tests.support.models import DECODERS, OTHERS, inputs  # noqa: E402
from tilegen.disk import say_once  # noqa: E402
from tilegen.errors import TilegenError  # noqa: E402
from tilegen.integrations import model_masks  # noqa: E402
from tilegen.integrations import transformers as integration  # noqa: E402
from tilegen.runtime import dispatch  # noqa: E402

MODELS = DECODERS | OTHERS
FLOOR = 16 * torch.finfo(torch.float32).eps
"""Of the largest number in a result: what sums in another order may differ by."""
EAGER = 256 * torch.finfo(torch.float32).eps
"""Most that eager attention in fp32 may be from fp64, so that it says something."""
ROWS = {  # where tokens are, of batches of 3 x 9
    "right": [[1] * 9, [1] * 6 + [0] * 3, [1] * 1 + [0] * 8],
    "left": [[1] * 9, [0] * 3 + [1] * 6, [0] * 8 + [1] * 1],
    "between": [[1] * 4 + [0] * 2 + [1] * 3, [0, 1] * 4 + [1], [1] * 9],
}


def exact_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> Any:
    """Return attention written out, for tests in fp64; a row that sees nothing gives 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    score = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    score = score if softcap is None else softcap * torch.tanh(score / softcap)
    score = score if position_bias is None else score + position_bias
    keep = torch.ones_like(score, dtype=torch.bool)
    if attention_mask is not None:
        keep = attention_mask.expand_as(score)
    elif getattr(module, "is_causal", True) and score.shape[-2] > 1:
        keep = keep.tril()
    empty = ~keep.any(-1, keepdim=True)
    score = score.masked_fill(~keep & ~empty, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.view(1, -1, 1, 1).expand(*score.shape[:-1], 1)
        score = torch.cat([score, sinks], -1)
    weights = score.softmax(-1)[..., : keep.shape[-1]].masked_fill(empty, 0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None


def exact_mask(*given: Any, **named: Any) -> Any:
    named |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*given, **named)


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)


def outputs(model: Any, given: dict[str, Any], at: Any = slice(None)) -> torch.Tensor:
    actual = model(**given)
    logits = actual.last_hidden_state if hasattr(actual, "last_hidden_state") else actual.logits
    return logits[at]


def results(name: str, attention: str, given: dict[str, Any], at: Any, dtype: Any) -> list[Any]:
    """Return logits and the gradients of all parameters."""
    model = MODELS[name].make(attention, dtype)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
    logits = outputs(model, given, at)
    logits.square().mean().backward()
    return [logits.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def hold(name: str, given: dict[str, Any], at: Any = slice(None)) -> None:
    """Compare logits and gradients of a model with those of eager attention."""
    exact = results(name, "exact", given, at, torch.float64)
    eager = results(name, "eager", given, at, torch.float32)
    checks = results(name, "tilegen", given, at, torch.float32)
    assert len(checks) == len(eager) == len(exact) > 5
    scale = max(one.abs().max() for one in exact[1:])
    for i, (right, theirs, ours) in enumerate(zip(exact, eager, checks, strict=True)):
        size = right.abs().max() if i == 0 else scale
        error = (theirs - right).abs().max()
        assert error <= EAGER * size, f"{name}: result {i} of eager attention"
        assert (ours - right).abs().max() <= 2 * error + FLOOR * size, f"{name}: result {i}"


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_eager_attention(name: str) -> None:
    hold(name, inputs(name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt_oss", "llama4", "gpt2", "bert"])
@pytest.mark.parametrize("side", ROWS)
def test_padding(name: str, side: str) -> None:
    """Tokens see no padding; what padding itself sees nobody reads."""
    is_token = torch.tensor(ROWS[side])
    if name == "bert":
        is_token[:, 0] = 1
    given = inputs(name, batch=3) | {"attention_mask": is_token}
    hold(name, given, is_token.bool())


def test_padding_of_encoders_is_seen_by_cross_attention() -> None:
    is_token = torch.tensor(ROWS["right"])
    hold("t5", inputs("t5", batch=3) | {"attention_mask": is_token})
    decoder = is_token[:, :6]
    given = inputs("t5", batch=3) | {"decoder_attention_mask": decoder}
    hold("t5", given, decoder.bool())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4", "gpt_oss"])
def test_packed_documents(name: str) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
    hold(name, inputs(name) | {"position_ids": positions, "use_cache": torch.tensor(False)})


def test_packed_documents_with_a_cache_equal_eager_attention_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    say_once.cache_clear()
    given = inputs("llama") | {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])}
    with caplog.at_level(logging.WARNING, "tilegen"):
        hold("llama", given)
        hold("llama", given)
    said = [one for one in caplog.messages if "position_ids restart" in one]
    assert len(said) == 1
    assert "use_cache=False" in said[0]


def test_a_padded_batch_is_not_taken_for_packed_documents(caplog: pytest.LogCaptureFixture) -> None:
    """`generate` gives left padding positions that do not rise."""
    is_token = torch.tensor(ROWS["left"])
    positions = (is_token.cumsum(-1) - 1).clamp(min=0)
    given = inputs("llama", batch=3) | {"attention_mask": is_token, "position_ids": positions}
    with caplog.at_level(logging.WARNING, "tilegen"):
        outputs(MODELS["llama"].make("tilegen"), given)
    assert not [one for one in caplog.messages if "restart" in one]


def test_documents_given_by_cu_seqlens_are_kept_apart_in_spite_of_a_cache() -> None:
    ids = inputs("mistral", batch=1)["input_ids"]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5]])
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    packed = {"position_ids": positions, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu.clone()}
    packed |= {"max_length_q": 6, "max_length_k": 6}
    model = MODELS["mistral"].make("tilegen")
    together = outputs(model, {"input_ids": ids, **packed})
    apart = torch.cat([outputs(model, {"input_ids": one}) for one in (ids[:, :3], ids[:, 3:])], 1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


NOT_GENERATING = ("qwen2", "qwen3", "gemma4", "deepseek_v3")
"""Decoders whose caches and masks are those of others."""


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", [*(one for one in DECODERS if one not in NOT_GENERATING), "t5", "whisper"]
)
def test_generated_tokens(name: str, cache: str) -> None:
    given = inputs(name, batch=3)
    given.pop("decoder_input_ids", None)
    if name in DECODERS:
        given["attention_mask"] = torch.tensor(ROWS["left"])
    options = {"max_new_tokens": 5, "do_sample": False, "min_new_tokens": 5}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    eager, ours = (
        MODELS[name].make(attention).generate(**given, **options)
        for attention in ("eager", "tilegen")
    )
    assert torch.equal(eager, ours)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
def test_a_static_cache_step_by_step(name: str) -> None:
    """Prefill in two parts and single tokens, past the window and the chunk."""
    ids = inputs(name, tokens=12)["input_ids"]
    results: list[torch.Tensor] = []
    for attention in ("eager", "tilegen"):
        model = MODELS[name].make(attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            parts = [
                model(input_ids=part, past_key_values=cache).logits
                for part in ids.split([3, 6, 1, 1, 1], 1)
            ]
        results.append(torch.cat(parts, 1))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_steps_of_a_generation_find_the_plans_of_the_first(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets and padding change from step to step, the structure of masks does not; nothing is
    traced at all."""
    model = MODELS["gemma3"].make("tilegen")
    is_token = torch.tensor(ROWS["left"])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    made: list[Any] = []
    new_plan = dispatch._new_plan

    def counted(*given: Any) -> Any:
        made.append(given)
        return new_plan(*given)

    monkeypatch.setattr(dispatch, "_new_plan", counted)
    monkeypatch.setattr("tilegen.masks.tracing.trace.trace_mask", refused)
    ids = inputs("gemma3", batch=3)["input_ids"]
    steps: list[int] = []
    forward = type(model).forward

    def noted(*given: Any, **named: Any) -> Any:
        actual = forward(*given, **named)
        steps.append(len(made))
        return actual

    monkeypatch.setattr(type(model), "forward", noted)
    model.generate(input_ids=ids, attention_mask=is_token, **options)
    assert len(steps) == 6
    assert steps[1] == steps[-1]
    made.clear()
    other = 1 - is_token.flip(0)  # holes, and rows of padding alone
    other[:, -1] = 1
    model.generate(input_ids=ids, attention_mask=other, **options)
    assert not made


def refused(*_: Any) -> Any:
    raise AssertionError("a mask was traced")


# --------------------------------------------------------------------------------------------------
# Masks of a user


def custom(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    keep = (torch.rand(2, 1, 9, 9, generator=generator) < 0.6) | torch.eye(9, dtype=torch.bool)
    if kind == "bool":
        return keep
    added = torch.randn(2, 1, 9, 9, generator=generator)
    return added.masked_fill(~keep, torch.finfo(torch.float32).min if kind == "min" else -1e4)


@pytest.mark.parametrize("kind", ["bool", "min", "added"])
def test_four_dimensional_masks_go_through(kind: str) -> None:
    mask = custom(kind)
    model = MODELS["llama"].make("tilegen")
    eager = MODELS["llama"].make("eager")
    ids = inputs("llama")["input_ids"]
    theirs = mask
    if kind == "bool":  # which eager attention does not take
        theirs = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    expected = outputs(eager, {"input_ids": ids, "attention_mask": theirs})
    out = outputs(model, {"input_ids": ids, "attention_mask": mask})
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_see_nothing_give_zero() -> None:
    is_token = torch.tensor([[0, 0, 0, 1, 1]])
    made = model_masks.model_mask(1, 5, 5, attention_mask=is_token.bool())
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    out, _ = call(q, k, v, made)
    assert torch.equal(out[:, :3], torch.zeros(1, 3, 2, 8))
    assert bool(out[:, 3:].abs().gt(0).all())


def test_a_learned_additive_mask_gets_its_gradient() -> None:
    added = torch.randn(1, 2, 5, 5, requires_grad=True)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    out, _ = call(q, k, v, added)
    (grads,) = torch.autograd.grad(out.square().sum(), added)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
    (expected,) = torch.autograd.grad(theirs.square().sum(), added)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> Any:
    return integration.attention_forward(torch.nn.Identity(), q, k, v, mask, **named)


def test_a_window_counts_the_query_where_there_is_no_mask() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind()
    at = torch.arange(6)
    for width in (1, 2, 6):
        near = (at[:, None] - at).abs() < width
        for is_causal in (True, False):
            keep = near & (at <= at[:, None]) if is_causal else near
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            out, _ = call(q, k, v, None, sliding_window=width, is_causal=is_causal)
            torch.testing.assert_close(out.transpose(1, 2), expected)


def test_out_is_contiguous_and_causality_is_the_modules() -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 16)
    module = torch.nn.Identity()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for is_causal in (True, False):
        module.is_causal = is_causal  # pyright: ignore
        out, weights = integration.attention_forward(module, q, k, v, None, unknown="ignored")
        expected = sdpa(q, k, v, is_causal=is_causal, enable_gqa=True)
        assert weights is None
        assert out.is_contiguous()
        torch.testing.assert_close(out.transpose(1, 2), expected)
    assert out.shape == (2, 3, 4, 16)


def test_dropout_of_a_model_in_training_is_that_of_attention() -> None:
    q, k, v = _qkv()
    torch.manual_seed(5)
    out, _ = call(q, k, v, None, dropout=0.5)
    torch.manual_seed(5)
    expected = tilegen.attention(q, k, v, mask=tilegen.causal(), dropout_p=0.5)
    assert torch.equal(out.transpose(1, 2), expected)
    model = MODELS["gpt2"].make("tilegen").train()
    for layer in model.transformer.h:
        layer.attn.attn_dropout.p = 0.5
    results: list[torch.Tensor] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(outputs(model, inputs("gpt2")))
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2])


_CU = torch.tensor([0, 5])
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a paged cache": (lambda: call(*_qkv(), None, cache=object()), "got a paged cache"),
    "an integer mask": (
        lambda: call(*_qkv(), torch.ones(1, 1, 5, 5).long()),
        "expected attention_mask to be a bool or floating tensor",
    ),
    "a mask of two dimensions": (lambda: call(*_qkv(), torch.ones(1, 5)), r"got .*\(1, 5\)"),
    "a mask for other lengths": (
        lambda: call(*_qkv(), model_masks.model_mask(1, 4, 5)),
        "expected 4 queries and 5 keys",
    ),
    "blocks that an indexer has chosen": (
        lambda: call(*_qkv(), None, block_indices=torch.zeros(1, 2, 5, 1)),
        "expected no block_indices",
    ),
    "sinks of each query": (
        lambda: call(*_qkv(), None, sinks=torch.zeros(1, 2, 5, 1)),
        "expected no sinks",
    ),
    "packed documents in two rows": (
        lambda: call(*_qkv(2), None, cu_seq_lens_q=_CU, cu_seq_lens_k=_CU),
        "expected one row of packed documents",
    ),
}  # fmt: skip


def _qkv(batch: int = 1) -> Any:
    return torch.randn(3, batch, 2, 5, 8).unbind()


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_arguments_are_refused_in_one_line(case: str) -> None:
    make, expected = REFUSED[case]
    with pytest.raises(TilegenError, match=expected) as error:
        make()
    assert "\n" not in str(error.value)
