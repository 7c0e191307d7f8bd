"""Checked and counted builds, and refusals."""

import inspect

import pytest
import torch

from tests.compiler import kernels
from tests.compiler.runs import launch
from tilegen import cpu
from tilegen.cpu.direct import DirectFunction
from tilegen.cpu.function import overlap
from tilegen.emit.render import render
from tilegen.errors import Unsupported, WrongResult
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem


def _line_of(kernel: object, text: str) -> int:
    lines, first = inspect.getsourcelines(kernel.fn)  # type: ignore[attr-defined]
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_a_read_beyond_the_end_is_named() -> None:
    function = DirectFunction(kernels.beyond, mode="bounds")
    x, out = torch.arange(10.0), torch.zeros(10)
    line = _line_of(kernels.beyond, "mask=at <= n")
    with pytest.raises(WrongResult, match=f"beyond, line {line}: x_ptr: element 10, counted"):
        function[(1,)](x, out, 10, 16)
    assert torch.equal(out, x)
    function[(1,)](torch.arange(11.0)[:10], out, 10, 16)  # the storage has one more


def test_a_write_beyond_the_end_is_named_and_not_done() -> None:
    function = DirectFunction(kernels.beyond, mode="bounds")
    whole = torch.full((12,), 5.0)
    short = torch.empty(0).set_(whole.untyped_storage(), 0, (12,))
    out = torch.zeros(8)
    with pytest.raises(WrongResult, match="out_ptr: element 8"):
        function[(1,)](short, out, 10, 16)
    assert torch.equal(out, torch.full((8,), 5.0))


def test_emitted_kernels_stay_in_their_tensors() -> None:
    """Ragged lengths and head dims, forward and backward, without vectors that hide a lane."""
    problem = AttentionProblem.parse("b1 hq2 hkv1 q37 kv53 d40/24 bf16 causal(bottom_right)")
    q, k = torch.randn(1, 2, 37, 40).bfloat16(), torch.randn(1, 1, 53, 40).bfloat16()
    v, dout = torch.randn(1, 1, 53, 24).bfloat16(), torch.randn(1, 2, 37, 24).bfloat16()
    config = TileConfig(block_m=32, block_n=16)
    module = cpu.load(render(problem, config, "fwd", aligned=False), "bounds")
    out, _ = module.launch(q, k, v, 0.2)
    plain = cpu.load(render(problem, config, "fwd", aligned=False))
    assert torch.equal(out, plain.launch(q, k, v, 0.2)[0])
    with pytest.raises(WrongResult, match=r"k_ptr|v_ptr"):
        module.launch(q, k, v[:, :, :40].clone(), 0.2)  # fewer values than keys
    assert dout.shape == out.shape


def test_unknown_operations_are_refused_by_name_and_line() -> None:
    line = _line_of(kernels.sorted_tile, "tl.cumsum")
    with pytest.raises(Unsupported, match=f"line {line} of the kernel: tt.scan: unknown"):
        launch(kernels.sorted_tile, (1,), torch.arange(16.0), torch.empty(16), 16)


def test_memory_that_is_written_must_not_be_shared() -> None:
    x = torch.randn(64)
    with pytest.raises(Unsupported, match="out_ptr is written and shares memory with x_ptr"):
        launch(kernels.unary, (1,), x, x[1:], 63, "abs", 64)
    both = torch.randn(32, 2)
    assert not overlap(both[:, 0], both[:, 1])
    assert overlap(both[:, 0], both.view(-1)[1:3])
    assert overlap(both, both.view(torch.int16))
    launch(kernels.unary, (1,), x[:32], x[32:], 32, "abs", 64)
    assert torch.equal(x[32:], x[:32].abs())


def _attention(problem: str, *, rows: int = 300) -> tuple[object, tuple[torch.Tensor, ...]]:
    parsed = AttentionProblem.parse(problem)
    module = cpu.load(render(parsed, TileConfig(block_m=32, block_n=32), "fwd"))
    generator = torch.Generator().manual_seed(0)
    return module, tuple(torch.randn(1, 4, rows, 32, generator=generator) for _ in range(3))


def test_nan_and_infinities_come_out_where_pytorch_has_them() -> None:
    module, (q, k, v) = _attention("hq4 q300 d32 fp32 full")
    q[0, 0, 5, 3], k[0, 1, 7, 2], v[0, 2, 9, 1] = float("nan"), float("inf"), float("inf")
    v[0, 3, 11, 4] = float("nan")
    out = module.launch(q, k, v, 0.2)[0]  # type: ignore[attr-defined]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.2)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    torch.testing.assert_close(out, expected, equal_nan=True)
