"""Machine code of kernels written by hand, whose counts are known: sm_90, sm_100, sm_80 and AMD."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tilegen.compiling.machine_code.instructions import read_gcn, read_sass, unit_of
from tilegen.compiling.machine_code.loops import loops_of
from tilegen.compiling.machine_code.reading import MachineCode, read
from tilegen.gpus.spec import gpu
from tilegen.model.as_compiled import clocks_as_compiled, issue_clocks
from tilegen.model.rates import rates_of
from tilegen.model.resources import StepCode

H200 = gpu("h200")
QK = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8].tnspB, RZ, !UPT ;"
PV = "HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR4].tnspB, R88, gsb0 ;"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"


def sass(*lines: str) -> str:
    """Return a kernel's disassembly; a line that ends with a colon is a label."""
    text = ['\t.headerflags\t@"EF_CUDA_SM90"', "", '\t.section\t.text.kernel,"ax",@progbits']
    text += ["kernel:", ".text.kernel:"]
    at = 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            guard, _, rest = line.rpartition("| ")
            text.append(f"        /*{at:04x}*/ {guard:>18} {rest} ")
            at += 16
    return "\n".join(text)


FORWARD = sass(
    "MOV R1, c[0x0][0x28] ;",
    ".L_x_1:",
    "BAR.SYNC.DEFER_BLOCKING 0x0 ;",
    "WARPGROUP.ARRIVE ;",
    *[QK] * 7,
    QK.replace("!UPT", "!UPT, gsb0"),
    WAIT,
    *["FFMA.FTZ R24, R24, R3, -R4 ;"] * 3,
    *["MUFU.EX2 R24, R24 ;"] * 4,
    "@P1| SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR19], R4 ;",
    "@!P1| BRA `(.L_x_3) ;",
    ".L_x_2:",
    "F2FP.BF16.F32.PACK_AB R152, R25, R24 ;",
    *[PV.replace(", gsb0", "")] * 7,
    PV,
    "STL [R1+0x4], R5 ;",
    "LDS.128 R8, [R9] ;",
    "@P0| BRA `(.L_x_1) ;",
    WAIT,
    "EXIT ;",
    ".L_x_3:",  # a wait that is tried again, out of line
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR19], R4 ;",
    "@!P1| BRA `(.L_x_3) ;",
    "BRA `(.L_x_2) ;",
    ".L_x_4:",
    "BRA `(.L_x_4) ;",
)


def test_a_loop_follows_from_its_jumps() -> None:
    code = read(FORWARD, warps=8)
    inner, spin = [one for one in code.loops if one.products], code.loops[-1]
    assert len(inner) == 1
    assert len(code.loops) == 2, "what follows the end is no loop of the kernel"
    (loop,) = inner
    # The branch back out of line is the loop's; the wait that is tried again is a loop in it.
    assert (loop.first, loop.depth, loop.instructions) == (1, 0, 33)
    assert (spin.depth, spin.instructions) == (1, 2)


def test_instructions_bytes_and_products_are_counted() -> None:
    (loop,) = [one for one in read(FORWARD, warps=8).loops if one.products]
    assert {str(one): number for one, number in loop.products.items()} == {
        "64x128x16.SS": 8,
        "64x128x16.RS": 8,
    }
    assert loop.multiply_adds(8) == 2 * 2 * 128 * 64 * 128, "two products of two warpgroups"
    assert (loop.units["tensor"], loop.units["exp"], loop.units["fp32"]) == (16, 4, 3)
    assert (loop.units["alu"], loop.units["local"]) == (1, 1)
    assert loop.shared_bytes == 32 * 16
    assert loop.local_share == pytest.approx(1 / 33)


def test_instructions_between_a_wait_and_the_next_product_are_exposed() -> None:
    (loop,) = [one for one in read(FORWARD, warps=8).loops if one.products]
    assert loop.waits == (0,)
    assert not loop.serialized
    # Groups of PV are still in flight at the beginning of the next pass, until the wait.
    assert (loop.exposed["exp"], loop.exposed["fp32"], loop.exposed["shared"]) == (4, 3, 0)
    assert loop.timeline.startswith("B M*8 w0 X*4 S M*8")
    deeper = FORWARD.replace(WAIT, WAIT.replace("0x0", "0x1"), 1)
    (loop,) = [one for one in read(deeper, warps=8).loops if one.products]
    assert (loop.waits, loop.exposed["exp"]) == ((1,), 0)


def test_products_that_are_each_waited_for() -> None:
    text = sass(".L_x_0:", *[PV, WAIT] * 3, "@P0| BRA `(.L_x_0) ;", "EXIT ;")
    assert read(text, warps=4).loops[0].serialized
    text = sass(".L_x_0:", *[PV, WAIT] * 2, PV, "@P0| BRA `(.L_x_0) ;", "EXIT ;")
    assert not read(text, warps=4).loops[0].serialized


def step_of(code: MachineCode, multiply_adds: int) -> StepCode:
    step = code.step(multiply_adds)
    assert step is not None
    return step


def test_a_step_is_found_by_its_multiply_adds() -> None:
    code = read(FORWARD, warps=8)
    whole = 4 * 128 * 64 * 128
    step = step_of(code, whole)
    assert (step.instructions, step.multiply_adds, step.partial_instructions) == (264, whole, 264)
    # A: 64 x 16 and B: 16 x 128 of a product with both in shared memory, B alone of the others.
    assert step.shared_bytes == 8 * 512 + 2 * 2 * (8 * (64 + 128) + 8 * 128) * 16
    unrolled = step_of(code, whole // 2)
    assert (unrolled.instructions, unrolled.exponentials) == (132, 16)
    assert code.step(whole - 1) is None, "another kernel's step"
    assert code.step(2 * whole) is None


def test_spills_outside_loops_belong_to_the_program() -> None:
    spilled = ["STL.64 [R1+0x8], R4 ;", "STL [R1+0x4], R5 ;", *["LDL.LU.128 R4, [R1] ;"] * 2]
    loop = [".L_x_0:", "LDL.64 R4, [R1] ;", PV, "@P0| BRA `(.L_x_0) ;"]
    step = step_of(read(sass(*spilled, *loop, "EXIT ;"), warps=4), 64 * 128 * 16)
    assert (step.local, step.local_once) == (4 * 2, 4 * (2 + 1 + 2 * 4))
    unrolled = step_of(read(sass(*spilled, *[PV] * 8, "EXIT ;"), warps=4), 8 * 64 * 128 * 16)
    assert (unrolled.local, unrolled.local_once) == (4 * 11, 0)
    clocks = clocks_as_compiled(step, H200)
    assert (clocks.local, clocks.local_once) == (step.local, step.local_once)


def test_a_loop_over_slices_belongs_to_its_step() -> None:
    text = sass(
        ".L_x_0:",
        "MUFU.EX2 R24, R24 ;",
        ".L_x_1:",
        *[QK] * 3,
        QK.replace("!UPT", "!UPT, gsb0"),
        "@P1| BRA `(.L_x_1) ;",
        WAIT,
        PV,
        "@P0| BRA `(.L_x_0) ;",
        "EXIT ;",
    )
    code = read(text, warps=4)
    product = 64 * 128 * 16
    step = step_of(code, (3 * 4 + 1) * product)
    assert step.instructions == 4 * (3 * 5 + 4)
    assert code.step((3 * 4 + 2) * product) is None


def test_a_kernel_without_a_loop_is_its_steps() -> None:
    code = read(sass(*[PV] * 8, "EXIT ;"), warps=4)
    assert step_of(code, 4 * 64 * 128 * 16).instructions == round(4 * 9 / 2)


def test_matrix_instructions_of_a_warp() -> None:
    product = "HMMA.16816.F32.BF16 R4, R8, R12, R4 ;"
    code = read(sass(".L_x_0:", *[product] * 6, "@P0| BRA `(.L_x_0) ;", "EXIT ;"), warps=4)
    (loop,) = code.loops
    assert loop.multiply_adds(4) == 4 * 6 * 16 * 8 * 16
    assert not loop.asynchronous


def test_products_of_blackwell_are_described_by_a_constant() -> None:
    text = sass(
        ".L_x_0:",
        "UMOV UR27, 0x8200490 ;",
        *["UTCHMMA gdesc[UR12], gdesc[UR6], tmem[UR16], tmem[UR26], idesc[UR27], !UPT ;"] * 2,
        "UMOV UR25, 0x4100490 ;",
        "UTCHMMA tmem[UR14], gdesc[UR4], tmem[UR18], tmem[UR24], idesc[UR25], UPT ;",
        "UTCBAR [UR8], URZ ;",
        "BRA.U UP0, `(.L_x_0) ;",
        "EXIT ;",
    )
    (loop,) = read(text, warps=8).loops
    assert {str(one): number for one, number in loop.products.items()} == {
        "128x128x16.SS": 2,
        "64x64x16.TS": 1,
    }
    assert loop.multiply_adds(8) == (2 * 128 * 128 + 64 * 64) * 16, "one thread issues for all"


GCN = """
\t.text
attention:
; %bb.0:
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\ts_waitcnt lgkmcnt(0)
\tds_read_b128 v[0:3], v9 offset:16
\tds_write_b64 v9, v[4:5]
\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
\tv_mfma_f32_32x32x8_bf16_1k v[0:15], v[16:17], v[18:19], v[0:15]
\tv_exp_f32_e32 v20, v20
\tscratch_store_dword off, v1, s32
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel attention
"""


def test_amd_assembly_is_read_too() -> None:
    (loop,) = read(GCN, warps=4, gcn=True).loops
    assert loop.instructions == 8
    assert {str(one): number for one, number in loop.products.items()} == {"32x32x8.RR": 2}
    assert loop.multiply_adds(4) == 4 * 2 * 32 * 32 * 8
    assert (loop.units["shared"], loop.units["local"], loop.units["exp"]) == (2, 1, 1)
    assert list(read_gcn(GCN)) == ["attention"]


@pytest.mark.parametrize(
    "opcode, unit",
    [
        ("LDGSTS.E.BYPASS.128", "shared"),
        ("LDGDEPBAR", "barrier"),
        ("LDG.E.128", "global"),
        ("LDL.64", "local"),
        ("IMAD.MOV.U32", "half"),
        ("UIADD3", "uniform"),
        ("FMNMX", "alu"),
        ("UTCBAR", "barrier"),
        ("ds_bpermute_b32", "shuffle"),
        ("v_pk_mul_f32", "fp32"),
    ],
)
def test_instructions_have_units(opcode: str, unit: str) -> None:
    assert unit_of(opcode) == unit


def test_a_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a disassembled kernel"):
        read("nvdisasm fatal", warps=4)
    assert loops_of(read_sass(sass("EXIT ;"))["kernel"]) == []


def test_clocks_follow_from_counts() -> None:
    code = step_of(read(FORWARD, warps=8), 4 * 128 * 64 * 128)
    clocks = clocks_as_compiled(code, H200)
    assert clocks.exp == code.exponentials * 32 / 16
    assert clocks.issue == issue_clocks(code, H200) == code.instructions / 4
    assert clocks.smem == code.shared_bytes / 128
    assert clocks.local == 8, "a store of 4 bytes for each of 256 threads, 128 bytes a clock"
    assert 0 < clocks.exposed < 1
    assert clocks.bound >= clocks.tensor + clocks.exposed * max(clocks.issue, clocks.exp)
    # Integers run on half of the lanes that issue could fill.
    assert issue_clocks(replace(code, integer=code.instructions), H200) == code.instructions / 2
    narrow = clocks_as_compiled(replace(code, rows=16), H200)
    assert narrow.tensor == pytest.approx(clocks.tensor / rates_of("sm_90").narrow_rate)
    waiting = clocks_as_compiled(replace(code, exposed=code.instructions), H200)
    assert waiting.exposed == 1
    assert clocks_as_compiled(replace(code, partial_instructions=664), H200).masking == 100


def test_code_that_waits_for_its_products_takes_the_part_counted_for_its_kernel() -> None:
    """Only code whose products are asynchronous shows what they hide."""
    code = replace(step_of(read(FORWARD, warps=8), 4 * 128 * 64 * 128), asynchronous=False)
    parts = rates_of("sm_90").exposed
    assert isinstance(parts, dict)
    for kernel, counted in (("", "fwd"), ("fwd", "fwd"), ("bwd_dq", "bwd_dq"), ("other", "fwd")):
        clocks = clocks_as_compiled(replace(code, kernel=kernel), H200)
        assert clocks.exposed == parts[counted]
    assert len(set(parts.values())) == len(parts)
