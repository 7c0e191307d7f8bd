"""The forward for Hopper: what it refuses, when a call uses it, and its check in a child."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.problems import task
from tests.support.records import RECORD, timed
from tilegen import api, pipeline
from tilegen.check import in_child
from tilegen.choose.families import families_used, ranked_families, why_not_ranked
from tilegen.choose.ranker import propose
from tilegen.choose.records import Records
from tilegen.choose.search_space import legal_configs
from tilegen.compiling.compiler import compile_for
from tilegen.emit.render import render
from tilegen.environment import settings
from tilegen.errors import Unsupported, WrongResult
from tilegen.explaining.explained import ExplainedPass
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import TileConfig
from tilegen.kernels.registry import FORWARD
from tilegen.model.footprint import footprint
from tilegen.problem import AttentionProblem
from tilegen.store import save

H200 = gpu("h200")
LLAMA = AttentionProblem.parse("b1 hq32 hkv8 q4096 d128 bf16 causal")
KERNEL, FAMILY = "fwd_hopper", FORWARD["hopper_forward"]
CONFIG = TileConfig.parse("m128n128w8s2t")


@pytest.mark.parametrize(
    "problem, arch, reason",
    [
        ("hq8 q1024 d128 bf16 causal", "sm_90", ""),
        ("hq8 q1024 d192/128 fp16 window(64,0)", "sm_90", ""),
        ("hq8 q1024 d64 bf16 causal score(s,sinks)", "sm_90", ""),
        ("hq8 q1024 d128 bf16 causal", "sm_100", "needs sm_90, not sm_100"),
        ("hq8 q1024 d96 bf16 causal", "sm_90", "serves head dims 64/64, 128/128, .*, not 96/96"),
        ("hq8 q1024 d128 fp32 causal", "sm_90", "needs fp16 or bf16"),
        ("hq8 q1024 d128 bf16 documents(@q:1024)", "sm_90", "does not keep NaN of other documents"),
        ("hq8 q1024 d128 bf16 causal dropout", "sm_90", "does not drop weights"),
        ("hq8 q1024 d128 bf16 causal invariant", "sm_90", "tile-dependent order"),
        ("hq8 q1024 d128 bf16 causal page64", "sm_90", "does not read pages"),
    ],
)
def test_what_it_refuses(problem: str, arch: str, reason: str) -> None:
    import re

    given = FAMILY.why_not(AttentionProblem.parse(problem), arch)
    assert re.search(reason, given) if reason else not given


@pytest.mark.parametrize(
    "config, reason",
    [
        ("m128n128w8s2", "add t"),
        ("m128n128w4s2t", "has w4 for each 64 query rows"),
        ("m192n64w12s2tu", "has turns of two warpgroups"),
        ("m64n64w4s2t", "block_m of fwd_hopper must be one of"),
        ("m128n32w8s2t", "block_n of fwd_hopper must be one of"),
    ],
)
def test_configs_that_it_cannot_have(config: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        render(LLAMA, TileConfig.parse(config), KERNEL)


def test_other_kernels_have_none_of_its_knobs() -> None:
    for key in ("m128n128w8s2p132", "m128n128w8s2u", "m192n64w8s2"):
        with pytest.raises(Unsupported):
            render(LLAMA, TileConfig.parse(key), "fwd")


def test_the_search_space_has_only_configs_that_can_be_rendered() -> None:
    configs = legal_configs(task(KERNEL, LLAMA))
    assert {(one.block_m, one.num_warps) for one in configs} == {(128, 8), (192, 12)}
    assert {one.persistent for one in configs} == {0, H200.num_sms}
    for config in configs:
        assert render(LLAMA, config, KERNEL).source


@pytest.mark.slow
def test_shared_memory_is_predicted() -> None:
    for text, key in (
        ("hq8 q1024 d128 bf16 causal", "m128n128w8s2t"),
        ("hq8 q1024 d192/128 bf16 causal", "m128n128w8s2t"),
        ("hq8 q1024 d64 bf16 causal", "m192n64w12s3t"),
    ):
        problem, config = AttentionProblem.parse(text), TileConfig.parse(key)
        built = compile_for(render(problem, config, KERNEL), "sm_90").reported
        predicted = footprint(task(KERNEL, problem).tiled(config)).smem_bytes
        assert built.shared_bytes <= predicted <= built.shared_bytes + 1024


def test_only_hopper_compiles_it() -> None:
    with pytest.raises(Unsupported, match="needs sm_90, not sm_100"):
        compile_for(render(LLAMA, CONFIG, KERNEL), "sm_100")


# --------------------------------------------------------------------------------------------------
# The choice


def record(kernel: str, config: TileConfig, us: float) -> None:
    made = replace(RECORD, problem=LLAMA.bucket, kernel=kernel, gpu="h200", arch="sm_90")
    save(replace(made, config=config, measurement=timed(us), estimate=None))


def pass_check(config: TileConfig = CONFIG, failed: str = "") -> None:
    """Record a result of the check, as a child would give it."""
    tiled = task(KERNEL, LLAMA).tiled(config)
    path = in_child.path_of(tiled)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**in_child.circumstances(tiled), "failed": failed}))


def used(**options: bool) -> str:
    (family,) = families_used(Records(LLAMA, H200, **options), "forward")
    return family.name


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    from tilegen.environment import reread

    reread()


def test_the_model_never_chooses_it() -> None:
    assert (
        why_not_ranked(FAMILY, LLAMA, H200)
        == "only measured times choose it, or TILEGEN_HOPPER=1, once its check has passed"
    )
    assert FAMILY.name not in dict(ranked_families(LLAMA, H200, "forward"))
    pass_check()
    assert used() == "q_stationary"


def test_a_measured_record_and_a_check_choose_it() -> None:
    record("fwd", TileConfig.parse("m128n128w8s2"), 300.0)
    record(KERNEL, CONFIG, 200.0)
    assert used() == "q_stationary"  # not checked here
    pass_check(TileConfig.parse("m128n64w8s2t"))
    assert used() == "q_stationary"  # another config was checked
    pass_check(failed="out WRONG")
    assert used() == "q_stationary"
    pass_check()
    assert used() == "hopper_forward"
    assert used(roles=False) == "q_stationary"
    chosen = pipeline.choose(LLAMA, H200, "forward")
    assert chosen[KERNEL].config == CONFIG
    assert list(pipeline.choose(LLAMA, H200, "forward", describable=False)) == ["fwd"]


def test_a_slower_record_does_not() -> None:
    record("fwd", TileConfig.parse("m128n128w8s2"), 300.0)
    record(KERNEL, CONFIG, 301.0)
    pass_check()
    assert used() == "q_stationary"


def test_the_setting_chooses_configs_that_passed() -> None:
    with settings(hopper=True):
        assert used() == "q_stationary"
        pass_check(config := TileConfig.parse("m192n64w12s2t"))
        assert used() == "hopper_forward"
        assert pipeline.choose(LLAMA, H200, "forward")[KERNEL].config == config
        b200 = families_used(Records(LLAMA, gpu("b200")), "forward")
        assert [one.name for one in b200] == ["q_stationary"]


def test_a_check_holds_for_one_driver_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_check()
    tiled = task(KERNEL, LLAMA).tiled(CONFIG)
    assert in_child.outcome(tiled) == ""
    known = in_child.circumstances(tiled)
    for name in known:
        changed = {**known, name: "other"}
        monkeypatch.setattr(in_child, "circumstances", lambda _, changed=changed: changed)
        assert in_child.outcome(tiled) is None


def test_explain_names_the_reason() -> None:
    left_out = ExplainedPass("forward", LLAMA, H200).left_out
    assert "TILEGEN_HOPPER=1" in left_out["hopper_forward"]
    (best, *_) = propose(task(KERNEL, LLAMA), top=1)
    assert best.config.consumers >= 2


@pytest.mark.slow
def test_bundles_leave_it_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record("fwd", TileConfig.parse("m64n64w4s2"), 300.0)
    record(KERNEL, CONFIG, 200.0)
    pass_check()
    with caplog.at_level(logging.WARNING):
        made = api.generate(LLAMA, "h200", out=tmp_path / "out", forward_only=True)
    assert "bundles leave out hopper_forward" in caplog.text
    assert {one.kernel for one in made.binaries} == {"fwd"}


# --------------------------------------------------------------------------------------------------
# The child


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(in_child, "CHILD", code)


RESULTS = (
    "import json; print(json.dumps([dict(tensor='out', ok={ok}, error=1.0, allowed=2.0, "
    "index=[0], found=0.0, expected=0.0, text='out WRONG')]))"
)


def test_a_result_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = task(KERNEL, LLAMA).tiled(CONFIG)
    child(monkeypatch, RESULTS.format(ok=True))
    assert in_child.check(tiled) == ""
    assert in_child.passed(tiled.task) == [CONFIG]
    child(monkeypatch, "raise SystemExit(1)")
    assert in_child.check(tiled) == ""  # no child was started


@pytest.mark.parametrize(
    "code, reason",
    [
        (RESULTS.format(ok=False), "out WRONG"),
        ("raise ValueError('no GPU')", "the check ended with 1: ValueError: no GPU"),
    ],
)
def test_a_failure_is_a_result(code: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiled = task(KERNEL, LLAMA).tiled(CONFIG)
    child(monkeypatch, code)
    assert in_child.check(tiled) == reason
    assert in_child.outcome(tiled) == reason
    assert in_child.passed(tiled.task) == []


def test_a_kernel_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all processes of its group; the GPU is asked for an answer after that."""
    waits = "import sys, time; time.sleep(60 * (sys.stdin.read() != '{}')); print('[1]')"
    child(monkeypatch, waits)
    monkeypatch.setattr(in_child, "SECONDS", 1.0)
    with pytest.raises(WrongResult, match="fwd_hopper did not end within 1 s"):
        in_child.run(LLAMA, {KERNEL: CONFIG})
    child(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(in_child, "PROBE_SECONDS", 1.0)
    with pytest.raises(in_child.DeviceHung, match="the GPU does not answer"):
        in_child.run(LLAMA, {KERNEL: CONFIG})


@pytest.mark.slow
def test_the_child_checks_what_it_is_given() -> None:
    """On this processor, with a kernel that it can run."""
    problem = AttentionProblem.parse("hq2 q40 d32 fp32 causal")
    job = {"problem": problem.key, "configs": {"fwd": "m16n16w4s2"}, "seed": 0}
    command = [sys.executable, "-c", in_child.CHILD]
    given = json.dumps(job)
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    assert [(one["tensor"], one["ok"]) for one in json.loads(done.stdout)] == [
        ("out", True),
        ("lse", True),
    ]
