"""A call that was made before may be captured in a CUDA graph: nothing is read on the host, and
nothing is copied onto the device. CPU tensors take the path of a GPU's, up to the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any
from unittest import mock

import pytest
import torch

import tilegen
from benchmarks.call_cost import as_on_a_gpu

READS = (
    *("item", "tolist", "numpy", "nonzero", "repeat_interleave"),
    *("__bool__", "__int__", "__index__", "__float__"),
)
"""Methods of tensors that wait for a GPU."""
MAKES = ("tensor", "equal", "nonzero", "repeat_interleave", "from_numpy")
"""Functions of PyTorch that wait for a GPU, or copy onto it."""
LENGTH = 64
IDS, TIMES, PLACES = torch.arange(LENGTH) // 20, torch.arange(LENGTH) / 2, torch.arange(LENGTH)
PREDICATES: dict[str, Callable[..., Any]] = {
    "floats": lambda b, h, q, k: TIMES[k] * 0.5 + 3 <= TIMES[q],
    "integers": lambda b, h, q, k: PLACES[k] - 3 <= PLACES[q],
    "equal": lambda b, h, q, k: PLACES[k] * 2 == PLACES[q] + 1,
    "padded documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (IDS[q] >= 0),
}
CHANGES: dict[str, Callable[[], dict[str, Any]]] = {
    "documents, alibi": lambda: dict(
        mask=tilegen.documents(IDS.expand(2, -1)) & tilegen.causal(),
        score=tilegen.alibi(torch.ones(4)),
    ),
    "prefixes, trained": lambda: dict(
        mask=tilegen.prefix_lm(tilegen.values(torch.tensor([3, 9]), "b")),
        score=tilegen.bias(torch.zeros(LENGTH, LENGTH, requires_grad=True)),
    ),
    "dilated": lambda: dict(mask=tilegen.dilated(2)),
    "blocks, sinks": lambda: dict(
        mask=tilegen.block_sparse(torch.ones(4, 4) > 0, 16), score=tilegen.sinks(torch.zeros(4))
    ),
    "tree": lambda: dict(mask=tilegen.tree(torch.arange(-1, LENGTH - 1))),
    "lengths, dropout": lambda: dict(
        kv_lengths=torch.tensor([3, 4]), mask=tilegen.documents(IDS), dropout_p=0.1
    ),
    **{name: lambda fn=fn: dict(mask=tilegen.predicate(fn)) for name, fn in PREDICATES.items()},
}


@contextlib.contextmanager
def captured() -> Generator[None]:
    """Refuse operations that cannot be captured, and tensors made without a device."""

    def forbidden(owner: Any, name: str, when: Callable[[Any], bool] = lambda _: True) -> Any:
        does = getattr(owner, name)

        def call(given: Any, *more: Any, **options: Any) -> Any:
            assert not when(given), f"{name} cannot be captured"
            return does(given, *more, **options)

        return mock.patch.object(owner, name, call)

    with contextlib.ExitStack() as stack:
        for owner, names in ((torch.Tensor, READS), (torch, MAKES)):
            for name in names:
                stack.enter_context(forbidden(owner, name))
        elsewhere = forbidden(torch, "as_tensor", lambda x: not isinstance(x, torch.Tensor))
        stack.enter_context(elsewhere)
        stack.enter_context(torch.device("meta"))
        yield


def check(call: Callable[[], torch.Tensor]) -> None:
    def both() -> None:
        out = call()
        if out.requires_grad:
            out.backward(torch.zeros_like(out))

    with as_on_a_gpu(notes=True) as driver:
        for _ in range(2):
            both()
        before = len(driver.launches)
        with captured():
            both()
        assert len(driver.launches) > before


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_call_may_be_captured(name: str) -> None:
    """With gradients, but for predicates, whose tensors the forward reads already."""
    grad = name not in PREDICATES
    q = torch.zeros(2, 4, LENGTH, 16, dtype=torch.bfloat16, requires_grad=grad)
    k = torch.zeros(2, 2, LENGTH, 16, dtype=torch.bfloat16, requires_grad=grad)
    changes = CHANGES[name]()
    check(lambda: tilegen.attention(q, k, k, **changes))


@pytest.mark.slow
def test_packed_sequences_may_be_captured() -> None:
    x = torch.zeros(LENGTH, 4, 16, dtype=torch.bfloat16, requires_grad=True)
    starts = torch.tensor([0, 20, LENGTH], dtype=torch.int32)
    changes: dict[str, Any] = dict(mask=tilegen.causal(), score=tilegen.alibi(torch.ones(4)))
    check(lambda: tilegen.attention_varlen(x, x, x, starts, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [tilegen.causal("bottom_right"), tilegen.tree(torch.tensor([-1]))], ids=str
)
def test_requests_in_pages_may_be_captured(mask: tilegen.Mask) -> None:
    pages, table = torch.zeros(8, 16, 1, 16).bfloat16(), torch.zeros(2, 4, dtype=torch.int32)
    given = torch.zeros(2, 4, 1, 16).bfloat16(), pages, pages, table, torch.tensor([20, 33])
    check(lambda: tilegen.attention_paged(*given, mask=mask))
