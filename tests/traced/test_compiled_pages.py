"""torch.compile takes calls over the pages of a cache as they are, in one graph for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._subclasses.fake_tensor import FakeTensorMode

import tilegen
import tilegen.operators
from tilegen.errors import TilegenError
from tilegen.operators.crossing import crossing

BOTTOM = tilegen.causal("bottom_right")
HEADS, HEADS_KV, WIDTH, V_WIDTH, PAGE = 4, 2, 32, 24, 16


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()


def call(lengths: list[int], queries: list[int], *, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of a call with packed queries; pages are two parts of one tensor."""
    generator = torch.Generator().manual_seed(seed)
    requests, pages = len(lengths), 5 * len(lengths)
    cache = torch.randn(2, pages, PAGE, HEADS_KV, WIDTH, generator=generator)
    return {
        "q": torch.randn(sum(queries), HEADS, WIDTH, generator=generator),
        "k_pages": cache[0],
        "v_pages": cache[1, ..., :V_WIDTH],
        "block_table": torch.randperm(pages, generator=generator).view(requests, 5),
        "kv_lengths": torch.tensor(lengths),
        "q_starts": torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()]),
        "max_q_length": max(queries),
    }


SEEN = tilegen.ancestors(torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
SLOPES = torch.rand(HEADS, generator=torch.Generator().manual_seed(1))
CALLS: dict[str, Callable[..., Any]] = {
    "plain": tilegen.attention_paged,
    "causal": lambda **x: tilegen.attention_paged(**x, mask=BOTTOM, scale=-0.2),
    "tree": lambda **x: tilegen.attention_paged(**x, mask=tilegen.tree(SEEN)),
    "score": lambda **x: tilegen.attention_paged(
        **x, mask=BOTTOM, score=lambda s, b, h, i, j: s + SLOPES[h] * (j - i) * (b + 1)
    ),
    "sinks": lambda **x: tilegen.attention_paged(
        **x, score=tilegen.sinks(SLOPES), max_kv_length=75
    ),
    "lse": lambda **x: tilegen.attention_paged(**x, mask=BOTTOM, return_lse=True),
    "lengths of their own": lambda **x: tilegen.attention_paged(
        **x, mask=tilegen.kv_lengths(torch.tensor([30, 2]))
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_call_is_the_same(name: str, uniform: bool) -> None:
    given, run = call([70, 9], [3, 3]), CALLS[name]
    if uniform:
        del given["q_starts"], given["max_q_length"]
        given["q"] = given["q"].unflatten(0, (2, 3)).transpose(1, 2)
    expected = run(**given)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(**given)
    if not isinstance(actual, tuple):
        actual, expected = (actual,), (expected,)
    for left, other in zip(actual, expected, strict=True):
        assert left.stride() == other.stride()
        torch.testing.assert_close(left, other)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_steps_of_decoding_are_one_graph(layout: str) -> None:
    """Requests, queries and keys of any numbers, and pages that the graph writes into."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def step(k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        where = [given[name] for name in ("k_pages", "v_pages", "block_table", "kv_lengths")]
        tilegen.append_paged(k, v, *where, q_starts=given["q_starts"], layout=layout)
        return tilegen.attention_paged(**given, mask=BOTTOM, layout=layout) * 2

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for i, (lengths, queries) in enumerate(
        # No two sizes are equal at first: torch.compile would take them for the same ever after.
        [
            ([70] * 7, [6, 4, 1, 2, 3, 6, 1]),
            ([71] * 6, [2, 9, 4, 1, 2, 4]),
            ([20] * 9, [5, 3, 6] * 3),
        ]
    ):
        given, same = (call(lengths, queries, seed=i) for _ in range(2))
        if layout == "HND":
            for arguments in (given, same):
                arguments["k_pages"], arguments["v_pages"] = (
                    arguments[name].transpose(1, 2).contiguous() for name in ("k_pages", "v_pages")
                )
        new = torch.randn(2, sum(queries), HEADS_KV, WIDTH)
        k, v = new[0], new[1, ..., :V_WIDTH]
        torch.testing.assert_close(compiled(k, v, given), step(k, v, same))
        for name in ("k_pages", "v_pages"):
            assert torch.equal(given[name], same[name])
    assert len(graphs) == 1


@pytest.mark.slow
def test_writes_are_seen_by_later_reads() -> None:
    """Also where functions replace what changes in place, and pages of keys and of values are
    views of one tensor."""

    def step(
        new: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        before = cache.sum()
        tilegen.append_paged(new, new, cache[0], cache[1], table, lengths)
        q = new.repeat_interleave(2, 1)
        out = tilegen.attention_paged(q, cache[0], cache[1], table, lengths)
        return out.sum() + cache.sum() - before

    generator = torch.Generator().manual_seed(3)
    cache = torch.randn(2, 6, PAGE, HEADS_KV, WIDTH, generator=generator)
    new = torch.randn(2, HEADS_KV, 2, WIDTH, generator=generator)
    where = torch.arange(6).view(2, 3), torch.tensor([40, 2])
    mine, other = cache.clone(), cache.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(new, mine, *where), step(new, other, *where))
    assert torch.equal(mine, other)
    assert not torch.equal(mine, cache)


@pytest.mark.slow
def test_values_in_keys_are_written_and_read() -> None:
    """Pages of values that overlap those of keys, which the operator changes both."""

    def step(
        new: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        pages = cache, cache[..., :WIDTH]
        tilegen.append_paged(new, new[..., :WIDTH], *pages, table, lengths)
        return tilegen.attention_paged(new.repeat_interleave(2, 1), *pages, table, lengths)

    generator = torch.Generator().manual_seed(4)
    cache = torch.randn(6, PAGE, HEADS_KV, 48, generator=generator)
    new = torch.randn(2, HEADS_KV, 2, 48, generator=generator)
    where = torch.arange(6).view(2, 3), torch.tensor([40, 2])
    mine, other = cache.clone(), cache.clone()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(new, mine, *where), step(new, other, *where))
    assert torch.equal(mine, other)
    assert not torch.equal(mine, cache)


def _operands(name: str) -> tuple[Any, tuple[Any, ...]]:
    given = call([70, 9], [3, 2])
    if name == "append":
        new = torch.randn(5, HEADS_KV, WIDTH)
        where = (given["block_table"], given["kv_lengths"], given["q_starts"], "NHD")
        pages = given["k_pages"].clone(), given["v_pages"].clone()
        return torch.ops.tilegen.append.default, (new, new[..., :V_WIDTH], *pages, *where)
    crossed = crossing(tilegen.tree(SEEN), tilegen.softcap(3.0), None)
    arguments = (*given.values(), None, crossed.text, crossed.tensors, 0.3, "NHD")
    return torch.ops.tilegen.paged.default, arguments


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paged", "append"])
def test_opcheck(name: str) -> None:
    operator, arguments = _operands(name)
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def test_tensors_without_data() -> None:
    given = call([70, 9], [3, 2])
    with FakeTensorMode() as mode:
        given = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one
            for name, one in given.items()
        }
        out, lse = tilegen.attention_paged(**given, mask=BOTTOM, return_lse=True)
    assert (out.shape, lse.shape) == ((5, HEADS, V_WIDTH), (HEADS, 5))
    assert lse.dtype == torch.float32


def test_gradients_are_refused() -> None:
    given = call([70, 9], [3, 2])
    given["q"].requires_grad_()
    compiled = torch.compile(CALLS["causal"], fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="attention over pages has no backward"):
        compiled(**given)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**given), CALLS["causal"](**given))


def test_sizes_that_do_not_fit_are_refused_at_run_time() -> None:
    given = call([70, 9], [3, 2]) | {"kv_lengths": torch.tensor([81, 9])}
    compiled = torch.compile(CALLS["causal"], fullgraph=True, backend="eager")
    with pytest.raises(TilegenError, match=r"kv_lengths must be 0\.\.80"):
        compiled(**given)
