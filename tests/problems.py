"""The one table of small problems that tests of every tier share; a test's id is the problem's key.

Small, and together awkward: lengths 1, 63, 200 and 1023; unequal
lengths; head dims that are no power of two; every kind of group; a window of one; rows that keep
nothing; every mask and dtype.
"""

from __future__ import annotations

from tilegen.problem import AttentionProblem

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
