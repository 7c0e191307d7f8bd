"""Lists of live tiles cost what the live ones do: memory, and tiles evaluated pair by pair."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.tiles import CPU, SAME_DOCUMENT, block_layout, neighbourhood, shape_of
from tilegen.masks.language import evaluation
from tilegen.masks.language.algebra import equal
from tilegen.masks.language.expr import K, Q
from tilegen.masks.tiles import tile_classes
from tilegen.masks.tiles.tile_lists import lists_of


@pytest.fixture
def largest_result(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that gives the bytes of the largest result of any operation so far."""
    largest = 0
    computed = evaluation.Walk._compute

    def compute(self: evaluation.Walk, expr: Any) -> Any:
        nonlocal largest
        result = computed(self, expr)
        parts = [result] if isinstance(result, torch.Tensor) else result
        parts = parts if isinstance(parts, list | tuple) else vars(parts).values()
        largest = max(largest, *(part.nbytes for part in parts))
        return result

    monkeypatch.setattr(evaluation.Walk, "_compute", compute)
    return lambda: largest


@pytest.mark.parametrize("seqlen", [65_536, 262_144])
def test_documents_take_memory_for_live_tiles_only(
    seqlen: int, largest_result: Callable[[], int]
) -> None:
    ids = torch.arange(seqlen, dtype=torch.int32) // 1000
    shape = shape_of(seqlen, 128)
    classes = tile_classes.classify(SAME_DOCUMENT & (K <= Q), [ids], shape, CPU)
    rows = lists_of(classes, "rows")
    # A document of 1000 rows meets at most 9 row tiles, and each of them at most 9 column tiles.
    assert rows.visited_tiles <= 9 * 9 * -(-seqlen // 1000)
    assert rows.visited_tiles >= 8 * 9 / 2 * (seqlen // 1000)
    assert len(rows.starts) == 2 * shape.rows + 1
    assert classes.evaluated_tiles == 0
    assert largest_result() <= tile_classes.CHUNK_BYTES // 8


def test_pairs_are_evaluated_in_chunks(
    largest_result: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_classes, "CHUNK_BYTES", 1 << 20)
    ids = torch.randint(0, 400, (4096,), generator=torch.Generator().manual_seed(0))
    classes = tile_classes.classify(SAME_DOCUMENT, [ids], shape_of(4096, 128), CPU)
    assert classes.open_tiles == 32 * 32
    assert classes.evaluated_tiles > 100
    assert largest_result() <= 1 << 18


@pytest.mark.parametrize(
    "keep, seqlen, evaluated",
    [
        (K <= Q, 65_536, 0),
        ((K <= Q) & (Q - K < 4096), 65_536, 0),
        (equal((Q - K) % 4, 0) & (K <= Q), 16_384, 0),
        (equal((Q - K) % 100, 0) & (K <= Q), 16_384, 0),
        (neighbourhood(64, 3), 65_536, 0),
        (neighbourhood(100, 3), 10_000, 250),
    ],
)
def test_few_tiles_are_evaluated_pair_by_pair(keep: Any, seqlen: int, evaluated: int) -> None:
    classes = tile_classes.classify(keep, [], shape_of(seqlen, 128), CPU)
    assert classes.evaluated_tiles <= evaluated


@pytest.mark.parametrize("block", [32, 64, 128, 256])
@pytest.mark.parametrize("tile", [(128, 128), (128, 64), (64, 256)])
def test_no_tile_of_a_layout_is_evaluated(block: int, tile: tuple[int, int]) -> None:
    blocks = 4096 // block
    layout = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(0)) < 0.05
    shape = shape_of(4096, tile)
    classes = tile_classes.classify(block_layout(block), [layout], shape, CPU)
    assert classes.evaluated_tiles == 0
    if block >= max(tile):
        assert classes.open_tiles == 0
    expected = layout.repeat_interleave(block, 0).repeat_interleave(block, 1)
    kept = expected.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0])).sum((1, 3))
    lists = lists_of(classes, "rows")
    assert lists.visited_tiles == int((kept > 0).sum())
    full = lists.flags(shape.columns)[1]
    assert int(full.sum()) == int((kept == tile[0] * tile[1]).sum())
