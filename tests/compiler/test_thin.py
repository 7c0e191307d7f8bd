"""Products of few rows, whose right operand is read where it lies."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import TARGETS, launch
from tilegen.cpu import build, mlir
from tilegen.cpu.lower import lower
from tilegen.cpu.target import TARGETS as ALL
from tilegen.cpu.target import Target
from tilegen.cpu.thin_rows import Rows
from tilegen.cpu.ttir import ttir_of
from tilegen.cpus.spec import cpu
from tilegen.emit.render import render
from tilegen.pipeline import choose
from tilegen.problem import AttentionProblem

SHAPES = [(64, 128), (32, 32), (16, 64), (128, 256)]
"""Columns and depth; (16, 64) and (32, 32) are too small for some layouts, which pack instead."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = (1, 2, 4, 8, 16)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)], ids=str)
def test_products_of_few_rows(
    turned: tuple[bool, bool], rows: int, dtype: torch.dtype, target: Target
) -> None:
    """What is added to, and shapes, in turns; a row of a transposed left operand is no vector."""
    turn = ROWS.index(rows) + DTYPES.index(dtype) + 2 * turned[1]
    for i in (turn, turn + 1):
        n, k = SHAPES[i % len(SHAPES)]
        start = ("zero", "load", "scale")[i % 3]
        a, b = _random(rows, k, dtype=dtype), _random(k, n, dtype=dtype, seed=1)
        given = a.t().contiguous() if turned[0] else a, b.t().contiguous() if turned[1] else b
        c, scale = _random(rows, n, seed=2), _random(rows, seed=3)
        out = torch.empty(rows, n)
        arguments = *given, c, scale, out, rows, n, k, *turned, start
        launch(kernels.product, (1,), *arguments, target=target)
        before = {"zero": 0, "load": c.double(), "scale": c.double() * scale[:, None].double()}
        expected = before[start] + a.double() @ b.double()
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_rescaled_before_each_step(rows: int, dtype: torch.dtype, target: Target) -> None:
    steps, n = 3, 64
    a, b = _random(rows, n, dtype=dtype), _random(steps, n, n, dtype=dtype, seed=1)
    scale, out = _random(steps, rows, seed=2), torch.empty(rows, n)
    launch(kernels.streamed, (1,), a, b, scale, out, steps, rows, n, target=target)
    expected = torch.zeros(rows, n, dtype=torch.float64)
    for i in range(steps):
        expected = expected * scale[i][:, None].double() + a.double() @ b[i].double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_at_places_of_a_table(
    dtype: torch.dtype, turned: bool, masked: bool, target: Target
) -> None:
    """With a mask rows beyond the first are 0, whatever lies at their places."""
    rows, n, k = 4, 64, 128
    length = n if turned else k
    kept = 37 if masked else length
    places = torch.randperm(300, generator=torch.Generator().manual_seed(4))[:length].int()
    memory = _random(300, k if turned else n, dtype=dtype, seed=1)
    memory[places[kept:].long()] = float("nan")
    a = _random(rows, k, dtype=dtype)
    b = memory.double()[places.long()]
    b[kept:] = 0
    out = torch.empty(rows, n)
    launch(
        kernels.looked_up_product,
        (1,),
        *(a, memory, places, out, kept, rows, n, k, turned, masked),
        target=target,
    )
    expected = a.double() @ (b.T if turned else b)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=2e-5)


def test_nan_and_infinities_stay_in_their_columns(target: Target) -> None:
    a, b = torch.ones(4, 64), torch.ones(64, 64)
    b[3, 5], b[7, 9] = float("nan"), float("inf")
    for turned in (False, True):
        c, scale, out = torch.empty(4, 64), torch.empty(4), torch.empty(4, 64)
        given = a, b.t().contiguous() if turned else b, c, scale, out
        launch(kernels.product, (1,), *given, 4, 64, 64, False, turned, "zero", target=target)
        expected = a.double() @ b.double()
        torch.testing.assert_close(out.double(), expected, equal_nan=True)


@pytest.mark.parametrize(
    "name, dtype", [*product(("avx512bf16", "avx2", "neonbf16"), ("fp32", "bf16"))]
)
def test_decoding_packs_nothing_and_fetches_ahead(name: str, dtype: str) -> None:
    """A kernel of one query and four heads has no other products; one of pages fetches tiles."""
    for more in ("", " page16"):
        problem = AttentionProblem.parse(f"hq8 hkv2 q1 kv4096 d128 {dtype} full{more}")
        kernel, choice = next(iter(choose(problem, cpu("zen4"), "forward").items()))
        config = choice.config
        assert config.rows == 4
        source = build.source_of(render(problem, config, kernel))
        ir = lower(mlir.parse(ttir_of(source), source.file), ALL[name]).ir
        assert "@product" not in ir
        assert "call void @llvm.prefetch" in ir
        # Rows of pages are fetched into L2, by a table of their addresses.
        fetched = [line for line in ir.splitlines() if "call void @llvm.prefetch" in line]
        assert {"i32 0, i32 2, i32 1" in line for line in fetched} >= {bool(more)}
        assert bool(re.search(r"store <\d x ptr>", ir)) == bool(more)


@pytest.mark.parametrize("page", [16, 256])
def test_pages_are_fetched_an_iteration_before(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next page is looked up early in the loop over whole tiles; in the loop over others it is
    not, and a tile is fetched where it is read."""
    fetched: list[bool] = []
    fetch = Rows.fetch
    monkeypatch.setattr(
        Rows,
        "fetch",
        lambda its, *given: (fetched.append(its.ahead is not None), fetch(its, *given)),
    )
    at_once: list[Rows] = []
    monkeypatch.setattr(Rows, "_fetch_tile", lambda its: at_once.append(its))
    problem = AttentionProblem.parse(f"hq8 hkv2 q1 kv4096 d128 fp32 full page{page}")
    kernel, choice = next(iter(choose(problem, cpu("zen4"), "forward").items()))
    source = build.source_of(render(problem, choice.config, kernel))
    lower(mlir.parse(ttir_of(source), source.file), ALL["avx2"])
    assert all(fetched)
    assert len(fetched) > 8
    assert len(at_once) == 2


def test_tiles_have_no_more_rows_than_there_are() -> None:
    rows = {}
    for text in ("hq8 hkv8 q1", "hq8 hkv2 q1", "hq8 hkv2 q2", "hq8 hkv2 q16", "hq8 hkv8 q5"):
        problem = AttentionProblem.parse(f"{text} kv4096 d64 fp32 full")
        rows[text] = choose(problem, cpu("zen4"), "forward")["fwd_split"].config.rows
    assert list(rows.values()) == [1, 4, 8, 64, 8]
