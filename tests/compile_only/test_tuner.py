"""The tuner with the real model, templates and compiler; only the times are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.records import H200, timed
from tilegen.choose.ranker import propose
from tilegen.compiling.acceptable import why_not_spilled
from tilegen.compiling.compiler import compile_for
from tilegen.compiling.workers import Pool
from tilegen.emit.render import render
from tilegen.gpus.spec import catalogue
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import LARGE_CACHE
from tilegen.problem import AttentionProblem
from tilegen.store import look_up
from tilegen.task import KernelTask
from tilegen.tuning import bench
from tilegen.tuning.measure import Measurement
from tilegen.tuning.tuner import tune


def test_the_models_choice_is_compiled_then_measured_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Pool
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    problem = AttentionProblem.parse("b1 hq4 hkv1 q1024 kv1024 d64 bf16 causal")
    measured: list[TileConfig] = []

    def measure(config: TileConfig) -> Measurement:
        measured.append(config)
        return timed(100.0 + 10 * len(measured))

    record = tune(
        KernelTask.of("fwd", problem, H200),
        trials=2,
        measure=measure,
        compile=lambda configs: bench.compile_ahead(
            KernelTask.of("fwd", problem, H200), configs, compiler
        ),
        progress=False,
    )
    ranked = propose(KernelTask.of("fwd", problem, H200), top=2)
    assert [candidate.config for candidate in ranked] == measured
    assert record.config == ranked[0].config
    assert record.estimate is not None
    assert record.estimate.read_bytes == ranked[0].estimate.read_bytes
    hit = look_up(KernelTask.of("fwd", problem, H200))
    assert hit is not None
    assert hit.record == record


def test_kernels_that_do_not_fit_are_refused_by_the_compiler_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: Pool
) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    problem = AttentionProblem.parse("b1 hq1 hkv1 q1024 kv1024 d256 bf16 full")
    large = TileConfig(block_m=128, block_n=128, num_warps=8, num_stages=3)
    ((config, built),) = bench.compile_ahead(KernelTask.of("fwd", problem, H200), [large], compiler)
    refusal = bench.refused(built, H200)
    assert config == large
    assert refusal is not None
    assert refusal.status in ("out_of_resources", "build_failed")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_the_safe_tiles_fit_everywhere(arch: str) -> None:
    problem = AttentionProblem.parse("hq4 hkv1 q300 d256 bf16 causal(bottom_right)&window(63,9)")
    for kernel in LARGE_CACHE:
        built = compile_for(render(problem, bench.smallest_config(kernel), kernel), arch)
        assert built.reported.shared_bytes <= min(gpu.smem_per_block for gpu in catalogue())
        assert not why_not_spilled(built.reported.spill_bytes)
