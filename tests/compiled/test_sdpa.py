"""`tilegen.scaled_dot_product_attention` by emitted kernels, against PyTorch's."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen


def inputs(heads_kv: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = (2, 4, 20, 16), (2, heads_kv, 37, 16), (2, heads_kv, 37, 16)
    return [torch.randn(size, requires_grad=True) for size in sizes]


def compare(given: list[torch.Tensor], mask: torch.Tensor | None, **options: bool) -> None:
    out = tilegen.scaled_dot_product_attention(*given, mask, **options)
    expected = of_torch(*given, mask, **options)
    trained = [*given, *([mask] if mask is not None and mask.requires_grad else [])]
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for left, other in zip(
        (out, *torch.autograd.grad(out, trained, weights)),
        (expected, *torch.autograd.grad(expected, trained, weights)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=3e-5, rtol=3e-5)


def test_causal_starts_at_the_top_left() -> None:
    compare(inputs(heads_kv=2), None, is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("size", [(2, 1, 20, 37), (4, 20, 37)], ids=str)
def test_bool_masks_of_pairs(size: tuple[int, ...]) -> None:
    keep = torch.rand(size, generator=torch.Generator().manual_seed(1)) > 0.5
    keep[..., 3] = True
    compare(inputs(), keep)


@pytest.mark.slow
def test_padded_columns_on_either_side() -> None:
    """The first batch entry is padded on the right, the second one on the left."""
    place = torch.arange(37)
    compare(inputs(), torch.stack([place < 9, place >= 30])[:, None, None])


@pytest.mark.slow
def test_added_masks_are_trained_and_may_be_infinite() -> None:
    mask = torch.randn(1, 4, 20, 37)
    mask[..., ::3] = -torch.inf
    compare(inputs(), mask.requires_grad_())


@pytest.mark.parametrize("rows", [1, 20], ids=["columns", "pairs"])
def test_rows_without_keys_are_zero(rows: int) -> None:
    keep = torch.ones(2, 1, rows, 37, dtype=torch.bool)
    keep[1] = False
    q, k, v = inputs()
    out = tilegen.scaled_dot_product_attention(q, k, v, keep)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for tensor in (out, *gradients):
        assert not tensor[1].any()
        assert tensor[0].any()
