"""Earlier first choices beside today's: each line says what changed, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import first_choices
from benchmarks.first_choices import Compiled, lines, main, passes, why
from benchmarks.rows import read
from benchmarks.workloads import CATALOGUE
from tilegen.choose.families import kernels_of
from tilegen.errors import Unsupported
from tilegen.gpus.spec import GpuSpec, gpu
from tilegen.kernels.config import Kernel, TileConfig
from tilegen.kernels.registry import KERNELS
from tilegen.problem import AttentionProblem

H200 = gpu("h200")
OLD, NEW, SPILLS = map(TileConfig.parse, ("m64n64w4s3", "m128n128w8s2t", "m128n64w4s3"))
SECONDS = {OLD: 1.5e-3, NEW: 1e-3}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of compiling, and the choice that a call would make."""

    def compiled(_: AttentionProblem, __: GpuSpec, ___: Kernel, config: TileConfig) -> Compiled:
        return Compiled(
            seconds=SECONDS.get(config, 1e-3), why_not_used="spills" * (config == SPILLS)
        )

    def settled(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(config=NEW)

    monkeypatch.setattr(first_choices, "compiled", compiled)
    monkeypatch.setattr(first_choices, "choose_by_model", settled)


def test_reasons_come_from_compiled_numbers() -> None:
    def of(seconds: float | None, why_not_used: str = "") -> Compiled:
        return Compiled(seconds=seconds, why_not_used=why_not_used)

    assert why(of(1.0, "spills"), of(1.0)) == "not usable: spills"
    assert why(of(1.0), of(1.001)).startswith("as fast")
    assert why(of(1.5), of(1.0)) == "slower by machine code, 1.50 times the time"
    assert why(of(0.8), of(1.0)).startswith("faster by machine code, 0.80 times")
    assert why(of(None), of(1.0)) == "not compiled"


@pytest.mark.usefixtures("known")
def test_each_kernel_of_either_time_has_a_line() -> None:
    problem = AttentionProblem.parse("b1 hq8 hkv1 q1 kv32768 d128 bf16 full")
    before = {"fwd": OLD, "bwd_preprocess": NEW, "bwd_dkdv": SPILLS, "bwd_dq": OLD}
    results = {one["kernel"]: one for one in lines(problem, H200, before)}
    now = kernels_of(problem, H200)
    assert "fwd_split" in now
    assert set(results) == {*now, *before}
    assert "after" not in results["fwd"]
    assert results["fwd"]["why"] == "the pass is computed by fwd_split fwd_combine"
    assert results["fwd_split"]["why"] == "in the place of fwd"
    assert results["bwd_preprocess"]["why"] == "the same"
    for kernel in {*before, *now} - {"fwd", "fwd_split", "fwd_combine", "bwd_preprocess"}:
        assert results[kernel]["why"]


@pytest.mark.usefixtures("known")
def test_unusable_configs_are_named_and_both_are_timed() -> None:
    problem = AttentionProblem.parse("b1 hq32 hkv8 q8192 d128 bf16 causal")
    before = {"fwd": OLD, "bwd_preprocess": NEW, "bwd_dkdv": SPILLS, "bwd_dq": NEW}
    results = {one["kernel"]: one for one in lines(problem, H200, before)}
    assert results["bwd_dkdv"]["why"] == "not usable: spills"
    assert (results["fwd"]["before_us"], results["fwd"]["after_us"]) == (1500, 1000)
    assert results["fwd"]["why"] == "slower by machine code, 1.50 times the time"


@pytest.mark.usefixtures("known")
def test_the_command_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    out = tmp_path / "choices.csv"
    main(gpu=["h200"], out=out, most=1)
    first = read(out)
    main(gpu=["h200"], out=out, most=1)
    both = read(out)
    assert both[: len(first)] == first
    assert len({one["problem"] for one in both}) == 2
    assert {one["compiled_for"] for one in both} == {"h200"}
    empty = tmp_path / "none.csv"
    with pytest.raises(Unsupported, match="found none"):
        main(before=empty, out=out)


def test_earlier_choices_are_of_the_catalogue() -> None:
    rows = read(first_choices.BEFORE)
    assert {one["compiled_for"] for one in rows} == {"h200", "a100", "b200", "rtx5090"}
    keys = {one.problem.normal().key for one in CATALOGUE}
    assert len({one["problem"] for one in rows} & keys) >= 25
    assert all(one["kernel"] in KERNELS for one in rows)
    ways = passes(tuple(dict.fromkeys(one["kernel"] for one in rows)))
    assert set(ways) == {"forward", "backward"}
