"""Compiled calls run the emitted kernels, forward and backward, as other calls do."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from tests.support.traced import calls, gradients, qkv
from tests.traced import test_compiled_pages

CALLS, PAGED = calls(), test_compiled_pages.CALLS
NAMES = (
    "documents outside",
    "function inside",
    "chained outside",
    "sinks inside",
    "lengths inside",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_call_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    call = CALLS[name]
    given = (*qkv(), *call.given)
    compiled = torch.compile(call.run, fullgraph=True, backend="aot_eager")
    grads, expected = gradients(compiled, given), gradients(call.run, given)
    for left, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(left, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree", "score", "sinks"])
def test_a_compiled_call_over_pages_is_the_same(name: str) -> None:
    torch._dynamo.reset()
    given, run = test_compiled_pages.call([70, 9], [3, 2]), PAGED[name]
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**given), run(**given))
