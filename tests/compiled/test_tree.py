"""Trees of drafted tokens in emitted kernels: right in dense and paged calls, for any lengths of
requests, and reading no table for keys before the tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import tilegen
from tests.compiled.test_paged import configs, expected_of
from tests.support.counted import counted, counting, predicted
from tests.support.problems import tiled
from tests.support.splits import NAMES, splits
from tilegen.check.reference import make_inputs
from tilegen.check.verification import require, verify
from tilegen.cpu.reports import CountedTraffic
from tilegen.emit.render import render
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.launch.binding import BoundKernel
from tilegen.masks import Mask
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, alibi, sinks, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

WIDTH = 9
PARENTS = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 4, 6])
TILE = TileConfig(block_m=16, block_n=16)


def problem_of(lengths: str, mask: Mask, heads: str = "b2 hq6 hkv2") -> AttentionProblem:
    problem = AttentionProblem.parse(f"{heads} {lengths} d16 fp16 full")
    return replace(problem, mask=mask.stand_in)


# --------------------------------------------------------------------------------------------------
# Bytes


def bound(
    problem: AttentionProblem, config: TileConfig, kernel: Kernel, mask: Mask
) -> tuple[Any, CountedTraffic]:
    launch, actual = counting(render(problem, config, kernel, aligned=False))
    bound_kernel = BoundKernel(launch, problem.mask, kernel, config)
    return bound_kernel.given(
        mask, Shape(*problem.shape.by_axis.values()), torch.device("cpu")
    ), actual


@pytest.mark.parametrize("window", [None, (60, -1)])
@pytest.mark.parametrize("kernel", ["fwd", "fwd_split", "bwd_dkdv", "bwd_dq"])
def test_bytes_equal_the_model(kernel: Kernel, window: tuple[int, int] | None) -> None:
    """The table is read in the tiles that it cuts, and nowhere else."""
    mask = tilegen.tree(tilegen.ancestors(PARENTS).expand(2, WIDTH, WIDTH))
    if window is not None:
        mask = mask & tilegen.sliding_window(*window, "bottom_right")
    for keys in (200, 16, 25):
        problem = problem_of(f"q{WIDTH} kv{keys}", mask)
        config = splits(problem)[NAMES[0]] if kernel == "fwd_split" else TILE
        x, rows = make_inputs(problem), torch.zeros(2, 6, WIDTH)
        backward = (x.dout, rows, rows) if kernel.startswith("bwd") else ()
        launch, actual = bound(problem, config, kernel, mask)
        launch(x.q, x.k, x.v, *backward, 0.1)
        expected = traffic_of(tiled(kernel, problem, config), aligned=False)
        assert (actual.read_bytes, actual.write_bytes) == (
            expected.read_bytes,
            expected.write_bytes,
        )


@pytest.mark.parametrize("page", [8, 64])
def test_bytes_of_pages(page: int) -> None:
    mask = tilegen.tree(PARENTS)
    problem = replace(problem_of(f"q{WIDTH} kv300", mask, "b2 hq4 hkv2"), page=page)
    kernels = configs(problem)
    reads = {"fwd_paged": {"t0": tilegen.ancestors(PARENTS).view(torch.uint8)}}
    assert counted(problem, kernels, reads) == predicted(problem, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["tree(@:8)", "tree(@b:4)&window(30,0,bottom_right)"])
def test_verify_takes_typical_trees(mask: str) -> None:
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 q7 kv100 d16 fp32 {mask} page16")
    require(verify(problem, configs(problem)))
    problem = replace(problem, page=0)
    require(verify(problem, splits(problem)))


# --------------------------------------------------------------------------------------------------
# Calls


@pytest.mark.parametrize(
    "score", [None, softcap(3.0), sinks(torch.tensor([0.5, -1.0, 2.0, 0.0]))],
    ids=["plain", "softcap", "sinks"],
)  # fmt: skip
@pytest.mark.parametrize("unseen", [1e4, float("inf"), float("nan")])
def test_a_dense_call_with_gradients(score: Score | None, unseen: float) -> None:
    lengths = [70, 33]
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(2, 4, WIDTH, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, 70, 16, generator=generator)
    mask = tilegen.tree(PARENTS.expand(2, WIDTH), lengths)
    k[1, :, 33:], v[1, :, 33:] = unseen, unseen  # keys of no request
    given = [x.requires_grad_() for x in (q, k, v)]
    out, lse = tilegen.attention(*given, mask=mask, score=score, return_lse=True)
    gradients = torch.autograd.grad(out.sin().sum() + lse.sum(), given)
    for i, length in enumerate(lengths):
        results = [x[i : i + 1, :, : length if x is not q else None].detach() for x in given]
        results = [x.double().requires_grad_() for x in results]
        keys, values = results[1:]
        expected = expected_dense(results[0], keys, values, score)
        torch.testing.assert_close(out[i].double(), expected[0][0], atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(lse[i].double(), expected[1][0], atol=2e-6, rtol=2e-6)
        grads = torch.autograd.grad(expected[0].sin().sum() + expected[1].sum(), results)
        for mine, other in zip(gradients, grads, strict=True):
            rows = mine[i, :, : other.shape[2]].double()
            torch.testing.assert_close(rows, other[0], atol=2e-5, rtol=2e-5)
            assert not mine[i, :, other.shape[2] :].any()


def expected_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: Score | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) by a mask that is spelt out: ones, and the tree's table behind them."""
    rows, keys = q.shape[2], k.shape[2]
    table = torch.ones(rows, keys, dtype=torch.bool)
    seen = [{i} for i in range(rows)]
    for i in range(rows):
        if (parent := int(PARENTS[i])) >= 0:
            seen[i] |= seen[parent]
        table[i, keys - rows :] = torch.tensor([j in seen[i] for j in range(rows)])
    from tilegen.check.reference import attention_reference

    return attention_reference(q, k, v, mask=tilegen.from_bool(table), score=score)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(
    "window, score",
    [(None, None), (40, None), (None, alibi(torch.tensor([1.0, 0.5, 0.25, 0.125])))],
    ids=["plain", "window", "alibi"],
)
def test_pages_of_requests_of_any_lengths(
    window: int | None, score: Score | None, uniform: bool
) -> None:
    """A tree of its own for each request, of fewer tokens than the table is wide, or of none;
    nothing is read that is in no request."""
    page, heads = 16, 4
    queries = [WIDTH] * 5 if uniform else [1, WIDTH, 0, 5, 4]
    lengths = torch.tensor([33, 160, 50, 17, WIDTH])
    generator = torch.Generator().manual_seed(5)
    tables = (torch.rand(5, WIDTH, WIDTH, generator=generator) < 0.4) | torch.eye(WIDTH).bool()
    k_pages, v_pages = torch.randn(2, 30, page, 2, 16, generator=generator)
    order = torch.randperm(30, generator=generator)
    table, used = torch.full((5, 12), 10**6), 0
    for i, length in enumerate(lengths.tolist()):
        count = -(-length // page)
        table[i, :count] = order[used : used + count]
        used += count
        if rest := -length % page:
            k_pages[table[i, count - 1], page - rest :] = float("nan")
            v_pages[table[i, count - 1], page - rest :] = float("nan")
    k_pages[order[used:]], v_pages[order[used:]] = float("nan"), float("nan")
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    q = torch.randn(sum(queries), heads, 16, generator=generator)

    def masked(drafted: Mask) -> Mask:
        return drafted if window is None else drafted & tilegen.sliding_window(window, window)

    options: dict[str, Any] = {"mask": masked(tilegen.tree(tables)), "score": score}
    if uniform:
        given = q.unflatten(0, (5, WIDTH)).transpose(1, 2)
    else:
        given, options["q_starts"], options["max_q_length"] = q, starts, WIDTH
    out, lse = tilegen.attention_paged(
        *(given, k_pages, v_pages, table, lengths), **options, return_lse=True
    )
    if uniform:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    for i, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if first == end:
            continue
        length = int(lengths[i])
        keep = torch.ones(end - first, length, dtype=torch.bool)
        keep[:, length - (end - first) :] = tables[i, : end - first, : end - first]
        actual = expected_of(
            *(q[first:end].transpose(0, 1), k_pages, v_pages, table[i, : -(-length // page)]),
            *(length, masked(tilegen.from_bool(keep)), score),
        )
        torch.testing.assert_close(
            out[first:end].transpose(0, 1)[None].double(), actual[0], atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            lse[:, first:end][None].double(), actual[1], atol=2e-6, rtol=2e-6
        )
