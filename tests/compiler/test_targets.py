"""Inner loops of kernels compiled for processors other than this machine's."""

import re
from dataclasses import replace

import pytest

from tilegen.cpu import build, jit, mlir
from tilegen.cpu.lower import lower
from tilegen.cpu.target import TARGETS, host
from tilegen.cpu.ttir import ttir_of
from tilegen.emit.render import render
from tilegen.errors import InvalidProblem
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

PRODUCTS = {
    ("amx", "fp32"): r"vfmadd\w+ps.*zmm",
    ("avx512bf16", "bf16"): r"vdpbf16ps.*zmm",
    ("avx512bf16", "fp32"): r"vfmadd\w+ps.*zmm",
    ("avx512", "bf16"): r"vfmadd\w+ps.*zmm",
    ("avx512", "fp32"): r"vfmadd\w+ps.*zmm",
    ("avx2", "bf16"): r"vfmadd\w+ps.*ymm",
    ("avx2", "fp16"): r"vfmadd\w+ps.*ymm",
    ("avx2", "fp32"): r"vfmadd\w+ps.*ymm",
    ("sse2", "fp32"): r"mulps.*xmm",
    ("sse2", "bf16"): r"mulps.*xmm",
    ("neon", "fp32"): r"fmla\s+v\d+\.4s",
    ("neon", "fp16"): r"fmla\s+v\d+\.4s",
    ("neonbf16", "bf16"): r"bfdot\s+v\d+\.4s",
    ("neonbf16", "fp32"): r"fmla\s+v\d+\.4s",
}
"""The instruction of a product, by processor and dtype."""


@pytest.fixture(scope="module", autouse=True)
def _all_processors() -> None:
    jit.initialise_all()


def _assembly(name: str, dtype: str, kernel: str) -> str:
    problem = AttentionProblem.parse(f"hq8 hkv8 q1024 d64 {dtype} causal")
    source = build.source_of(render(problem, TileConfig.parse("m64n64w4s1"), kernel))
    lowered = lower(mlir.parse(ttir_of(source), source.file), TARGETS[name])
    return jit.assembly_of(lowered, TARGETS[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype, kernel",
    [(*one, ("fwd", "bwd_dkdv")[i % 2]) for i, one in enumerate(PRODUCTS)],
)
def test_inner_loops_hold_products_and_nothing_spilled(name: str, dtype: str, kernel: str) -> None:
    pattern, target = PRODUCTS[name, dtype], TARGETS[name]
    blocks = re.split(r"\n(?=[.\w]+:)", _assembly(name, dtype, kernel))
    loops = [block for block in blocks if len(re.findall(pattern, block)) >= 4 * target.rows]
    assert loops, f"no loop of {pattern}"
    for loop in loops:
        products = len(re.findall(pattern, loop))
        # A spilled accumulator is stored in the loop; what only copies registers is not.
        stores = re.findall(r"mov[au]ps\s+%[xyz]mm\d+, .*\(%rsp|str\s+q\d+, \[sp", loop)
        assert len(stores) * 20 <= products, f"{len(stores)} spills for {products} products"


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv"])
def test_weights_take_few_instructions_with_avx512(kernel: str) -> None:
    """An instruction rounds sixteen to bf16, and another leaves what exp2 has a polynomial for."""
    text = _assembly("avx512bf16", "bf16", kernel)
    assert len(re.findall("vcvtneps2bf16.*zmm", text)) >= 4
    assert len(re.findall("vreduceps.*zmm", text)) == len(re.findall("vscalefps.*zmm", text)) > 0
    assert "vcvtneps2bf16" not in _assembly("avx512", "bf16", kernel)


@pytest.mark.parametrize("name", TARGETS)
def test_no_function_of_libm_is_called_per_element(name: str) -> None:
    """Exponentials and roundings are code of the kernel's own, on every processor."""
    text = _assembly(name, "fp16", "fwd")
    calls = re.findall(r"^\s*(?:callq|bl)\s+([a-z]\w+)", text, re.MULTILINE)
    assert "program" in calls
    assert {call for call in calls if not call.startswith("product_")} <= {"program", "work"}


@pytest.mark.parametrize("kernel", ["fwd", "bwd_dkdv"])
def test_amx_multiplies_by_tiles(kernel: str) -> None:
    """Four results by two and two operands, all eight tiles; AMX is off on every machine."""
    text = _assembly("amx", "bf16", kernel)
    loops = [block for block in re.split(r"\n(?=[.\w]+:)", text) if "tdpbf16ps" in block]
    assert loops
    for loop in loops:
        assert len(re.findall("tdpbf16ps", loop)) == 4
        assert len(re.findall("tileload", loop)) >= 4
    assert {f"tmm{i}" for i in range(8)} <= set(re.findall(r"tmm\d", text))
    assert "ldtilecfg" in text
    assert not host().amx


def test_this_machine_is_one_of_the_processors() -> None:
    target = host()
    assert target.name in TARGETS
    assert target.lanes == TARGETS[target.name].lanes


@pytest.mark.parametrize("vectors", [0, 3, 6])
def test_other_numbers_of_vectors_than_powers_of_two_are_refused(vectors: int) -> None:
    with pytest.raises(InvalidProblem, match=f"must be a power of two, .* got {vectors}"):
        replace(host(), vectors=vectors)
