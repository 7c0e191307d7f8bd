"""Models of transformers whose attention is emitted kernels, against eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
transformers = pytest.importorskip("transformers", reason=REASON)

import tilegen.integrations.transformers  # noqa: E402, F401
from tests.support.models import DECODERS, inputs  # noqa: E402

TOLERANCE = 512 * torch.finfo(torch.float32).eps
"""Of the largest number in a result: two layers of sums in fp32, in two orders each."""
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sinks, windows and padding": ("gpt_oss", {"attention_mask": LEFT}),
    "packed documents in windows": ("mistral", {"position_ids": PACKED, "use_cache": False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_eager_attention(case: str) -> None:
    name, given = CASES[case]
    is_token = given.get("attention_mask", torch.ones(2, 7)).bool()
    results: list[list[torch.Tensor]] = []
    for attention in ("eager", "tilegen"):
        model = DECODERS[name].make(attention)
        logits = model(**inputs(name, tokens=7), **given).logits[is_token]
        logits.square().mean().backward()
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        results.append([logits.detach(), torch.cat([one.flatten() for one in gradients])])
    for theirs, ours in zip(*results, strict=True):
        assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max()


@pytest.mark.slow
def test_steps_with_a_static_cache() -> None:
    """Offsets are numbers that kernels read; rows before the first token see nothing."""
    ids = inputs("gemma3", tokens=8)["input_ids"]
    results: list[torch.Tensor] = []
    for attention in ("eager", "tilegen"):
        model = DECODERS["gemma3"].make(attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
        with torch.no_grad():
            parts = ids.split([5, 2, 1], 1)
            logits = [model(input_ids=one, past_key_values=cache).logits for one in parts]
        results.append(torch.cat(logits, 1))
    assert (results[1] - results[0]).abs().max() <= TOLERANCE * results[0].abs().max()
