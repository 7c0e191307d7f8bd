"""The verbs as functions: each returns what the command prints, and bad input is one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tilegen
from tests.support.records import H200
from tests.support.replay import SMALL, Replay
from tilegen import pipeline
from tilegen.check.verification import Check
from tilegen.choose.families import kernels_of
from tilegen.cli.main import app
from tilegen.cpus.host import current_cpu
from tilegen.errors import TilegenError, Unsupported
from tilegen.explaining.explained import BY_MODEL
from tilegen.kernels.config import TileConfig
from tilegen.problem import AttentionProblem
from tilegen.task import KernelTask
from tilegen.tuning.bench import Bench

PROBLEM = "hq8 hkv2 q512 d64 bf16 causal"
PARSED = AttentionProblem.parse(PROBLEM)
VERBS = ("propose", "explain", "read_code", "show", "generate", "tune", "verify")
ROOT = Path(tilegen.__file__).parent


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def values(*arguments: str) -> Any:
    return json.loads(printed(*arguments, "--json"))


def plain(value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def test_the_verbs_are_names_of_the_package_and_of_nothing_else() -> None:
    assert set(VERBS) <= set(tilegen.__all__)
    assert not {path.stem for path in ROOT.rglob("*")} & set(VERBS)
    for name in ("Candidate", "Check", "Explanation", "Manifest", "RenderedKernel", "TuningRecord"):
        assert is_dataclass(getattr(tilegen, name))
        assert getattr(tilegen, name).__dataclass_params__.frozen


@pytest.mark.parametrize("problem", [PROBLEM, PARSED], ids=["notation", "problem"])
@pytest.mark.parametrize("gpu", ["h200", H200], ids=["name", "spec"])
def test_propose(problem: str | AttentionProblem, gpu: Any) -> None:
    candidates = tilegen.propose(problem, gpu, top=3, fast_memory="48KiB")
    asked = ("propose", PROBLEM, "--gpu", "h200", "--top", "3", "--fast-memory", "48KiB")
    assert [{"gpu": "h200"} | one for one in plain([*map(asdict, candidates)])] == values(*asked)
    assert candidates == tilegen.propose(problem, gpu, top=3, fast_memory=48 * 1024)


def test_no_gpu_given_is_the_one_at_hand_or_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilegen.devices.detect", lambda: None)
    assert tilegen.propose(PROBLEM, top=1) == tilegen.propose(PROBLEM, "cpu", top=1)
    assert tilegen.show(PROBLEM, by_model=True) == tilegen.show(PROBLEM, "cpu", by_model=True)
    assert tilegen.explain(PROBLEM, kernel="fwd", by_model=True).gpu == current_cpu()
    monkeypatch.setattr("tilegen.devices.detect", lambda: tilegen.gpu("t4"))
    assert tilegen.propose(PROBLEM, top=1) == tilegen.propose(PROBLEM, "t4", top=1)


def test_explain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("explain", PROBLEM, "--gpu", "h200", "--kernel", "bwd_preprocess", "--model")
    told = tilegen.explain(PROBLEM, "h200", kernel="bwd_preprocess", by_model=True)
    assert printed(*asked).startswith(told.text() + "\n\nmore: ")
    assert told.text("all") + "\n" == printed(*asked, "--all")
    sections = ("--section", "tile", "--section", "time")
    assert told.text("time", "tile") + "\n" == printed(*asked, *sections)
    assert "delta" in told.text("traffic")
    assert "delta" not in told.text("time")
    monkeypatch.setattr("tilegen.explaining.explained.explain_all", lambda *_, **__: told.explained)
    assert told.latex() + "\n" == printed(*asked, "--latex")
    assert plain(told.values) == values(*asked)
    whole = tilegen.explain(PROBLEM, "h200", by_model=True)
    everything = ("explain", PROBLEM, "--gpu", "h200", "--model", "--all")
    assert whole.text("all") + "\n" == printed(*everything)
    assert "backward: kernels" in whole.text("pass")
    drawn: list[Any] = []
    monkeypatch.setattr("tilegen.explaining.plot.draw", lambda *given: drawn.append(given))
    told.plot(tmp_path / "it.svg")
    printed(*asked, "--plot", str(tmp_path / "it.svg"))
    assert drawn == 2 * [(PARSED, H200, told.explained, tmp_path / "it.svg")]


def test_show() -> None:
    config = TileConfig.parse("m64n32w4s2")
    shown = tilegen.show(PROBLEM, "h200", kernel="bwd_dq", config=config, unaligned=True)
    asked = ("show", PROBLEM, "--kernel", "bwd_dq", "--config", config.key, "--unaligned")
    assert shown.source == printed(*asked).split("\n", 1)[1]
    assert values(*asked)["digest"] == shown.digest


@pytest.mark.slow
def test_explanations_and_listings_are_of_the_tile_that_a_call_launches() -> None:
    """The model's first spills here, so a call settles on another tile."""
    problem = "b2 hq16 hkv16 q4096 d192/128 bf16 causal"
    chosen = pipeline.choose(AttentionProblem.parse(problem), H200, may_compile=True)
    (told,) = tilegen.explain(problem, "h200", kernel="bwd_dkdv").values
    assert TileConfig(**told["config"]) == chosen["bwd_dkdv"].config
    assert re.fullmatch(
        r"the model, the fastest by machine code of \d compiled", told["tile"]["choice"]["value"]
    )
    assert tilegen.show(problem, "h200", kernel="bwd_dkdv").config == chosen["bwd_dkdv"].config
    first = tilegen.propose(problem, "h200", kernel="bwd_dkdv", top=1)[0].config
    assert first != chosen["bwd_dkdv"].config, "choose another problem: this test shows nothing"
    (told,) = tilegen.explain(problem, "h200", kernel="bwd_dkdv", by_model=True).values
    assert TileConfig(**told["config"]) == first
    assert told["tile"]["choice"]["value"] == BY_MODEL
    assert tilegen.show(problem, "h200", kernel="bwd_dkdv", by_model=True).config == first
    (told,) = tilegen.explain(problem, "h200", kernel="fwd", config="m64n32w4s2").values
    assert "choice" not in told["tile"]


def test_generate_returns_the_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def nothing_built(problems: Any, gpus: Any, out: Path, **options: Any) -> Path:
        asked.append((problems, [one.name for one in gpus], options["directions"]))
        manifest = tilegen.Manifest(versions={"tilegen": "0"}, problems=(), binaries=())
        out.mkdir(exist_ok=True)
        (out / "manifest.json").write_text(manifest.to_json())
        return out / "manifest.json"

    monkeypatch.setattr("tilegen.bundles.building.generate", nothing_built)
    made = tilegen.generate([PROBLEM], arch="sm_90", out=tmp_path / "a", forward_only=True)
    out = str(tmp_path / "b")
    told = values("generate", PROBLEM, "--arch", "sm_90", "--out", out, "--forward-only")
    assert asked[0] == asked[1] == ([PARSED], ["h200"], ("forward",))
    assert told["versions"] == made.versions
    assert told["manifest"] == f"{out}/manifest.json"
    (tmp_path / "models.txt").write_text(f"{PROBLEM}\n")
    tilegen.generate(catalog=tmp_path / "models.txt", gpu=["a100", H200], out=out)
    assert asked[2] == ([PARSED], ["a100", "h200"], ("forward", "backward"))


def test_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: H200)
    replay = Replay(SMALL)
    monkeypatch.setattr("tilegen.tuning.tuner.real_bench", lambda *_: Bench(measure=replay))
    monkeypatch.setattr("tilegen.choose.ranker.ranked_space", lambda *_: (replay.space, []))
    (record,) = tilegen.tune(PROBLEM, kernel="fwd")
    assert record.config == replay.fastest
    (told,) = values("tune", PROBLEM, "--kernel", "fwd")
    assert told["config"] == json.loads(record.to_json())["config"]


@pytest.mark.parametrize("query", [1, 2])
def test_the_budget_is_for_all_kernels(query: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a second more than its part; a step of decoding has no backward to tune."""
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: H200)
    now, budgets = [0.0], dict[str, float]()

    def tuned(task: KernelTask, *, seconds: float, **_: object) -> str:
        budgets[task.kernel] = seconds
        now[0] += seconds + 1.0
        return task.kernel

    monkeypatch.setattr("tilegen.tuning.tuner.tune", tuned)
    monkeypatch.setattr("tilegen.api.time.monotonic", lambda: now[0])
    problem = AttentionProblem.parse(f"b8 hq8 q{query} kv4096 d64 bf16 causal")
    tilegen.tune(problem, seconds=60.0)
    assert {*budgets} == {*kernels_of(problem, H200, "forward" if query == 1 else None)}
    assert now[0] == pytest.approx(61.0)
    tilegen.tune(problem, kernel="bwd_dkdv", seconds=9.0)
    assert budgets["bwd_dkdv"] == 9.0


def test_tune_for_a_gpu_that_is_elsewhere() -> None:
    with pytest.raises(Unsupported, match="needs that GPU at hand"):
        tilegen.tune(PROBLEM, "b200", kernel="fwd")


def test_verify(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wrong = Check(
        tensor="out", ok=False, error=1.0, allowed=0.5, index=(0, 1), found=2.0, expected=1.0
    )
    asked: list[Any] = []

    def judged(problem: Any, configs: Any) -> tuple[Check, ...]:
        asked.append((problem, configs))
        return (wrong,)

    monkeypatch.setattr("tilegen.check.verification.verify", judged)
    assert tilegen.verify(PROBLEM, "h200", config="m64n32w4s2") == (wrong,)
    arguments = ["verify", PROBLEM, "--gpu", "h200", "--config", "m64n32w4s2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1  # as WrongResult, which becomes one line
    assert result.stdout == f"{wrong}\n"
    assert asked[0] == asked[1]
    caplog.set_level("INFO", logger="tilegen")
    tilegen.verify("b2 hq32 hkv8 q100000 d64 bf16 causal", "h200")
    assert str(asked[2][0]) == "b1 hq4 hkv1 q300 kv300 d64 bf16 causal"
    assert caplog.messages[-1].endswith(f"checking the same kernels on '{asked[2][0]}'")


ANY: Any = None
BAD: dict[str, tuple[Callable[[], object], str]] = {
    "no problem": (lambda: tilegen.propose(ANY), "problem must be an AttentionProblem or its"),
    "notation": (lambda: tilegen.explain("hq8"), "expected a problem"),
    "GPU": (lambda: tilegen.show(PROBLEM, "h201"), "did you mean h200"),
    "GPU of another type": (lambda: tilegen.show(PROBLEM, ANY or 7), "gpu must be one of"),
    "kernel": (lambda: tilegen.propose(PROBLEM, kernel="bwd"), "kernel must be one of"),
    "config": (lambda: tilegen.verify(PROBLEM, config="128x64"), "such as m128n64w8s3"),
    "config of another type": (lambda: tilegen.verify(PROBLEM, config=ANY or 7), "TileConfig or"),
    "memory": (lambda: tilegen.propose(PROBLEM, "h200", fast_memory="lots"), "48KiB"),
    "top": (lambda: tilegen.propose(PROBLEM, top=0), "top must be an int of at least 1"),
    "problems and a file": (lambda: tilegen.generate(PROBLEM, catalog="a"), "got both or neither"),
    "no problems": (lambda: tilegen.generate(), "got both or neither"),
    "GPU and arch": (lambda: tilegen.generate(PROBLEM, "h200", arch="sm_90"), "got both"),
    "arch": (lambda: tilegen.generate(PROBLEM, arch="hopper"), "arch must be one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(TilegenError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
