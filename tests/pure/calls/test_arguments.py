"""Arguments in the forms in which people pass them: masks, numbers, block masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    _create_empty_block_mask,
    create_block_mask,
    noop_mask,
)
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.errors import InvalidProblem, Unsupported
from tilegen.integrations import flash_attn

ROWS, COLUMNS = 21, 30
AT, COLUMN = torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
KEEP = (AT >= COLUMN) & (AT - COLUMN <= 4)
SHIFT = torch.tensor(4)


def in_window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= SHIFT)


FORMS: dict[str, Any] = {
    "text": "causal & window(4, 0)",
    "function": in_window,
    "bool": KEEP,
    "bool, by head": KEEP.expand(2, -1, -1).clone(),
    "bool, by batch": KEEP.expand(3, 2, -1, -1).clone(),
}


def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 2, n, 16, requires_grad=True) for n in (ROWS, COLUMNS, COLUMNS)]


def check(out: torch.Tensor, expected: torch.Tensor, given: list[torch.Tensor]) -> None:
    """Compare outputs and gradients."""
    for left, other in zip(
        (out, *torch.autograd.grad(out.square().sum(), given)),
        (expected, *torch.autograd.grad(expected.square().sum(), given)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_masks_in_other_forms(form: str, compiles: bool) -> None:
    torch._dynamo.reset()
    run: Any = tilegen.attention
    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiles else run
    given = qkv()
    for _ in range(2):
        check(run(*given, mask=FORMS[form]), of_torch(*given, KEEP), given)


def test_masks_in_other_forms_change_in_place() -> None:
    given, keep, reach = qkv(), KEEP.clone(), torch.tensor(4)
    mask = lambda b, h, q, k: (q >= k) & (q - k <= reach)  # noqa: E731
    for _ in range(2):
        check(tilegen.attention(*given, mask=keep), of_torch(*given, keep), given)
        check(tilegen.attention(*given, mask=mask), of_torch(*given, keep), given)
        reach.fill_(2)
        keep &= AT - COLUMN <= 2


@pytest.mark.parametrize("form", ["text", "function"])
def test_masks_in_other_forms_of_packed_and_paged_calls(form: str) -> None:
    mask, whole = FORMS[form], tilegen.predicate(in_window)
    q, k, v = (x[0].transpose(0, 1) for x in qkv())
    k, v, starts = k[:ROWS], v[:ROWS], torch.tensor([0, 9, ROWS])
    varlen = partial(tilegen.attention_varlen, q, k, v, starts)
    torch.testing.assert_close(varlen(mask=mask), varlen(mask=whole))
    pages, table = torch.randn(2, 3, 8, 2, 16), torch.tensor([[1, 2, 0]])
    paged = partial(tilegen.attention_paged, q.transpose(0, 1)[None].detach(), *pages, table)
    lengths = torch.tensor([21])
    torch.testing.assert_close(paged(lengths, mask=mask), paged(lengths, mask=whole))
    jagged = torch.nested.nested_tensor([q[:9], q[9:]], layout=torch.jagged).transpose(1, 2)
    out = tilegen.attention(jagged, jagged, jagged, mask=mask)
    expected = tilegen.attention(jagged, jagged, jagged, mask=whole)
    torch.testing.assert_close(out.values(), expected.values())


@pytest.mark.parametrize(
    "mask, said",
    [
        (tilegen.causal, r"tilegen.causal itself: call it, mask=tilegen.causal\(\)"),
        (tilegen.prefix_lm, r"mask=tilegen.prefix_lm\(\w+\)"),
        ("documents(@q:50)", "reads tensors, which a text does not hold"),
        ("casual", "did you mean causal"),
        (KEEP.float(), "must be bool.*pass score=tilegen.bias"),
        (KEEP[0], r"must be bool, \(q, k\).*got torch.bool \(30,\)"),
        (3, "must be a tilegen mask such as .* got int"),
    ],
)
def test_masks_that_are_none(mask: Any, said: str) -> None:
    packed = [x[0].transpose(0, 1)[:20] for x in qkv()]
    for call in (
        partial(tilegen.attention, *qkv()),
        partial(tilegen.attention_varlen, *packed, torch.tensor([0, 20])),
    ):
        with pytest.raises(InvalidProblem, match=said) as caught:
            call(mask=mask)
        assert "\n" not in str(caught.value)


def test_arguments_of_other_libraries_say_what_to_write() -> None:
    attention: Any = tilegen.attention
    for name in ("is_causal", "causal"):
        with pytest.raises(InvalidProblem, match=rf"no {name}.*write mask=tilegen.causal\(\)"):
            attention(*qkv(), **{name: True})
    with pytest.raises(InvalidProblem, match=r"mask=attn_mask for bools"):
        attention(*qkv(), attn_mask=KEEP)
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        attention(*qkv(), scales=1.0)


SCALES = (torch.tensor(0.3), np.float32(0.3), np.float64(0.3), np.array(0.3))


@pytest.mark.parametrize("scale", SCALES, ids=[type(one).__name__ for one in SCALES])
def test_scales(scale: Any) -> None:
    given = qkv()
    for call in (tilegen.attention, tilegen.scaled_dot_product_attention, tilegen.flex_attention):
        check(call(*given, scale=scale), of_torch(*given, scale=0.3), given)


@pytest.mark.parametrize("scale", [torch.ones(2), torch.tensor(0.3, requires_grad=True), np.nan])
def test_scales_that_are_none(scale: Any) -> None:
    with pytest.raises(InvalidProblem, match="scale must be a finite number, got"):
        tilegen.attention(*qkv(), scale=scale)


def test_numbers_of_numpy_and_tensors() -> None:
    given = [x.transpose(1, 2) for x in qkv()]
    given[1:] = [x[:, :ROWS] for x in given[1:]]
    expected = flash_attn.flash_attn_func(*given, window_size=(4, 0), softcap=3.0)
    sides: tuple[Any, ...] = (torch.tensor([4, 0]), np.array([4, 0]), (np.int64(4), np.int32(0)))
    for window in (*sides, list(torch.tensor([4, 0]))):
        for cap in (np.float32(3.0), torch.tensor(3.0)):
            out = flash_attn.flash_attn_func(*given, window_size=window, softcap=cap)
            torch.testing.assert_close(out, expected)
    for window in ((torch.tensor(4.0), 0), (True, 0), (np.int64(-2), 0)):
        with pytest.raises(InvalidProblem, match="distances of 0 or more"):
            flash_attn.flash_attn_func(*given, window_size=window)
    dropped = tilegen.attention(*qkv(), dropout_p=torch.tensor(1.0))  # type: ignore[arg-type]
    assert not dropped.any()
    masks = tilegen.sliding_window, tilegen.prefix_lm, tilegen.dilated, tilegen.kv_lengths
    for make in masks[:3]:
        made: Any = make
        assert made(np.int64(3)) == made(3)
        assert made(np.int64(3)).notation == made(3).notation
    assert tilegen.sliding_window(np.int64(-1), np.int64(2)) == tilegen.sliding_window(None, 2)  # type: ignore[arg-type]


@pytest.mark.slow
def test_block_masks_that_mask_nothing() -> None:
    given = qkv()
    of_others = torch.randn(3, 2, 500, 16)
    for mask in (
        _create_empty_block_mask(given[0], given[1]),
        _create_empty_block_mask(of_others, of_others),
        create_block_mask(noop_mask, 1, 1, ROWS, COLUMNS, device="cpu"),
    ):
        torch._dynamo.reset()
        compiled = torch.compile(tilegen.flex_attention, fullgraph=True, backend="aot_eager")
        for call in (tilegen.flex_attention, compiled):
            check(call(*given, block_mask=mask), of_torch(*given), given)
    count = torch.ones(1, 1, 1, dtype=torch.int32)
    first = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    whole = BlockMask.from_kv_blocks(count, first, BLOCK_SIZE=1 << 30, mask_mod=in_window)
    check(tilegen.flex_attention(*given, block_mask=whole), of_torch(*given, KEEP), given)
    other = create_block_mask(in_window, 1, 1, 64, 64, device="cpu")
    with pytest.raises(ValueError, match="was made for lengths"):
        tilegen.flex_attention(*given, block_mask=other)


def pages_and(q: torch.Tensor) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """Return calls over pages of a prompt of 8 tokens after 12 others, and the result."""
    torch.manual_seed(1)
    pages, table = torch.randn(2, 4, 16, 2, 16), torch.tensor([[2, 1]], dtype=torch.int32)
    k, v = (x[table[0].long()].flatten(0, 1)[None, :20].transpose(1, 2) for x in pages)
    keep = torch.ones(8, 20, dtype=torch.bool).tril(12)
    expected = of_torch(q.transpose(0, 1)[None], k, v, keep)[0].transpose(0, 1)
    starts, ends = (torch.tensor([0, n], dtype=torch.int32) for n in (8, 20))

    def packed(q: torch.Tensor, *, longest: Any = (8, 20), **options: Any) -> torch.Tensor:
        call = flash_attn.flash_attn_varlen_func
        return call(q, *pages, starts, ends, *longest, causal=True, block_table=table, **options)

    def cached(q: torch.Tensor, *, longest: Any = None, **options: Any) -> torch.Tensor:
        call = flash_attn.flash_attn_with_kvcache
        lengths = torch.tensor([20])
        out = call(
            *(q[None], *pages), cache_seqlens=lengths, block_table=table, causal=True, **options
        )
        return out[0]

    return (lambda *args, **options: (packed(*args, **options), cached(*args, **options))), expected  # type: ignore[return-value]


def test_calls_over_pages_that_need_gradients() -> None:
    q = torch.randn(8, 2, 16, requires_grad=True)
    call, expected = pages_and(q)
    slopes = torch.zeros(2, requires_grad=True)
    for given, options in ((q, {}), (q.detach(), dict(alibi_slopes=slopes))):
        for out in call(given, **options):
            torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
            with pytest.raises(Unsupported, match=r"no backward: call it under torch.no_grad"):
                out.sum().backward()
    longest = torch.tensor(8), np.int64(20)
    for out in call(q.detach(), longest=longest):
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
        assert not out.requires_grad
