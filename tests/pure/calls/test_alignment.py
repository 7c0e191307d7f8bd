"""How `attention` decides between aligned and unaligned kernels; a mistake is a dead CUDA
context."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tilegen
from tests.support.calls import taking
from tilegen import cpu, pipeline
from tilegen.emit.identity import RenderedKernel, is_aligned, rows_are_aligned
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import TileConfig
from tilegen.launch import autograd, kernels
from tilegen.launch.binding import BoundKernel
from tilegen.launch.changes import Changes
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.runtime.call import call_key, facts_of


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
        def launch(*tensors: Any, **_: Any) -> Any:
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
    "heads 260 apart": (
        torch.zeros(516, dtype=torch.float16).as_strided((1, 2, 8, 32), (0, 260, 32, 1)),
        False,
    ),
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


@pytest.mark.parametrize("other", [dense(offset=1), wide(36), CASES["heads 260 apart"][0]])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_the_same_shape_at_another_place_is_another_call(
    which: str, other: torch.Tensor, seen: Seen
) -> None:
    for given in (dense(), other, dense(), other):
        tilegen.attention(*(given if which == one else dense() for one in "qkv"))
    assert seen.kernels == [("fwd", True), ("fwd", False)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.usefixtures("seen")
def test_kernels_read_one_length_of_each_batch_entry(count: int) -> None:
    q = dense().expand(2, 2, 8, 32).contiguous()
    with pytest.raises(InvalidProblem, match=f"size 2 along batch, got {count}"):
        tilegen.attention(q, q, q, kv_lengths=torch.full((count,), 3))


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


def test_rows_of_every_tensor_count() -> None:
    for dims, aligned in (("d32", True), ("d36", False), ("d32/36", False), ("d36/32", False)):
        assert rows_are_aligned(AttentionProblem.parse(f"hq2 q64 {dims} fp16 full")) == aligned


def test_plans_are_shared_by_calls_that_kernels_cannot_tell_apart() -> None:
    def key(*sizes: int, far: str = "", batch: int = 1) -> Any:
        given = [
            torch.empty_strided(
                (batch, 2, size, 16), (16, 2**23, 2**22 if name == far else 16, 1), device="meta"
            )
            for name, size in zip("qkv", sizes, strict=True)
        ]
        return call_key(facts_of(*given, Changes(tilegen.full())))

    assert key(40, 50, 50) == key(64, 33, 33) != key(65, 50, 50)
    assert key(40, 50, 50) != key(40, 65, 65)
    # What is not usual has a key of its own: a longer v, rows that need a copy, too many programs.
    assert key(40, 50, 51) != key(40, 50, 52)
    for name in "qkv":
        assert key(40, 50, 50, far=name) != key(41, 50, 50, far=name)
    assert key(64, 64, 64, batch=2**23) == key(63, 64, 64, batch=2**23)
    assert key(64, 64, 64, batch=2**24) != key(63, 64, 64, batch=2**24)
