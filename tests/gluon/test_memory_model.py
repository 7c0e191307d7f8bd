"""Rules of the memory model, each on a kernel of a few lines; the Gluon forward has tests of its
own."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("greenlet", reason="greenlet, which runs partitions in the memory model")

from tests.gluon.memory_model import Fault, run
from tests.gluon.memory_model.faults import NotModelled
from tests.gluon.memory_model.language import real
from tests.gluon.memory_model.memory import GlobalTensor, described
from tests.gluon.memory_model.values import Int, Tile, rounded

HEAD = """
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = gl.constexpr(16)
COLUMNS = gl.constexpr(64)

def described(x):
    layout = gl.NVMMASharedLayout.get_default_for([16, 64], gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 64], layout)
"""
COPY = """
@gluon.jit
def kernel(x_desc, y_desc, rows):
    smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    first = gl.program_id(0) * ROWS
    mbarrier.expect(ready, ROWS * COLUMNS * 2)
    tma.async_load(x_desc, [first, 0], ready, smem)
    mbarrier.wait(ready, 0)
    tma.async_store(y_desc, [first, 0], smem)
    tma.store_wait(0)

def launch(x):
    y = torch.empty_like(x)
    kernel[(-(-len(x) // 16),)](described(x), described(y), len(x))
    return y
"""


def source(*parts: str, **changes: str) -> str:
    text = HEAD + "".join(map(textwrap.dedent, parts))
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


LOAD = "mbarrier.wait(ready, 0)\n    if smem.load(None) < smem.load(None): pass"
CLEAR = "smem.store(gl.zeros([64, 64], gl.bfloat16))\n    "


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_tiles_at_the_end_are_filled_with_zeros_and_not_written() -> None:
    x = rows_of(40)
    y, report = run(source(COPY), x)
    assert torch.equal(x, y)
    assert report.read_bytes == {"x_desc": 40 * 128, "y_desc": 0}
    assert report.written_bytes == {"x_desc": 0, "y_desc": 40 * 128}


@pytest.mark.parametrize(
    "old, new, says",
    [
        ("tma.async_load(x_desc, [first, 0]", "tma.async_load(x_desc, [first]", "2 dimensions"),
        ("    tma.async_store(y_desc, [first, 0], smem)\n", "", "not written exactly once"),
        ("[first, 0], smem)", "[0, 0], smem)", "not written exactly once"),
        ("mbarrier.wait(ready, 0)", "mbarrier.invalidate(ready)", "is not init|race on smem"),
        ("mbarrier.expect(ready, ROWS * COLUMNS * 2)", "pass", "1 of 1 arrivals pending, 2048"),
        ("COLUMNS * 2)", "COLUMNS)", "got 1024 bytes more than phase 0 expects"),
        ("COLUMNS * 2)", "COLUMNS * 4)", "2048 bytes expected that did not come"),
        ("count=1)", "count=1048576)", "not 1..1048575"),
        ("[1], mbarrier", "[2], mbarrier", "holds 2 mbarriers"),
        ("mbarrier.wait(ready, 0)", "mbarrier.wait(smem, 0)", "holds no mbarrier"),
        ("tma.store_wait(0)", "smem.store(smem.load(None))\n    tma.store_wait(0)", "race on smem"),
        ("ready, smem)", "ready, smem.slice(8, 16))", "has 16 entries, asked for 8 to 23"),
        ("ready, smem)", "ready, smem.slice(0, 8))", "loads to"),
        ("mbarrier.wait(ready, 0)", "mbarrier.wait(ready, 0)\n    mbarrier.wait(ready, 0)", ""),
        ("gl.program_id(0) * ROWS", "gl.program_id(0) * 1073741824 * ROWS", "overflows"),
        ("mbarrier.wait(ready, 0)", LOAD, "no condition"),
    ],
)
def test_one_rule_after_the_other(old: str, new: str, says: str) -> None:
    text = changed(source(COPY), old, new)
    for seed in range(4):
        if says:
            with pytest.raises(Fault, match=says):
                run(text, rows_of(40), seed=seed)
        else:
            run(text, rows_of(40), seed=seed)


SHARED = """
@gluon.jit
def _store(smem, full, x):
    smem.store(gl.full([ROWS, COLUMNS], 3.0, gl.float32).to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(full, count=1)

@gluon.jit
def _leave(y_desc, smem, full):
    mbarrier.wait(full, 0)
    tma.async_store(y_desc, [0, 0], smem)
    tma.store_wait(0)

@gluon.jit
def kernel(y_desc):
    smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    gl.warp_specialize([(_leave, (y_desc, smem, full)), (_store, (smem, full, 0))], [4], [24])

def launch(y):
    kernel[(1,)](described(y))
    return y
"""


def test_a_fence_belongs_to_the_partition_that_stores() -> None:
    text = source(SHARED)
    y, _ = run(text, rows_of(16))
    assert (y == 3).all()
    late = changed(text, "    fence_async_shared()\n", "")
    late = changed(late, "    tma.async_store", "    fence_async_shared()\n    tma.async_store")
    for seed in range(4):
        with pytest.raises(Fault, match="no proxy fence on smem"):
            run(late, rows_of(16), seed=seed)


READ = """
@gluon.jit
def _read(y_ptr, smem, full, empty):
    rows, columns = gl.arange(0, ROWS), gl.arange(0, COLUMNS)
    for i in range(2):
        mbarrier.wait(full, i)
        x = smem.load(None)
        fence_async_shared()
        mbarrier.arrive(empty, count=1)
        gl.store(y_ptr + (i * ROWS + rows[:, None]) * COLUMNS + columns[None, :], x)

@gluon.jit
def _load(x_desc, smem, full, empty):
    for i in range(2):
        mbarrier.wait(empty, i ^ 1)
        mbarrier.expect(full, ROWS * COLUMNS * 2)
        tma.async_load(x_desc, [i * ROWS, 0], full, smem)

@gluon.jit
def kernel(x_desc, y_ptr):
    smem = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [(_read, (y_ptr, smem, full, empty)), (_load, (x_desc, smem, full, empty))], [4], [24])

def launch(x):
    y = torch.empty_like(x)
    kernel[(1,)](described(x), y)
    return y
"""


@pytest.mark.parametrize("place", ["nowhere", "before the load", "in the partition that loads"])
def test_a_fence_comes_between_a_load_and_the_tma_load_that_overwrites(place: str) -> None:
    text, x = source(READ), rows_of(32)
    y, _ = run(text, x)
    assert torch.equal(x, y)
    fence = "        fence_async_shared()\n"
    broken = changed(text, fence, "")
    if place == "before the load":
        broken = changed(broken, "        x = smem", f"{fence}        x = smem")
    elif place == "in the partition that loads":
        broken = changed(broken, "        mbarrier.expect", f"{fence}        mbarrier.expect")
    for seed in range(4):
        with pytest.raises(Fault, match=r"no proxy fence on smem.* may be there before this load"):
            run(broken, x, seed=seed)


def test_a_deadlock_names_lines_and_barriers() -> None:
    text = changed(source(SHARED), "mbarrier.arrive(full, count=1)", "pass")
    with pytest.raises(Fault) as raised:
        run(text, rows_of(16), seed=7)
    said = str(raised.value)
    assert "nothing can go on, and nothing is in flight" in said
    assert "program waits for phase 0 of full[0] (line" in said
    assert "mbarrier.wait(full, 0))" in said
    assert "full[0]: phase 0, 1 of 1 arrivals pending" in said
    assert "seed 7" in said


def test_a_partition_must_not_leave_others_behind() -> None:
    text = changed(source(SHARED), "[(_leave, (y_desc, smem, full)), ", "[")
    with pytest.raises(Fault, match="expected one number less than functions"):
        run(text, rows_of(16))


PRODUCTS = """
@gluon.jit
def kernel(x_desc, y_ptr):
    smem = gl.allocate_shared_memory(gl.bfloat16, [64, COLUMNS], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, 64 * COLUMNS * 2)
    tma.async_load(x_desc, [0, 0], ready, smem)
    mbarrier.wait(ready, 0)
    acc = gl.zeros([64, 64], gl.float32)
    one = warpgroup_mma(smem, smem.permute((1, 0)), acc, use_acc=False, is_async=True)
    two = warpgroup_mma(smem, smem.permute((1, 0)), one, is_async=True)
    two = warpgroup_mma_wait(0, deps=[two])
    rows = gl.arange(0, 64)
    gl.store(y_ptr + rows[:, None] * 64 + rows[None, :], two)

def launch(x):
    y = torch.empty(64, 64)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    kernel[(1,)](TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout), y)
    return y
"""


def test_products_of_one_accumulator_follow_each_other() -> None:
    x = rows_of(64)
    y, _ = run(source(PRODUCTS), x)
    torch.testing.assert_close(y, 2 * (x.float() @ x.float().T))


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "    two = warpgroup_mma_wait(0, deps=[two])\n",
            "",
            "registers are read that the product",
        ),
        ("deps=[two])", "deps=[one])", "deps leave out a tile"),
        ("wait(0, deps=[two])", "wait(0)", "deps must be given"),
        ("gl.store(", f"{CLEAR}gl.store(", ""),
        ("two = warpgroup_mma_wait(0", f"{CLEAR}two = warpgroup_mma_wait(0", "race on smem"),
        ("gl.zeros([64, 64], gl.float32)", "gl.zeros([64, 32], gl.float32)", "a product of"),
        ("smem.permute((1, 0)), one", "acc, one", "lies in shared memory"),
        ("two)\n\ndef", "two.to(gl.bfloat16) + 1.0)\n\ndef", "convert to fp32"),
    ],
)
def test_products_in_flight(old: str, new: str, says: str) -> None:
    text = changed(source(PRODUCTS), old, new)
    if not says:
        run(text, rows_of(64))
        return
    with pytest.raises((Fault, NotModelled), match=says):
        run(text, rows_of(64))


# --------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("a, b", [(7, 2), (-7, 2), (7, -2), (-7, -2), (0, 5)])
def test_integers_divide_as_in_c(a: int, b: int) -> None:
    assert Int(a) // b == int(a / b)
    assert Int(a) % b == a - b * int(a / b)
    assert type(Int(a) // b) is type(a + Int(b)) is type(2 * Int(a)) is Int
    tile = Tile(np.array([a]), real.int32)
    assert (tile // b).data.tolist() == [int(a / b)]
    assert (tile % b).data.tolist() == [a - b * int(a / b)]


def test_integers_have_32_bits() -> None:
    with pytest.raises(Fault, match="overflows: 4294967296"):
        Int(65536) * 65536
    with pytest.raises(Fault, match="overflows"):
        Tile(np.array([2**31 - 1]), real.int32) + 1
    with pytest.raises(Fault, match="// 0"):
        Int(1) // Int(0)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_conversions_round_as_pytorch_does(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 300
    kind = {"bf16": real.bfloat16, "fp16": real.float16}[name]
    assert np.array_equal(rounded(x.numpy(), kind), x.to(dtype).float().numpy())


def test_nan_passes_through_maxima() -> None:
    from tests.gluon.memory_model.modules import modules

    gl: Any = modules(lambda one: one)["triton.experimental.gluon.language"]
    tile = Tile(np.array([[1.0, np.nan]], np.float32), real.float32)
    assert np.isnan(gl.max(tile, 1).data).all()
    assert np.isnan(gl.maximum(tile, 5.0).data).tolist() == [[False, True]]


@pytest.mark.parametrize(
    "line, says",
    [
        ("gl.histogram(rows, 4)", "histogram"),
        ("gl.inline_asm_elementwise('nop;', '=r', [rows], gl.int32, True, 1)", "needs a twin"),
        ("rows / 2", "integers is not modelled"),
        ("smem.reshape([32, 128])", "without ones"),
        ("tma.async_load(x_desc, [0, 0], ready, smem, multicast=True)", "multicast"),
    ],
)
def test_unknown_operations_are_refused_by_name(line: str, says: str) -> None:
    text = changed(source(PRODUCTS), "    gl.store(", f"    {line}\n    gl.store(")
    with pytest.raises((NotModelled, AttributeError), match=says):
        run(text, rows_of(64))


def test_other_imports_are_refused() -> None:
    text = source(COPY) + "\nfrom triton.experimental.gluon.language.nvidia import blackwell\n"
    other = "import triton.experimental.gluon.language.nvidia.blackwell as b\n" + source(COPY)
    for item in (text, other):
        with pytest.raises((NotModelled, ImportError), match=r"blackwell|expected an import"):
            run(item, rows_of(16))


@dataclass
class Described:
    """An unchecked descriptor, like one that a kernel makes itself."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: None = None


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"strides": [60, 1]}, "strides that are multiples of 16"),
        ({"strides": [64, 2]}, "a dense last dimension"),
        ({"base": torch.zeros(2000).bfloat16()[1:]}, "an address and rows of tiles"),
        ({"block_shape": [16, 12]}, "an address and rows of tiles"),
        ({"shape": [1] * 6, "strides": [8] * 5 + [1], "block_shape": [8] * 6}, "6 dimensions"),
        ({}, ""),
    ],
)
def test_descriptors_are_as_the_hardware_takes_them(changes: dict[str, Any], says: str) -> None:
    plain = {"base": torch.zeros(16, 64).bfloat16(), "shape": [16, 64], "strides": [64, 1]}
    given = Described(**(plain | {"block_shape": [16, 64]} | changes))
    machine: Any = None
    tensor = GlobalTensor("x", torch.zeros(16, 64).bfloat16())
    if not says:
        assert described(machine, "x", tensor, given, real.bfloat16).bytes == 2048
        return
    with pytest.raises(Fault, match=says):
        described(machine, "x", tensor, given, real.bfloat16)
