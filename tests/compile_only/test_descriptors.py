"""Kernels that load streamed tiles through tensor descriptors compile to fewer registers."""

import inspect
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg

from benchmarks.stand_in import stand_in
from tests.support.problems import DESCRIBED, tiled
from tilegen.compiling.compiler import compile_for
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.errors import Unsupported
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.launch.bound_module import bound_kernel
from tilegen.masks import predicate
from tilegen.model.footprint import footprint
from tilegen.model.on_chip import SPILL_DOUBT
from tilegen.problem import AttentionProblem

ARGUMENTS = len(inspect.signature(make_tensordesc_arg).parameters)  # one more in Triton 3.9
PARSE, CONFIG = AttentionProblem.parse, TileConfig.parse
LLAMA = PARSE("b1 hq32 hkv8 q8192 d128 bf16 causal")
SMALL = PARSE("b1 hq4 hkv2 q1024 d64 bf16 causal")
ROLES: dict[Kernel, tuple[str, list[object]]] = {
    "fwd_hopper": ("m128n64w8s2tp132", [4, "made", 1, 4, 64, 40]),
    "bwd_dq_hopper": ("m128n64w8s2t", [4, "given", "given", 4, 64, 40]),
    "bwd_dkdv_hopper": ("m64n128w8s2t", [2, 2, 64, 40]),
}
"""Kernels whose warpgroups have roles: a config, and the grid with what is neither a descriptor
nor a scale."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arch, kernel, text, fewer",
    [
        ("sm_90", "fwd", "m128n128w8s2", 20),
        ("sm_90", "bwd_dkdv", "m64n64w8s2", 0),  # Triton 3.7.1: 37 fewer, 3.6.0: none
        ("sm_90", "bwd_dq", "m128n64w8s3", 40),
        ("sm_100", "bwd_dkdv", "m64n128w8s2", 10),
        ("sm_120", "fwd", "m64n64w4s2", 40),
    ],
)
def test_fewer_registers(arch: str, kernel: Kernel, text: str, fewer: int) -> None:
    """And shared memory for barriers alone: the tiles take as much of it."""
    plain, described = (
        compile_for(render(LLAMA, CONFIG(one), kernel), arch) for one in (text, f"{text}t")
    )
    by_tma, by_address = described.reported, plain.reported
    assert by_tma.registers <= by_address.registers - fewer
    assert by_tma.spill_bytes <= 8  # dK/dV with Triton 3.6.0; others none
    assert by_address.shared_bytes <= by_tma.shared_bytes <= by_address.shared_bytes + 1024
    assert described.scratch_pointers == plain.scratch_pointers
    if triton.__version__ == "3.7.1":  # whose reports the model is fitted to
        needs = footprint(tiled(kernel, LLAMA, CONFIG(f"{text}t"), arch))
        assert 0.85 * by_tma.registers <= needs.registers <= SPILL_DOUBT * by_tma.registers
        assert by_tma.shared_bytes <= needs.smem_bytes <= by_tma.shared_bytes + 2048


@pytest.mark.slow
@pytest.mark.parametrize("kernel", DESCRIBED)
def test_tiles_that_pass_come_by_tma_alone(kernel: Kernel) -> None:
    config = CONFIG("m64n64w4s3t")
    rendered = render(PARSE("b1 hq4 hkv2 q1024 d80 bf16 causal"), config, kernel)
    source = triton.compiler.ASTSource(
        fn=getattr(load(rendered), rendered.function),
        signature=dict(rendered.signature),
        constexprs={},
        attrs={},
    )
    options = {"num_warps": 4, "num_stages": 3}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    assert "cp.async.bulk.tensor.4d.shared" in ptx
    assert "cp.async.cg" not in ptx


STAMPS = torch.arange(2)
BY_HEAD: dict[str, Any] = {
    "one range": lambda b, h, q, k: (k >= h) & (k < q + b),
    "several ranges": lambda b, h, q, k: (k <= h) | ((k >= q) & (k < q + b + 9)),
    "a table of 64 bits": lambda b, h, q, k: k < STAMPS[h],
}


@pytest.mark.parametrize(
    "name, kernel",  # each kernel has two of the three forms
    [
        *(("one range", "fwd"), ("one range", "bwd_dkdv"), ("one range", "fwd_split")),
        *(("several ranges", "bwd_dq"), ("several ranges", "fwd_split")),
        *(("several ranges", "bwd_dkdv"), ("a table of 64 bits", "fwd")),
        ("a table of 64 bits", "bwd_dq"),
    ],
)
def test_tiles_are_counted_in_32_bits(name: str, kernel: Kernel) -> None:
    """Whatever their bounds have, such as numbers of heads and batches, which address 64 bits."""
    problem = PARSE("b2 hq2 hkv2 q1024 d16 fp16 full")
    problem = replace(problem, mask=predicate(BY_HEAD[name]).stand_in)
    config = CONFIG("m32n32k128w4s2t" if kernel == "fwd_split" else "m32n32w4s2t")
    assert compile_for(render(problem, config, kernel), "sm_90").binary


def test_a_gpu_without_tma_is_refused() -> None:
    with pytest.raises(Unsupported, match="sm_80 has no tensor descriptors"):
        compile_for(render(SMALL, CONFIG("m64n64w4s2t")), "sm_80")


@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize("kernel", DESCRIBED)
def test_no_length_recompiles(kernel: Kernel) -> None:
    """And kernels compiled ahead are found at launch."""
    rendered = render(SMALL, CONFIG("m32n32w4s2t"), kernel)
    compile_for(rendered, "sm_90")
    module, results = load(rendered), list[bool]()
    knobs = triton.knobs.compilation
    before, knobs.listener = knobs.listener, lambda **event: results.append(event["cache_hit"])
    try:
        for batch, rows in ((1, 1), (2, 17), (1, 1024), (3, 100)):
            for inside in (False, True):
                shape = (batch, rows, 4, 64) if inside else (batch, 4, rows, 64)
                q = torch.empty(shape, dtype=torch.bfloat16)
                q = q.transpose(1, 2) if inside else q
                sums = torch.empty(batch, 4, rows)
                given = (q, q[:, :2], q[:, :2])
                backward = (*given, q, sums, sums, 0.1)
                module.launch(*((*given, 0.1) if kernel == "fwd" else backward))
    finally:
        knobs.listener = before
    assert results == [True]
    assert len(getattr(module, rendered.function).device_caches[0][0]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, text",
    [
        *zip(DESCRIBED, cycle(["d64 bf16 causal", "d80 fp16 full"])),
        *((name, "d64 bf16 causal") for name in ROLES),
    ],
)
def test_a_launch_is_that_of_the_binder_and_compiles_nothing_else(
    kernel: Kernel, text: str
) -> None:
    """Triton's launcher makes the same maps of its arguments either way."""
    problem = PARSE(f"b1 hq4 hkv2 q64 {text}")
    config = CONFIG(ROLES[kernel][0] if kernel in ROLES else "m64n32w4s2t")
    rendered = render(problem, config, kernel)
    module = load(rendered)
    ours = bound_kernel(rendered, torch.device("cpu"), module)
    dtype = torch.bfloat16 if problem.dtype == "bf16" else torch.float16
    flat = torch.zeros(1, 64, 4, problem.head_dim_qk, dtype=dtype).transpose(1, 2)
    q, k = flat, flat[:, :2, :40]
    sums = torch.zeros(1, 4, 64)
    is_forward = kernel.startswith("fwd")
    given = (q, k, k, 0.1) if is_forward else (q, k, k, q, sums, sums, 0.1)
    with stand_in(notes=True) as driver:
        results = [launch(*given) for launch in (ours.launch, module.launch, ours.launch)]
        assert len(getattr(module, rendered.function).device_caches[0][0]) == 1
    made = []
    for (grid, name, values), result in zip(driver.launches, results, strict=True):
        assert name == rendered.function
        own = [one.data_ptr() for one in (result if isinstance(result, tuple) else (result,))]
        items = [
            _mapped(x) if hasattr(x, "strides") else getattr(x, "data_ptr", lambda x=x: x)()
            for x in values
        ]
        items = ["given" if x == sums.data_ptr() else x for x in items]
        made.append([grid, *("made" if x in own else x for x in items)])
    if kernel in ROLES:  # whose results are described, too
        made = [[x for x in items if not isinstance(x, list)] for items in made]
        scale = 0.1443 if is_forward else 0.1
        assert made[0] == [*ROLES[kernel][1], pytest.approx(scale, rel=1e-3)]
    assert made[0] == made[1] == made[2]
    maps = 0 if kernel in ROLES else 2 * (1 + (problem.head_dim_qk == 80))
    assert sum(isinstance(x, list) for x in made[0]) == maps


def _mapped(descriptor: Any) -> list[Any]:
    """Return the arguments that Triton's launcher makes of a descriptor, and those it passes to the
    driver."""
    metadata = dict(
        swizzle=3, elem_size=2, elem_type=10, block_size=[1, 1, 32, 64], fp4_padded=False
    )
    fill = lambda *given: [list(one) if isinstance(one, tuple) else one for one in given]  # noqa: E731
    utils = SimpleNamespace(fill_tma_descriptor_tiled=fill, fill_tma_descriptor=fill)
    with mock.patch.object(triton.runtime.driver, "_active", SimpleNamespace(utils=utils)):
        return make_tensordesc_arg(descriptor, metadata, *[None] * (ARGUMENTS - 2))


def test_a_launch_refuses_expanded_dimensions() -> None:
    config = CONFIG("m32n32w4s2t")
    rendered = render(SMALL, config)
    launch = bound_kernel(rendered, torch.device("cpu"), load(rendered)).launch
    q = torch.zeros(1, 4, 64, 64, dtype=torch.bfloat16)
    with stand_in(), pytest.raises(ValueError, match="no expanded dimension"):
        launch(q, q[:, :1].expand(1, 2, 64, 64), q[:, :2], 0.1)
