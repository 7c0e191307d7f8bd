"""Numbers that masks read at run time: what they accept, how they are looked up, stand-ins."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch

import tilegen
from tilegen.check.reference import dense_mask
from tilegen.errors import InvalidProblem
from tilegen.masks import (
    Mask,
    Table,
    block_sparse,
    causal,
    documents,
    from_bool,
    kv_lengths,
    parse_mask,
    predicate,
    prefix_lm,
    random_blocks,
    sliding_window,
    values,
)
from tilegen.masks.form import Shape
from tilegen.masks.language.evaluation import evaluate
from tilegen.masks.language.expr import PAIR, B, K, Q
from tilegen.masks.language.rewriting import renamed
from tilegen.masks.tensors import tensors_of
from tilegen.masks.tiles.spans import depends_on
from tilegen.masks.tiles.tile_ranges import tile_ranges
from tilegen.masks.values import Pair
from tilegen.problem import AttentionProblem

SHAPE = Shape(batch=2, heads=4, seqlen_q=20, seqlen_kv=30)
CPU = torch.device("cpu")


# --------------------------------------------------------------------------------------------------
# What they accept


@pytest.mark.parametrize(
    "tensor, axes, message",
    [
        ([1.5, 2.5], "h", "must be integers, got torch.float32"),
        ([True, False], "h", "must be integers, got torch.bool"),
        ([1j], "h", "must be integers"),
        ([1, 2], "", "one dimension for each of ''"),
        (5, "h", "one dimension for each of 'h'"),
        ([[1, 2]], "q", "one dimension for each of 'q'"),
        ([1, 2], "hb", "axes must be one of"),
        ([1, 2], "x", "axes must be one of"),
        ([[1, 2]], "qk", "axes must be one of"),
        (torch.zeros(0, dtype=torch.int32), "h", "must not be empty"),
        ([2**30], "h", "below 2\\*\\*30"),
        ([-(2**30)], "h", "below 2\\*\\*30"),
        (torch.tensor([-(2**31)], dtype=torch.int32), "h", "below 2\\*\\*30"),
    ],
)
def test_invalid_values_get_one_clear_error(tensor: Any, axes: str, message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        values(tensor, axes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_will_do(dtype: torch.dtype) -> None:
    window = values(torch.tensor([3, 100], dtype=dtype), "h")
    assert window.on(CPU).dtype == torch.int32
    assert window.on(CPU).tolist() == [3, 100]


def test_values_that_are_not_contiguous_are_copied() -> None:
    table = torch.arange(24).view(4, 6)
    assert values(table.T, "bh").on(CPU).is_contiguous()
    assert values(table.T, "bh").on(CPU).tolist() == table.T.tolist()


MISFITS: dict[str, tuple[Mask, str]] = {
    "heads": (sliding_window(values([1, 2, 3], "h")), "size 4 along query heads, got 3"),
    "one head": (sliding_window(values([1], "h")), "size 4 along query heads, got 1"),
    "batch": (kv_lengths([5, 6, 7]), "size 2 along batch, got 3"),
    "rows": (sliding_window(values([1] * 30, "q")), "size 20 along query rows, got 30"),
    "columns": (prefix_lm(values([1] * 20, "k")), "size 30 along key-value columns, got 20"),
    "second axis": (prefix_lm(values([[1] * 2] * 2, "bh")), "size 4 along query heads, got 2"),
    "documents": (documents(cu_seqlens=[0, 5, 31]), "must end at most with q's 20 tokens, got 31"),
    "a token more": (
        documents(cu_seqlens=[0, 5, 21]),
        "must end at most with q's 20 tokens, got 21",
    ),
    "document columns": (documents([0] * 20), "size 30 along key-value columns, got 20"),
    "layout": (block_sparse(torch.ones(3, 2, 2, dtype=torch.bool), 16), "heads, got 3"),
    "from_bool": (from_bool(torch.ones(4, 1, 20, 30, dtype=torch.bool)), "batch, got 4"),
    "inside a combination": (causal() & ~kv_lengths([5]), "size 2 along batch, got 1"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_values_of_another_size_get_one_clear_error(name: str) -> None:
    mask, message = MISFITS[name]
    with pytest.raises(InvalidProblem, match=message):
        tensors_of(mask, SHAPE, CPU)
    q, k = torch.zeros(2, 4, 20, 16), torch.zeros(2, 4, 30, 16)
    with pytest.raises(InvalidProblem, match=message):
        tilegen.attention(q, k, k, mask=mask)


# --------------------------------------------------------------------------------------------------
# How they are looked up


def test_reads_follow_the_device_of_the_indices() -> None:
    """A mask made on the CPU serves tensors on a GPU; `meta` stands for one here."""
    tables = torch.arange(20), torch.rand(4, 5, 5) < 0.5
    masks = [
        sliding_window(values([3, 5, 7, 9], "h")) & kv_lengths([3, 9]),
        block_sparse(tables[1], 4) & causal(),
        predicate(lambda b, h, q, k: tables[0][q] > k) & causal(),
        documents(torch.arange(20) % 3),
    ]
    for mask in masks:
        assert dense_mask(mask, 20, 20, "meta", batch=2, heads=4).device.type == "meta"
        assert dense_mask(mask, 20, 20, batch=2, heads=4).device.type == "cpu"


def test_a_layout_drops_pairs_beyond_it() -> None:
    mask = block_sparse(torch.ones(2, 3, dtype=torch.bool), 4)
    keep = dense_mask(mask, 20, 30)
    assert keep[:8, :12].all()
    assert keep.sum() == 8 * 12


# --------------------------------------------------------------------------------------------------
# Stand-ins


def test_a_stand_in_cannot_be_computed() -> None:
    texts = ["window(@h:8,0)", "documents(@q:8)", "same_id(@q:8,@k:8)", "block_sparse(@:50,16)"]
    texts += ["causal&~kv_prefix(@b:8)", "keep(k<=t0[q],@:50int)"]
    q = torch.zeros(2, 4, 20, 16)
    for text in texts:
        mask = parse_mask(text)
        assert mask.is_stand_in
        with pytest.raises(InvalidProblem, match="expected a mask with its tensors"):
            dense_mask(mask, 20, 20, batch=2, heads=4)
        with pytest.raises(InvalidProblem, match="expected a mask with its tensors"):
            tensors_of(mask, SHAPE, CPU)
        with pytest.raises(InvalidProblem, match="expected a mask with its tensors"):
            tilegen.attention(q, q, q, mask=mask)


def test_values_are_equal_only_to_themselves_and_stand_ins_by_what_they_say() -> None:
    left, other = values([3, 4], "h"), values([3, 4], "h")
    assert left != other
    assert sliding_window(left) == sliding_window(left)
    assert sliding_window(left) != sliding_window(other)
    assert sliding_window(left).stand_in == sliding_window(other).stand_in
    assert hash(sliding_window(left).stand_in) == hash(sliding_window(other).stand_in)
    assert Table("h", 8) != Table("b", 8)
    assert Table("q", 8, pattern="firsts") != Table("q", 8)


def test_keys_of_problems_with_values_are_read_back() -> None:
    """Records and the processes that tune know a mask by its text."""
    from tilegen.masks.packed import packed

    tables = torch.rand(20, 20) < 0.5, torch.arange(20)
    masks = [
        sliding_window(values([3, 5], "h"), values(9, "")) | prefix_lm(values([[1, 2]], "bh")),
        documents([0, 0, 1, 1]) & causal(),
        documents([[0, 1], [1, 1]]),
        documents([0, 1, 0]),
        ~kv_lengths([5, 6]),
        random_blocks(90, 90, block=8, per_row=2, heads=4),
        from_bool(tables[0]),
        packed([0, 5, 9], mask=prefix_lm(3)),
        packed([0, 5, 9], [0, 2, 30], mask=causal() | prefix_lm(2)),
        predicate(lambda b, h, q, k: tables[0][q, k] & (tables[1][q] > k)),
    ]
    for mask in masks:
        problem = AttentionProblem(
            num_heads_q=4,
            num_heads_kv=4,
            seqlen_q=20,
            seqlen_kv=20,
            head_dim_qk=16,
            head_dim_v=16,
            dtype="fp16",
            mask=mask.stand_in,
        )
        assert " " not in mask.notation
        assert AttentionProblem.parse(problem.key) == problem
        assert mask.general.notation == mask.stand_in.general.notation


def test_typical_tensors_fit_where_the_real_ones_did() -> None:
    for text in ("window(@h:8,0)", "documents(@bq:8)", "same_id(@q:8,@k:8)", "kv_prefix(@b:9)",
                 "block_sparse(@bh:50,7)", "within(same_id(@q:8,@k:8),prefix_lm(3))"):  # fmt: skip
        mask = parse_mask(text).realized(SHAPE)
        assert not mask.is_stand_in
        assert mask.stand_in == parse_mask(text)
        tensors_of(mask, SHAPE, CPU)
        assert dense_mask(mask, 20, 30, batch=2, heads=4).any()


# --------------------------------------------------------------------------------------------------
# As expressions read them


def element(tensor: torch.Tensor, *indices: int) -> int:
    """An element as PyTorch and Python have it; 0 beyond the ends."""
    try:
        return int(tensor[indices])
    except IndexError:
        return 0


@pytest.mark.parametrize("seed", range(4))
def test_values_are_read_at_any_index(seed: int) -> None:
    """Negative indices count from the end; an index out of range reads 0."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns, count = torch.randint(1, 9, (3,), generator=generator).tolist()
    sparse: Any = block_sparse(torch.rand(rows, columns, generator=generator) < 0.5, 4)
    numbers = values(torch.randint(-9, 9, (count,), generator=generator), "k")
    q, k = torch.arange(24)[:, None], torch.arange(24)
    pair = Pair(*PAIR)
    for value, read, at in (
        (sparse.args[0], sparse.args[0].at(pair, Q - 12, K - 12), lambda q, k: (q - 12, k - 12)),
        (numbers, numbers.at(pair._replace(k=K - 12)), lambda q, k: (k - 12,)),
    ):
        named = renamed(read, {value.slot: (0, value.kind)})
        actual = evaluate(named, [value.tensor], b=0, h=0, q=q, k=k, seqlen_q=24, seqlen_kv=24)
        expected = torch.tensor(
            [[element(value.tensor, *at(i, j)) for j in range(24)] for i in range(24)]
        )
        assert torch.equal(actual.expand(24, 24).long(), expected)
        assert expected.any()
        assert not expected.all(), "beyond the end"


def test_cached_facts_of_a_mask_keep_no_tensor_alive() -> None:
    def made() -> list[ref[torch.Tensor]]:
        lengths, ids = torch.tensor([90, 50]), torch.randint(0, 3, (96,))
        mask = kv_lengths(lengths) & causal() & documents(ids)
        other = predicate(lambda b, h, q, k: (ids[q] != ids[k]) & (k < lengths[b]))
        for known in (mask, other):
            assert depends_on(known) == {B}
            for side in ("rows", "columns"):
                sizes = dict(seqlen_q=96, seqlen_kv=96, block_m=16, block_n=16)
                assert tile_ranges(known, side, batch=2, **sizes).visited_tiles
        return [ref(lengths), ref(ids)]

    alive = made()
    gc.collect()
    assert [known() for known in alive] == [None, None]
