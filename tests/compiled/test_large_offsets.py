"""Offsets of 2**31 elements and more are addressed, in each input and in each dimension.

Storage is reserved, and touched only where a tensor has elements: 4 GiB of addresses for one that
is spread, and up to 2 GiB of memory where the system gives out pages of 2 MiB.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import tilegen
from tilegen.kernels.layout import MAX_ROW_STRIDE
from tilegen.launch.autograd import addressable

FAR = 2**31 + 64
ROW = MAX_ROW_STRIDE // 2
STRIDES = {
    "batch": ((2, 1, 24, 16), 0, FAR),
    "heads": ((1, 2, 24, 16), 1, FAR),
    "rows": ((1, 1, 2**31 // ROW + 9, 16), 2, ROW),
    # Kernels count strides in units of 16, where all are multiples; here not.
    "odd rows": ((1, 1, 2**31 // ROW + 9, 16), 2, ROW + 1),
}
"""Sizes, the spread dimension and its stride."""
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

pytestmark = pytest.mark.skipif(MEMORY < 2**33, reason="needs 8 GiB of memory")


def _reserved(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"the system reserves no {size / 2**29:.1f} GiB: {error}")


def _spread(tensor: torch.Tensor, axis: str) -> torch.Tensor:
    """Return the tensor with its last element more than 2**31 elements after its first."""
    sizes, number, stride = STRIDES[axis]
    strides = list(tensor.stride())
    strides[number] = stride
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    assert last > 2**31
    storage = _reserved(last + 1)
    spread = storage.as_strided(sizes, strides).copy_(tensor)
    assert addressable(spread), "the call would make a copy, whose offsets are small"
    return spread


@pytest.mark.parametrize("axis", STRIDES)
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_one_tensor_is_spread(name: str, axis: str) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = STRIDES[axis][0]
    few = (*sizes[:2], 24, 16)
    longer = ("q", "dout") if name in ("q", "dout") else ("k", "v")
    tensors = {
        each: torch.randn(sizes if each in longer else few, generator=generator).half()
        for each in ("q", "k", "v", "dout")
    }
    exact = [tensors[each].double().requires_grad_() for each in ("q", "k", "v")]
    expected = scaled_dot_product_attention(*exact)
    gradients = torch.autograd.grad(expected, exact, tensors["dout"].double())

    tensors[name] = _spread(tensors[name], axis)
    leaves = [tensors[each].requires_grad_() for each in ("q", "k", "v")]
    out = tilegen.attention(*leaves)
    actual = torch.autograd.grad(out, leaves, tensors["dout"])
    for ours, right in zip((out, *actual), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.double(), right, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("padding", [0, 1])
def test_pages_of_a_large_cache(padding: int) -> None:
    """The pages of a sequence lie on both sides of 2**31 elements, at multiples of 16 or not."""
    sizes = page, heads, dim = 16, 2, 16
    stride = page * heads * dim + padding
    pages = 2**31 // stride + 5
    table = torch.tensor([[pages - 1, 3, pages - 2, 0]])
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(1, heads, 1, dim, generator=generator).half()
    dense = [torch.randn(4, *sizes, generator=generator).half() for _ in range(2)]
    caches = [_reserved(pages * stride) for _ in range(2)]
    caches = [x.as_strided((pages, *sizes), (stride, heads * dim, dim, 1)) for x in caches]
    for pool, values in zip(caches, dense, strict=True):
        pool[table[0]] = values
    out = tilegen.attention_paged(q, *caches, table, torch.tensor([60]))
    k, v = (x.flatten(0, 1)[:60].transpose(0, 1)[None].double() for x in dense)
    expected = scaled_dot_product_attention(q.double(), k, v)
    torch.testing.assert_close(out.double(), expected, atol=4e-3, rtol=4e-3)
