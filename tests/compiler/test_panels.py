"""Right operands that lie in memory as a panel does, and others that only nearly do."""

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, launch
from tilegen.cpu import panels
from tilegen.cpu.target import Target

ROWS = DEPTH = 32


def _check(what: str, stride: int, left: int, skipped: int, target: Target) -> None:
    n = target.lanes * target.vectors
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(ROWS, DEPTH, generator=generator)
    memory = torch.full((DEPTH * (stride + skipped) + n,), float("nan"))
    b, out = torch.zeros(DEPTH, n), torch.empty(ROWS, n)
    for row in range(left):
        first = row * stride + row // 2 * skipped
        b[row] = memory[first : first + n] = torch.randn(n, generator=generator)
    given = a, memory, out, stride, left, skipped
    launch(kernels.spread_product, (1,), *given, ROWS, n, DEPTH, what, target=target)
    torch.testing.assert_close(out, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


@pytest.mark.parametrize("apart", [0, 1, 16])
@pytest.mark.parametrize("what", ["plain", "masked", "uneven"])
def test_rows_at_any_distance(what: str, apart: int, target: Target) -> None:
    """Rows that follow each other, as in a panel, and rows with other memory between."""
    stride = target.lanes * target.vectors + apart
    skipped = 8 if what == "uneven" else 0
    for left in (1, 17, DEPTH) if what == "masked" else (DEPTH,):
        _check(what, stride, left, skipped, target)


def test_a_tile_that_is_a_panel_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "packed", lambda *_: "null")  # reading it would end the process
    target = TARGETS["wide"]
    _check("read where it lies", target.lanes * target.vectors, DEPTH, 0, target)
