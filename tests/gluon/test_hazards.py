"""Registers of products in flight, read off machine code: emitted kernels leave them alone, and a
binary whose waits come too early is found out."""

from __future__ import annotations

import re

import pytest

from tests.gluon.hazards import Hazard, hazards
from tests.gluon.test_gluon import FORMS, compiled
from tilegen.compiling.compiler import compile_for
from tilegen.compiling.machine_code.instructions import read_sass
from tilegen.compiling.machine_code.reading import disassembled
from tilegen.emit.render import render
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem

WAIT_FOR_ALL = re.compile(rb"\xc5\x79\x00\x00\x00\x80\x00\x00\x00(\x00)\x01\x00", re.DOTALL)
"""WARPGROUP.DEPBAR.LE gsb0, 0x0: the byte says how many groups may be in flight."""


def of_binary(cubin: bytes) -> list[Hazard]:
    return [one for code in read_sass(disassembled(cubin)).values() for one in hazards(code)]


@pytest.mark.slow
@pytest.mark.parametrize("text", FORMS)
def test_kernels_for_hopper_have_none(text: str) -> None:
    assert of_binary(compiled(text).binary) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, config",
    [("fwd", "m128n128w8s2"), ("bwd_dkdv", "m64n128w8s2"), ("bwd_dq", "m128n128w8s2")],
)
def test_emitted_kernels_have_none(kernel: str, config: str) -> None:
    problem = AttentionProblem.parse("hq4 q1024 d128 bf16 causal")
    built = compile_for(render(problem, TileConfig.parse(config), kernel), "sm_90")
    assert of_binary(built.binary) == []


@pytest.mark.slow
def test_a_binary_whose_waits_come_too_early_is_found_out() -> None:
    cubin = bytearray(compiled(next(iter(FORMS))).binary)
    places = [one.start(1) for one in WAIT_FOR_ALL.finditer(bytes(cubin))]
    assert len(places) > 4
    for place in places:
        cubin[place] = 1
    results = {one.what for one in of_binary(bytes(cubin))}
    assert results >= {"reads a result", "writes a result"}


# --------------------------------------------------------------------------------------------------
# By hand

HEAD = '\t.section .text.kernel,"ax",@progbits\n'
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0"


def of(*lines: str) -> list[tuple[int, int, str]]:
    text = HEAD + "".join(f"        /*{16 * i:04x}*/ {one} ;\n" for i, one in enumerate(lines))
    return [(one.at, one.register, one.what) for one in hazards(read_sass(text)["kernel"])]


@pytest.mark.parametrize(
    "line, results",
    [
        ("MOV R4, R9", [(1, 4, "writes an operand")]),
        ("MOV R8, R4", []),  # read twice
        ("MOV R8, R9", []),
        ("FADD R3, R55, R9", [(1, 55, "reads a result")]),
        ("FMUL R24, R24, 2", [(1, 24, "writes a result"), (1, 24, "reads a result")]),
        ("LDS.128 R0, [R80]", []),
        ("LDS.128 R4, [R80]", [(1, at, "writes an operand") for at in (4, 5, 6, 7)]),
        ("STS [R80], R56", []),
        ("STS [R80], R30", [(1, 30, "reads a result")]),
        ("SHFL.BFLY PT, R5, R9, 0x1, 0x1f", [(1, 5, "writes an operand")]),
        ("ISETP.GE.AND P0, PT, R24, R9, PT", [(1, 24, "reads a result")]),
        ("IMAD.WIDE R6, R9, 4, R10", [(1, 6, "writes an operand"), (1, 7, "writes an operand")]),
    ],
)
def test_instructions_that_touch_a_product_in_flight(
    line: str, results: list[tuple[int, int, str]]
) -> None:
    assert of(PRODUCT, line) == results
    assert of(PRODUCT, "WARPGROUP.DEPBAR.LE gsb0, 0x0", line) == []


def test_groups_retire_in_order() -> None:
    other = PRODUCT.replace("R24", "R60").replace("R4,", "R8,")
    lines = PRODUCT, other, "WARPGROUP.DEPBAR.LE gsb0, 0x1", "FADD R3, R24, R25", "MOV R8, R9"
    assert of(*lines) == [(4, 8, "writes an operand")]


def test_products_of_one_accumulator_may_follow_each_other() -> None:
    assert of(PRODUCT, PRODUCT.replace("R4,", "R8,"), "WARPGROUP.DEPBAR.LE gsb0, 0x0") == []


def test_paths_of_a_loop_are_followed() -> None:
    """What is issued at the end of a loop is in flight at its beginning."""
    lines = ["MOV R0, R1", "FADD R3, R24, R9", PRODUCT, "@P0 BRA `(.L_x_0)", "EXIT"]
    text = HEAD + "".join(
        (".L_x_0:\n" if i == 1 else "") + f"        /*{16 * i:04x}*/ {one} ;\n"
        for i, one in enumerate(lines)
    )
    actual = hazards(read_sass(text)["kernel"])
    assert [(one.at, one.register, one.what) for one in actual] == [(1, 24, "reads a result")]
