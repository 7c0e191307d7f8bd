"""The benchmark of first results, as far as it goes without a GPU."""

import subprocess
from pathlib import Path

import pytest
import typer

from benchmarks import first_result
from tilegen.problem import AttentionProblem

SMALL = AttentionProblem.parse("hq2 hkv1 q128 d32 fp16 causal")


@pytest.mark.parametrize("provider", first_result.PROVIDERS)
def test_the_programs_of_first_results_are_python(provider: str) -> None:
    compile(
        first_result.PREPARE + first_result.PROVIDERS[provider] + first_result.FINISH,
        provider,
        "exec",
    )


@pytest.mark.slow
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
    monkeypatch.setattr("tilegen.gpus.spec.detect", lambda: None)
    with pytest.raises(typer.Exit):
        first_result.main()
    assert "nothing to time" in capsys.readouterr().out
