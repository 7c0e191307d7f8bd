"""One way to kernels: families by measured time, and every caller asks the same chooser."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilegen
from tests.support import warm
from tests.support.bundles import write_bundle
from tests.support.records import RECORD, timed
from tilegen import pipeline
from tilegen.bundles.manifest import MANIFEST, Manifest
from tilegen.calls import ranks
from tilegen.choose import records
from tilegen.choose.families import family
from tilegen.choose.ranker import propose
from tilegen.emit.identity import RenderedKernel
from tilegen.explaining.explained import explain_all
from tilegen.gpus.spec import gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import FAMILIES, KERNELS
from tilegen.launch import kernels
from tilegen.launch.binding import BoundKernel
from tilegen.problem import AttentionProblem
from tilegen.runtime import dispatch
from tilegen.store import save
from tilegen.task import KernelTask

H200 = gpu("h200")
LARGE = AttentionProblem.parse("b32 hq8 hkv2 q512 kv512 d64 bf16 causal")
SMALL = AttentionProblem.parse("b1 hq8 hkv2 q512 kv512 d512 bf16 causal")


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))


def config_of(kernel: Kernel) -> TileConfig:
    knobs = KERNELS[kernel].knobs
    return TileConfig(block_m=knobs.block_m[0], block_n=knobs.block_n[0], block_d=knobs.block_d[0])


def measured(problem: AttentionProblem, kernel: Kernel, us: float, name: str = "h200") -> None:
    changed = replace(RECORD, problem=problem.bucket, kernel=kernel, gpu=name, arch="sm_90")
    save(replace(changed, config=config_of(kernel), measurement=timed(us), estimate=None))


def used(problem: AttentionProblem, direction: Any = "forward") -> tuple[Kernel, ...]:
    return tuple(pipeline.choose(problem, H200, direction))


# --------------------------------------------------------------------------------------------------
# Families


def test_without_records_the_model_decides() -> None:
    for problem in (LARGE, SMALL):
        for direction in FAMILIES:
            mine = family(problem, H200, direction)
            assert used(problem, direction) == FAMILIES[direction][mine].names


def test_of_measured_families_the_fastest_is_used() -> None:
    assert used(LARGE) == ("fwd",)
    measured(LARGE, "fwd", 1000.0)
    measured(LARGE, "fwd_scores", 300.0)
    assert used(LARGE) == ("fwd",), "half a family has no time"
    measured(LARGE, "fwd_values", 500.0)
    assert used(LARGE) == ("fwd_scores", "fwd_values")
    measured(LARGE, "fwd_streamed", 799.0)
    assert used(LARGE) == ("fwd_streamed",)
    chosen = pipeline.choose(LARGE, H200, "forward")["fwd_streamed"]
    assert (chosen.config, chosen.ranked.origin) == (config_of("fwd_streamed"), "record")


def test_an_explanation_is_about_the_family_that_calls_use() -> None:
    measured(LARGE, "fwd", 1000.0)
    measured(LARGE, "fwd_streamed", 799.0)
    for by_model, expected in ((False, "q_streamed"), (True, "q_stationary")):
        kernel = FAMILIES["forward"][expected].names[0]
        (told,) = explain_all(LARGE, H200, [kernel], by_model=by_model)
        assert told.way.chosen == expected
        assert [best.kernel for best in told.way.families[expected]] == [kernel]
        assert ("measured" in told.way.because) == (not by_model)


def test_a_kernel_is_shown_as_calls_launch_it_or_as_the_model_has_it() -> None:
    measured(LARGE, "fwd", 1000.0)
    recorded, first = config_of("fwd"), propose(KernelTask.of("fwd", LARGE, H200), top=1)[0].config
    assert recorded != first
    for by_model, config in ((False, recorded), (True, first)):
        shown = tilegen.show(LARGE, "h200", by_model=by_model).source
        assert f"BLOCK_M = tl.constexpr({config.block_m})" in shown
        assert f"BLOCK_N = tl.constexpr({config.block_n})" in shown


def test_a_family_is_not_left_for_one_that_the_model_ranks_behind_it() -> None:
    """Only because somebody has timed that, or timed it on another GPU."""
    for kernel in ("fwd_scores", "fwd_values", "fwd_streamed"):
        measured(LARGE, kernel, 900.0)
    assert used(LARGE) == ("fwd",)
    measured(LARGE, "fwd", 1000.0, name="h100")
    assert used(LARGE) == ("fwd",)
    assert pipeline.choose(LARGE, H200, "forward")["fwd"].source.endswith("borrowed from h100")


def test_ranks_agree_on_a_family_too(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        ("h200", kernel, LARGE.bucket.key): config_of(kernel)
        for kernel in FAMILIES["forward"]["small_cache"].names
    }
    monkeypatch.setattr(records, "_agreed", table)
    measured(LARGE, "fwd", 10.0)
    chosen = pipeline.choose(LARGE, H200, "forward")
    assert tuple(chosen) == ("fwd_scores", "fwd_values")
    assert {one.source for one in chosen.values()} == {"all ranks agreed"}
    assert used(SMALL) == FAMILIES["forward"][family(SMALL, H200, "forward")].names


def test_records_are_read_once_and_of_other_families_only_if_they_can_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, object]] = []
    look_up = records.look_up

    def counted(task: KernelTask, **options: Any) -> Any:
        asked.append((task.kernel, options["borrow"]))
        return look_up(task, **options)

    monkeypatch.setattr(records, "look_up", counted)
    used(LARGE)
    assert asked == [("fwd", False), ("fwd", "only")]
    asked.clear()
    measured(LARGE, "fwd", 1000.0)
    used(LARGE)
    others = ("fwd_split", "fwd_streamed", "fwd_hopper", "fwd_scores")
    assert asked == [("fwd", False), *((kernel, False) for kernel in others)]


def test_a_record_of_a_large_cache_problem_is_found_without_the_model(tmp_path: Path) -> None:
    problem = replace(LARGE, batch=64)  # as many programs as leave no SM idle
    for kernel in ("fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"):
        measured(problem, kernel, 100.0)
    code = (
        "import sys\n"
        "from tilegen import pipeline\n"
        "from tilegen.gpus.spec import gpu\n"
        "from tilegen.problem import AttentionProblem\n"
        f"chosen = pipeline.choose(AttentionProblem.parse({problem.key!r}), gpu('h200'))\n"
        "print({one.ranked.origin for one in chosen.values()})\n"
        "print(sorted({'sympy', 'optuna', 'jinja2', 'triton'} & set(sys.modules)))\n"
    )
    said = warm.output(code, env={"TILEGEN_CACHE_DIR": str(tmp_path)})
    assert said.splitlines() == ["{'record'}", "[]"]


# --------------------------------------------------------------------------------------------------
# Callers


def test_every_caller_uses_the_same_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls, bundles, ranks and commands: the fastest measured family, its recorded configs."""
    for kernel, us in (("fwd", 900.0), ("fwd_scores", 100.0), ("fwd_values", 100.0)):
        measured(LARGE, kernel, us)
    expected = {kernel: config_of(kernel).key for kernel in ("fwd_scores", "fwd_values")}
    chosen = pipeline.choose(LARGE, H200, "forward")
    assert {kernel: one.config.key for kernel, one in chosen.items()} == expected

    write_bundle([LARGE], [H200], tmp_path / "bundle", ("forward",))
    manifest = Manifest.from_json((tmp_path / "bundle" / MANIFEST).read_text())
    (served,) = manifest.problems
    assert served.passes["forward"].config_from == dict.fromkeys(expected, "record")
    assert {one.kernel: one.config.key for one in manifest.binaries} == expected

    agreed = json.loads(ranks._choices([LARGE.bucket], H200))
    assert expected.items() <= {kernel: config for kernel, _, config in agreed}.items()

    loaded: dict[str, str] = {}

    def bound(rendered: RenderedKernel, _: object) -> BoundKernel:
        loaded[rendered.kernel] = rendered.config.key
        return BoundKernel(lambda: None, rendered.problem.mask, rendered.kernel, rendered.config)

    monkeypatch.setattr(kernels, "bound_kernel", bound)
    monkeypatch.setattr(kernels, "runs_compiled", lambda _: False)  # as for a GPU
    dispatch.Kernels(LARGE, torch.device("cpu"), True).load("forward")
    assert loaded == expected
