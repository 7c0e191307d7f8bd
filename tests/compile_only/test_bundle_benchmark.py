"""The benchmarks of bundles, as far as they go without a GPU."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from benchmarks import bundle, first_result
from tests import warm
from tilegen.problem import AttentionProblem

SMALL = AttentionProblem.parse("hq2 hkv1 q128 d32 fp16 causal")


ONE_COMPILER = """
from functools import partial
from tests.bundles import rank_small_tile
from tilegen.compiling.workers import Pool
from tilegen.bundles import building
building.Pool, building.rank = partial(Pool, 1), rank_small_tile
"""


def generated(command: list[str], *, env: dict[str, str], **_: object) -> SimpleNamespace:
    """Stand for `subprocess.run`: one process starts to compile small tiles, not one for each
    core."""
    _, _, module, *arguments = command
    code = f"{ONE_COMPILER}\nfrom runpy import run_module; run_module({module!r}, None, '__main__')"
    return SimpleNamespace(stdout=warm.output(code, *arguments, env=env))


def test_a_bundle_is_generated_again_checked_and_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CALLS", 20), ("TURNS", 1), ("LOOKUPS", 5)):
        monkeypatch.setattr(bundle, name, value)
    monkeypatch.setattr(bundle, "PROBLEMS", {"llama3-8b-8k": SMALL})
    forked = SimpleNamespace(run=generated, PIPE=subprocess.PIPE)
    monkeypatch.setattr(bundle, "subprocess", forked)
    numbers = {one.benchmark: one for one in bundle.numbers(tmp_path, ("sm_90",))}
    assert next(iter(numbers)) == "generate 1 problems, sm_90"
    assert numbers["binaries"].value == 4
    assert 0 < numbers["bundle with sources and manifest"].value < 1
    assert numbers["generate what is there"].ratio is not None
    assert 0 < numbers["attention() from a bundle, up to the driver"].value < 1e4
    assert len(numbers) == 8


def test_every_catalogued_problem_is_in_the_bundle() -> None:
    assert len(set(bundle.PROBLEMS.values())) == len(bundle.PROBLEMS) > 50


@pytest.mark.parametrize("provider", first_result.PROVIDERS)
def test_the_programs_of_first_results_are_python(provider: str) -> None:
    compile(
        first_result.PREPARE + first_result.PROVIDERS[provider] + first_result.FINISH,
        provider,
        "exec",
    )


def test_a_first_result_is_timed_in_a_process_of_its_own() -> None:
    code = first_result.PREPARE + first_result.PROVIDERS["sdpa"] + first_result.FINISH
    code = code.replace('"cuda"', '"cpu"').replace("torch.cuda.synchronize()", "")
    given = first_result.arguments(SMALL, Path(), backward=True)
    assert 0 < first_result.first_result(code, given) < 60
    with pytest.raises(subprocess.CalledProcessError):
        first_result.first_result("raise SystemExit(3)", given)


def test_a_provider_that_fails_costs_its_own_row_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle's fails here, too: no other time is then the baseline."""
    endings = {
        "bundle": "raise SystemExit('no driver')",
        "flex, compiling": "import time; time.sleep(60)",
        "sdpa": "print(0.5)",
    }
    monkeypatch.setattr(first_result, "make_bundle", lambda *_: Path())
    monkeypatch.setattr(first_result, "source_of", lambda _: Path())
    monkeypatch.setattr(first_result, "TIME_LIMIT", 2.0)
    monkeypatch.setattr(first_result, "PREPARE", "")
    monkeypatch.setattr(first_result, "FINISH", "")
    monkeypatch.setattr(first_result, "TRITON", "; raise SystemExit(3)")
    monkeypatch.setattr(first_result, "PROVIDERS", endings)
    results = list(first_result.rows("gpt2", repeats=1))
    assert [(row.seconds, row.ratio, row.detail) for row in results] == [
        *((None, None, "no driver"), (None, None, "no result in 2 s"), (0.5, None, "")),
        (None, None, "exit status 3"),
        *((None, None, "no driver"), (None, None, "no result in 2 s"), (0.5, None, "")),
    ]
    assert "no driver" in first_result.line(results[0])
    assert "0.500 s" in first_result.line(results[2])
    assert "no driver" in capsys.readouterr().err


@pytest.mark.parametrize("workload", ["window-128-32k", "deepseek-v3-absorbed-4k", "nobody's"])
def test_only_causal_workloads_are_timed(workload: str) -> None:
    with pytest.raises(typer.BadParameter, match="workload must be one of gpt2, llama3-8b-2k"):
        next(first_result.rows(workload, repeats=1))


def test_without_a_gpu_nothing_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_result, "has_gpu", lambda: False)
    with pytest.raises(typer.Exit):
        first_result.main()
    assert "nothing to time" in capsys.readouterr().out
