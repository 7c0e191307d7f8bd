"""New keys and values, written into pages by one kernel: the same as PyTorch writes, and nothing
else."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilegen
from tilegen.cpu.direct import DirectFunction
from tilegen.runtime import slots
from tilegen.runtime.slots import write_slots
from tilegen.runtime.write_kernel import write_tokens

CASES = list(
    zip(
        (1, 2, 5, 16, 33, 7),  # heads
        ((8, 8), (64, 24), (100, 128), (128, 128), (16, 40), (576, 512)),  # head dims
        (1, 16, 4, 256, 32, 8),  # keys of a page
        itertools.cycle((torch.float16, torch.bfloat16, torch.float32)),
        itertools.cycle(("NHD", "HND")),
        strict=False,
    )
)


def cache(heads: int, dims: tuple[int, int], page: int, layout: str) -> list[torch.Tensor]:
    shape = (11, page, heads) if layout == "NHD" else (11, heads, page)
    return [torch.randn(*shape, dim) for dim in dims]


@pytest.mark.parametrize("heads, dims, page, dtype, layout", CASES)
def test_slots_equal_those_that_pytorch_writes(
    heads: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(heads)
    pages = [x.to(dtype) for x in cache(heads, dims, page, layout)]
    # Of another dtype and with other strides than the pages.
    k, v = (torch.randn(9, dim + 3, heads).transpose(1, 2)[..., :dim] for dim in dims)
    where = torch.randperm(11 * page)[:9]
    where[3] = where[7] = -1
    expected = [x.clone() for x in pages]
    write_slots(k, v, *pages, where, layout=layout)
    monkeypatch.setattr(slots, "_runs_kernel", lambda k: False)
    write_slots(k, v, *expected, where, layout=layout)
    assert all(map(torch.equal, pages, expected))


@pytest.mark.any_triton
@pytest.mark.parametrize("at_once", [2, 1024])
@pytest.mark.parametrize("heads, dims, page, dtype, layout", CASES)
def test_tokens_go_where_tables_and_lengths_say(
    heads: int,
    dims: tuple[int, int],
    page: int,
    dtype: torch.dtype,
    layout: str,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests with no, one and several tokens; tokens before and after them belong to none."""
    monkeypatch.setattr(slots, "REQUESTS_AT_ONCE", at_once)
    torch.manual_seed(page)
    pages = [x.to(dtype) for x in cache(heads, dims, page, layout)]
    fourth, end = 1 + min(page, 3), 6 if page > 2 else 1 + 2 * page
    # Behind the last request lies what would do for another.
    table = torch.tensor([[*range(11), 10]]).view(6, 2).int()[:5]
    starts = torch.tensor([0, 0, 1, fourth, fourth, end, 9]).int()[:6] + 2
    lengths = torch.tensor([0, 1, 2 * page, 1, min(5, 2 * page), 2 * page]).int()[:5]
    k, v = (torch.randn(11, heads, dim).to(dtype) for dim in dims)
    expected = [x.clone() for x in pages]
    given = table, lengths
    tilegen.append_paged(k, v, *pages, *given, q_starts=starts, layout=layout)
    monkeypatch.setattr(slots, "_runs_kernel", lambda k: False)
    tilegen.append_paged(k, v, *expected, *given, q_starts=starts, layout=layout)
    assert all(map(torch.equal, pages, expected))


def test_padded_batches() -> None:
    pages = cache(2, (16, 16), 4, "NHD")
    table, lengths = torch.arange(6).view(3, 2).int(), torch.tensor([2, 8, 5]).int()
    new = torch.randn(2, 3, 2, 2, 16)
    tilegen.append_paged(*new, *pages, table, lengths)
    for x, written in zip(new, pages, strict=True):
        for request, length in enumerate(lengths):
            for token in range(2):
                at = int(length) - 2 + token
                row = written[table[request, at // 4], at % 4]
                assert torch.equal(row, x[request, :, token])


def test_values_in_keys_win_over_keys() -> None:
    pages = torch.randn(6, 8, 1, 48)
    k, v = torch.randn(2, 4, 1, 48)
    write_slots(k, v[..., :32], pages, pages[..., :32], torch.tensor([5, -1, 40, 0]))
    rows = pages.flatten(0, 2)[[5, 40, 0]]
    assert torch.equal(rows[:, :32], v[[0, 2, 3], 0, :32])
    assert torch.equal(rows[:, 32:], k[[0, 2, 3], 0, 32:])


def test_nothing_is_moved_but_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [x.half() for x in cache(3, (40, 24), 16, "NHD")]
    k, v = (torch.randn(7, 3, dim).half() for dim in (40, 24))
    where = torch.tensor([3, -1, 100, 7, 20, -1, 0])
    kernel = DirectFunction(write_tokens, aliases=True, mode="count")
    monkeypatch.setattr(slots, "_compiled", lambda: kernel)
    write_slots(k, v, *pages, where)
    (build,) = kernel._known.values()
    moved = build.traffic
    assert moved.write_bytes == 5 * 3 * (40 + 24) * 2
    assert moved.read_bytes == moved.write_bytes + 7 * where.element_size()


def test_places_that_a_table_does_not_have_are_not_written() -> None:
    """Lengths are not checked on a GPU: too short and too long ones write nothing."""
    pages = cache(2, (16, 16), 4, "NHD")
    before = [x.clone() for x in pages]
    where = torch.arange(4).view(2, 2).int(), torch.tensor([1, 9]).int(), torch.tensor([0, 2, 3])
    k, v = torch.randn(2, 3, 2, 16)
    slots._launch(k, v, (pages[0], pages[1]), where=where)
    assert torch.equal(pages[0][0, 0], k[1]), "the second token is the first request's only one"
    pages[0][0, 0], pages[1][0, 0] = before[0][0, 0], before[1][0, 0]
    assert all(map(torch.equal, pages, before))
