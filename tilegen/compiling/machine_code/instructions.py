"""Instructions of a disassembled kernel, and the unit of an SM that executes each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

Unit = Literal[
    "tensor",
    "wait",
    "exp",
    "fp32",
    "alu",
    "half",
    "shared",
    "local",
    "global",
    "shuffle",
    "barrier",
    "uniform",
    "branch",
    "other",
]
"""`exp` are all special functions, `half` what runs on half of the fp32 lanes (IMAD)."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of one warp."""

    opcode: str
    """Name with its modifiers: `HGMMA.64x128x16.F32.BF16`."""
    operands: str
    target: int | None = None
    """The instruction that may come next by a jump, counted from 0."""
    falls_through: bool = True
    """False: the next instruction never follows it."""
    scatters: bool = False
    """True if the instruction jumps through a register."""


# First match wins. SASS: CUDA Binary Utilities, instruction set reference.
_SASS: tuple[tuple[Unit, str], ...] = (
    ("tensor", r"[HQI]GMMA|UTC[HQI]MMA|[HQI]MMA\.|DMMA"),
    ("wait", r"WARPGROUP\.DEPBAR|SYNCS\.PHASECHK"),
    ("exp", r"MUFU"),
    ("local", r"LDL|STL"),
    ("shared", r"LDSM|STSM|LDS\b|LDS\.|STS\b|STS\.|LDGSTS"),
    ("global", r"LDG(?!DEPBAR)|STG|UTMA|UBLKCP|RED|ATOM|LD\b|LD\.|ST\b|ST\.|LDTM|STTM"),
    ("shuffle", r"SHFL|REDUX"),
    (
        "barrier",
        r"BAR\b|BAR\.|B2R|MEMBAR|FENCE|CCTL|ERRBAR|LDGDEPBAR|DEPBAR|SYNCS|WARPGROUP|WARPSYNC|UTC",
    ),
    ("branch", r"BRA|BRX|EXIT|CALL|RET|BSSY|BSYNC|JMP|NANOSLEEP|YIELD|ELECT|VOTE|NOP|BREAK|BMOV"),
    ("fp32", r"FFMA|FADD|FMUL|HFMA2|HADD2|HMUL2"),
    ("half", r"IMAD|IDP"),
    ("other", r"R2UR|S2UR|S2R|CS2R|MOV|LDC|LEPC"),
    ("uniform", r"U[A-Z0-9]+|R2UR|VOTEU"),
    (
        "alu",
        r"FMNMX|FSEL|FSETP|FSET|FCHK|F2|I2|PRMT|SEL|V?IADD|LEA|SHF|LOP|IABS|V?IMNMX|VIADD|ISETP"
        r"|PLOP|ISET|BMSK|SGXT|POPC|FLO|P2R|R2P|HSET|HMNMX|VHMNMX",
    ),
)
# AMD: CDNA3 instruction set architecture, sections 6 to 11.
_GCN: tuple[tuple[Unit, str], ...] = (
    ("tensor", r"v_s?mfma|v_wmma"),
    ("exp", r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)"),
    ("local", r"scratch_"),
    ("shared", r"ds_(?!bpermute|permute|swizzle)"),
    ("shuffle", r"ds_|v_\w*_dpp|v_permlane"),
    ("global", r"buffer_|global_|flat_"),
    ("wait", r"s_waitcnt"),
    ("barrier", r"s_barrier"),
    ("branch", r"s_c?branch|s_endpgm|s_setpc|s_swappc|s_nop|s_sleep|s_setprio"),
    ("uniform", r"s_"),
    ("fp32", r"v_(?:pk_)?(?:fma|fmac|add|sub|subrev|mul|mad)_f"),
    ("alu", r"v_"),
)


@cache
def unit_of(opcode: str) -> Unit:
    """Return the unit that executes an instruction."""
    table = _GCN if opcode[:1].islower() else _SASS
    for unit, pattern in table:
        if re.match(pattern, opcode):
            return unit
    return "other"


_SASS_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;")
_GCN_LINE = re.compile(r"\s+()([a-z]\w+)(?:\s+([^;]*))?")
_LABEL = re.compile(r"(\.L\w+):")
_ENDS = re.compile(r"(?:EXIT|RET|BRX|JMX|BRA|JMP)\b|s_branch|s_endpgm|s_setpc")


def read_sass(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each function of what `nvdisasm -c` prints."""
    parts = re.split(r"^\s*\.section\s+\.text\.([^,\s]+),.*$", text, flags=re.MULTILINE)[1:]
    return {
        name: _linked(body.splitlines(), _SASS_LINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read_gcn(text: str) -> dict[str, list[Instruction]]:
    """Return the instructions of each kernel of AMD assembly, as the compiler prints it."""
    functions: dict[str, list[Instruction]] = {}
    for name in re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, flags=re.MULTILINE):
        body = text.partition(f"\n{name}:")[2].partition("\n.Lfunc_end")[0]
        functions[name] = _linked(body.splitlines(), _GCN_LINE)
    return functions


def _linked(lines: Iterable[str], line: re.Pattern[str]) -> list[Instruction]:
    labels: dict[str, int] = {}
    rows: list[tuple[str, str, str]] = []
    for text in lines:
        if label := _LABEL.match(text):
            labels[label[1]] = len(rows)
        elif match := line.match(text):
            rows.append((match[1] or "", match[2], (match[3] or "").strip()))
    linked = []
    for guard, opcode, operands in rows:
        jumps = opcode.startswith(("BRA", "JMP", "s_branch", "s_cbranch"))
        to = re.search(r"(\.L\w+)\)?$", operands) if jumps else None
        # `BRA.U UP0, (.L_x_0)` tests a uniform register, `BRA.DIV` whether a warp diverges.
        conditional = guard or re.match(r"!?U?P\w+,", operands) or ".DIV" in opcode
        ends = bool(_ENDS.match(opcode)) and not conditional
        target = labels.get(to[1]) if to else None
        scatters = opcode.startswith(("BRX", "JMX"))
        linked.append(Instruction(opcode, operands, target, not ends, scatters))
    return linked
