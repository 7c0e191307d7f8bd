"""Port a model written for FlexAttention by changing one import."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

# before: from torch.nn.attention.flex_attention import flex_attention
from tilegen import flex_attention

WINDOW = 64
slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)


def windowed(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the last WINDOW keys of each query."""
    return (q >= k) & (q - k < WINDOW)


def alibi(
    s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor:
    """Lower a score by the distance, times a slope of the head that is trained."""
    return s - slopes[h] * (q - k)


torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, 256, 32, requires_grad=True) for _ in range(3))
block_mask = create_block_mask(windowed, None, None, 256, 256, device="cpu")
out = flex_attention(q, k, v, score_mod=alibi, block_mask=block_mask)
out.sum().backward()
print("out", tuple(out.shape), "and the gradient of the slopes", slopes.grad)

at = torch.arange(256)
distance = at[:, None] - at
scores = (q @ k.transpose(-1, -2)) / 32**0.5 - slopes[:, None, None] * distance
kept = (distance >= 0) & (distance < WINDOW)
expected = scores.masked_fill(~kept, float("-inf")).softmax(-1) @ v
print("as written out:", torch.allclose(out, expected, atol=1e-5))
