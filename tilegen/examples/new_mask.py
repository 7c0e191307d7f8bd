"""Write a mask as a function, look at it, and see what it saves."""

import torch

import tilegen

SENTENCE = 16
is_separator = torch.arange(256) % SENTENCE == 0


def summaries(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Keep the own sentence, and of earlier ones the separators."""
    return (q >= k) & ((q // SENTENCE == k // SENTENCE) | is_separator[k])


mask = tilegen.predicate(summaries)
print(mask.show(64))

q, k, v = torch.randn(3, 1, 4, 256, 32)
out = tilegen.attention(q, k, v, mask=mask)

at = torch.arange(256)
kept = summaries(at, at, at[:, None], at[None, :])
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=kept)
print(f"{kept.float().mean():.0%} of the pairs; as SDPA:", torch.allclose(out, expected, atol=1e-5))

print(tilegen.explain("hq4 q256 d32 fp32 causal&window(15,0)", "h200").text().splitlines()[1])
