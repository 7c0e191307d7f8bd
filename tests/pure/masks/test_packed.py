"""Packed sequences: memory, ids of every kind, one kernel for every layout and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import splits
from tilegen.check.reference import dense_mask
from tilegen.emit.identity import kernel_digest
from tilegen.emit.render import render
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    documents,
    kv_lengths,
    predicate,
    prefix_lm,
    sliding_window,
    streaming,
    values,
)
from tilegen.masks.packed import longest_of, packed
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.problem import AttentionProblem

CONFIGS: dict[Kernel, TileConfig] = {
    kernel: splits.ALL.get(kernel)
    or TileConfig(block_m=64, block_n=64, block_d=32 if KERNELS[kernel].sliced else 0)
    for kernel, spec in KERNELS.items()
    if not spec.specialised  # they serve no documents
    if kernel != "fwd_paged"  # whose lengths a mask does not know
}
LONG = 1_048_576


def problem(mask: Mask, seqlen_q: int = 4096, seqlen_kv: int = 4096) -> AttentionProblem:
    return AttentionProblem(
        num_heads_q=4,
        num_heads_kv=2,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim_qk=64,
        head_dim_v=64,
        dtype="fp16",
        mask=mask.stand_in,
    )


def tensor_bytes(mask: Mask, length: int) -> int:
    """The bytes of a call's tables."""
    return sum(value.on("cpu", (length, length)).nbytes for value in mask.tables)


# --------------------------------------------------------------------------------------------------
# Memory


def test_a_causal_window_of_a_million_tokens_takes_no_memory() -> None:
    mask = causal() & sliding_window(4095)
    assert not mask.tables
    for side in ("rows", "columns"):
        ranges = tile_ranges(mask, side, seqlen_q=LONG, seqlen_kv=LONG, block_m=128, block_n=128)
        assert any(ranges.pieces)  # in closed form: nothing is listed
        tiles = LONG // 128  # of which each sees 33, but for the first 32
        assert ranges.visited_tiles == 33 * tiles - 32 * 33 // 2
    for kernel, config in CONFIGS.items():
        assert "tiles_ptr" not in render(problem(mask, LONG, LONG), config, kernel).source


@pytest.mark.parametrize("length", [10_000, 100_000])
def test_packed_documents_take_four_numbers_a_token(length: int) -> None:
    lengths = torch.full((length // 100,), 100)
    cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    for mask in (
        documents(cu_seqlens=cu),
        documents(ids),
        documents(ids) & causal(),
        packed(cu, mask=sliding_window(9)),
        packed(cu, cu, mask=causal("bottom_right") & sliding_window(9)),
    ):
        assert tensor_bytes(mask, length) == 16 * length
        tables = [value.on("cpu", (length, length)) for value in mask.tables]
        assert all(table.dtype == torch.int32 for table in tables)
    assert tensor_bytes(packed(cu, mask=prefix_lm(9)), length) == 24 * length


def test_a_layout_takes_a_byte_a_block() -> None:
    mask = block_sparse(torch.rand(8, 512, 512) < 0.1, 128)
    assert tensor_bytes(mask, 65_536) == 8 * 512 * 512


# --------------------------------------------------------------------------------------------------
# One kernel for all


def digests(masks: list[tuple[Mask, int]]) -> dict[Kernel, set[str]]:
    return {
        kernel: {
            kernel_digest(problem(mask, length, length), config, kernel, aligned=True)
            for mask, length in masks
        }
        for kernel, config in CONFIGS.items()
    }


def layouts(count: int) -> list[list[int]]:
    """Where documents start, from one document to hundreds, short and long, sorted by nothing."""
    generator = torch.Generator().manual_seed(0)
    results: list[list[int]] = []
    for i in range(count):
        lengths = torch.randint(1, 2 + 2 ** (i % 11), (1 + 7 * i,), generator=generator)
        results.append([0, *lengths.cumsum(0).tolist()])
    return results


def test_fifty_lengths_and_twenty_layouts_emit_each_kernel_once() -> None:
    lengths = [1 + 37 * i * i for i in range(50)]
    each: list[list[tuple[Mask, int]]] = [
        [(causal() & sliding_window(100), length) for length in lengths],
        [(documents(cu_seqlens=cu), cu[-1]) for cu in layouts(20)],
        [(packed(cu, mask=causal()), cu[-1]) for cu in layouts(20)],
        [(packed(cu, mask=prefix_lm(3)), cu[-1]) for cu in layouts(20)],
        [(documents(torch.arange(n) % m), n) for n, m in ((40, 3), (900, 7), (5000, 70))],
        [(kv_lengths([n, n // 2 + 1]), n) for n in lengths],
        [(streaming(values(n // 9, ""), values([n] * 4, "h")), n) for n in lengths],
        [(block_sparse(torch.rand(n, n) < n / 40, 64), 64 * n) for n in range(2, 40)],
    ]
    assert len({mask.stand_in for mask, _ in each[1]}) > 5
    for masks in each:
        assert all(len(found) == 1 for found in digests(masks).values())


def test_captured_tensors_of_any_size_emit_one_kernel() -> None:
    def of(length: int, seed: int) -> Mask:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, seed, (length,), generator=generator)
        return predicate(lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q))

    masks = [(of(length, seed), length) for length, seed in ((50, 2), (300, 9), (777, 300))]
    assert len({mask.stand_in for mask, _ in masks}) > 1
    assert all(len(found) == 1 for found in digests(masks).values())


def test_other_kinds_of_masks_emit_other_kernels() -> None:
    """What the kernel must know is in its digest: which axes, block size, what is combined."""
    cu = [0, 10, 64]
    masks = [
        documents(cu_seqlens=cu),
        documents([[0] * 64, [1] * 64]),
        documents(torch.arange(64) % 3),
        packed(cu, mask=causal()),
        packed(cu, mask=prefix_lm(3)),
        packed(cu, mask=prefix_lm(4)),
        sliding_window(values([3] * 4, "h")),
        sliding_window(values([3], "b")),
        sliding_window(3),
        block_sparse(torch.eye(4) > 0, 16),
        block_sparse(torch.eye(4) > 0, 32),
        block_sparse((torch.eye(4) > 0).expand(4, 4, 4), 16),
    ]
    assert len(digests([(mask, 64) for mask in masks])["fwd"]) == len(masks)


@pytest.mark.parametrize("kernel", CONFIGS)
def test_compiled_code_depends_on_no_number_that_changes(kernel: Kernel) -> None:
    """Lengths, strides, sizes and counts of tiles must not make Triton compile again."""
    from tilegen.emit.kernel_files import load

    for mask in (documents(cu_seqlens=[0, 9]), documents([0, 1, 0]), causal()):
        rendered = render(problem(mask), CONFIGS[kernel], kernel)
        function = getattr(load(rendered), rendered.function)
        types = dict(rendered.signature)
        for parameter in function.params:
            if not types[parameter.name].startswith("*") and types[parameter.name] != "fp32":
                assert parameter.do_not_specialize, parameter.name


# --------------------------------------------------------------------------------------------------
# Ids and lengths


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_ids_of_every_dtype(dtype: torch.dtype) -> None:
    for ids in ([3, 3, 1, 1, 1], [3, 1, 3, -7, 1]):
        expected = torch.tensor([[one == other for other in ids] for one in ids])
        actual = dense_mask(documents(torch.tensor(ids, dtype=dtype)), 5, 5)
        assert torch.equal(actual, expected)


def test_ids_that_differ_above_32_bits_are_different() -> None:
    ids = [5, 2**32 + 5, 5, -(2**63), 0, 2**63 - 1, 2**32]
    expected = torch.tensor([[one == other for other in ids] for one in ids])
    assert torch.equal(dense_mask(documents(torch.tensor(ids)), 7, 7), expected)


def test_documents_without_tokens_hold_nothing() -> None:
    mask = packed([0, 0, 3, 3, 5, 5], [0, 2, 2, 4, 4, 9])
    expected = torch.zeros(5, 9, dtype=torch.bool)  # rows 0-2 have no columns, columns 4-8 no rows
    assert torch.equal(dense_mask(mask, 5, 9), expected)


def test_the_longest_document_decides() -> None:
    assert longest_of(torch.tensor([0, 3, 20, 20, 25])) == 17
    assert longest_of(torch.tensor([0])) == longest_of(torch.tensor([0, 0])) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([1, 5],), "must rise from 0"),
        (([0, 5, 3],), "must rise from 0"),
        (([],), "integers of shape"),
        (([[0, 5]],), "integers of shape"),
        (([0.0, 5.0],), "integers of shape"),
        (([0, 5], [0, 3, 5]), "the same documents"),
    ],
)
def test_bad_cu_seqlens_get_one_clear_error(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        packed(*arguments)


@pytest.mark.parametrize(
    "arguments", [{}, {"ids": [0], "cu_seqlens": [0, 1]}, {"ids": []}, {"ids": [0.5]}, {"ids": 3}]
)
def test_bad_documents_get_one_clear_error(arguments: Any) -> None:
    with pytest.raises(InvalidProblem, match=r"documents needs|ids must be"):
        documents(**arguments)


@pytest.mark.parametrize("divisor", ["document", "column"])
def test_bits_of_quotients_within_documents(divisor: str) -> None:
    """Places within documents are differences of tables, whose quotients SymPy knows less of."""

    def fn(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // ((b if divisor == "document" else k) + 1)) ^ k) < 3

    cu, at = torch.tensor([0, 8, 20]), torch.arange(20)
    mask = packed(cu, None, predicate(fn))
    document = (at >= 8).long()
    place = at - cu[document]
    same = document[:, None] == document
    expected = same & fn(document[:, None], 0, place[:, None], place)
    assert torch.equal(dense_mask(mask, 20, 20).view(20, 20), expected)
    ranges = tile_ranges(mask, "rows", seqlen_q=20, seqlen_kv=20, block_m=2, block_n=2)
    live = expected.view(10, 2, 10, 2).any(3).any(1)
    assert ranges.visited_tiles >= int(live.sum())
    for kernel, config in CONFIGS.items():
        assert render(problem(mask, 20, 20), config, kernel).source
