"""Modules that an emitted Gluon file imports, with the names of Triton 3.6 to 3.9, which differ."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from tests.gluon.memory_model.language import (
    arange,
    arrive,
    cdiv,
    constexpr,
    convert_layout,
    expect,
    fence_async_shared,
    full,
    function_of,
    init,
    inline_asm_elementwise,
    invalidate,
    largest,
    load,
    now,
    num_programs,
    program_id,
    reduced,
    smallest,
    static_assert,
    store,
    store_wait,
    tma_load,
    tma_store,
    wait,
    warpgroup_mma,
    warpgroup_mma_wait,
    where,
    zeros,
)

MODEL_OF = "model of "


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(f"{MODEL_OF}{name}")  # else `from` looks for what is not here in Triton's
    vars(module).update(contents)
    return module


def modules(jit: Callable[..., Any]) -> dict[str, ModuleType]:
    """Return the modules that an emitted file imports, by name; `jit` takes its functions."""
    root = "triton.experimental.gluon"
    mbarrier = _module(
        f"{root}.language.nvidia.hopper.mbarrier",
        **{"init": init, "invalidate": invalidate, "expect": expect, "arrive": arrive},
        **{"wait": wait, "MBarrierLayout": real_mbarrier.MBarrierLayout},
    )
    tma = _module(
        f"{root}.language.nvidia.hopper.tma",
        **{"async_load": tma_load, "async_copy_global_to_shared": tma_load},
        **{"async_store": tma_store, "async_copy_shared_to_global": tma_store},
        store_wait=store_wait,
    )
    hopper = _module(
        f"{root}.language.nvidia.hopper",
        mbarrier=mbarrier,
        tma=tma,
        fence_async_shared=fence_async_shared,
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_init=lambda value: value,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
    nvidia = _module(f"{root}.language.nvidia", hopper=hopper)
    language = _module(f"{root}.language", nvidia=nvidia, **_LANGUAGE)
    gluon = _module(root, language=language, jit=jit)
    experimental = _module("triton.experimental", gluon=gluon)
    every = (experimental, gluon, language, nvidia, hopper, mbarrier, tma)
    return {one.__name__.removeprefix(MODEL_OF): one for one in every}


_NAMES = (
    *("float32", "float16", "bfloat16", "int32", "int64", "uint8", "int1"),
    *("BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"),
    *("NVMMASharedLayout", "SwizzledSharedLayout"),
)
_LANGUAGE: dict[str, Any] = {name: getattr(real, name) for name in _NAMES} | {
    **{"arange": arange, "full": full, "zeros": zeros, "convert_layout": convert_layout},
    **{"where": where, "maximum": largest, "minimum": smallest},
    **{"max": reduced(np.max), "min": reduced(np.min), "sum": reduced(np.sum)},
    **{"exp2": function_of(np.exp2), "log2": function_of(np.log2), "exp": function_of(np.exp)},
    **{"abs": function_of(np.abs), "load": load, "store": store, "cdiv": cdiv},
    **{
        "program_id": program_id,
        "num_programs": num_programs,
        "static_range": range,
        "static_assert": static_assert,
    },
    "constexpr": constexpr,
    "inline_asm_elementwise": inline_asm_elementwise,
    "allocate_shared_memory": lambda dtype, shape, layout, value=None: now().allocate(
        dtype, shape, layout
    ),
    "warp_specialize": lambda functions, warps, registers=None: now().specialize(
        functions, warps, registers
    ),
}
