"""Integers that torch.compile made variables of are read at run time: two graphs for all values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tilegen
from tilegen.runtime import dispatch

HEADS = 2


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def mask_of(n: int) -> Callable[..., Any]:
    return lambda b, h, i, j: (j <= i + n) & (i + n - j < 7)


def score_of(n: int) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s - 0.25 * (i + n - j) * (h + 1) + n / 8


def power_of(n: int) -> Callable[..., Any]:
    """Return a score that needs the number itself."""
    return lambda s, b, h, i, j: s + (h + 1) ** (n % 3) / 4


def expected(q: Any, k: Any, mask: Any, score: Any) -> torch.Tensor:
    """Compute attention in fp64 by calling the functions pair by pair."""
    q, k = q.double(), k.double()
    b, h, i, j = (
        torch.arange(n).view([-1 if axis == at else 1 for at in range(4)])
        for axis, n in enumerate((len(q), HEADS, q.shape[2], k.shape[2]))
    )
    logits = q @ k.mT / q.shape[3] ** 0.5
    logits = logits if score is None else score(logits, b, h, i, j)
    keep = torch.ones(1, dtype=torch.bool) if mask is None else mask(b, h, i, j)
    return torch.where(keep, logits, -torch.inf).softmax(-1) @ k


CASES: dict[str, tuple[Any, Any]] = {
    "mask": (mask_of, None),
    "score": (None, score_of),
    "both": (mask_of, score_of),
}


def attended(q: torch.Tensor, k: torch.Tensor, case: tuple[Any, Any], *, made: bool = False) -> Any:
    n = k.shape[2] - q.shape[2]
    mask, score = (None if one is None else one(n) for one in case)
    if made:
        mask, score = mask and tilegen.predicate(mask), score and tilegen.score(score)
    return tilegen.attention(q, k, k, mask=mask, score=score)


def tensors(length: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(length)
    return torch.randn(1, HEADS, rows, 16, generator=drawn), torch.randn(
        1, HEADS, length, 16, generator=drawn
    )


def check(function: Callable[..., Any], length: int, case: tuple[Any, Any]) -> None:
    q, k = tensors(length)
    mask, score = (None if one is None else one(length - 3) for one in case)
    out = function(q, k).double()
    torch.testing.assert_close(out, expected(q, k, mask, score), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_decoding_compiles_two_graphs(name: str, made: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k: attended(q, k, CASES[name], made=made), backend=counter, fullgraph=True
    )
    for length in range(20, 32):
        check(compiled, length, CASES[name])
    assert counter.frame_count == 2


@pytest.mark.slow
def test_sizes_that_must_be_known_are_fixed() -> None:
    compiled = torch.compile(
        lambda q, k: attended(q, k, (None, power_of)), backend="aot_eager", fullgraph=True
    )
    for length in range(20, 24):
        check(compiled, length, (None, power_of))


@pytest.mark.slow
def test_narrow_tables_keep_their_dtype() -> None:
    """An integer of Python changes no dtype: int8 wraps around."""
    table = torch.tensor([100, -100], dtype=torch.int8)

    def of(n: int) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s + (table[h] + n) / 64

    compiled = torch.compile(
        lambda q, k: attended(q, k, (None, of)), backend="aot_eager", fullgraph=True
    )
    for length in range(40, 44):
        check(compiled, length, (None, of))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_export_takes_sizes(name: str, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> Any:
            return attended(q, k, CASES[name])

    sizes = ({}, {2: torch.export.Dim("keys", min=8, max=4096)})
    program = torch.export.export(Model(), tensors(20), dynamic_shapes=sizes, strict=strict)
    for length in (11, 29, 70):
        check(program.module(), length, CASES[name])


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_calls_read_a_second_value_at_run_time(
    name: str, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[Any] = []
    plan = dispatch._new_plan  # pyright: ignore[reportPrivateUsage]

    def counted(*args: Any) -> Any:
        planned.append(args)
        return plan(*args)

    monkeypatch.setattr(dispatch, "_new_plan", counted)
    counts: list[int] = []
    for length in range(20, 32):
        check(lambda q, k: attended(q, k, CASES[name], made=made), length, CASES[name])
        counts.append(len(planned))
    assert counts[3] == counts[-1] <= 4


def test_constants_of_living_functions_stay_constants() -> None:
    """As those of a module's layers."""

    def near(n: int) -> Callable[..., Any]:
        return lambda b, h, i, j: i - j < n

    masks = [tilegen.predicate(near(n)) for n in (3, 4)]
    for _ in range(2):
        for mask in masks:
            q, k = tensors(30)
            tilegen.attention(q, k, k, mask=mask)
            assert mask.follows is None
