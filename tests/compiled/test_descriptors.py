"""Kernels that load streamed tiles through tensor descriptors, compiled for the CPU."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch

import tilegen
from tests.compiled.mutations import Mutation, noticed
from tests.compiled.test_counts import counted
from tests.support.calls import gpu_road
from tests.support.problems import DESCRIBED, configs, tiled
from tilegen import cpu
from tilegen.check.reference import Inputs, make_inputs
from tilegen.check.verification import check, require, run, verify
from tilegen.choose import records
from tilegen.cpu import executable
from tilegen.emit.identity import RenderedKernel
from tilegen.emit.render import render
from tilegen.gpus.spec import ASSUMED, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.masks import Mask, causal, documents, kv_lengths
from tilegen.masks.dropout import Dropout
from tilegen.masks.score import alibi, softcap
from tilegen.model.traffic import traffic_of
from tilegen.problem import AttentionProblem

SQUARE = configs(TileConfig(block_m=32, block_n=32))
WIDE = configs(TileConfig(block_m=16, block_n=64))


def kernels(problem: AttentionProblem) -> dict[Kernel, RenderedKernel]:
    return {kernel: render(problem, config, kernel) for kernel, config in SQUARE.items()}


@pytest.mark.slow
@pytest.mark.any_triton
@pytest.mark.parametrize(
    "text",
    [
        "b2 hq4 hkv2 q63 kv63 d64 fp16 causal",
        "b1 hq4 hkv1 q40 kv77 d80 bf16 causal(bottom_right)",  # 64 and 16 columns
        "b1 hq2 hkv2 q50 kv70 d72/40 fp16 window(20,3)",  # 16 columns, 8 of which exist
        "b1 hq2 hkv1 q45 kv100 d128 bf16 full",
        "b1 hq2 hkv2 q60 kv20 d96 fp16 window(20,3)",  # rows that keep nothing
        "b1 hq1 hkv1 q1 kv33 d16 bf16 full",
    ],
)
def test_agrees_with_the_reference(text: str) -> None:
    problem = AttentionProblem.parse(text)
    require(verify(problem, SQUARE if problem.seqlen_q % 2 else WIDE))


@pytest.mark.slow
def test_heads_inside_rows() -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q50 kv70 d64 bf16 causal")
    inputs = make_inputs(problem, heads_inside=True)
    assert not inputs.k.is_contiguous()
    require(check(kernels(problem), inputs, mask=problem.mask))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mask",
    [
        causal() & documents([i // 30 for i in range(75)]),
        kv_lengths(torch.tensor([20, 75])),
        causal() & kv_lengths(torch.tensor([64, 1])),
    ],
    ids=str,
)
def test_masks_that_read_tensors(mask: Mask) -> None:
    plain = AttentionProblem.parse("b2 hq4 hkv2 q75 kv75 d64 fp16 full")
    problem = replace(plain, mask=mask.stand_in)
    require(check(kernels(problem), make_inputs(problem), mask=mask))


@pytest.mark.slow
def test_scores_and_dropout() -> None:
    plain = AttentionProblem.parse("b1 hq2 hkv1 q75 kv75 d32 fp16 causal")
    score = alibi(torch.tensor([0.5, 0.25])).then(softcap(5.0))
    dropout = Dropout(0.3, torch.tensor([1 << 40, 3]))
    problem = replace(plain, score=score.form, dropout=True)
    actual = check(
        kernels(problem), make_inputs(problem), mask=problem.mask, score=score, dropout=dropout
    )
    require(actual)


@pytest.mark.parametrize("kernel", DESCRIBED)
@pytest.mark.parametrize(
    "text",
    [
        "b2 hq4 hkv2 q100 kv77 d72/16 fp16 causal&window(33,3)",
        "b1 hq2 hkv1 q64 kv192 d64 fp16 full",
    ],
)
def test_bytes_equal_those_of_the_model(text: str, kernel: Kernel) -> None:
    """Elements outside of a tensor are not moved."""
    problem, config = AttentionProblem.parse(text), WIDE[kernel]
    expected = traffic_of(tiled(kernel, problem, config))
    assert (expected.read_bytes, expected.write_bytes) == counted(problem, config, kernel)


def _with_bad_second_head(problem: AttentionProblem) -> tuple[Inputs, Inputs]:
    clean, bad = make_inputs(problem), make_inputs(problem)
    for tensor in (bad.q, bad.k, bad.v, bad.dout):
        tensor[:, 1:] = float("nan")
    return clean, bad


@pytest.mark.slow
def test_a_tile_at_the_end_of_a_head_holds_nothing_of_the_next() -> None:
    """Not even where it is masked: 0 times NaN would be seen."""
    problem = AttentionProblem.parse("b1 hq2 hkv2 q45 kv45 d64 fp16 causal")
    results = [run(kernels(problem), inputs, 0.2) for inputs in _with_bad_second_head(problem)]
    for name, tensor in results[0].items():
        assert torch.equal(tensor[:, 0], results[1][name][:, 0]), name


BROKEN = [
    *(Mutation(f"a-query-head-{one}", one, "head_kv.to(", "head.to(") for one in ("fwd", "bwd_dq")),
    Mutation("key-head-dkdv", "bwd_dkdv", "head_at = head.to", "head_at = (head // GROUP_SIZE).to"),
    Mutation("first-batch", "fwd", "batch_at, head_at = batch", "batch_at, head_at = (0 * batch)"),
    Mutation("first-batch-dkdv", "bwd_dkdv", "batch_at = batch.to", "batch_at = (0 * batch).to"),
    Mutation(
        "first-values",
        "fwd",
        "v = v_desc.load([batch_at, head_at, tile_n * BLOCK_N, 0])",
        "v = v_desc.load([batch_at, head_at, 0, 0])",
    ),
    *(
        Mutation(f"first-columns-{one}", one, "BLOCK_N, 64]", "BLOCK_N, 0]")
        for one in ("fwd", "bwd_dq")
    ),
    Mutation("first-columns-dkdv", "bwd_dkdv", "BLOCK_M, 64]", "BLOCK_M, 0]"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mutation", BROKEN, ids=lambda one: one.name)
def test_broken_kernels_are_noticed(mutation: Mutation) -> None:
    problem = AttentionProblem.parse("b2 hq4 hkv2 q52 kv52 d80/64 fp16 causal&window(20,5)")
    every = kernels(problem)
    whole = every[mutation.kernel]
    assert mutation.old in whole.source
    source = whole.source.replace(mutation.old, mutation.new)
    every[mutation.kernel] = replace(whole, source=source, digest=f"{whole.digest}-{mutation.name}")
    if mutation.kernel == "fwd":
        every = {"fwd": every["fwd"]}
    assert noticed(every, make_inputs(problem), mutation.kernel, mask=problem.mask)


def test_a_launch_refuses_strides_of_zero_for_descriptors() -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q40 kv40 d64 fp16 full")
    x = make_inputs(problem)
    launch = cpu.load(kernels(problem)["fwd"]).launch
    with pytest.raises(ValueError, match=r"expected no expanded dimension, .* got strides"):
        launch(x.q, x.k[:, :1].expand_as(x.k), x.v, 0.1)
    single_head = x.k[:1].as_strided(x.k.shape, (1, *x.k.stride()[1:]))  # of size 1: any stride
    out, _ = launch(x.q, single_head, x.v, 0.1)
    assert torch.equal(out, launch(x.q, x.k, x.v, 0.1)[0])


@pytest.mark.slow
@pytest.mark.any_triton
def test_calls_of_all_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Configs with descriptors, agreed on: expanded and odd tensors are loaded by addresses, and an
    expanded gradient is copied."""
    problem = AttentionProblem.parse("b2 hq4 hkv2 q40 kv40 d64 fp16 causal")
    monkeypatch.setattr(records, "_agreed", {})
    for kernel, config in SQUARE.items():
        records.remember(gpu(ASSUMED), kernel, problem.bucket.key, config)
    loaded: list[bool] = []

    def noted(rendered: RenderedKernel, device: torch.device) -> ModuleType:
        loaded.append(rendered.config.descriptors)
        return executable(rendered, device)

    with gpu_road(noted):
        _call_with_strides()
    assert loaded == [True, False, True, True] + 2 * [False] * 4


def _call_with_strides() -> None:
    q = torch.randn(2, 4, 40, 64, dtype=torch.float16)
    dense = torch.randn(2, 2, 40, 64, dtype=torch.float16)
    odd = torch.randn(2 * 2 * 40 * 64 + 1).half()[1:].view(2, 2, 40, 64)
    for k in (dense, dense[:, :1].expand_as(dense), odd):
        inputs = [x.detach().requires_grad_() for x in (q, k, dense)]
        out = tilegen.attention(*inputs, mask=tilegen.causal())
        grad = torch.randn(2, 4, 1, 64, dtype=torch.float16).expand_as(out)
        out.backward(grad)
        exact = [x.detach().double().requires_grad_() for x in (q, k, dense)]
        repeated = [x.repeat_interleave(2, 1) for x in exact[1:]]
        whole = torch.nn.functional.scaled_dot_product_attention(
            exact[0], repeated[0], repeated[1], is_causal=True
        )
        whole.backward(grad.double())
        torch.testing.assert_close(out.double(), whole, atol=1e-2, rtol=1e-2)
        for left, other in zip(inputs, exact, strict=True):
            assert left.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(left.grad.double(), other.grad, atol=3e-2, rtol=3e-2)
