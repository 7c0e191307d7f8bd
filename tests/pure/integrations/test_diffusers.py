"""Models of diffusers with tilegen in the dispatcher, against its native attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

REASON = "needs the package diffusers (pip install 'tilegen[integrations]')"
diffusers = pytest.importorskip("diffusers", reason=REASON)

from diffusers.models import attention_dispatch  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402

from tilegen.check.reference import dense_mask  # noqa: E402
from tilegen.errors import InvalidProblem, Unsupported  # noqa: E402
from tilegen.integrations import diffusers as integration  # noqa: E402
from tilegen.integrations import given  # noqa: E402
from tilegen.masks import snapshots  # noqa: E402

NATIVE = attention_dispatch.AttentionBackendName.NATIVE
TOLERANCE = 512 * torch.finfo(torch.float32).eps
"""Of the largest number in a result: blocks of sums in fp32, in two orders."""


def flux() -> tuple[Any, dict[str, Any]]:
    """Return a double block and a single one, over text and image, and their inputs."""
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        **{"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1},
        **{"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32},
        **{"pooled_projection_dim": 32, "axes_dims_rope": (4, 4, 8)},
    )
    inputs = {
        "hidden_states": torch.randn(2, 12, 4),
        "encoder_hidden_states": torch.randn(2, 5, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(12, 3).round(),
        "txt_ids": torch.zeros(5, 3),
    }
    return model, inputs


def wan() -> tuple[Any, dict[str, Any]]:
    """Return blocks of self and cross attention over a video, and their inputs."""
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        **{"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12},
        **{"in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32},
        **{"num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32},
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 6, 4),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 16),
    }
    return model, inputs


@pytest.mark.parametrize("make", [flux, wan])
def test_models_agree_with_native_attention(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = make()
    calls: list[int] = []
    backend = integration.backend

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return backend(*given, **named)

    counted.__signature__ = inspect.signature(backend)  # pyright: ignore
    results: list[list[torch.Tensor]] = []
    for ours in (False, True):
        model.zero_grad()
        if ours:
            monkeypatch.setattr(integration, "backend", counted)
            with integration.attention():
                out = model(**inputs).sample
        else:
            out = model(**inputs).sample
        out.square().mean().backward()
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        results.append([out.detach(), torch.cat(gradients)])
    assert len(calls) == (2 if make is flux else 4)
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


def native(*given: Any, **named: Any) -> Any:
    return attention_dispatch.dispatch_attention_fn(*given, **named)


def qkv(heads: int = 2) -> Any:
    torch.manual_seed(0)
    return torch.randn(2, 6, 4, 16), torch.randn(2, 5, heads, 16), torch.randn(2, 5, heads, 16)


TOKENS = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 1]]).bool()
MASKS: dict[str, Any] = {
    "none": {},
    "causal": {"is_causal": True},
    "padding": {"attn_mask": TOKENS},
    "additive padding": {"attn_mask": torch.zeros(2, 5).masked_fill(~TOKENS, -torch.inf)},
    "weights of keys": {"attn_mask": torch.linspace(-1, 1, 10).view(2, 5)},
    "padding in four dimensions": {"attn_mask": TOKENS[:, None, None]},
    "by head": {"attn_mask": (torch.arange(4 * 6 * 5) % 3 > 0).view(1, 4, 6, 5)},
    "additive": {"attn_mask": torch.linspace(-1, 1, 4 * 6 * 5).view(1, 4, 6, 5)},
    "scale": {"scale": 0.3},
    "fewer heads of keys": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", MASKS)
def test_calls_agree_with_native_attention(name: str) -> None:
    q, k, v = qkv(2 if name == "fewer heads of keys" else 4)
    expected = native(q, k, v, **MASKS[name])
    with integration.attention():
        actual = native(q, k, v, **MASKS[name])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_a_block_mask_counts() -> None:
    q, k, v = (one[:, :5] for one in qkv(4))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu")
    actual = integration.backend(q, k, v, attn_mask=mask)
    torch.testing.assert_close(actual, native(q, k, v, is_causal=True))


def test_lse_is_laid_out_as_diffusers_lays_it_out() -> None:
    q, k, v = qkv(4)
    _, lse = integration.backend(q, k, v, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bqhk", q, k) / 4
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_a_captured_graph_builds_the_tables_of_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call before made of the same tensor would stay as it was when the graph replays."""
    dense, padding = torch.randn(2, 1, 5, 5), torch.ones(2, 1, 1, 5, dtype=torch.bool)
    for tensor in (dense, padding):
        once = given.of_tensor(tensor, 2, (5, 5))
        assert given.of_tensor(tensor, 2, (5, 5)) is once
        with monkeypatch.context() as patched:
            patched.setattr(given, "is_captured", lambda _: True)
            assert given.of_tensor(tensor, 2, (5, 5)) is not once
        assert given.of_tensor(tensor, 2, (5, 5)) is once


def kept_of(mask: torch.Tensor) -> torch.Tensor:
    """Return which pairs the mask of a tensor keeps, made as all layers of a model make it."""
    actual, _ = given.of_tensor(mask[:, None], 1, (5, 5))
    return dense_mask(actual, 5, 5).reshape(5, 5)


def test_changes_of_a_mask_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped = torch.full((1, 5, 5), -torch.inf)
    for looked_at in (True, False):  # as on a CPU, and as on a GPU
        monkeypatch.setattr(snapshots, "is_checked", lambda _, seen=looked_at: seen)
        mask = torch.zeros(1, 5, 5)
        assert kept_of(mask).all()
        mask[0, 0] = -torch.inf
        assert kept_of(mask).sum() == 20
        assert kept_of(mask.data).sum() == 20
        mask.fill_(-torch.inf)
        assert not kept_of(mask.data).any()
        mask.fill_(0.0)
        assert kept_of(mask).all()
        mask.data = dropped
        assert not kept_of(mask).any()


def test_changes_of_a_mask_by_numpy_are_seen() -> None:
    mask = torch.zeros(1, 5, 5)
    assert kept_of(mask).all()
    mask.numpy()[0, 1] = -np.inf
    assert kept_of(mask).sum() == 20


def test_nothing_is_left_behind() -> None:
    registry = attention_dispatch._AttentionBackendRegistry
    before = registry.get_active_backend(), set(registry._supports_context_parallel)

    def stop() -> None:
        with integration.attention(), integration.attention():
            assert registry.get_active_backend() == (NATIVE, integration.backend)
            raise KeyError

    with attention_dispatch.attention_backend("_native_math"):
        with pytest.raises(KeyError):
            stop()
        assert registry.get_active_backend()[0] == "_native_math"
    assert before == (registry.get_active_backend(), set(registry._supports_context_parallel))


def test_unsupported_arguments_are_refused_in_one_line() -> None:
    q, k, v = qkv(4)
    with pytest.raises(Unsupported, match="context parallelism"):
        integration.backend(q, k, v, _parallel_config=object())
    with pytest.raises(InvalidProblem, match=r"expected attn_mask .* got \(2, 5\) torch.int64"):
        integration.backend(q, k, v, attn_mask=TOKENS.long())
    with pytest.raises(InvalidProblem, match="pass enable_gqa=True"):
        integration.backend(*qkv(2))


def test_the_contract_is_that_of_the_version_tested() -> None:
    version = f"diffusers {diffusers.__version__} has moved"
    theirs = set(inspect.signature(attention_dispatch._native_attention).parameters)
    assert theirs <= set(inspect.signature(integration.backend).parameters), version


def test_other_registers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, "_AttentionBackendRegistry")
    with pytest.raises(Unsupported, match=r"expected the registers .*, got 0\."):
        integration.attention().__enter__()
