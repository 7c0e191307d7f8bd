"""`tilegen.attention` without an interpreter or a GPU: bad input, the PyTorch fallback, records."""

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tilegen
from tilegen import cpu, disk, pipeline, store
from tilegen.check.reference import attention_reference, make_inputs
from tilegen.errors import InvalidProblem, TilegenError, Unsupported
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.runtime import plans
from tilegen.task import KernelTask
from tilegen.tuning.measure import Measurement

pytestmark = pytest.mark.oldest


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in shapes]


GOOD = (1, 4, 8, 16)
BAD = {
    "three dimensions": (
        [torch.zeros(4, 8, 16)] * 3,
        {},
        "q must be a tensor (batch, heads, seqlen",
    ),
    "head dims that differ": (tensors(GOOD, (1, 4, 8, 32), GOOD), {}, "head_dim"),
    "batches that differ": (tensors(GOOD, (2, 4, 8, 16), (2, 4, 8, 16)), {}, "batch"),
    "kv lengths that differ": (tensors(GOOD, GOOD, (1, 4, 9, 16)), {}, "v must have k's"),
    "heads no multiple": (tensors(GOOD, (1, 3, 8, 16), (1, 3, 8, 16)), {}, "multiple of"),
    "more kv heads": (tensors((1, 2, 8, 16), GOOD, GOOD), {}, "multiple of"),
    "no heads": (tensors(*[(1, 0, 8, 16)] * 3), {}, "must not be empty"),
    "no head dim": (tensors(*[(0, 4, 8, 0)] * 3), {}, "must not be empty"),
    "heads of nothing": (tensors((0, 3, 8, 16), *[(0, 2, 8, 16)] * 2), {}, "multiple of"),
    "wrong dtype": (tensors(GOOD, GOOD, GOOD, dtype=torch.float64), {}, "fp16, bf16 or fp32"),
    "integers": (tensors(GOOD, GOOD, GOOD, dtype=torch.int32), {}, "fp16, bf16 or fp32"),
    "mixed dtypes": ([*tensors(GOOD, GOOD), torch.zeros(GOOD).half()], {}, "one dtype"),
    "mixed devices": (
        [*tensors(GOOD, GOOD), torch.zeros(GOOD, device="meta")],
        {},
        "one dtype and",
    ),
    "other device": ([torch.zeros(GOOD, device="meta")] * 3, {}, "CUDA or CPU"),
    "fewer kv_lengths": (
        tensors(*[(2, 4, 8, 16)] * 3),
        {"kv_lengths": torch.tensor([3])},
        "size 2 along batch",
    ),
    "more kv_lengths": (
        tensors(GOOD, GOOD, GOOD),
        {"kv_lengths": torch.tensor([3, 4])},
        "size 1 along batch",
    ),
    "too few rows of blocks": (
        tensors(GOOD, GOOD, GOOD),
        {"mask": tilegen.block_sparse(torch.ones(1, 2) > 0, 4)},
        "with 2 x 2 blocks, got 1 x 2",
    ),
    "too few columns of blocks": (
        tensors(GOOD, GOOD, GOOD),
        {"mask": tilegen.block_sparse(torch.ones(2, 1) > 0, 4)},
        "with 2 x 2 blocks, got 2 x 1",
    ),
    "NaN scale": (tensors(GOOD, GOOD, GOOD), {"scale": float("nan")}, "finite number"),
    "infinite scale": (tensors(GOOD, GOOD, GOOD), {"scale": float("inf")}, "finite number"),
    "text scale": (tensors(GOOD, GOOD, GOOD), {"scale": "0.1"}, "finite number"),
    "mask tensor": (tensors(GOOD, GOOD, GOOD), {"mask": torch.ones(8, 8)}, "must be bool"),
    "mask text": (tensors(GOOD, GOOD, GOOD), {"mask": "casual"}, "did you mean causal"),
    "no tensors": ([1, 2, 3], {}, "torch tensors"),
    "sparse tensors": ([torch.zeros(GOOD).to_sparse()] * 3, {}, "dense torch tensors"),
    "head dim too wide": (tensors(*[(1, 1, 4, 2048)] * 3), {}, r"8..512 in fp32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_error(name: str) -> None:
    arguments, options, message = BAD[name]
    with pytest.raises(TilegenError) as caught:
        tilegen.attention(*arguments, **options)
    assert message in str(caught.value)
    assert "the call was q" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "q, k, v",
    [
        ((2, 4, 6, 16), (1, 2, 6, 16), (1, 2, 6, 16)),
        ((2, 4, 6, 16), (2, 2, 6, 16), (1, 2, 6, 16)),
        ((2, 4, 6, 16), (2, 2, 6, 16), (2, 1, 6, 16)),
        ((2, 4, 6, 16), (2, 2, 6, 16), (2, 2, 5, 16)),
        ((2, 4, 6, 16), (2, 2, 5, 16), (2, 2, 6, 16)),
        ((2, 4, 6, 16), (2, 2, 6, 1), (2, 2, 6, 16)),
        ((2, 4, 6, 32), (2, 2, 6, 16), (2, 2, 6, 16)),
        ((2, 4, 6, 16), (2, 2, 6, 32), (2, 2, 6, 16)),
        ((4, 6, 16), (2, 2, 6, 16), (2, 2, 6, 16)),
    ],
    ids=str,
)
def test_a_plan_serves_no_call_of_tensors_that_do_not_fit(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> None:
    # Plans of every bucket that the others could be taken for.
    for rows, columns, width in itertools.product((2, 6), (2, 6), (16, 32)):
        fits = (2, 4, rows, width), (2, 2, columns, width), (2, 2, columns, 16)
        tilegen.attention(*map(torch.zeros, fits))
    with pytest.raises(InvalidProblem):
        tilegen.attention(torch.zeros(q), torch.zeros(k), torch.zeros(v))


def test_where_nothing_compiles_pytorch_computes_with_one_notice(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = make_inputs(AttentionProblem.parse("b2 hq4 hkv2 q30 kv40 d16 bf16 full"))
    disk.say_once.cache_clear()
    plans.by_call.clear()
    monkeypatch.setenv("TILEGEN_CPU", "")
    monkeypatch.setattr(
        cpu, "why_not_compiled", lambda: "llvmlite is not installed; run pip install it"
    )
    with caplog.at_level(logging.WARNING, logger="tilegen"):
        for mask in (None, tilegen.causal(), tilegen.causal("bottom_right")):
            out, lse = tilegen.attention(x.q, x.k, x.v, mask=mask, return_lse=True)
            expected = attention_reference(x.q.float(), x.k.float(), x.v.float(), mask=mask)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, expected[0].bfloat16())
            torch.testing.assert_close(lse, expected[1])
    assert [record.message for record in caplog.records] == [
        "CPU tensors: computing with PyTorch, since llvmlite is not installed; run pip install it"
    ]


def test_the_fallback_has_gradients_and_empty_rows() -> None:
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (12, 4, 4))
    out = tilegen.attention(q, k, v, mask=tilegen.causal("bottom_right"))
    out.sum().backward()
    assert (out[:, :, :8] == 0).all()
    assert q.grad is not None
    assert (q.grad[:, :, :8] == 0).all()
    assert q.grad.isfinite().all()


def test_choice_takes_the_record_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    problem = AttentionProblem.parse("b3 hq8 hkv2 q1000 d64 bf16 causal")
    gpu = tilegen.gpu("h200")
    chosen = pipeline.choose_kernel(KernelTask.of("fwd", problem, gpu))
    assert chosen.source == "the model"
    other = replace(chosen.config, num_warps=4 if chosen.config.num_warps == 8 else 8)
    store.save(
        store.TuningRecord(
            gpu="h200",
            arch="sm_90",
            kernel="fwd",
            problem=problem.bucket,
            config=other,
            measurement=Measurement(
                status="ok", median_us=10.0, p20_us=9.0, p80_us=11.0, repeats=20, message=""
            ),
            versions=store.current_versions(),
            date=store.now(),
        )
    )
    chosen = pipeline.choose_kernel(KernelTask.of("fwd", problem, gpu))
    assert chosen.config == other
    assert chosen.source.startswith(str(tmp_path))
    assert pipeline.choose_kernel(KernelTask.of("bwd_dq", problem, gpu)).source == "the model"


def test_configs_and_names_of_the_package() -> None:
    assert repr(TileConfig(block_m=64, block_n=32)) == (
        "TileConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)"
    )
    assert "attention" in dir(tilegen)
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = tilegen.atention
    with pytest.raises(Unsupported, match="block_m must be one of"):
        TileConfig(block_m=65, block_n=32)
    with pytest.raises(Unsupported, match="expected a config"):
        TileConfig.parse("m64")
    assert TileConfig.parse("m64n32w4s2") == TileConfig(block_m=64, block_n=32)
    assert isinstance(InvalidProblem("x"), ValueError)


def test_tensors_without_effect_on_a_score_get_zero_gradients() -> None:
    """As PyTorch gives it: `0 * t[q]` is part of the function, though no kernel computes it."""
    q, k, v = (torch.randn(1, 1, 8, 16) for _ in range(3))
    made, gone, kept = (torch.randn(8, requires_grad=True) for _ in range(3))
    in_vain = tilegen.score(lambda s, b, h, q, k: s + 0 * (2 * made)[q] + gone[k] - gone[k])
    constant = tilegen.score(lambda s, b, h, q, k: kept[k])
    for score in (
        in_vain.then(tilegen.softcap(5.0)),
        tilegen.alibi(kept[:1]).then(in_vain),
        in_vain.then(constant),
        constant.then(in_vain),
    ):
        out, lse = tilegen.attention(q, k, v, score=score, return_lse=True)
        for result in (out, lse):
            zeros = torch.autograd.grad(result.sum(), [made, gone], retain_graph=True)
            assert all(torch.equal(one, torch.zeros(8)) for one in zeros)
    (gradient,) = torch.autograd.grad((out**2).sum(), [kept])
    assert gradient.abs().max() > 0
    with torch.no_grad():
        assert not tilegen.attention(q, k, v, score=in_vain).requires_grad
