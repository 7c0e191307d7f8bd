"""The problems that tests of every tier share, their tasks on a device, sizes for a GPU or the
interpreter, and resources and configs of kernels.

The problems are small, and together awkward: lengths 1, 63, 200 and 1023; unequal lengths; head
dims that are no power of two; every kind of group; a window of one; rows that keep nothing; every
mask and dtype. A test's id is the problem's key.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

from tilegen.gpus.spec import gpu, gpu_for
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS, LARGE_CACHE
from tilegen.model.resources import Resources, StepCode
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask, Tiled

PROBLEMS: tuple[AttentionProblem, ...] = tuple(
    AttentionProblem.parse(text)
    for text in (
        "b1 hq1 hkv1 q1 kv1 d16 fp32 full",
        "b1 hq2 hkv1 q1 kv200 d64 bf16 causal(bottom_right)",  # a decoding step
        "b2 hq4 hkv4 q63 kv63 d64 fp16 causal",
        "b1 hq4 hkv1 q200 kv200 d60 bf16 causal",  # one key-value head for all
        "b1 hq8 hkv2 q64 kv256 d100 fp16 causal(bottom_right)",  # groups of four
        "b1 hq2 hkv2 q256 kv64 d64 fp32 causal(bottom_right)",  # rows 0..191 keep nothing
        "b1 hq2 hkv2 q64 kv200 d32 fp16 causal",  # columns 64..199 are kept by no row
        "b1 hq1 hkv1 q1023 kv1023 d128 bf16 window(127,0)",
        "b1 hq2 hkv2 q200 kv200 d80 fp16 window(0,0)",  # every row sees itself alone
        "b1 hq3 hkv1 q127 kv65 d72 fp32 window(16,16)",
        "b1 hq2 hkv2 q96 kv200 d96 bf16 window(40,-1)",
        "b2 hq2 hkv1 q200 kv40 d160 bf16 window(8,0,bottom_right)",  # rows 0..159 keep nothing
        "b1 hq2 hkv2 q200 kv200 d40 fp16 causal&window(40,24)",
        "b1 hq2 hkv1 q130 kv200 d128 bf16 causal(bottom_right)&window(63,9)",
        "b1 hq2 hkv2 q129 kv129 d192/128 bf16 causal",
        "b1 hq2 hkv2 q65 kv100 d24/8 fp32 full",
        "b1 hq1 hkv1 q70 kv130 d256 fp16 full",
    )
)


def task(kernel: Kernel, problem: AttentionProblem, arch: str = "") -> KernelTask:
    """Return a kernel for a problem, as it stands, on the H200 or on a GPU of an architecture."""
    device = gpu_for(arch) if arch else gpu("h200")
    return KernelTask(KERNELS[kernel], problem, device)


def tiled(
    kernel: Kernel,
    problem: AttentionProblem,
    config: TileConfig,
    arch: str = "",
    *,
    joined: TileConfig | None = None,
    follows: Kernel = "",
) -> Tiled:
    """Return such a task with a config; `joined` are the splits that the kernel joins, of the
    kernel that it `follows`, or of the usual."""
    kernel_task = task(kernel, problem, arch)
    before = KERNELS[follows] if follows else None
    return Tiled(KernelTask(kernel_task.spec, problem, kernel_task.device, joined, before), config)


STEP = StepCode(
    instructions=3456,
    exponentials=256,
    fp32=896,
    integer=648,
    multiply_adds=2**22,
    rows=64,
    shared_bytes=271360,
    local=136,
    exposed=40,
    exposed_exponentials=0,
    asynchronous=True,
    serialized=False,
)
"""A step of dK/dV at head dim 128 with tiles of 64 x 128, as compiled for sm_90."""


def used(
    *,
    registers: int = 255,
    spill_bytes: int = 0,
    shared_bytes: int = 1024,
    step_code: StepCode | None = None,
) -> Resources:
    """Return resources as a compiler would report them."""
    return Resources(
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        step_code=step_code,
    )


Size = TypeVar("Size")
IS_REHEARSED = os.environ.get("TRITON_INTERPRET") == "1"


def sized(on_gpu: Size, *, rehearsed: Size) -> Size:
    """Return the size for a GPU, or in the interpreter the size for tests/rehearsal.py.

    The model gives few rows whole tiles of 64 to 256 keys: a rehearsed problem with less than 257
    keys has a tail, but not several tiles of keys.
    """
    return rehearsed if IS_REHEARSED else on_gpu


DESCRIBED: tuple[Kernel, ...] = tuple(name for name in LARGE_CACHE if KERNELS[name].described)


def configs(config: TileConfig) -> dict[Kernel, TileConfig]:
    """Return a config for each kernel of a forward and a backward, with descriptors where it may
    have them."""
    return {name: replace(config, descriptors=name in DESCRIBED) for name in LARGE_CACHE}
