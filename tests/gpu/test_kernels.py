"""Emitted kernels on the GPU: right, deterministic, never recompiled for a length, tunable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegen
from benchmarks import rows, run
from benchmarks.check import check, make_inputs
from benchmarks.providers import providers
from benchmarks.workloads import Workload
from tests.support.problems import PROBLEMS, configs, sized
from tilegen.check import verification
from tilegen.check.reference import Inputs
from tilegen.check.reference import make_inputs as make_strided_inputs
from tilegen.choose.ranker import propose
from tilegen.emit.identity import is_aligned
from tilegen.emit.render import render
from tilegen.errors import NoRecord
from tilegen.gpus.spec import GpuSpec, detect
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.descriptors import ARCHITECTURES
from tilegen.kernels.registry import LARGE_CACHE, smallest_config
from tilegen.pipeline import choose, choose_kernel
from tilegen.problem import AttentionProblem
from tilegen.store import look_up
from tilegen.task import KernelTask
from tilegen.tuning.tuner import tune

TUNING_SECONDS = 30.0
DENSE = AttentionProblem.parse(
    sized(
        "b2 hq8 hkv2 q1000 kv1000 d128 bf16 causal",
        rehearsed="b1 hq2 hkv1 q100 kv100 d32 bf16 causal",
    )
)
"""Large enough for several waves of tiles and for races between programs to show."""


@pytest.fixture(scope="module")
def spec() -> GpuSpec:
    actual = detect()
    assert actual is not None
    return actual


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the kernels that Triton compiles because it has not seen such arguments before."""
    import triton

    seen: list[str] = []

    def hook(*, repr: str, **_: Any) -> bool:
        seen.append(repr)
        return False  # go on and compile

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    return seen


def best(problem: AttentionProblem, spec: GpuSpec, rank: int = 0) -> dict[Kernel, TileConfig]:
    """Return the model's choice for every kernel; at another `rank`, or the last there is."""
    ranked = {k: propose(KernelTask.of(k, problem, spec), top=rank + 1) for k in LARGE_CACHE}
    return {kernel: candidates[-1].config for kernel, candidates in ranked.items()}


def unaligned(inputs: Inputs) -> Inputs:
    """Return the same values in tensors whose rows start at odd addresses."""

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(
            *tensor.shape[:3], tensor.shape[3] + 1, dtype=tensor.dtype, device="cuda"
        )
        view = room[..., 1:]
        view.copy_(tensor)
        assert not is_aligned(view)
        return view

    return Inputs(*map(shifted, (inputs.q, inputs.k, inputs.v, inputs.dout)))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_all_kernels_agree_with_the_reference(problem: AttentionProblem, spec: GpuSpec) -> None:
    verification.require(verification.verify(problem, best(problem, spec), device="cuda"))


@pytest.mark.parametrize("rank", range(1, 6))
def test_lower_ranked_configs_agree_with_the_reference(rank: int, spec: GpuSpec) -> None:
    verification.require(verification.verify(DENSE, best(DENSE, spec, rank), device="cuda"))


@pytest.mark.parametrize("layout", ["transposed", "unaligned"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_any_strides(layout: str, dtype: str, spec: GpuSpec) -> None:
    lengths = sized("q200 kv300", rehearsed="q70 kv100")
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 {lengths} d64 {dtype} window(70,20)")
    inputs = make_strided_inputs(problem, device="cuda", heads_inside=layout == "transposed")
    if layout == "unaligned":
        inputs = unaligned(inputs)
    aligned = layout != "unaligned"
    kernels = {k: render(problem, c, k, aligned=aligned) for k, c in best(problem, spec).items()}
    verification.require(verification.check(kernels, inputs, mask=problem.mask))


@pytest.mark.parametrize("heads_inside", [False, True])
@pytest.mark.parametrize("tile", ["m64n64w4s2", "m128n128w8s2", "m64n128w4s3"])
@pytest.mark.parametrize(
    "text",
    [
        "b2 hq8 hkv2 q1000 kv777 d128 bf16 causal(bottom_right)",
        "b3 hq4 hkv4 q200 kv333 d80/64 fp16 window(70,20)",  # 64 and 16 columns
        "b1 hq2 hkv1 q65 kv100 d72/40 fp16 full",  # 16 columns, 8 of which exist
    ],
)
def test_tensor_descriptors(text: str, tile: str, heads_inside: bool, spec: GpuSpec) -> None:
    """Through the emitted `launch`: tails and padded columns arrive as 0, by TMA."""
    if spec.arch not in ARCHITECTURES:
        pytest.skip(f"needs a GPU with TMA, found {spec.arch}")
    problem, every = AttentionProblem.parse(text), configs(TileConfig.parse(tile))
    inputs = make_strided_inputs(problem, device="cuda", heads_inside=heads_inside)
    kernels = {kernel: render(problem, config, kernel) for kernel, config in every.items()}
    verification.require(verification.check(kernels, inputs, mask=problem.mask))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_attention_and_its_gradients(problem: AttentionProblem) -> None:
    inputs = make_inputs(problem)
    leaves = [tensor.requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
    out = tilegen.attention(*leaves, mask=problem.mask)
    grads = torch.autograd.grad(out, leaves, inputs.dout)
    for actual in ({"out": out}, dict(zip(("dq", "dk", "dv"), grads, strict=True))):
        verdict = check(problem, inputs, actual)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_unaligned_tensors_right_after_aligned_ones(dtype: str) -> None:
    """The same shape twice: the choice of the first call must not serve the second."""
    lengths = sized("q200 kv300", rehearsed="q40 kv50")
    problem = AttentionProblem.parse(f"b2 hq4 hkv2 {lengths} d64 {dtype} causal")
    aligned = make_inputs(problem)
    shifted = unaligned(aligned)
    odd_dout = Inputs(aligned.q, aligned.k, aligned.v, shifted.dout)
    assert all(is_aligned(tensor) for tensor in (aligned.q, aligned.k, aligned.v, aligned.dout))
    for inputs in (aligned, shifted, odd_dout, aligned):
        # No copies: those would be aligned.
        leaves = [tensor.detach().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v)]
        assert [leaf.data_ptr() for leaf in leaves] == [
            tensor.data_ptr() for tensor in (inputs.q, inputs.k, inputs.v)
        ]
        out = tilegen.attention(*leaves, mask=problem.mask)
        grads = torch.autograd.grad(out, leaves, inputs.dout)
        for actual in ({"out": out}, dict(zip(("dq", "dk", "dv"), grads, strict=True))):
            verdict = check(problem, inputs, actual)
            assert verdict.ok, verdict.detail


@pytest.mark.parametrize("problem", PROBLEMS[::4], ids=str)
def test_the_safe_tiles_agree_with_the_reference(problem: AttentionProblem) -> None:
    """The tiles with which the tuner checks backward kernels."""
    configs: dict[Kernel, TileConfig] = {kernel: smallest_config(kernel) for kernel in LARGE_CACHE}
    verification.require(verification.verify(problem, configs, device="cuda"))


def test_offsets_past_two_to_the_31(spec: GpuSpec) -> None:
    problem = AttentionProblem.parse("b5 hq64 hkv64 q65600 kv128 d128 bf16 full")
    needed = 2 * 2 * problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_qk
    if torch.cuda.mem_get_info()[0] < 2 * needed:
        pytest.skip(f"needs {2 * needed / 2**30:.0f} GiB of free GPU memory")
    assert problem.batch * problem.num_heads_q * problem.seqlen_q * problem.head_dim_qk > 2**31
    inputs = make_inputs(problem)
    with torch.no_grad():
        out = tilegen.attention(inputs.q, inputs.k, inputs.v, mask=problem.mask)
    verdict = check(problem, inputs, {"out": out})  # judges the first and the last head
    assert verdict.ok, verdict.detail


def test_backward_is_deterministic(spec: GpuSpec) -> None:
    inputs = make_inputs(DENSE)
    kernels = {
        kernel: render(DENSE, config, kernel) for kernel, config in best(DENSE, spec).items()
    }
    first, *others = (verification.run(kernels, inputs, DENSE.head_dim_qk**-0.5) for _ in range(5))
    for other in others:
        for name, tensor in first.items():
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("aligned", [True, False])
def test_lengths_never_recompile(aligned: bool, spec: GpuSpec, compiled: list[str]) -> None:
    """One kernel each serves all lengths, batches and heads, the 1 and the multiples of 16 too."""
    # A head dim of its own: what other tests have compiled would not be seen again.
    problem = AttentionProblem.parse("b1 hq2 hkv1 q256 kv256 d56 fp16 causal(bottom_right)")
    kernels = {
        kernel: render(problem, config, kernel, aligned=aligned)
        for kernel, config in best(problem, spec).items()
    }
    for batch, heads, seqlen_q, seqlen_kv in (
        (1, 1, 1, 1),
        (1, 1, 1, 777),
        (3, 1, 16, 16),
        (1, 5, 17, 63),
        (2, 2, 64, 1024),
        (1, 16, 1000, 1001),
        (4, 1, 2048, 2048),
        (1, 1, 4095, 4097),
    ):
        sized = AttentionProblem(
            batch=batch,
            num_heads_q=heads * problem.group_size,
            num_heads_kv=heads,
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_kv,
            head_dim_qk=problem.head_dim_qk,
            head_dim_v=problem.head_dim_v,
            dtype=problem.dtype,
            mask=problem.mask,
        )
        inputs = make_inputs(sized)
        inputs = inputs if aligned else unaligned(inputs)
        verification.require(verification.check(kernels, inputs, mask=sized.mask))
    ours = [text for text in compiled if text.startswith("attention_")]
    assert len(ours) == len(set(ours)) == len(LARGE_CACHE), ours


def test_tuning_for_half_a_minute_leaves_a_record_that_calls_use(spec: GpuSpec) -> None:
    problem = AttentionProblem.parse("b2 hq8 hkv2 q1024 kv1024 d64 bf16 causal")
    record = tune(KernelTask.of("fwd", problem, spec), seconds=TUNING_SECONDS, progress=False)
    assert record.is_measured
    assert re.fullmatch(r"[0-9a-f]{12}", record.measurement.digest)
    assert record.trials > 1
    entry = look_up(KernelTask.of("fwd", problem, spec))
    assert entry is not None
    assert entry.record == record
    chosen = choose_kernel(KernelTask.of("fwd", problem, spec))
    assert (chosen.config, chosen.source) == (record.config, str(entry.file))


def test_a_later_run_measures_nothing_again(spec: GpuSpec) -> None:
    problem = AttentionProblem.parse("b1 hq2 hkv2 q256 kv256 d32 fp16 full")
    first = tune(KernelTask.of("fwd", problem, spec), trials=3, progress=False)
    measured: list[TileConfig] = []

    def refuse(config: TileConfig) -> Any:
        measured.append(config)
        raise NoRecord("measured again")

    again = tune(KernelTask.of("fwd", problem, spec), trials=3, measure=refuse, progress=False)
    assert measured == []
    assert again.config == first.config


def test_benchmark_rows_are_checked_and_timed(tmp_path: Path, spec: GpuSpec) -> None:
    workload = Workload(name="small", problem=DENSE, source="test")
    chosen = [p for p in providers() if p.name in ("tilegen", "sdpa-flash")]
    path = tmp_path / "rows.csv"
    left = run.run(
        run.cases([workload], chosen), path, deadline=float("inf"), seconds=0.05, spec=spec
    )
    lines = rows.read(path)
    assert left == 0
    assert len(lines) == 4
    details = [row["detail"] for row in lines]
    assert {row["status"] for row in lines if row["provider"] == "tilegen"} == {"ok"}, details
    # Whether another's results are right is not ours to require.
    assert {row["status"] for row in lines} <= {"ok", "wrong"}, details
    assert all(float(row["median_us"]) > 0 for row in lines)
    kernels = {(row["provider"], row["direction"]): len(row["digest"].split()) for row in lines}
    assert kernels == {
        **{("tilegen", d): len(choose(DENSE.bucket, spec, d)) for d in workload.directions},
        ("sdpa-flash", "forward"): 0,
        ("sdpa-flash", "backward"): 0,
    }
