"""Add a family of kernels: part of a template, a kernel's record, and a family's record."""

import dataclasses
import tempfile
from pathlib import Path

import tilegen
from tilegen.check.verification import verify
from tilegen.choose.families import ranked_families
from tilegen.kernels.q_stationary import FWD, one_launch
from tilegen.kernels.registry import register
from tilegen.kernels.spec import FamilySpec

# A template is looked for in the kernel's folder, then among tilegen's: here a forward with another
# step. It rescales the output only where a row's maximum has grown by 1, so weights reach 2.
STEP = """\
{% import "_partials.jinja" as part with context %}
{% import "_mask.jinja" as mask with context %}
{% set doc = "Add a tile of keys and values; rescale rows whose maximum grew by more than 1." %}
{% macro step(q_idx) %}
k_tile = k_base + tile_n * BLOCK_N * k_row
v_tile = v_base + tile_n * BLOCK_N * v_row
{{ mask.k_exists }}
{{ part.load_tile("k", "k_tile", "k_offs", qk_chunks, "k_exists") }}
{{ part.load_tile("v", "v_tile", "v_offs", v_chunks, "k_exists") }}
{{ part.dot_rows("s", "q", "k", qk_chunks) }}
s *= softmax_scale_log2
if MASKED:
    {{ mask.keep_pairs("", q_idx, "tile_n * BLOCK_N + offs_n[None, :]") }}
    s = tl.where(keep, s, float("-inf"))
largest = tl.max(s, 1)
m_new = tl.where(largest > m_i + 1.0, largest, m_i)
m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
p = tl.exp2(s - m_safe[:, None])
alpha = tl.exp2(m_i - m_safe)
m_i = m_new
l_i = l_i * alpha + tl.sum(p, 1)
{% for c in v_chunks %}
acc{{ c.suffix }} *= alpha[:, None]
{% endfor %}
{{ part.accumulate_kept("acc", "p", "v", v_chunks, taints=true) }}
{% endmacro %}
"""
problem = tilegen.AttentionProblem.parse("hq4 hkv2 q500 d64 bf16 causal&window(200,0)")
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "_online_softmax.jinja").write_text(STEP)
    kernel = dataclasses.replace(
        FWD, name="fwd_lazy", folder=Path(folder), like="fwd", supports=frozenset(), described=()
    )
    run = one_launch(kernel)
    register(FamilySpec(name="lazy", direction="forward", kernels=(kernel,), run=run))

    # On a GPU a call takes the family that is timed, or else predicted, to be the fastest.
    for name, seconds in ranked_families(problem, tilegen.gpu("h200"), "forward"):
        print(f"{name:14}{1e6 * seconds:6.1f} us predicted on an H200")
    (record,) = tilegen.tune(problem, kernel="fwd_lazy", trials=2)
    print(f"{record.config.key} is the fastest of {record.trials} tiles tried here")
    for check in verify(problem, {"fwd_lazy": record.config}):
        print(check)
