"""Products on a mask's edge: what they give, and what they leave out."""

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, launch
from tilegen.cpu.target import Target


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


MASKS = {
    "less": lambda i, j, left, right: j < i + left,
    "at most": lambda i, j, left, right: j <= i + left,
    "more": lambda i, j, left, right: j > i - left,
    "at least": lambda i, j, left, right: j >= i - left,
    "turned": lambda i, j, left, right: (j < i + left) & (j <= i + right),
    "window": lambda i, j, left, right: (j >= i - left) & (j <= i + right),
    "two sides": lambda i, j, left, right: (j < i - left) | (j >= i + right),
    "rows": lambda i, j, left, right: (i < left) | (j < 0),
    "columns": lambda i, j, left, right: (j < left) | (i < 0),
    "sparse": lambda i, j, left, right: (j <= i) & ((i - j) % 3 == 0),
    "exclusive": lambda i, j, left, right: (j <= i) ^ (j < left),
    "falling": lambda i, j, left, right: i + j < left,
    "none": lambda i, j, left, right: (j < 0) & (i < 0),
}
SHAPES = [(64, 64, 32), (32, 128, 16), (128, 32, 64)]
NUMBERS = [(0, 0), (5, 3), (41, 17), (-9, 30), (200, 200)]


def _inputs(m: int, n: int, k: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (m, k), (n, k), (n, k), (m, k)
    return [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]


def _computed(
    what: str, numbers: tuple[int, int], given: list[torch.Tensor], target: Target
) -> tuple[torch.Tensor, ...]:
    (m, k), n = given[0].shape, len(given[1])
    results = torch.empty(m, k), torch.empty(m, n), torch.empty(n, k)
    launch(kernels.edges, (1,), *given, *results, *numbers, m, n, k, what, target=target)
    return results


@pytest.mark.parametrize("what", MASKS)
def test_products_beside_a_mask(what: str, target: Target) -> None:
    """Shapes and dtypes in turns."""
    turn = list(MASKS).index(what) + list(TARGETS.values()).index(target)
    m, n, k = SHAPES[turn % len(SHAPES)]
    dtype = (torch.float32, torch.bfloat16)[turn % 2]
    near = 2e-2 if dtype == torch.bfloat16 else 1e-5
    given = _inputs(m, n, k, dtype)
    a, b, v, u = (tensor.double() for tensor in given)
    for numbers in NUMBERS:
        out, grads, back = _computed(what, numbers, given, target)
        keep = MASKS[what](torch.arange(m)[:, None], torch.arange(n)[None], *numbers)
        weights = torch.where(keep, torch.exp2(a @ b.T), 0)
        expected = weights * (u @ v.T - 1)
        torch.testing.assert_close(out.double(), weights @ v, rtol=near, atol=2 * near)
        torch.testing.assert_close(grads.double(), expected, rtol=near, atol=2 * near)
        torch.testing.assert_close(back.double(), expected.T @ u, rtol=near, atol=5 * near)


FAR = {"at most": (0, 63), "at least": (63, 0), "window": (0, 63), "sparse": (0, 63)}
"""Masks with a row, and a column that the mask drops for all rows of a microkernel's block."""


@pytest.mark.parametrize("what", FAR)
def test_nothing_beyond_the_edge_is_multiplied(what: str, target: Target) -> None:
    """NaN times 0 would be NaN."""
    row, column = FAR[what]
    given = _inputs(64, 64, 32, torch.float32)
    given[1][column] = given[2][column] = float("nan")
    out, grads, _ = _computed(what, (3, 3), given, target)
    assert out[row].isfinite().all()
    assert grads[row].isfinite().all()
    given = _inputs(64, 64, 32, torch.float32)
    given[3][row] = float("nan")
    assert _computed(what, (3, 3), given, target)[2][column].isfinite().all()
