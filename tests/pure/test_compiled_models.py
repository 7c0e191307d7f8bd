"""torch.compile takes whole models of transformers with tilegen's attention, in one graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo

REASON = "needs the package transformers (pip install 'tilegen[integrations]')"
pytest.importorskip("transformers", reason=REASON)

import tilegen.integrations.transformers  # noqa: E402, F401
from tests.tiny_models import COMPILED, DECODERS, inputs  # noqa: E402

LEFT = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
GIVEN: dict[str, Any] = {
    "llama": {},
    "qwen3": {"use_cache": False},  # transformers looks for packed documents
    "mistral": {},
    "gemma2": {"attention_mask": LEFT},
    "gpt_oss": {"attention_mask": LEFT},
}


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
