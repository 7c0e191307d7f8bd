"""torch.compile takes whole models of transformers with tilegen's attention, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
transformers = pytest.importorskip("transformers", reason=REASON)

from transformers.masking_utils import create_masks_for_generate  # noqa: E402

import tilegen.integrations.transformers  # noqa: E402, F401
from tests.support.models import COMPILED, DECODERS, inputs  # noqa: E402

LEFT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
GIVEN: dict[str, Any] = {
    "llama": {},
    "qwen3": {"use_cache": False},  # transformers looks for packed documents
    "mistral": {},
    "gemma2": {"attention_mask": LEFT},
    "gpt_oss": {"attention_mask": LEFT},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_model_compiles_in_one_graph(name: str) -> None:
    """And not again for other padding."""
    torch._dynamo.reset()
    model = DECODERS[name].make("tilegen")
    given = inputs(name) | GIVEN[name]
    expected = model(**given).logits
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(**given).logits, expected)
    if "attention_mask" in given:
        given["attention_mask"] = LEFT.flip(0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert torch.equal(compiled(**given).logits, model(**given).logits)


@pytest.mark.slow
def test_steps_of_a_generation_compile_once() -> None:
    """With a static cache `generate` makes masks ahead, outside of what is compiled."""
    torch._dynamo.reset()
    ids = inputs("gemma3", tokens=12)["input_ids"]
    results: list[torch.Tensor] = []
    for attention in ("eager", "tilegen"):
        model = DECODERS["gemma3"].make(attention)
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        step = model.forward
        if attention == "tilegen":
            step = torch.compile(step, fullgraph=True, backend="eager")
        with torch.no_grad():
            logits = [model(input_ids=ids[:, :8], past_key_values=cache).logits]
            for i, item in enumerate(ids[:, 8:].split(1, 1)):
                positions = torch.full((1, 1), 8 + i)
                given = {"past_key_values": cache, "position_ids": positions}
                masks = create_masks_for_generate(
                    config=model.config,
                    inputs_embeds=model.get_input_embeddings()(item),
                    attention_mask=None,
                    **given,
                )
                with torch._dynamo.config.patch(error_on_recompile=i > 1):
                    logits.append(step(input_ids=item, attention_mask=masks, **given).logits)
        results.append(torch.cat(logits, 1))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
