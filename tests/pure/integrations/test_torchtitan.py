"""torchtitan's attention layers with tilegen inside, against FlexAttention written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxOutput, and_masks, create_block_mask

REASON = (
    "needs the package torchtitan, whose requirements do not go with ours: "
    "pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser"
)
theirs = pytest.importorskip("torchtitan.models.common.attention", reason=REASON)

from torchtitan.models.common.config_utils import make_gqa_config  # noqa: E402
from torchtitan.models.common.rope import CosSinRoPE  # noqa: E402
from torchtitan.models.gpt_oss.model import apply_attention_sink_rescale  # noqa: E402

from tilegen.errors import InvalidProblem  # noqa: E402
from tilegen.integrations import torchtitan as ours  # noqa: E402

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 0, 1]])
TOLERANCE = 128 * torch.finfo(torch.float32).eps
"""Of the largest number in a result: sums in fp32, in two orders."""


def masks() -> Any:
    """Return the BlockMask that torchtitan makes of positions, of blocks that torch computes."""
    mods = (
        theirs.get_causal_mask_mod(),
        theirs.get_efficient_causal_mask_mod_for_packed_document(POSITIONS),
    )
    return create_block_mask(and_masks(*mods), 2, None, 9, 9, device="cpu")


def layer(inner: Any) -> Any:
    """Return a layer with the same random weights for each inner attention."""
    config = make_gqa_config(
        **{"dim": 32, "n_heads": 4, "n_kv_heads": 2, "wqkv_param_init": {}, "wo_param_init": {}},
        inner_attention=inner,
        rope=CosSinRoPE.Config(dim=8, max_seq_len=16),
    )
    made = config.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.5)
    return made


def results(inner: Any, attention_masks: Any) -> list[torch.Tensor]:
    made = layer(inner)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    out = made(x, attention_masks, POSITIONS)
    out.square().mean().backward()
    return [out.detach(), torch.cat([one.grad.flatten() for one in made.parameters()])]


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: Any, **_: Any
) -> Any:
    """Compute FlexAttention's result, without gradients on a CPU."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    b, h, i, j = (
        torch.arange(n).view(-1, *[1] * (3 - axis)) for axis, n in enumerate((2, 1, 9, 9))
    )
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~block_mask.mask_mod(b, h, i, j), -torch.inf)
    return scores.softmax(-1) @ v, AuxOutput(lse=scores.logsumexp(-1))


@pytest.fixture(autouse=True)
def _differentiable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(theirs.FlexAttention, "_compiled_flex_attn", written_out)


def test_layers_agree_with_their_own_attention() -> None:
    expected = results(theirs.FlexAttention.Config(), masks())
    varlen = theirs.create_varlen_metadata_for_document(POSITIONS)
    for inner, mask in (
        (ours.FlexAttention.Config(), masks()),
        (ours.VarlenAttention.Config(), varlen),
    ):
        for right, actual in zip(expected, results(inner, mask), strict=True):
            assert (actual - right).abs().max() <= TOLERANCE * right.abs().max()


def qkv() -> Any:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(2, 9, heads, dim, generator=generator, requires_grad=True)
        for heads, dim in ((4, 16), (2, 16), (2, 8))
    ]


def test_sinks_by_a_transform_of_out_and_lse_are_trained() -> None:
    results: list[tuple[torch.Tensor, ...]] = []
    varlen = theirs.create_varlen_metadata_for_document(POSITIONS)
    for module, mask in (
        (theirs.FlexAttention.Config().build(), masks()),
        (ours.FlexAttention.Config().build(), masks()),
        (ours.VarlenAttention.Config().build(), varlen),
    ):
        q, k, v = qkv()
        sinks = torch.linspace(-1, 1, 4).requires_grad_()
        out = module(
            *(q, k, v),
            attention_masks=mask,
            scale=0.3,
            enable_gqa=True,
            out_transform=lambda out, lse, s=sinks: apply_attention_sink_rescale(out, lse, s),
        )
        assert out.shape == (2, 9, 4, 8)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v, sinks))))
    for others in results[1:]:
        for right, other in zip(results[0], others, strict=True):
            assert (other - right).abs().max() <= TOLERANCE * right.abs().max()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (1, 0), (8, 0), (2, 1)])
def test_windows_count_tokens_before_and_behind(window: tuple[int, int]) -> None:
    """A window of (w, 0) is w tokens before the query, and the query."""
    q, k, v = (one.detach() for one in qkv())
    out = ours.VarlenAttention.Config(window_size=window).build()(
        *(q, k, v),
        attention_masks=theirs.create_varlen_metadata_for_document(POSITIONS),
        enable_gqa=True,
    )
    document = (POSITIONS == 0).cumsum(1)
    at = torch.arange(9)
    left, right = (9 if one == -1 else one for one in window)
    keep = (document[:, :, None] == document[:, None]) & (at >= at[:, None] - left)
    keep = keep & (at <= at[:, None] + right)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(one.transpose(1, 2) for one in (q, k, v)), attn_mask=keep[:, None], enable_gqa=True
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_models_take_our_configurations_for_theirs() -> None:
    """By these classes a model decides which masks it makes."""
    assert isinstance(ours.FlexAttention.Config(), theirs.FlexAttention.Config)
    assert isinstance(ours.VarlenAttention.Config(), theirs.VarlenAttention.Config)


def test_no_mask_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidProblem, match="BlockMask or VarlenMetadata, got NoneType"):
        ours.FlexAttention.Config().build()(*qkv(), attention_masks=None, enable_gqa=True)
