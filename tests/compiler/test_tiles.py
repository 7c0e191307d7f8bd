"""Products, reductions, loops, branches and memory against PyTorch, for every layout of vectors."""

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, launch
from tilegen.cpu.products import row_blocks
from tilegen.cpu.target import Target


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


SHAPES = [(16, 16, 16), (64, 128, 32), (32, 16, 64), (128, 32, 16)]
TURNED = [(False, False), (False, True), (True, False), (True, True)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", TURNED, ids=str)
def test_products(turned: tuple[bool, bool], dtype: torch.dtype, target: Target) -> None:
    """Shapes, and what is added to, in turns: each layout of vectors meets all of them, and each
    dtype in each layout all shapes."""
    turn = TURNED.index(turned) + DTYPES.index(dtype) + list(TARGETS.values()).index(target)
    m, n, k = SHAPES[turn % len(SHAPES)]
    a, b = _random(m, k, dtype=dtype), _random(k, n, dtype=dtype, seed=1)
    given = a.t().contiguous() if turned[0] else a, b.t().contiguous() if turned[1] else b
    c, scale = _random(m, n, seed=2), _random(m, seed=3)
    starts = {
        "zero": 0,
        "load": c.double(),
        "scale": c.double() * scale[:, None].double(),
        "sum": c.double() + scale[:, None].double(),
        "twice": 2 * c.double(),
    }
    for place in (turn, turn + 2):
        start, before = list(starts.items())[place % len(starts)]
        out = torch.empty(m, n)
        launch(kernels.product, (1,), *given, c, scale, out, m, n, k, *turned, start, target=target)
        expected = before + a.double() @ b.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


IN_PLACE = [
    *("at once", "read later", "transposed", "part is loaded", "part is stored"),
    *("stored elsewhere", "a store comes before", "read before the store"),
]


@pytest.mark.parametrize("how", IN_PLACE)
def test_products_that_are_added_to_memory(how: str, target: Target) -> None:
    """The first two are written by the microkernel itself: see `in_place`."""
    size, n = 32, 19
    a, b, memory = _random(size, size), _random(size, 32, seed=1), _random(size * 41 + 8, seed=2)
    out = memory.clone()
    launch(kernels.added_to_memory, (1,), a, b, out, n, how, size, target=target)
    expected = memory.double()
    block = expected[: size * 40].view(size, 40)[:, :32]
    block = block.T if how == "transposed" else block
    product, before, there = a.double() @ b.double(), block.clone(), torch.arange(size) < n
    after = before + product
    if how == "part is loaded":
        after = before * there[:, None] + product
    if how == "part is stored":
        after = torch.where(there[:, None], after, before)
    if how == "read before the store":
        expected[size * 40 :][:size] = before[:, 0]
    if how == "stored elsewhere":
        block = expected[8:][: size * 40].view(size, 40)[:, :32]
    block.copy_(after)
    if how == "read later":
        expected[size * 40 :][:size] = after.sum(1)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


def test_blocks_of_rows_cover_all_rows() -> None:
    for rows in range(1, 300):
        for most in (1, 2, 3, 4, 6, 8, 12, 16):
            assert sum(height * count for height, count in row_blocks(rows, most)) == rows


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("what", ["sum", "max", "min", "xor"])
@pytest.mark.parametrize("shape", [(16, 128), (64, 8), (32, 2)], ids=str)
def test_reductions(shape: tuple[int, int], what: str, axis: int, target: Target) -> None:
    x = _random(*shape)
    if what == "xor":
        x = (1e6 * x).to(torch.int32)
    elif what != "sum":
        x[3, 1] = float("nan")  # a maximum drops it
    out = torch.empty(shape[1 - axis], dtype=x.dtype)
    launch(kernels.reduction, (1,), x, out, *shape, axis, what, target=target)
    if what == "sum":
        torch.testing.assert_close(out, x.sum(axis))
    elif what == "xor":
        rows = x.unbind(axis)
        expected = rows[0]
        for row in rows[1:]:
            expected = expected ^ row
        assert torch.equal(out, expected)
    else:
        filled = x.nan_to_num(nan=float("-inf" if what == "max" else "inf"))
        assert torch.equal(out, getattr(filled, f"a{what}")(axis))


def test_loops_carry_scalars(target: Target) -> None:
    x = _random(1000)
    for n in (1000, 1, 0):
        out = torch.empty(1)
        launch(kernels.total, (1,), x, out, n, 64, target=target)
        torch.testing.assert_close(out[0], x[:n].sum())


def test_loops_hand_tiles_over_in_a_circle(target: Target) -> None:
    x, (m, n) = _random(5, 16, 32), (16, 32)
    for steps in (0, 1, 2, 5):
        out = torch.empty(m, n)
        launch(kernels.rotated_sum, (1,), x, out, steps, m, n, target=target)
        a, b, c = torch.zeros(m, n), torch.ones(m, n), 2 * torch.ones(m, n)
        for step in range(steps):
            a, b, c = c + x[step], a, b
        torch.testing.assert_close(out, a - 2 * b + 3 * c)


def test_branches_and_early_returns(target: Target) -> None:
    x = _random(150)
    out = torch.full((192,), 9.0)
    launch(kernels.branches, (5,), x, out, 150, 32, target=target)
    block = torch.arange(150) // 32
    torch.testing.assert_close(out[:150], torch.where(block % 2 == 0, x * 2, x - 1) + x)
    assert torch.equal(out[150:], torch.full((42,), 9.0))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int64], ids=str
)
def test_gathers_under_masks(dtype: torch.dtype, target: Target) -> None:
    m, n, rows = 16, 8, 11
    table = (50 * _random(20, 3 * n)).to(dtype)
    index = torch.randint(20, (m,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    out = torch.empty(m, n, dtype=dtype)
    launch(kernels.gather, (1,), table, index, out, rows, m, n, target=target)
    expected = table[index][:, ::3].clone()
    expected[rows:], expected[:, 5] = -7, -7
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_under_a_mask(dtype: torch.dtype, target: Target) -> None:
    x, out = _random(16, 32, dtype=dtype), torch.full((16, 32), 9.0)
    for n in (16, 11, 0):
        out.fill_(9.0)
        launch(kernels.ragged, (1,), x, out, n, 16, 32, target=target)
        seen = x.float().clone()
        seen[n:] = 3.0
        torch.testing.assert_close(out[:n], (seen + seen.sum(0))[:n])
        assert torch.equal(out[n:], torch.full((16 - n, 32), 9.0))


def test_rows_that_run_backwards(target: Target) -> None:
    x, out = _random(50), torch.zeros(64)
    launch(kernels.turned_round, (1,), x, out, 50, 64, target=target)
    assert torch.equal(out[:50], x.flip(0))
    assert not out[50:].any()


@pytest.mark.parametrize("axis", [0, 1])
def test_reductions_that_the_same_tile_reads(axis: int, target: Target) -> None:
    x, out = _random(32, 64), torch.empty(32, 64)
    launch(kernels.softmax, (1,), x, out, 32, 64, axis, target=target)
    torch.testing.assert_close(out, x.softmax(axis))


def test_atomic_additions(target: Target) -> None:
    value = _random(500)
    index = torch.randint(7, (500,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    out = torch.zeros(7)
    launch(kernels.scatter_add, (16,), value, index, out, 500, 32, target=target)
    torch.testing.assert_close(out, torch.zeros(7).index_add(0, index, value), rtol=1e-4, atol=1e-4)


def test_tiles_of_three_axes(target: Target) -> None:
    x, out = _random(32, 64), torch.empty(2, 64)
    launch(kernels.reshaped, (1,), x, out, 32, 64, target=target)
    torch.testing.assert_close(out, x.view(16, 2, 64).sum(0))


def test_tiles_are_read_before_they_are_overwritten(target: Target) -> None:
    x = _random(100)
    values = x.clone()
    launch(kernels.update, (1,), values, 100, 128, target=target)
    assert torch.equal(values, torch.cat([torch.zeros(1), x[:-1]]) + 1)


def test_operands_are_packed_where_every_loop_reads_them(target: Target) -> None:
    n = 16
    a, b = _random(n, n), _random(n, n, seed=1)
    for first, second in ((0, 0), (0, 2), (2, 0), (1, 3)):
        out = torch.empty(n, n)
        launch(kernels.skipped_pack, (1,), a, b, out, first, second, n, target=target)
        expected = first * (a @ b) + second * (b @ a + a @ b.t())
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_operands_packed_in_a_branch_are_packed_again_after_it(target: Target) -> None:
    n = 16
    a, b = _random(n, n), _random(n, n, seed=1)
    for taken in (0, 1):
        out = torch.empty(n, n)
        launch(kernels.packed_in_branch, (1,), a, b, out, taken, n, target=target)
        torch.testing.assert_close(out, (1 + taken) * (a @ b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_whose_rows_are_rescaled(dtype: torch.dtype, target: Target) -> None:
    m, n, steps = 32, 16, 3
    a, b = _random(m, n, dtype=dtype), _random(n, n, dtype=dtype, seed=1)
    scale, out = _random(steps, m, seed=2), torch.empty(m, n)
    launch(kernels.rescaled, (1,), a, b, scale, out, steps, m, n, target=target)
    expected = torch.zeros(m, n, dtype=torch.float64)
    for step in range(steps):
        expected = expected * scale[step, :, None].double() + a.double() @ b.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
