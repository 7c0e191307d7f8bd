"""The benchmark of decoding on a CPU: its rows, and that a stopped run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_decode
from benchmarks.environment import RESULTS
from benchmarks.rows import read
from tests.support.calls import compiled_once
from tilegen.problem import AttentionProblem

ROOT = Path(__file__).parents[2]
SMALL = AttentionProblem.parse("hq4 hkv2 q1 kv1024 d32 fp32 full")
PROVIDERS = "tilegen", "reading", "sdpa gqa", "sdpa rows", "NHD", "HND"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with compiled_once(tmp_path_factory):
        yield


@pytest.mark.usefixtures("_kernels")
def test_rows_of_a_case_and_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_decode, "cases", lambda: iter([SMALL]))
    out = tmp_path / "decode.csv"
    for _ in range(2):  # the second run has nothing left to measure
        cpu_decode.main(out=out, minutes=5.0, seconds=0.001, threads="1")
    rows = read(out)
    assert [row["provider"] for row in rows] == list(PROVIDERS)
    for row in rows:
        rate = 2 * 2 * 1024 * 32 * 4 / float(row["median_ms"]) / 1e6
        assert float(row["gbytes_per_s"]) == pytest.approx(rate, rel=1e-3)
    capsys.readouterr()
    cpu_decode.main(out=out, only_summary=True)
    said = capsys.readouterr().out.splitlines()
    assert said[4].startswith("| hq4 hkv2 q1 kv1024 d32 fp32 | 1 | ")


@pytest.mark.usefixtures("_kernels")
def test_all_forms_compute_the_same() -> None:
    """All timed functions compute the same attention, for any layout of their tensors."""
    problem = AttentionProblem.parse("hq8 hkv2 q4 kv1024 d32 fp32 full")
    q, k, v = cpu_decode.tensors(problem)
    forms = cpu_decode.functions(problem, q, k, v)
    forms.pop(cpu_decode.READING)
    results = {name: form() for name, form in forms.items()}
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), enable_gqa=True
    )
    for name, result in results.items():
        assert isinstance(result, torch.Tensor)
        torch.testing.assert_close(
            result.double().reshape(exact.shape), exact, rtol=1e-5, atol=1e-6, msg=name
        )


def test_the_page_has_the_summary_of_the_result_file() -> None:
    lines = list(cpu_decode.summary(read(RESULTS / "cpu" / "decode.csv")))
    table = "\n".join(lines[: lines.index("")])
    assert table in (ROOT / "benchmarks" / "README.md").read_text()
