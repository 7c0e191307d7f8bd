"""Kernels of all forms of masks, and of scores, compile for every architecture within its shared
memory; other lengths or table elements do not compile again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import sliced
from tilegen.compiling.compiler import CompiledKernel, compile_for
from tilegen.compiling.workers import compile_many
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.kernel_files import load
from tilegen.emit.render import render
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.passes import forward, gradients
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.launch.binding import BoundKernel
from tilegen.masks import (
    Mask,
    block_sparse,
    causal,
    documents,
    global_tokens,
    predicate,
    prefix_lm,
    sliding_window,
    tree,
    values,
)
from tilegen.masks.form import Shape
from tilegen.masks.score import Score, alibi, relative_bias, sinks, softcap
from tilegen.masks.tensors import score_tensors
from tilegen.problem import AttentionProblem

GPUS = {"sm_80": "a100", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
CONFIG = TileConfig(block_m=64, block_n=16, num_warps=4, num_stages=2)
PROBLEM = AttentionProblem.parse("hq4 hkv2 q1024 d64 bf16 causal")
WHOLE: tuple[Kernel, ...] = ("fwd", "bwd_dkdv", "bwd_dq")
FORWARD, BACKWARD = ("fwd", *sliced.FORWARD), ("bwd_dkdv", *sliced.BACKWARD)
SLICES: tuple[Kernel, ...] = tuple(kernel for kernel, c in sliced.ALL.items() if c.block_d)

MASKS: dict[str, Mask] = {
    "several_ranges": causal() & (global_tokens(64) | sliding_window(255)),
    "values_by_batch": prefix_lm(values([64, 100], "b")),
    "values_by_head": sliding_window(values([64, 100, 3, 1000], "h")),
    "documents": causal() & documents(cu_seqlens=[0, 1000, 1024]),
    "tree_by_batch": tree(torch.eye(64).bool().expand(2, 64, 64)),
    "lists": block_sparse(torch.eye(8).bool(), 128),
    "lists_by_head": block_sparse(torch.eye(8).bool().expand(4, 8, 8), 128),
}
TABLE = torch.zeros(4, 65, requires_grad=True)
SCORES: dict[str, Score] = {
    "softcap": softcap(20.0),
    "relative_bias": relative_bias(TABLE),
    "sinks": sinks(torch.zeros(4)),
    "all": alibi(torch.zeros(4)).then(relative_bias(TABLE)).then(sinks(torch.zeros(4))),
}


def rendered(
    kernel: Kernel, mask: Mask, score: Score | None = None, *, dtype: str = "bf16"
) -> RenderedKernel:
    problem = AttentionProblem.parse(f"hq4 hkv2 q1024 d64 {dtype} full")
    problem = replace(problem, mask=mask.stand_in, score=score and score.form)
    return render(problem, CONFIG if kernel in LARGE_CACHE else sliced.ALL[kernel], kernel)


def share(arch: str) -> list[RenderedKernel]:
    """Return an architecture's part of all kernels: forms of masks and scores are in kernels of
    slices and of whole head dims in turn, and each architecture has some of both."""
    forms: list[tuple[Mask, Score | None]] = [
        *((mask, None) for mask in MASKS.values()),
        *((causal(), score) for score in SCORES.values()),
    ]
    dtypes, architectures = ("bf16", "fp16", "fp32"), list(GPUS)
    asked: list[RenderedKernel] = []
    for i, (mask, score) in enumerate(forms):
        turn, kernels = i // 2, WHOLE if i % 2 else SLICES
        if architectures[(i + turn) % 4] == arch:
            kernel = kernels[turn % len(kernels)]
            asked.append(rendered(kernel, mask, score, dtype=dtypes[turn % 3]))
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_kernels_compile_within_shared_memory(arch: str) -> None:
    limit = gpu(GPUS[arch]).smem_per_block
    for kernel, compiled in compile_many(share(arch), arch, workers=1):
        assert isinstance(compiled, CompiledKernel), (kernel.function, compiled)
        assert compiled.binary[:4] == b"\x7fELF"
        assert compiled.reported.shared_bytes <= limit, kernel.function


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, text, config",
    [
        ("bwd_dkdv", "d64", "m64n64w4s4"),
        ("bwd_columns", "d256", "m64n128d128w8s4"),
    ],
)
def test_lists_leave_tiles_as_far_ahead(kernel: Kernel, text: str, config: str) -> None:
    """As many stages hold tiles as where no list says which come."""
    shared = [
        compile_for(
            render(
                AttentionProblem.parse(f"hq4 hkv1 q1024 {text} bf16 {mask}"),
                TileConfig.parse(config),
                kernel,
            ),
            "sm_90",
        ).reported.shared_bytes
        for mask in ("causal", "block_sparse(@:25,64)")
    ]
    assert shared[0] <= shared[1] <= shared[0] + 64 * 64


@pytest.mark.slow
def test_kernels_of_a_mask_that_keeps_nothing_compile() -> None:
    nothing = causal() & predicate(lambda b, h, q, k: False)
    kernels = [rendered(kernel, nothing) for kernel in (*WHOLE, *SLICES)]
    for item, compiled in compile_many(kernels, "sm_90", workers=1):
        assert isinstance(compiled, CompiledKernel), (item.function, compiled)


def launched(
    kernels: dict[Kernel, RenderedKernel], mask: Mask, score: Score | None, seqlen: int, batch: int
) -> None:
    """Call kernels of whole passes with a mask and a score of this length."""
    q = torch.empty(batch, 4, seqlen, 64, dtype=torch.bfloat16)
    k = torch.empty(batch, 2, seqlen, 64, dtype=torch.bfloat16)
    rows = torch.empty(batch, 4, seqlen)
    reads: dict[str, Any] = {}
    if score is not None:
        trained = {slot: torch.empty(one.shape) for slot, one in enumerate(score.captured)}
        reads = score_tensors(score.captured, score.sink_logits, trained)
    launches = {
        kernel: BoundKernel(load(one).launch, mask, kernel, one.config).given(
            mask, Shape.of(q, k), q.device, reads
        )
        for kernel, one in kernels.items()
    }
    if not set(FORWARD).isdisjoint(launches):
        forward(launches, q, k, k, 0.1, panel_rows=512)
    if not set(BACKWARD).isdisjoint(launches):
        gradients(launches, q, k, k, q, rows, rows, 0.1, panel_rows=512)


def compiled_once(kernels: dict[Kernel, RenderedKernel]) -> None:
    for kernel, rendered in kernels.items():
        actual = getattr(load(rendered), rendered.function).device_caches[0][0]
        assert len(actual) == 1, (kernel, list(actual))


def layout(number: int) -> list[int]:
    """Return cu_seqlens of some documents, of another length in all for every number."""
    lengths = [1 + (number * 37 + i * i * 13) % 90 for i in range(2 + number % 7)]
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.slow
@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize("names", [WHOLE, tuple(sliced.SMALL_CACHE)], ids=["whole", "slices"])
def test_no_document_layout_recompiles(names: tuple[Kernel, ...]) -> None:
    score = alibi(torch.zeros(4)).then(relative_bias(TABLE))
    mask = causal() & documents(cu_seqlens=layout(0))
    kernels = {
        kernel: rendered(kernel, mask, score) for kernel in names if kernel != "bwd_preprocess"
    }
    for number in range(8):
        cu = layout(number)
        launched(kernels, causal() & documents(cu_seqlens=cu), score, cu[-1], 1)
    compiled_once(kernels)


@pytest.mark.slow
@pytest.mark.usefixtures("compile_instead_of_launching")
@pytest.mark.parametrize(
    "name, names",
    [
        ("several_ranges", WHOLE[:1]),
        ("values_by_batch", WHOLE[1:]),
        ("lists", WHOLE),
        ("sinks", WHOLE[:1]),
    ],
    ids=["several_ranges", "values_by_batch", "lists", "sinks"],
)
def test_no_length_recompiles(name: str, names: tuple[Kernel, ...]) -> None:
    """15 lengths, each with new tensors of mask and score."""

    def made(i: int, length: int, batch: int) -> tuple[Mask, Score | None]:
        if name == "values_by_batch":
            return prefix_lm(values([i + b for b in range(batch)], "b")), None
        if name == "lists":
            side = -(-length // 32)
            return block_sparse(torch.eye(side).bool().roll(i % side, 0), 32), None
        if name == "sinks":
            return causal(), relative_bias(TABLE).then(sinks(torch.full((4,), float(i))))
        return MASKS[name], None

    first, score = made(0, 1, 1)
    kernels = {kernel: rendered(kernel, first, score) for kernel in names}
    for i in range(15):
        length, batch = 1 + (i * i * 7) % 600, 1 + i % 3
        mask, score = made(i, length, batch)
        launched(kernels, mask, score, length, batch)
    compiled_once(kernels)
