"""The benchmark of training: its rows, cases that do not fit, and that a stopped run goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the package transformers")

from benchmarks.environment import ROOT
from benchmarks.rows import read
from benchmarks.whole import train
from benchmarks.whole.models import MODELS
from tilegen.comparing.children import DoesNotFit, Failed, Worker

CASE = "gpt2-tiny b1 q64 fp32 plain"


class Needs:
    """Something that takes memory, or ends its process."""

    def gib(self, number: float) -> int:
        import torch

        return torch.ones(int(number * 2**30), dtype=torch.uint8).numel()

    def abort(self) -> None:
        os.abort()


def _worker(gib: float) -> Worker:
    return Worker(Needs, gib=gib, device="cpu", threads=1)


@pytest.mark.slow
def test_memory_beyond_the_limit_and_a_process_that_ends() -> None:
    with _worker(1.0) as worker:
        assert worker.call("gib", 0.2) == int(0.2 * 2**30)
        with pytest.raises(DoesNotFit, match="allocate"):
            worker.call("gib", 1.2)
    with _worker(1.0) as worker, pytest.raises(Failed, match="SIGABRT"):
        worker.call("abort")


class Sleeps:
    """A slow object that returns the id of its process."""

    def __init__(self, path: str) -> None:
        Path(path).write_text(str(os.getpid()))

    def sleep(self) -> None:
        time.sleep(600)


@pytest.mark.slow
def test_a_worker_ends_with_its_parent_whatever_it_does(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    code = (
        "from tilegen.comparing.children import Worker\n"
        "from tests.benchmarks.test_train import Sleeps\n"
        "if __name__ == '__main__':\n"
        f"    worker = Worker(Sleeps, {str(path)!r}, gib=1.0, device='cpu', threads=1)\n"
        "    print('started', flush=True)\n"
        "    worker.call('sleep')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    parent.wait()
    worker = Path(f"/proc/{path.read_text()}")
    end = time.monotonic() + 60
    while worker.exists():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_rows_of_a_case_and_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "train.csv"
    monkeypatch.setattr(train, "ATTENTIONS", ("tilegen", "eager", "flex_attention"))
    for _ in range(2):  # the second run has nothing left to measure
        train.main(out=out, case=[CASE], minutes=5.0, threads=1, gib=4.0)
    rows = {row["attention"]: row for row in read(out)}
    assert len(read(out)) == len(rows) == 3
    assert rows["flex_attention"]["status"] == "unsupported"
    for row in (rows["tilegen"], rows["eager"]):
        assert row["status"] == "ok"
        speed = 64 / (1e-3 * float(row["step_ms"]))
        assert float(row["tokens_per_s"]) == pytest.approx(speed, rel=1e-3)
        assert 0 < float(row["attention_share"]) < 1
        assert float(row["peak_mib"]) > 0
    assert rows["tilegen"]["first_loss"] == rows["eager"]["first_loss"]
    assert float(rows["tilegen"]["over_tilegen"]) == 1


@pytest.mark.slow
def test_a_case_that_does_not_fit_is_a_row() -> None:
    case = train.parse("classifier-tiny b1 q8192 fp32 plain")
    rows = train.measure(case, ["eager"], threads=1, gib=1.0)
    (row,) = list(rows)
    assert (row.status, row.step_ms) == ("does not fit", None)
    assert "allocate" in row.detail


@pytest.mark.parametrize(
    "text, reason",
    [
        ("gpt3 b1 q64 fp32 plain", "a model of"),
        ("gpt2 b1 q64 fp8 plain", "a dtype of"),
        ("gpt2 b1 q64 fp32 fast", "features of"),
        ("gpt2", "such as"),
    ],
)
def test_wrong_cases_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        train.parse(text)


def test_every_case_of_the_tables_is_one() -> None:
    for text in (*train.ON_CPU, *train.ON_GPU, *train.TINY):
        case = train.parse(text)
        assert case.key == text
        MODELS[case.model].batch(0, 1, 64, case.features, "cpu")
    wanted = ("gpt2 b1 q1024", "gpt2 b1 q2048", "bert b2 q512", "classifier b1 q4096")
    for beginning in (*wanted, "classifier b1 q8192"):
        for dtype in ("fp32", "bf16"):
            assert f"{beginning} {dtype} plain" in train.ON_CPU
