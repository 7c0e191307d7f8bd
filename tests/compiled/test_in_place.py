"""Kernels see in-place changes of a mask's tensors, however they are made."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import tilegen
from tests.support.inputs import CASES, WAYS, given, inputs
from tilegen.check.reference import attention_reference
from tilegen.masks.tiles import tile_lists

LISTED = "scattered documents"
"""Whose lists of tiles are kept from call to call."""


@pytest.mark.parametrize(
    "name, way", [(LISTED, way) for way in WAYS] + [(name, "numpy") for name in CASES]
)
def test_a_mask_follows_its_tensor(name: str, way: str) -> None:
    make, before, after = CASES[name]
    q, k, v = inputs()
    tensor = given(way, before.clone())
    mask = make(tensor)
    for _ in range(2):  # the second call takes what the first has kept
        out = tilegen.attention(q, k, v, mask=mask)
        torch.testing.assert_close(out, attention_reference(q, k, v, mask=make(before))[0])
    WAYS[way](tensor, after)
    expected = attention_reference(q, k, v, mask=make(after))[0]
    torch.testing.assert_close(tilegen.attention(q, k, v, mask=mask), expected)


def test_a_captured_call_is_right_for_values_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a replay read the tensor, and nothing that calls before have kept of it."""
    q, k, v = (x.requires_grad_() for x in inputs())
    make, before, after = CASES[LISTED]
    mask = make(tensor := before.clone())
    tilegen.attention(q, k, v, mask=mask)
    monkeypatch.setattr(tile_lists, "is_captured", lambda _: True)
    monkeypatch.setattr(tile_lists, "build", None)
    tensor.copy_(after)
    ours = tilegen.attention(q, k, v, mask=mask)
    expected = attention_reference(q, k, v, mask=make(after))[0]
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(ours)
    for left, other in zip(
        *(torch.autograd.grad(out, (q, k, v), weights) for out in (ours, expected)), strict=True
    ):
        torch.testing.assert_close(left, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefix", [None, 5], ids=["closed form", "general"])
def test_attention_varlen_follows_its_cu_seqlens(way: str, prefix: int | None) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in inputs())
    cu, others = torch.tensor([0, 30, 31, 70]), torch.tensor([0, 9, 50, 70])
    mask = None if prefix is None else tilegen.prefix_lm(prefix)

    def score(s: torch.Tensor, b: int, h: int, q_idx: int, kv_idx: int) -> torch.Tensor:
        return s + torch.sin(0.3 * q_idx) * torch.sin(0.5 * kv_idx)

    used = given(way, cu.clone())
    for expected in (cu, others):
        WAYS[way](used, expected)
        out = tilegen.attention_varlen(q, k, v, used, mask=mask, score=score)
        for first, end in pairwise(expected):
            document = (x[first:end].transpose(0, 1)[None] for x in (q, k, v))
            alone = attention_reference(*document, mask=mask, score=tilegen.score(score))[0][0]
            torch.testing.assert_close(out[first:end], alone.transpose(0, 1))


def test_gradients_are_refused_where_a_mask_has_changed_since_the_forward() -> None:
    """As PyTorch refuses them for tensors of its own."""
    q, k, v = inputs()
    q.requires_grad_()
    limits = torch.arange(70)
    out = tilegen.attention(q, k, v, mask=tilegen.predicate(lambda b, h, q, k: k <= limits[q]))
    limits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_are_refused_where_a_score_has_changed_since_the_forward() -> None:
    for make in (tilegen.sinks, tilegen.alibi):
        q, k, v = inputs()
        read = torch.ones(2, requires_grad=True)
        out = tilegen.attention(q, k, v, score=make(read))
        with torch.no_grad():
            read.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("train", [False, True], ids=["forward", "gradients"])
def test_a_score_follows_tensors_that_its_function_makes(train: bool) -> None:
    """As `0.5 * t` does, or `t.clamp(...)`, of a tensor that the function captures."""
    q, k, v = inputs()
    scale = torch.tensor([1.0, 2.0], requires_grad=train)
    shift = torch.randint(0, 9, (70,))

    def function(s: torch.Tensor, b: int, h: int, q_idx: int, kv_idx: int) -> torch.Tensor:
        return s * (0.5 * scale.clamp(0, 5))[h] + (shift * 2 + 1)[kv_idx]

    made = tilegen.score(function).then(tilegen.softcap(9.0))
    for _ in range(2):
        used = scale.detach().clone().requires_grad_(train)
        factors = (0.5 * used.clamp(0, 5))[:, None, None]
        logits = q @ k.mT * q.shape[-1] ** -0.5 * factors + (shift * 2 + 1)
        expected = (9 * torch.tanh(logits / 9)).softmax(-1) @ v
        out = tilegen.attention(q, k, v, score=made)
        torch.testing.assert_close(out, expected)
        if train:
            (gradient,) = torch.autograd.grad(out.square().sum(), scale)
            (wanted,) = torch.autograd.grad(expected.square().sum(), used)
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            scale.add_(1)
        shift.add_(3)
