"""How `attention` decides between aligned and unaligned kernels; a mistake is a dead CUDA
context."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tilegen
from tests.taken import taking
from tilegen import cpu, pipeline
from tilegen.emit.identity import RenderedKernel, is_aligned
from tilegen.kernels.config import TileConfig
from tilegen.launch import autograd, kernels
from tilegen.launch.binding import BoundKernel
from tilegen.runtime import plans


@dataclass
class Seen:
    """Kernels that `attention` chose, as (name, aligned), and the gradients they received."""

    kernels: list[tuple[str, bool]]
    gradients: list[torch.Tensor]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Emitted kernels replaced by ones that compute nothing."""
    asked = Seen([], [])

    def launch_of(kernel: str) -> Any:
        def launch(*tensors: Any) -> Any:
            first = tensors[0]
            rows = torch.zeros(first.shape[:3])
            if kernel == "fwd":
                return torch.zeros_like(first), rows
            if kernel == "bwd_preprocess":
                asked.gradients.append(tensors[1])
                return rows
            like = tuple(map(torch.zeros_like, tensors[:3]))
            return like[0] if kernel == "bwd_dq" else like[1:]

        return launch

    monkeypatch.setattr(cpu, "serves_calls", lambda: True)
    monkeypatch.setattr(cpu, "is_interpreting", lambda: True)  # which compiles nothing

    def bound(rendered: RenderedKernel, _: object) -> BoundKernel:
        asked.kernels.append((rendered.kernel, rendered.aligned))
        return BoundKernel(
            launch_of(rendered.kernel), rendered.problem.mask, rendered.kernel, rendered.config
        )

    monkeypatch.setattr(kernels, "bound_kernel", bound)
    config = TileConfig(block_m=16, block_n=16)
    monkeypatch.setattr(pipeline, "rank", taking(config))
    plans.forget()
    yield asked
    plans.forget()


def dense(width: int = 32, offset: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """(1, 2, 8, width), `offset` elements past an aligned address."""
    flat = torch.zeros(2 * 8 * width + offset, dtype=dtype)
    return flat[offset:].view(1, 2, 8, width)


def wide(row: int, width: int = 32) -> torch.Tensor:
    """(1, 2, 8, width) with rows `row` elements apart."""
    return torch.zeros(1, 2, 8, row, dtype=torch.float16)[..., :width]


CASES = {
    "dense": (dense(), True),
    "8 elements on": (dense(offset=8), True),
    "1 element on": (dense(offset=1), False),
    "4 elements on": (dense(offset=4), False),
    "fp32, 4 elements on": (dense(offset=4, dtype=torch.float32), True),
    "fp32, 2 elements on": (dense(offset=2, dtype=torch.float32), False),
    "a batch of one": (dense().as_strided((1, 2, 8, 32), (3, 256, 32, 1)), True),
    "rows of 40": (wide(40), True),
    "rows of 36": (wide(36), False),
    "head dim 36": (dense(width=36), False),
    "head dim 40": (dense(width=40), True),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_alignment_of_every_input_counts(name: str, which: str, seen: Seen) -> None:
    tensor, aligned = CASES[name]
    assert is_aligned(tensor) == aligned
    like = torch.zeros(tensor.shape, dtype=tensor.dtype)
    tilegen.attention(*(tensor if which == one else like for one in "qkv"))
    assert seen.kernels == [("fwd", aligned)]


def test_the_same_shape_at_another_address_is_another_call(
    seen: Seen,
) -> None:
    for offset in (0, 1, 0, 1):
        tilegen.attention(dense(offset=offset), dense(), dense())
    assert seen.kernels == [("fwd", True), ("fwd", False)]


def test_an_unaligned_gradient_is_copied_for_aligned_kernels(
    seen: Seen,
) -> None:
    q, k, v = (dense().requires_grad_() for _ in range(3))
    for grad in (dense(offset=1), wide(36), dense(offset=1).mT.contiguous().mT):
        tilegen.attention(q, k, v).backward(grad)
    assert {aligned for _, aligned in seen.kernels} == {True}
    assert len(seen.gradients) == 3
    assert all(map(is_aligned, seen.gradients))


def test_rows_too_far_apart_for_32_bits_are_copied() -> None:
    far = torch.empty(2**22 + 16, dtype=torch.float16).as_strided((1, 1, 2, 16), (0, 0, 2**22, 1))
    assert is_aligned(far)
    assert not autograd.addressable(far)
    assert autograd.addressable(far.contiguous())
    assert not autograd.addressable(dense().mT)
