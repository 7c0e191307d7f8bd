"""Problems whose scores read tensors are verified and timed with typical ones, every kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegen
from tests.compiled.test_scores import FAMILIES, SCORES, made_from
from tests.support.calls import gpu_road
from tests.support.score_inputs import HEADS, SLOPES, random
from tilegen import pipeline
from tilegen.check.reference import make_inputs
from tilegen.check.verification import require, verify
from tilegen.choose import records
from tilegen.errors import WrongResult
from tilegen.gpus import spec
from tilegen.gpus.spec import gpu
from tilegen.kernels import passes
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.panels import Launch
from tilegen.masks.score import Score, alibi, bias, relative_bias, sinks, temperature
from tilegen.model.resources import StepCode
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning import bench
from tilegen.tuning.bench import Timed, check_config
from tilegen.tuning.measure import Measurement, summarise

TRAINED: dict[str, Score] = {
    "heads": alibi(SLOPES.clone().requires_grad_()),
    "divisor": temperature(random(HEADS).half().requires_grad_()),
    "distances_and_sinks": relative_bias(random(HEADS, 21).requires_grad_()).then(
        sinks(random(HEADS))
    ),
    "pairs": bias(random(2, 1, 40, 50).bfloat16().requires_grad_()),
}


TRIED = TileConfig(block_m=32, block_n=32)


def problem_with(score: Score, text: str) -> AttentionProblem:
    """Return a problem as a record or the command line gives it: no tensor comes along."""
    problem = replace(AttentionProblem.parse(f"b2 hq{HEADS} hkv1 {text}"), score=score.form)
    return AttentionProblem.parse(problem.key)


@dataclass(frozen=True)
class Fits:
    """The compiler's report of a config that fits."""

    shared_bytes: int = 0
    registers: int = 255
    spill_bytes: int = 0
    step_code: StepCode | None = None


FORMS = {name: made_from(one).form for name, one in SCORES.items()}
READING = [name for name, form in FORMS.items() if form.captured or form.sinks]


@pytest.mark.parametrize(
    "name, family", list(zip(READING, itertools.cycle(FAMILIES), strict=False))
)
def test_scores_that_read_tensors_are_verified(name: str, family: str) -> None:
    problem = problem_with(made_from(SCORES[name]), "q40 kv50 d40/32 fp32 causal")
    checks = verify(problem, FAMILIES[family])
    require(checks)
    backward = {"out", "lse", "dq", "dk", "dv", *(["dsinks"] * problem.score.sinks)}
    assert {check.tensor for check in checks} == (
        {"out", "lse"} if family == "streamed" else backward
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["whole_heads", "small_cache"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_what_is_trained_are_verified(name: str, family: str) -> None:
    problem = problem_with(TRAINED[name], "q40 kv50 d40/32 fp16 causal")
    checks = {check.tensor: check for check in verify(problem, FAMILIES[family])}
    require(tuple(checks.values()))
    assert checks["dt0"].found != 0
    assert ("dsinks" in checks) == (name == "distances_and_sinks")


@pytest.mark.slow
def test_wrong_gradients_of_sinks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And held against the kernel that makes delta, from which they follow."""
    problem = problem_with(TRAINED["distances_and_sinks"], "q40 kv50 d16 fp32 full")
    right = passes.gradient_of_sinks
    monkeypatch.setattr(passes, "gradient_of_sinks", lambda *given: 1.001 * right(*given))
    checks = {check.tensor: check.ok for check in verify(problem, FAMILIES["whole_heads"])}
    names = ("out", "lse", "dq", "dk", "dv", "dt0")
    assert checks == {**dict.fromkeys(names, True), "dsinks": False}
    assert check_config(problem, "bwd_dq", TRIED) is None
    with pytest.raises(WrongResult, match=r"they are wrong: dsinks +WRONG"):
        check_config(problem, "bwd_preprocess", TRIED)


def test_wrong_gradients_of_what_is_trained_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """And held against the kernel that adds them up, not against its neighbour."""
    problem = problem_with(TRAINED["distances_and_sinks"], "q40 kv50 d16 fp32 full")
    gradients = passes.gradients

    def twice(launches: Mapping[Kernel, Launch], *given: Any, **options: Any) -> Any:
        launches["bwd_dq"](*given)  # which adds to what is there
        return gradients(launches, *given, **options)

    monkeypatch.setattr(passes, "gradients", twice)
    checks = {check.tensor: check.ok for check in verify(problem, FAMILIES["whole_heads"])}
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    assert checks == {**dict.fromkeys(names, True), "dt0": False}
    assert check_config(problem, "bwd_dkdv", TRIED) is None
    with pytest.raises(WrongResult, match=r"to check bwd_dq with; .* they are wrong: dt0 +WRONG"):
        check_config(problem, "bwd_dq", TRIED)


@pytest.mark.parametrize(
    "name, family",
    [*zip(TRAINED, itertools.cycle(FAMILIES)), ("heads", "small_cache"), ("heads", "streamed")],
)
def test_the_tuner_times_and_checks_such_problems(name: str, family: str) -> None:
    problem = problem_with(TRAINED[name], "q40 kv50 d40/32 fp16 causal")
    for kernel, config in FAMILIES[family].items():
        timed = Timed.of(KernelTask.of(kernel, problem, gpu("h200")), "cpu")
        timed.runs(config)()
        sums = [one for slot, one in timed.reads.items() if slot.startswith("dc")]
        assert len(sums) == (kernel in ("bwd_dq", "bwd_scores"))
        assert all(one.abs().sum() > 0 for one in sums)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_verifying_does_not_depend_on_the_caller(mode: Callable[[], Any]) -> None:
    """A call that tunes does so inside an autograd function, where gradients are off."""
    problem = problem_with(TRAINED["heads"], "q40 kv50 d16 fp16 causal")
    plain = verify(problem, FAMILIES["whole_heads"])
    with mode(), torch.autocast("cpu", torch.bfloat16):
        assert verify(problem, FAMILIES["whole_heads"]) == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["heads", "distances_and_sinks"])
def test_a_call_that_tunes_takes_any_score(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TILEGEN_TUNE=1 on a GPU, but for the clock and the compiler: as far as a CPU goes."""
    h200, tuned = gpu("h200"), list[Kernel]()
    choose = pipeline.choose

    def measure(run: Callable[[], None]) -> Measurement:
        run()
        return summarise([10.0])

    def compiled(*given: Any) -> Iterable[tuple[TileConfig, Fits]]:
        task, configs, _ = given
        tuned.append(task.kernel)
        return ((config, Fits()) for config in configs)

    monkeypatch.setenv("TILEGEN_TUNE", "1")
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(spec, "detect", lambda *_: h200)
    monkeypatch.setattr(records, "TUNE_SECONDS", 1e-6)
    monkeypatch.setattr(pipeline, "choose", lambda *a, **_: choose(*a, may_tune=True))
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "compile_ahead", compiled)
    x = make_inputs(AttentionProblem.parse(f"b2 hq{HEADS} hkv1 q40 kv50 d16 fp32 full"))
    q, k, v = (one.requires_grad_() for one in (x.q, x.k, x.v))
    with gpu_road():
        tilegen.attention(q, k, v, score=TRAINED[name]).sum().backward()
    assert tuned == ["fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"]
