"""`tilegen.scaled_dot_product_attention` against PyTorch's, in fp32 on a CPU."""

import logging
from itertools import product

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as of_torch

import tilegen
from tilegen.disk import say_once
from tilegen.errors import InvalidProblem
from tilegen.integrations import sdpa, tables
from tilegen.masks.kinds import kind_of_mask

Sizes = tuple[int, ...]
CORNER = torch.ones(5, 7, dtype=torch.bool).tril()
PLAIN = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 16))
MASKS = (
    *((5, 7), (1, 7), (5, 1), (4, 5, 7), (1, 5, 7), (1, 1, 1, 1)),
    *((2, 1, 1, 7), (2, 4, 1, 7), (2, 4, 5, 7), (2, 4, 5, 1), (2, 1, 5, 7), (1, 4, 1, 1)),
)


def inputs(*sizes: Sizes) -> list[torch.Tensor]:
    torch.manual_seed(sum(map(sum, sizes)))
    return [torch.randn(size, requires_grad=True) for size in sizes]


def joined(mask: torch.Tensor | None, is_causal: bool) -> torch.Tensor | None:
    """Return a mask without the pairs above the diagonal, which not all of PyTorch's back ends
    join."""
    if mask is None or not is_causal:
        return CORNER if is_causal else mask
    return mask & CORNER if mask.dtype is torch.bool else mask.masked_fill(~CORNER, -torch.inf)


def check_as_torch(
    sizes: tuple[Sizes, Sizes, Sizes], attn_mask: torch.Tensor | None = None, **options: object
) -> None:
    """Out and gradients, those of a mask too, are PyTorch's."""
    given = inputs(*sizes)
    trained = [*given, *([attn_mask] if attn_mask is not None and attn_mask.requires_grad else [])]
    out = tilegen.scaled_dot_product_attention(*given, attn_mask, **options)  # type: ignore[arg-type]
    expected = of_torch(*given, attn_mask, **options)  # type: ignore[arg-type]
    assert out.shape == expected.shape
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    for left, other in zip(
        (out, *torch.autograd.grad(out, trained, weights)),
        (expected, *torch.autograd.grad(expected, trained, weights)),
        strict=True,
    ):
        torch.testing.assert_close(left, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        PLAIN,
        ((2, 4, 7, 8), (2, 4, 5, 8), (2, 4, 5, 8)),
        ((5, 8), (7, 8), (7, 16)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 16)),
        ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8)),
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
        ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
        ((2, 1, 2, 5, 8), (3, 2, 7, 8), (2, 3, 1, 7, 8)),
    ],
    ids=str,
)
def test_shapes(sizes: tuple[Sizes, Sizes, Sizes], is_causal: bool) -> None:
    check_as_torch(sizes, is_causal=is_causal, scale=0.3 if is_causal else None)


@pytest.mark.parametrize(
    "q_size, kv_size",
    [
        ((5, 16), (2, 7, 16)),
        ((5, 16), (3, 2, 7, 16)),
        ((5, 16), (1, 7, 16)),
        ((2, 5, 16), (4, 3, 2, 7, 16)),
        ((3, 1, 5, 16), (2, 7, 16)),
    ],
)
def test_leading_dimensions_of_keys_alone(q_size: Sizes, kv_size: Sizes) -> None:
    q, k, v = torch.randn(q_size), torch.randn(kv_size), torch.randn(kv_size)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(tilegen.scaled_dot_product_attention(q, k, v), expected)


def test_shared_heads_need_to_be_enabled() -> None:
    sizes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 16))
    check_as_torch(sizes, enable_gqa=True, is_causal=True)
    check_as_torch(sizes, torch.randn(2, 4, 5, 7), enable_gqa=True)
    check_as_torch(((4, 5, 8), (2, 7, 8), (2, 7, 8)), enable_gqa=True)
    with pytest.raises(InvalidProblem, match=r"enable_gqa=True.*\(2, 4\), \(2, 2\), \(2, 2\)$"):
        tilegen.scaled_dot_product_attention(*inputs(*sizes))


@pytest.mark.parametrize("size", MASKS, ids=str)
def test_explicit_masks(size: Sizes) -> None:
    """Bool, added, trained, and expanded ones; a row of the first is left one column at least."""
    whole = (2, 4, 5, 7)
    torch.manual_seed(sum(size))
    keep = torch.rand(size) > 0.4
    keep[..., 0] = True
    for mask in (
        *(keep, keep.expand(whole), torch.randn(size), torch.randn(size, requires_grad=True)),
        *(torch.randn(size).expand(whole), torch.randn(size).expand(whole).requires_grad_()),
    ):
        check_as_torch(PLAIN, mask)


@pytest.mark.parametrize("size", MASKS, ids=str)
def test_explicit_masks_that_are_causal_too(size: Sizes) -> None:
    torch.manual_seed(sum(size))
    keep = torch.rand(size) > 0.4
    keep[..., 0] = True
    for mask in (keep, keep.expand(2, 4, 5, 7), torch.randn(size, requires_grad=True)):
        given = inputs(*PLAIN)
        read = [*given, *([mask] if mask.requires_grad else [])]
        for _ in range(2):  # the second time by a mask that is known
            out = tilegen.scaled_dot_product_attention(*given, mask, is_causal=True)
            expected = of_torch(*given, joined(mask, True))
            for left, other in zip(
                (out, *torch.autograd.grad(out.square().sum(), read)),
                (expected, *torch.autograd.grad(expected.square().sum(), read)),
                strict=True,
            ):
                torch.testing.assert_close(left, other, atol=2e-5, rtol=2e-5)
        plain = tilegen.scaled_dot_product_attention(*given, mask)
        torch.testing.assert_close(plain, of_torch(*given, mask), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("size", [(2, 3, 4, 5, 7), (1, 3, 1, 1, 7), (2, 1, 4, 5, 7), (3, 4, 5, 7)])
def test_masks_of_more_dimensions(size: Sizes) -> None:
    sizes = ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8))
    keep = torch.rand(size) > 0.4
    keep[..., 0] = True
    check_as_torch(sizes, keep)
    check_as_torch(sizes, torch.randn(size, requires_grad=True))


def test_a_single_query_and_three_dimensions() -> None:
    """Decoding, with a padded batch; and heads alone."""
    keep = torch.arange(7) < torch.tensor([7, 3])[:, None, None, None]
    check_as_torch(((2, 4, 1, 8), (2, 4, 7, 8), (2, 4, 7, 8)), keep)
    check_as_torch(((4, 5, 8), (4, 7, 8), (4, 7, 8)), torch.rand(4, 5, 7) > 0.2)


@pytest.mark.parametrize("rows", [(5,), ()], ids=["pairs", "columns"])
@pytest.mark.parametrize("added", [False, True])
def test_a_row_that_is_left_nothing_gives_zeros(rows: Sizes, added: bool) -> None:
    keep = torch.ones(2, 1, *(rows or (1,)), 7, dtype=torch.bool)
    keep[1] = False
    mask = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf) if added else keep
    q, k, v = inputs(*PLAIN)
    out = tilegen.scaled_dot_product_attention(q, k, v, mask)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    for tensor in (out, *gradients):
        assert not tensor[1].any()
        assert tensor[0].any()
    torch.testing.assert_close(out[0], of_torch(q, k, v)[0], atol=2e-5, rtol=2e-5)


def test_dropout_is_that_of_attention() -> None:
    """Drawn anew at each call, and reproducible."""
    given = inputs(*PLAIN)
    torch.manual_seed(1)
    out = tilegen.scaled_dot_product_attention(*given, dropout_p=0.5, is_causal=True)
    torch.manual_seed(1)
    expected = tilegen.attention(*given, mask=tilegen.causal(), dropout_p=0.5)
    torch.testing.assert_close(out, expected)
    again = tilegen.scaled_dot_product_attention(*given, dropout_p=0.5, is_causal=True)
    assert not torch.equal(out, again)
    everything = tilegen.scaled_dot_product_attention(*given, torch.randn(5, 7), dropout_p=1.0)
    assert not everything.any()


def test_changes_in_place_are_seen() -> None:
    q, k, v = inputs(*PLAIN)
    for mask in (torch.ones(5, 7, dtype=torch.bool), torch.ones(2, 1, 1, 7, dtype=torch.bool)):
        tilegen.scaled_dot_product_attention(q, k, v, mask)
        mask[..., 3:] = False
        out = tilegen.scaled_dot_product_attention(q, k, v, mask)
        torch.testing.assert_close(out, of_torch(q, k, v, mask), atol=2e-5, rtol=2e-5)


def test_one_mask_for_many_calls() -> None:
    """Of other leading dimensions, elsewhere in memory, and where its elements must be copied."""
    mask = torch.rand(3, 4, 5, 7) > 0.4
    mask[..., 0] = True
    deep = ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8))
    plain = ((3, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8))
    check_as_torch(plain, mask)
    for sizes in (deep, plain, deep):
        for _ in range(2):
            check_as_torch(sizes, mask)
            mask[:, :, :, 4] = False
            check_as_torch(sizes, mask)
            mask.data = mask.roll(1, -1)
            mask[..., 0] = True


def test_bool_masks_are_read_where_they_are_and_die_with_their_tensor() -> None:
    mask = torch.rand(2, 1, 5, 7) > 0.5
    sdpa.scaled_dot_product_attention(*inputs(*PLAIN), mask)
    count = len(sdpa._masks)
    q, k, _ = inputs(*PLAIN)
    first, second = (sdpa._explicit(mask, q, k, (2,))["mask"] for _ in range(2))
    assert first is second
    (table,) = first.tables
    assert table.on("cpu", (5, 7)).data_ptr() == mask.data_ptr()
    assert len(sdpa._masks) == count
    del mask, first, second, table
    assert len(sdpa._masks) == count - 1


def test_masks_of_one_shape_are_of_one_kind_whatever_they_keep() -> None:
    """Kernels are chosen once, and nobody waits for a GPU to count."""
    kinds = {
        kind_of_mask(tables.dense(torch.rand(2, 1, 5, 7) > threshold)) for threshold in (0.1, 0.9)
    }
    assert len(kinds) == 1


def test_expanded_masks_are_read_once() -> None:
    keep = torch.ones(5, 7).bool().expand(2, 4, 5, 7)
    assert sdpa._table(keep, (2,)).shape == (1, 1, 5, 7)
    trained = torch.ones(5, 7).expand(2, 4, 5, 7).requires_grad_()
    assert sdpa._table(trained, (2,)).shape == (2, 4, 5, 7)


@pytest.mark.parametrize(
    "mask, expected",
    [
        (torch.ones(5, 6), r"must broadcast to \(2, 4, 5, 7\), got \(5, 6\)$"),
        (torch.ones(2, 1, 1, 1, 7), r"must broadcast to \(2, 4, 5, 7\), got \(2, 1, 1, 1, 7\)$"),
        (torch.ones(1, 1, 6).bool(), r"must broadcast to \(2, 4, 5, 7\), got \(1, 1, 6\)$"),
        (torch.ones(5, 7).int(), r"^attn_mask must be bool or floating, got .* torch.int32"),
    ],
)
def test_masks_that_do_not_fit(mask: torch.Tensor, expected: str) -> None:
    with pytest.raises(InvalidProblem, match=expected):
        tilegen.scaled_dot_product_attention(*inputs(*PLAIN), mask)


def test_refused_arguments() -> None:
    given = inputs(*PLAIN)
    with pytest.raises(InvalidProblem, match=r"^dropout_p must be a number 0..1"):
        tilegen.scaled_dot_product_attention(*given, dropout_p=1.5)
    with pytest.raises(InvalidProblem, match=r"at least 2 dimensions.*got \(8,\)"):
        tilegen.scaled_dot_product_attention(torch.randn(8), *given[1:])


# --------------------------------------------------------------------------------------------------
# PyTorch's own name


def test_everywhere_has_torch_compute_with_tilegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch would route to another back end, by position or by name; only inside."""
    calls: list[object] = []
    ours = sdpa.scaled_dot_product_attention

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(kwargs)
        return ours(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", counted)
    q, k, v = inputs(*PLAIN)
    masks = (None, torch.ones(5, 7).bool(), torch.randn(2, 1, 5, 7))
    for mask, causal in product(masks, (False, True)):
        before = len(calls)
        expected = of_torch(q, k, v, joined(mask, causal))
        with sdpa.everywhere():
            item = of_torch(q, k, v, mask, 0.0, causal)
            other = of_torch(query=q, key=k, value=v, attn_mask=mask, is_causal=causal)
        assert len(calls) == before + 2
        for out in (item, other):
            torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
            torch.autograd.grad(out.sum(), q)


def test_everywhere_reaches_modules_that_call_it() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    expected = layer(x)
    with sdpa.everywhere():
        torch.testing.assert_close(layer(x), expected, atol=2e-5, rtol=2e-5)


def test_everywhere_leaves_unsupported_calls_to_torch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tilegen")
    q, k, v = (x.detach() for x in inputs(*PLAIN))
    jagged = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=torch.jagged)
    jagged = jagged.unflatten(-1, (2, 4)).transpose(1, 2)
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 8), torch.randn(2, 5, 8)])
    with torch.no_grad():
        for given in (
            (q.double(), k.double(), v.double()),
            *((jagged,) * 3, (strided,) * 3),
        ):
            say_once.cache_clear()
            caplog.clear()
            expected = of_torch(*given)
            with sdpa.everywhere():
                actual, _ = of_torch(*given), of_torch(*given)
            (said,) = [one.message for one in caplog.records]
            assert said.startswith("scaled_dot_product_attention: PyTorch computes instead: ")
            assert actual.is_nested == expected.is_nested
            if not actual.is_nested:
                torch.testing.assert_close(actual, expected)
    with sdpa.everywhere(), pytest.raises(RuntimeError, match="must match the size"):
        of_torch(q, k, v, torch.ones(5, 6))
