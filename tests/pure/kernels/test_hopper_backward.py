"""The backward for Hopper: what it refuses, when a call uses it, and its check in a child."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import task
from tests.support.records import RECORD, timed
from tilegen import api, pipeline
from tilegen.check import in_child
from tilegen.choose.families import families_used, why_not_ranked
from tilegen.choose.records import Records
from tilegen.choose.search_space import legal_configs
from tilegen.compiling.compiler import compile_for
from tilegen.emit.render import render
from tilegen.environment import settings
from tilegen.errors import Unsupported
from tilegen.explaining.explained import ExplainedPass
from tilegen.gpus.spec import gpu
from tilegen.kernels import passes
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import BACKWARD, partners
from tilegen.model.footprint import footprint
from tilegen.problem import AttentionProblem
from tilegen.store import save

H200 = gpu("h200")
LLAMA = AttentionProblem.parse("b1 hq32 hkv8 q4096 d128 bf16 causal")
BOTH, DKDV, DQ = (BACKWARD[f"hopper_{name}"] for name in ("two_pass", "dkdv", "dq"))
CONFIGS = {
    "bwd_dkdv_hopper": TileConfig.parse("m64n128w8s2t"),
    "bwd_dq_hopper": TileConfig.parse("m128n128w8s2t"),
}
PLAIN = {
    "bwd_preprocess": TileConfig.parse("m64n16w4s1"),
    "bwd_dkdv": TileConfig.parse("m64n64w4s2"),
    "bwd_dq": TileConfig.parse("m64n64w4s2"),
}
SLOPE, TRAINED = "score(5*tanh(s/5))", "score(s+t0[h]*(k-q),float32+)"


@pytest.mark.parametrize(
    "problem, dkdv, dq",
    [
        ("hq8 hkv2 q1024 d128 bf16 causal", "", ""),
        ("hq8 q1000 kv900 d64 fp16 window(64,0)", "", ""),
        ("hq8 q1024 d128 bf16 dilated(3) score(s+t0[h]*(k-q),float32)", "", ""),
        ("hq8 q1024 d64 bf16 kv_prefix(300) score(s,sinks)", "", ""),
        ("hq8 q1024 d128 bf16 causal invariant", "", ""),
        (f"hq8 q1024 d64 bf16 causal {SLOPE}", "", ""),
        (f"hq8 q1024 d128 bf16 causal {SLOPE}", "lacks registers for .* at head dim 128", ""),
        (f"hq8 q1024 d64 bf16 causal {TRAINED}", "", "computes no gradients of tensors"),
        ("hq8 q1024 d96 bf16 causal", "serves head dims 64/64, 128/128", "not 96/96"),
        ("hq8 q1024 d192/128 bf16 causal", "not 192/128", "not 192/128"),
        ("hq8 q1024 d128 fp32 causal", "needs fp16 or bf16", "needs fp16 or bf16"),
        ("hq8 q1024 d64 bf16 documents(@q:1024)", "NaN of other documents", "NaN of other"),
        ("hq8 q1024 d128 bf16 causal dropout", "does not drop weights", "does not drop weights"),
    ],
)
def test_what_each_kernel_refuses(problem: str, dkdv: str, dq: str) -> None:
    """And so each family that launches it, alone or beside the other's plain form."""
    parsed = AttentionProblem.parse(problem)
    for family, reason in ((DKDV, dkdv), (DQ, dq), (BOTH, dkdv or dq)):
        given = family.why_not(parsed, "sm_90")
        assert re.search(reason, given) if reason else not given
        assert family.why_not(parsed, "sm_100")


@pytest.mark.parametrize(
    "kernel, config, reason",
    [
        ("bwd_dkdv_hopper", "m64n128w8s2", "add t"),
        ("bwd_dkdv_hopper", "m64n128w4s2t", "has w4 for each 64 key rows"),
        ("bwd_dkdv_hopper", "m128n128w8s2t", "block_m of bwd_dkdv_hopper must be one of"),
        ("bwd_dq_hopper", "m64n128w8s2t", "has w4 for each 64 query rows"),
        ("bwd_dq_hopper", "m128n32w8s2t", "block_n of bwd_dq_hopper must be one of"),
        ("bwd_dq_hopper", "m128n128w8s2tp132", "computes one tile of rows per program"),
        ("bwd_dq_hopper", "m128n128w8s2tu", "computes one tile of rows per program"),
    ],
)
def test_configs_that_it_cannot_have(kernel: str, config: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        render(LLAMA, TileConfig.parse(config), kernel)


@pytest.mark.parametrize("kernel", CONFIGS)
def test_the_search_space_has_only_configs_that_can_be_rendered(kernel: str) -> None:
    configs = legal_configs(task(kernel, LLAMA))
    assert CONFIGS[kernel] in configs
    for config in configs:
        assert render(LLAMA, config, kernel).source


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel, problem, key",
    [
        ("bwd_dkdv_hopper", "hq8 hkv2 q1024 d128 bf16 causal", "m64n128w8s2t"),
        ("bwd_dkdv_hopper", f"hq8 hkv2 q1024 d64 bf16 causal {SLOPE}", "m64n128w8s3t"),
        ("bwd_dq_hopper", "hq8 hkv2 q1024 d128 bf16 causal", "m128n128w8s2t"),
        ("bwd_dq_hopper", "hq8 hkv2 q1024 d64 bf16 causal", "m192n64w12s3t"),
    ],
)
def test_the_footprint_is_predicted(kernel: str, problem: str, key: str) -> None:
    parsed, config = AttentionProblem.parse(problem), TileConfig.parse(key)
    built = compile_for(render(parsed, config, kernel), "sm_90").reported
    predicted = footprint(task(kernel, parsed).tiled(config))
    assert built.shared_bytes <= predicted.smem_bytes <= built.shared_bytes + 1024
    assert not predicted.spill_bytes


# --------------------------------------------------------------------------------------------------
# The choice


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    from tilegen.environment import reread

    reread()


def record(configs: Mapping[str, TileConfig], us: float) -> None:
    for kernel, config in configs.items():
        made = replace(RECORD, problem=LLAMA.bucket, kernel=kernel, gpu="h200", arch="sm_90")
        save(replace(made, config=config, measurement=timed(us), estimate=None))


def pass_check(*kernels: str) -> None:
    """Record the result of checks, as a child would give it."""
    for kernel in kernels:
        tiled = task(kernel, LLAMA).tiled(CONFIGS[kernel])
        path = in_child.path_of(tiled)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**in_child.circumstances(tiled), "failed": ""}))


def used(**options: bool) -> str:
    (family,) = families_used(Records(LLAMA, H200, **options), "backward")
    return family.name


def test_the_model_never_chooses_it() -> None:
    pass_check(*CONFIGS)
    for family in (BOTH, DKDV, DQ):
        assert "only measured times choose it" in why_not_ranked(family, LLAMA, H200)
    assert used() == "two_pass"


def test_the_fastest_of_both_kernels_and_of_each_beside_a_plain_one() -> None:
    record(PLAIN, 3000.0)
    record(CONFIGS, 2000.0)
    assert used() == "two_pass"  # not checked here
    pass_check("bwd_dq_hopper")
    assert used() == "hopper_dq"
    pass_check("bwd_dkdv_hopper")
    assert used() == "hopper_two_pass"
    assert used(roles=False) == "two_pass"
    chosen = pipeline.choose(LLAMA, H200, "backward")
    assert {name: chosen[name].config for name in CONFIGS} == CONFIGS


def test_a_slower_kernel_stays_plain() -> None:
    record(PLAIN, 3000.0)
    for (kernel, config), us in zip(CONFIGS.items(), (2000.0, 3001.0), strict=True):
        record({kernel: config}, us)
    pass_check(*CONFIGS)
    assert used() == "hopper_dkdv"


def test_the_setting_chooses_what_passed() -> None:
    with settings(hopper=True):
        assert used() == "two_pass"
        pass_check("bwd_dkdv_hopper")
        assert used() == "hopper_dkdv"
        pass_check("bwd_dq_hopper")
        assert used() == "hopper_two_pass"
        assert list(pipeline.choose(LLAMA, H200, "backward")) == [*BOTH.names]


def test_each_family_launches_its_kernels() -> None:
    for family in (BOTH, DKDV, DQ):
        made: list[str] = []

        def launch(name: str, made: list[str] = made) -> Any:
            return lambda *_: made.append(name) or (name, name)

        given = {name: launch(name) for name in family.names}
        passes.gradients(given, *range(7), panel_rows=1)
        assert sorted(made) == sorted(family.names[1:])


def test_explain_names_the_reasons() -> None:
    left_out = ExplainedPass("backward", LLAMA, H200).left_out
    assert "TILEGEN_HOPPER=1" in left_out["hopper_two_pass"]
    narrow = AttentionProblem.parse("hq8 q1024 d96 bf16 causal")
    left_out = ExplainedPass("backward", narrow, H200).left_out
    assert "serves head dims 64/64, 128/128, not 96/96" in left_out["hopper_dkdv"]


@pytest.mark.slow
def test_bundles_leave_it_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(PLAIN, 3000.0)
    record(CONFIGS, 2000.0)
    pass_check(*CONFIGS)
    with caplog.at_level(logging.WARNING):
        made = api.generate(LLAMA, "h200", out=tmp_path / "out")
    assert "bundles leave out hopper_two_pass" in caplog.text
    assert "bwd_dkdv_hopper, bwd_dq_hopper cannot" in caplog.text
    assert {one.kernel for one in made.binaries} == {"fwd", *PLAIN}


# --------------------------------------------------------------------------------------------------
# The child


def test_each_kernel_is_checked_beside_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own results alone: those of its partners are no reason against it."""
    jobs: list[dict[str, Any]] = []

    def answer(code: str, job: dict[str, Any], seconds: float) -> Any:
        jobs.append(job)
        return [dict(tensor=name, ok=name == "dq", text=f"{name} WRONG") for name in ("dk", "dq")]

    monkeypatch.setattr(in_child, "answer", answer)
    results = {name: in_child.check(task(name, LLAMA).tiled(CONFIGS[name])) for name in CONFIGS}
    assert results == {"bwd_dkdv_hopper": "dk WRONG", "bwd_dq_hopper": ""}
    others = {"fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"}
    for kernel in CONFIGS:
        plain = others - {kernel.removesuffix("_hopper")}
        assert {*partners(kernel, LLAMA)} == {kernel, *plain}
        assert any(job["configs"].keys() == {kernel, *plain} for job in jobs)
        assert any(
            job["configs"][kernel] == CONFIGS[kernel].key
            for job in jobs
            if kernel in job["configs"]
        )
