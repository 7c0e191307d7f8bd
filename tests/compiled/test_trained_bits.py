"""Gradients of a score's tensors have the same bits for any number of threads and in every run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import tilegen
from tests.support.score_inputs import random
from tilegen.masks import causal
from tilegen.masks.score import alibi, bias, relative_bias, temperature

BATCH, HEADS, ROWS, WIDTH = 2, 2, 150, 16
Leaf = torch.Tensor
Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _distance(table: Leaf, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    half = table.shape[-1] // 2
    return (k - q).clamp(-half, half) + half


FORMS: dict[str, tuple[Leaf, Callable[[Leaf], object], Callable[..., torch.Tensor]]] = {
    "distances": (
        random(HEADS, 41),
        relative_bias,
        lambda t, s, h, q, k: s + t[h, _distance(t, q, k)],
    ),
    "heads": (random(HEADS), alibi, lambda t, s, h, q, k: s + t[h] * (k - q)),
    "divisors": (random(HEADS, low=0.5, high=2.0), temperature, lambda t, s, h, q, k: s / t[h]),
    "matrix": (random(ROWS, ROWS), bias, lambda t, s, h, q, k: s + t[q, k]),
    "columns": (random(ROWS), bias, lambda t, s, h, q, k: s + t[k]),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = 4, BATCH, HEADS, ROWS, WIDTH
    return [one.to(dtype) for one in torch.randn(shape, generator=generator)]


def _gradient(name: str) -> torch.Tensor:
    """Return the gradient of a form's tensor, by compiled kernels."""
    leaf, made, _ = FORMS[name]
    q, k, v, dout = _inputs()
    trained = leaf.clone().requires_grad_()
    out = tilegen.attention(q, k, v, mask=causal(), score=made(trained))  # type: ignore[arg-type]
    return torch.autograd.grad(out, trained, dout)[0]


def _expected(name: str) -> torch.Tensor:
    """Return the same by dense attention in fp64."""
    leaf, _, changed = FORMS[name]
    q, k, v, dout = _inputs(torch.float64)
    trained = leaf.double().requires_grad_()
    at = torch.arange(ROWS)
    head, row, column = torch.arange(HEADS)[:, None, None], at[:, None], at
    scores = changed(trained, q @ k.mT * WIDTH**-0.5, head, row, column)
    weights = scores.masked_fill(column > row, float("-inf")).softmax(-1)
    return torch.autograd.grad(weights @ v, trained, dout)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_trained_gradients_have_the_same_bits_for_any_threads(name: str) -> None:
    results: list[torch.Tensor] = []
    for threads in (1, 2, 3, 2, 3):
        torch.set_num_threads(threads)
        results.append(_gradient(name))
    assert all(torch.equal(one, results[0]) for one in results)
    expected = _expected(name)
    largest = expected.abs().max().item()
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-5 * largest)


@pytest.mark.slow
def test_trained_gradients_from_several_python_threads() -> None:
    torch.set_num_threads(2)
    expected = {name: _gradient(name) for name in ("distances", "matrix")}
    wrong: list[str] = []

    def work(name: str) -> None:
        for _ in range(5):
            if not torch.equal(_gradient(name), expected[name]):
                wrong.append(name)

    started = [threading.Thread(target=work, args=(name,)) for name in 2 * [*expected]]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not wrong
